"""wgmma with results of halves, several steps along k, groups, and what its descriptors cannot mean; against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import cuda_module, run_ptx

from deep_gemm_k3.emulator import Device, EmulatorError

DTYPES = {"f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}

KERNEL = r"""
typedef unsigned int u32; typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(128) k(const uint4* image, int pieces, u32* out, const u64* a, const u64* b, int steps, int waits) {
  extern __shared__ __align__(1024) uint4 s[];
  for (int i = threadIdx.x; i < pieces; i += 128) s[i] = image[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  REGISTERS
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+PLACE"(v[i]) :: "memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int i = 0; i < steps; ++i) {
    asm volatile("PRODUCT" : OUTPUTS : "l"(a[i]), "l"(b[i]), "r"(i) : "memory");
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (waits) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < COUNT; ++i) out[threadIdx.x * COUNT + i] = WORD(v[i]);
}"""


def values(shape: tuple[int, int], kind: str) -> torch.Tensor:
    return torch.randint(-4, 5, shape).to(torch.float32).to(DTYPES[kind])


def run(kind: str, d: str, a: torch.Tensor, b: torch.Tensor, *, waits: bool, seed: int = 0) -> np.ndarray:
    """D (64 x n) over all of k, as one row of words per thread; operands along k with the 128-byte swizzle."""
    size, n, k = a.element_size(), b.shape[0], a.shape[1]
    per, steps = 32 // size, k * size // 32
    assert k * size <= 128 * 4
    image = np.zeros((64 + n) * k * size + 8192, np.uint8)
    bases = []
    at = 0
    for matrix in (a, b):  # columns of 128 bytes, each a stack of atoms of eight rows
        rows = matrix.shape[0]
        raw = matrix.contiguous().view(torch.uint8).numpy().reshape(rows, -1)
        row, byte = np.meshgrid(np.arange(rows), np.arange(raw.shape[1]), indexing="ij")
        offset = byte // 128 * rows * 128 + row * 128 + byte % 128
        image[at + (offset ^ (row % 8 << 4))] = raw
        bases.append([at + i * per * size // 128 * rows * 128 + i * per * size % 128 for i in range(steps)])
        at += -(-rows * raw.shape[1] // 1024) * 1024
    words = [np.array([(1024 + x) >> 4 | 1 << 16 | 64 << 32 | 1 << 62 for x in base], np.uint64) for base in bases]
    count = n // 4 if d == "f16" else n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    product = (
        f"{{ .reg .pred p; setp.ne.u32 p, %{count + 2}, 0; wgmma.mma_async.sync.aligned.m64n{n}k{per}.{d}.{kind}.{kind} "
        f"{{{registers}}}, %{count}, %{count + 1}, p, 1, 1{', 0, 0' if size == 2 else ''}; }}"
    )
    source = KERNEL.replace("PRODUCT", product).replace("COUNT", str(count))
    source = source.replace("OUTPUTS", ", ".join(f'"+{"r" if d == "f16" else "f"}"(v[{i}])' for i in range(count)))
    source = source.replace("PLACE", "r" if d == "f16" else "f").replace(
        "REGISTERS", f"{'u32' if d == 'f16' else 'float'} v[{count}] = {{}};"
    )
    source = source.replace("WORD(", "(" if d == "f16" else "__float_as_uint(")
    out = np.zeros((128, count), np.uint32)
    device = Device(seed=seed, race_detection=True)
    pieces = at // 16
    device.launch(
        cuda_module(source), "k", 1, 128, params=[image, pieces, out, *words, steps, int(waits)], shared_bytes=at + 1024
    )
    assert not device.findings, device.findings
    return out


def spread(matrix: np.ndarray) -> np.ndarray:
    """(thread, element) of a 64 x n accumulator."""
    thread, i = np.meshgrid(np.arange(128), np.arange(matrix.shape[1] // 2), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
    return matrix[row, thread % 4 * 2 + i % 2 + i // 4 * 8]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("kind", "d"), [("f16", "f16"), ("e4m3", "f16"), ("e5m2", "f16"), ("f16", "f32"), ("bf16", "f32"), ("e4m3", "f32")])  # fmt: skip
@pytest.mark.parametrize("n", [8, 40, 96])
def test_steps_along_k(n: int, kind: str, d: str, waits: bool) -> None:
    """Two columns of 128 bytes: the descriptor's start moves inside a swizzled row, then to the next column of atoms."""
    k = 256 // DTYPES[kind].itemsize
    a, b = values((64, k), kind), values((n, k), kind)
    got = run(kind, d, a, b, waits=waits, seed=n)
    want = (a.float() @ b.float().T).numpy()
    if d == "f16":
        assert np.array_equal(got.view(np.float16), spread(want).astype(np.float16))
    else:
        assert np.array_equal(got.view(np.float32), spread(want))


WRONG = """.reg .f32 %f<4>; .reg .b64 %a, %b; .reg .pred %p; .reg .b32 %t; .shared .align 1024 .b8 box[4096]; mov.pred %p, 0; mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
mov.u64 %a, FIRST; mov.u64 %b, SECOND; wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %a, %b, %p, 1, 1, 0, 0; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""
GOOD = 1024 >> 4 | 8 << 16 | 16 << 32


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (GOOD | 0x3FFF, GOOD, "out-of-bounds"),
        (GOOD & ~0x3FFF, GOOD, "out-of-bounds"),
        (GOOD, (GOOD & ~0x3FFF) | 5120 - 16 >> 4, "out-of-bounds"),
        (GOOD | 1 << 49, GOOD, "base offset is not modelled"),
        (GOOD, GOOD | 7 << 49 | 1 << 62, "base offset is not modelled"),
    ],
)
def test_descriptors_that_cannot_be_meant(first: int, second: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=f"(?s){message}.*PTX line"):
        run_ptx(WRONG.replace("FIRST", str(first)).replace("SECOND", str(second)), "", [], block=128)


def test_unwritten_operands_are_a_finding() -> None:
    device = run_ptx(WRONG.replace("FIRST", str(GOOD)).replace("SECOND", str(GOOD)), "", [], block=128)
    assert {f.kind for f in device.findings} == {"uninitialised-shared"}


def test_lanes_of_a_warp_must_come_together() -> None:
    body = WRONG.replace("FIRST", str(GOOD)).replace("SECOND", str(GOOD)).replace("mov.pred %p, 0;", "mov.pred %p, 0; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 3; @%p exit;")  # fmt: skip
    with pytest.raises(EmulatorError, match="wgmma executed by lanes"):
        run_ptx(body, "", [], block=128)
