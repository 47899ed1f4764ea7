"""Shared by the tests of tcgen05: one kernel that runs products over given images of shared and tensor memory.

Tensor memory is an array (CTA, column, lane) of 32-bit words; shared memory an array (CTA, byte) whose first byte has
the shared address 1024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from emu_support import cuda_module

from deep_gemm_k3.emulator import Device

SHARED_START = 1024
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
MODE = {"none": 0, "128B": 2, "64B": 4, "32B": 6}
STEP = np.dtype(
    [("a", "u8"), ("b", "u8"), ("d", "u4"), ("at", "u4"), ("idesc", "u4"), ("sfa", "u4"), ("sfb", "u4"), ("acc", "u4")]
)

HELPERS = """
typedef unsigned u32; typedef unsigned long long u64;
__device__ u32 sptr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void wait(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @!p bra L; }" :: "r"(bar), "r"(parity) : "memory");
}
struct Step { u64 a, b; u32 d, at, idesc, sfa, sfb, acc; };
"""

KERNEL = """
extern "C" __global__ void CLUSTER __launch_bounds__(128) k(const uint4* image, int pieces, const u32* before, int before_columns, u32* after, int after_columns, const Step* steps, int count, u32 columns) {
  extern __shared__ __align__(1024) uint4 smem[];
  u32 t = threadIdx.x, warp = t / 32, rank = blockIdx.x, base = sptr(smem), bar = base + pieces * 16, slot = bar + 8;
  for (int i = t; i < pieces; i += 128) smem[i] = image[rank * pieces + i];
  if (warp == 0) {
    asm volatile("tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%0], %1;" :: "r"(slot), "r"(columns) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;");
  }
  if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(bar) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  u32 tmem; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(tmem) : "r"(slot) : "memory");
  for (int c = 0; c < before_columns; ++c)
    asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" :: "r"(tmem + (warp << 21) + c), "r"(before[(rank * before_columns + c) * 128 + t]) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;" ::: "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  if (t == 0 && rank % GROUP == 0) {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (int i = 0; i < count; ++i) {
      Step s = steps[i];
      BODY
    }
    COMMIT
  }
  wait(bar, 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  for (int c = 0; c < after_columns; ++c) {
    u32 v; asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1]; tcgen05.wait::ld.sync.aligned;" : "=r"(v) : "r"(tmem + (warp << 21) + c) : "memory");
    after[(rank * after_columns + c) * 128 + t] = v;
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %0, %1;" :: "r"(tmem), "r"(columns) : "memory");
}
"""
COMMIT = {
    1: 'asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(bar) : "memory");',
    2: 'asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" :: "r"(bar), "h"((unsigned short)3) : "memory");',
}
PLAIN = """asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::GROUP.kind::KIND [%0], A, %2, %3, MASKp SHIFT; }" :: "r"(tmem + s.d), AVALUE, "l"(s.b), "r"(s.idesc), "r"(s.acc) : "memory");"""
SCALED = """asm volatile("{ .reg .pred p; setp.ne.u32 p, %6, 0; tcgen05.mma.cta_group::GROUP.kind::KIND [%0], A, %2, %3, [%4], [%5], p; }" :: "r"(tmem + s.d), AVALUE, "l"(s.b), "r"(s.idesc), "r"(tmem + s.sfa), "r"(tmem + s.sfb), "r"(s.acc) : "memory");"""
COPY = """asm volatile("tcgen05.cp.cta_group::GROUP.KIND [%0], %1;" :: "r"(tmem + s.d), "l"(s.a) : "memory");"""
SHIFT = """asm volatile("tcgen05.shift.cta_group::GROUP.down [%0];" :: "r"(tmem + s.d) : "memory");"""


def body_of_product(
    kind: str, *, scaled: bool = False, a_in_tensor: bool = False, mask: list[int] | None = None, shift: int = 0
) -> str:
    text = SCALED if scaled else PLAIN
    words = "{" + ", ".join(f"m{i}" for i in range(len(mask))) + "}, " if mask else ""
    if mask:
        moves = "".join(f"mov.b32 m{i}, {word};" for i, word in enumerate(mask))
        text = text.replace("{ .reg", "{ .reg .b32 m<8>; " + moves + " .reg")
    return (
        text.replace("KIND", kind)
        .replace("AVALUE", '"r"(tmem + s.at)' if a_in_tensor else '"l"(s.a)')
        .replace(" A,", " [%1]," if a_in_tensor else " %1,")
        .replace("MASK", words)
        .replace("SHIFT", f", {shift}" if shift else "")
    )


