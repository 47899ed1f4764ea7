"""Single products of the tensor cores, bit by bit: one kernel, run on a GPU or on the emulator, on inputs made from seeds.

A probe names an instruction and its operand type. A family names how operands are drawn: close or far exponents, an
accumulator that dominates, sums that cancel, chains of instructions, results that are subnormal, infinities and NaN,
few products far apart. Every case is a 64 x 8 tile; K is what 32 bytes hold.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
__device__ __forceinline__ u64 descriptor(const void* p) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(p));
    return (at >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;  // 128 bytes along k, 256 along m or n
}
#define LOAD                                                                                                  \
    __shared__ __align__(1024) u32 sa[CHAIN][512], sb[CHAIN][64];                                              \
    const u32* ga = a + blockIdx.x * CHAIN * 512;                                                              \
    const u32* gb = b + blockIdx.x * CHAIN * 64;                                                               \
    for (int i = threadIdx.x; i < CHAIN * 512; i += 128) {                                                     \
        int r = i % 512 / 8, w = i % 8;                                                                        \
        sa[i / 512][(r / 8 * 2 + w / 4) * 32 + r % 8 * 4 + w % 4] = ga[i];                                     \
    }                                                                                                          \
    for (int i = threadIdx.x; i < CHAIN * 64; i += 128) {                                                      \
        int r = i % 64 / 8, w = i % 8;                                                                         \
        sb[i / 64][w / 4 * 32 + r * 4 + w % 4] = gb[i];                                                        \
    }                                                                                                          \
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;                      \
    c += blockIdx.x * 512 + row * 8 + column, d += blockIdx.x * 512 + row * 8 + column;                        \
    float v[4] = {c[0], c[1], c[64], c[65]};
#define STORE d[0] = v[0], d[1] = v[1], d[64] = v[2], d[65] = v[3];
#define WGMMA(NAME, SHAPE, TAIL)                                                                               \
    extern "C" __global__ void __launch_bounds__(128) NAME(const u32* a, const u32* b, const float* c, float* d) { \
        LOAD                                                                                                   \
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                                           \
        __syncthreads();                                                                                       \
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");                                                \
        for (int i = 0; i < CHAIN; ++i)                                                                        \
            asm volatile("wgmma.mma_async.sync.aligned." SHAPE " {%0, %1, %2, %3}, %4, %5, 1, 1, 1" TAIL ";"   \
                         : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])                                      \
                         : "l"(descriptor(sa[i])), "l"(descriptor(sb[i])) : "memory");                         \
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"                      \
                     : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])::"memory");                              \
        STORE                                                                                                  \
    }
#define MMA(NAME, SHAPE)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128) NAME(const u32* a, const u32* b, const float* c, float* d) { \
        LOAD                                                                                                   \
        int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;                                                     \
        for (int i = 0; i < CHAIN; ++i) {                                                                      \
            const u32 *x = ga + i * 512 + row * 8, *y = gb + i * 64 + g * 8;                                   \
            asm volatile("mma.sync.aligned." SHAPE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                         : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])                                      \
                         : "r"(x[t]), "r"(x[64 + t]), "r"(x[t + 4]), "r"(x[68 + t]), "r"(y[t]), "r"(y[t + 4])); \
        }                                                                                                      \
        STORE                                                                                                  \
    }
WGMMA(wgmma_bf16, "m64n8k16.f32.bf16.bf16", ", 0, 0")
WGMMA(wgmma_f16, "m64n8k16.f32.f16.f16", ", 0, 0")
WGMMA(wgmma_tf32, "m64n8k8.f32.tf32.tf32", "")
WGMMA(wgmma_e4m3, "m64n8k32.f32.e4m3.e4m3", "")
WGMMA(wgmma_e5m2, "m64n8k32.f32.e5m2.e5m2", "")
MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA(mma_f16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA(mma_e4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32")
MMA(mma_e5m2, "m16n8k32.row.col.f32.e5m2.e5m2.f32")
"""


@dataclass(frozen=True)
class Format:
    """An operand type: bits of a stored element, of its exponent and of its mantissa (which may lie above unused bits)."""

    bits: int
    exponent: int
    mantissa: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def unused(self) -> int:
        return self.bits - 1 - self.exponent - self.mantissa


