"""Findings about wgmma: registers that it still uses, and fences that it lacks; each with its fault-free twin."""

from __future__ import annotations

import numpy as np
import pytest
from emu_support import cuda_module
from test_emu_async import HELPERS
from test_emu_findings import kinds

from deep_gemm_k3.emulator import Module

# A product of 64 x 8 x 16 in BF16: A from registers, B from shared memory.
KERNEL = """
__device__ __forceinline__ void mma(float* d, unsigned* a, unsigned long long b) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, 1, 0;"
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0; }"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
extern "C" __global__ void k(const unsigned* x, float* y) {
  __shared__ __align__(128) unsigned tile[64];
  int t = threadIdx.x;
  if (t < 64) tile[t] = 0x3f803f80;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  unsigned long long b = (sptr(tile) >> 4) | (8ull << 16) | (16ull << 32);
  unsigned a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) { a[i] = x[t * 4 + i]; d[i] = y[t * 4 + i]; }
  FENCE
  for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
  mma(d, a, b);
  mma(d, a, b);
  COMMIT
  EARLY
  WAIT
  for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[i]), "+r"(a[i]) :: "memory");
  BETWEEN
  mma(d, a, b);
  asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
  for (int i = 0; i < 4; ++i) y[t * 4 + i] = d[i];
}
"""
PARTS = {
    "FENCE": 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");',
    "COMMIT": 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");',
    "EARLY": "",
    "WAIT": 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");',
    "BETWEEN": "",
}
USE_D = 'asm volatile("add.f32 %0, %0, 0f3f800000;" : "+f"(d[1]) :: "memory");'
READ_D = "y[t * 4] = d[0];"
USE_A = 'asm volatile("xor.b32 %0, %0, 1;" : "+r"(a[2]) :: "memory");'


def module(**changes: str) -> Module:
    source = HELPERS + KERNEL
    for name, text in {**PARTS, **changes}.items():
        source = source.replace(name, text)
    return cuda_module(source)


def found(kernel: Module, seeds: range) -> set[str]:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 1 << 32, 512, dtype=np.uint32) & np.uint32(0x3FFF3FFF)
    return kinds(kernel, [x, np.ones(512, np.float32)], seeds, block=128)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"BETWEEN": USE_D + PARTS["FENCE"]},  # registers written between products, then fenced
        {"BETWEEN": USE_A + PARTS["FENCE"]},
        {"EARLY": PARTS["WAIT"] + READ_D},
    ],
)
def test_no_finding_over_100_seeds(changes: dict[str, str]) -> None:
    assert found(module(**changes), range(100)) == set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"FENCE": ""}, "wgmma-fence"),
        ({"BETWEEN": USE_D}, "wgmma-fence"),
        ({"BETWEEN": USE_A}, "wgmma-fence"),
        ({"EARLY": READ_D}, "wgmma-registers"),
        ({"EARLY": USE_D, "BETWEEN": PARTS["FENCE"]}, "wgmma-registers"),
        ({"EARLY": USE_A, "BETWEEN": PARTS["FENCE"]}, "wgmma-registers"),
        ({"COMMIT": "", "EARLY": PARTS["WAIT"] + READ_D}, "wgmma-registers"),  # what is not committed is not waited for
        ({"WAIT": "", "BETWEEN": USE_D + PARTS["FENCE"]}, "wgmma-registers"),
    ],
)
def test_faults_are_found(changes: dict[str, str], expected: str) -> None:
    assert found(module(**changes), range(3)) == {expected}