def run_tensor(
    body: str,
    steps: np.ndarray,
    image: np.ndarray,
    before: np.ndarray,
    after_columns: int,
    *,
    group: int = 1,
    columns: int = 512,
    device: Device | None = None,
) -> np.ndarray:
    """Tensor memory (CTA, column, lane) after `body` has run for every step; findings are the caller's to look at."""
    source = KERNEL.replace("BODY", body).replace("COMMIT", COMMIT[group]).replace("GROUP", str(group))
    source = source.replace("CLUSTER", "__cluster_dims__(2, 1, 1)" if group == 2 else "")
    device = device or Device(arch="sm_100a")
    after = np.zeros((group, after_columns, 128), np.uint32)
    image = np.ascontiguousarray(image)
    pieces = image.shape[1] // 16
    device.launch(
        cuda_module(HELPERS + source, "sm_100a"),
        "k",
        group,
        128,
        params=[
            image,
            pieces,
            np.ascontiguousarray(before),
            before.shape[1],
            after,
            after_columns,
            steps,
            len(steps),
            columns,
        ],
        shared_bytes=image.shape[1] + 64,
    )
    return after


@dataclass
class Placed:
    """An operand in shared memory: which byte of the image each of its 16-byte pieces begins at, and its descriptor."""

    offsets: np.ndarray
    leading: int
    stride: int
    size: int
    swizzle: str

    def descriptor(self, offset: int) -> int:
        return (
            (SHARED_START + offset) >> 4
            | self.leading >> 4 << 16
            | self.stride >> 4 << 32
            | 1 << 46
            | MODE[self.swizzle] << 61
        )


def _swizzled(offset: np.ndarray, swizzle: str) -> np.ndarray:
    return offset ^ ((offset >> 7 & (SPAN[swizzle] // 16 - 1)) << 4)


def place_along_k(rows: int, pieces: int, swizzle: str) -> Placed:
    """Rows of `pieces` * 16 bytes: eight rows make an atom as wide as the swizzle, atoms follow each other by rows."""
    row, piece = np.meshgrid(np.arange(rows), np.arange(pieces), indexing="ij")
    span = SPAN[swizzle]
    if swizzle == "none":
        leading, stride = rows // 8 * 128, 128
        offsets = row // 8 * stride + row % 8 * 16 + piece * leading
        return Placed(offsets, leading, stride, rows * pieces * 16, swizzle)
    assert pieces * 16 <= span
    stride = 8 * span
    offsets = _swizzled(row // 8 * stride + row % 8 * span + piece * 16, swizzle)
    return Placed(offsets, 16, stride, -(-rows // 8) * stride, swizzle)


def place_along_rows(rows_bytes: int, depth: int, swizzle: str) -> Placed:
    """Pieces along m or n (axis 1) for every k (axis 0): eight k make an atom as wide as the swizzle."""
    k, piece = np.meshgrid(np.arange(depth), np.arange(rows_bytes // 16), indexing="ij")
    span = SPAN[swizzle]
    per, atom = span // 16, 8 * span
    across = -(-(rows_bytes // 16) // per)
    if swizzle == "none":
        leading, stride = 128 * across, 128
        outer, deeper = stride, leading
    else:
        leading, stride = atom, atom * across
        outer, deeper = leading, stride
    offsets = _swizzled(piece % per * 16 + piece // per * outer + k % 8 * span + k // 8 * deeper, swizzle)
    return Placed(offsets, leading, stride, across * atom * -(-depth // 8), swizzle)


def put(image: np.ndarray, at: int, placed: Placed, data: np.ndarray) -> None:
    """Writes the pieces `data` (first axis, second axis, 16 bytes) of an operand into a CTA's image from byte `at`."""
    where = at + placed.offsets[..., None] + np.arange(16)
    image[where] = data