FORMATS = {
    "bf16": Format(16, 8, 7), "f16": Format(16, 5, 10), "tf32": Format(32, 8, 10), "e4m3": Format(8, 4, 3),
    "e5m2": Format(8, 5, 2),
}  # fmt: skip
PROBES = ("wgmma_bf16", "wgmma_f16", "wgmma_tf32", "wgmma_e4m3", "wgmma_e5m2", "mma_bf16", "mma_f16", "mma_tf32", "mma_e4m3", "mma_e5m2")  # fmt: skip
FAMILIES = ("near", "far", "far_accumulator", "large_accumulator", "cancelling", "chain", "tiny", "special", "sparse")


class Bits:
    """A counter-based generator, the same on every machine and with every numpy."""

    def __init__(self, *seed: int) -> None:
        self._state = np.uint64(0)
        for part in seed:
            self._state = self._mix(np.array([int(self._state) ^ part], np.uint64))[0]
        self._count = 0

    @staticmethod
    def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
        with np.errstate(over="ignore"):
            z = z + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Integers in [low, high]."""
        count = int(np.prod(shape))
        index = np.arange(self._count, self._count + count, dtype=np.uint64)
        self._count += count
        with np.errstate(over="ignore"):
            raw = self._mix(index * np.uint64(0xD1342543DE82EF95) + self._state)
        return ((raw >> np.uint64(20)) % np.uint64(high - low + 1)).astype(np.int64).reshape(shape) + low


def _elements(f: Format, g: Bits, fields: tuple[int, int], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Codes with exponent fields in a range; those outside the format are clipped. No infinities, no NaN."""
    top = (1 << f.exponent) - (1 if f.bits == 8 and f.exponent == 4 else 2)
    field = np.clip(g.integers(*fields, shape), 0, top)
    mantissa = g.integers(0, (1 << f.mantissa) - 1, shape)
    if f.bits == 8 and f.exponent == 4:
        mantissa = np.where((field == top) & (mantissa == 7), 6, mantissa)
    return (g.integers(0, 1, shape) << (f.bits - 1)) | (field << (f.mantissa + f.unused)) | (mantissa << f.unused)


def _words(codes: NDArray[np.int64], bits: int) -> Words:
    """Elements [..., k] as 32-bit words, the first element lowest."""
    per = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per).astype(np.uint64)
    shifts = np.arange(per, dtype=np.uint64) * np.uint64(bits)
    return np.bitwise_or.reduce(parts << shifts, axis=-1).astype(np.uint32)


def _singles(g: Bits, low: int, high: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    field = g.integers(127 + low, 127 + high, shape)
    code = (g.integers(0, 1, shape) << 31) | (field << 23) | g.integers(0, (1 << 23) - 1, shape)
    return code.astype(np.uint32).view(np.float32)


@dataclass(frozen=True)
class Case:
    """Operands of ``cases`` tiles: words [cases, chain, rows, 8], accumulators float32 [cases, 64, 8]."""

    a: Words
    b: Words
    c: NDArray[np.float32]

    @property
    def chain(self) -> int:
        return int(self.a.shape[1])


def make_case(probe: str, family: str, cases: int) -> Case:
    """The operands of a family; `cases` tiles of them."""
    f = FORMATS[probe.split("_")[1]]
    g = Bits(PROBES.index(probe) % 5, FAMILIES.index(family), 20)
    chain, k, mid = (4 if family == "chain" else 1), 256 // f.bits, f.bias
    shape_a, shape_b, shape_c = (cases, chain, 64, k), (cases, chain, 8, k), (cases, 64, 8)
    spread = {"near": 1, "far": 10, "far_accumulator": 10, "large_accumulator": 2, "cancelling": 4, "chain": 3}.get(
        family, 7
    )
    fields = (mid - spread, mid + spread)
    a, b = _elements(f, g, fields, shape_a), _elements(f, g, fields, shape_b)
    c = np.zeros(shape_c, np.float32)
    if family == "tiny":
        wide = f.exponent == 8
        a = _elements(f, g, (0, 66) if wide else (0, 2), shape_a)
        b = _elements(f, g, (50, 70) if wide else (0, 3), shape_b)
        c = _singles(g, -126, -100, shape_c)
        c[:, ::2] *= np.float32(0.0 if not wide else 2.0**-12)
    elif family == "far_accumulator":
        c = _singles(g, -20, 20, shape_c)
    elif family == "large_accumulator":
        c = _singles(g, 8, 27, shape_c)
    elif family in ("chain", "sparse"):
        c = _singles(g, -14, 8, shape_c)
    elif family == "cancelling":
        half = k // 2
        a[..., half:] = a[..., :half] ^ (1 << (f.bits - 1))
        b[..., half:] = b[..., :half]
        a[..., k - 1] = _elements(f, g, fields, shape_a[:-1])
        c = _singles(g, -30, -8, shape_c)
    elif family == "special":
        top = ((1 << f.exponent) - 1) << (f.mantissa + f.unused)
        kind = g.integers(0, 60, shape_a)
        special = np.where(kind == 0, top, np.where(kind == 1, top | (1 << (f.bits - 1)), top | (1 << f.unused)))
        a = np.where(kind <= 2, special, a)
        b = np.where(g.integers(0, 40, shape_b) == 0, 0, b)
        c = np.where(g.integers(0, 30, shape_c) == 0, np.float32(np.inf), _singles(g, -2, 2, shape_c))
    if family == "sparse":
        a = np.where(g.integers(0, k - 1, shape_a) < 3, a, 0)
        c[:, :, ::2] = 0
    return Case(_words(a, f.bits), _words(b, f.bits), c.astype(np.float32))


def source(chain: int) -> str:
    return f"#define CHAIN {chain}\n{SOURCE}"


@functools.cache
def compile_ptx(text: str) -> str:
    """PTX for sm_90a, from NVRTC."""
    from cuda.bindings import nvrtc

    from deep_gemm_k3.jit.toolchain import find_toolchain

    find_toolchain()
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"probe.cu", 0, [], [])
    flags = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(status):
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.rstrip(b"\0").decode()


@dataclass(frozen=True)
class Kernel:
    """A kernel whose parameters are arrays; the last one receives the results."""

    ptx: str
    name: str
    grid: int

    def on_emulator(self, arrays: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        from deep_gemm_k3.emulator import Device, Module

        Device().launch(
            Module(self.ptx), self.name, self.grid, 128, params=[*(np.ascontiguousarray(x) for x in arrays), out]
        )

    def on_cuda(self, arrays: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """On the GPU of torch's current context."""
        import ctypes

        import torch
        from cuda.bindings import driver

        tensors = [torch.from_numpy(np.ascontiguousarray(x).view(np.int32)).cuda() for x in (*arrays, out)]
        torch.cuda.synchronize()
        status, module = driver.cuModuleLoadData(self.ptx.encode() + b"\0")
        assert int(status) == 0, status
        status, function = driver.cuModuleGetFunction(module, self.name.encode())
        assert int(status) == 0, status
        arguments = (tuple(t.data_ptr() for t in tensors), (ctypes.c_void_p,) * len(tensors))
        stream = torch.cuda.current_stream().cuda_stream
        (status,) = driver.cuLaunchKernel(function, self.grid, 1, 1, 128, 1, 1, 0, stream, arguments, 0)
        assert int(status) == 0, status
        torch.cuda.synchronize()
        driver.cuModuleUnload(module)
        out.view(np.int32)[...] = tensors[-1].cpu().numpy()

    def run(self, where: str, arrays: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        (self.on_cuda if where == "cuda" else self.on_emulator)(arrays, out)


def run(where: str, probe: str, case: Case) -> Words:
    """Result bits [cases, 64, 8], from "cuda" or "emulator"."""
    d = np.zeros(case.c.shape, np.float32)
    Kernel(compile_ptx(source(case.chain)), probe, d.shape[0]).run(where, (case.a, case.b, case.c), d)
    return d.view(np.uint32)


def digest(bits: Words) -> str:
    return hashlib.sha256(np.ascontiguousarray(bits).tobytes()).hexdigest()


def bf16_values(words: Words) -> NDArray[np.float32]:
    """The BF16 elements of words [..., n] as singles [..., 2 n]."""
    halves = np.stack((words << np.uint32(16), words & np.uint32(0xFFFF0000)), axis=-1)
    return halves.reshape(*words.shape[:-1], -1).view(np.float32)
