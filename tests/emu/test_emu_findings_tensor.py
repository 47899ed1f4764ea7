"""Findings about tcgen05: a kernel that is right, and the same with one link of its order taken out."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emu_support import cuda_module
from tensor_support import HELPERS, STEP, place_along_k, put

from deep_gemm_k3.emulator import Device, EmulatorError

RNG = np.random.default_rng(9)
ROUNDS = 4

# One warp copies A and B into two stages and multiplies; four others read the result of each round and hand its columns
# back. /*NAME*/ marks what a variant takes out or replaces.
KERNEL = (
    HELPERS
    + """
__device__ void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
extern "C" __global__ void __launch_bounds__(192) k(const uint4* image, int pieces, float* out, const Step* steps, int rounds) {
  extern __shared__ __align__(1024) uint4 smem[];
  __shared__ u64 bars[6]; __shared__ u32 slot;
  u32 t = threadIdx.x, warp = t / 32, base = sptr(smem), full = sptr(bars), empty = full + 16, done = full + 32, taken = full + 40;
  if (t == 0) {
    for (int i = 0; i < 4; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * i) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; mbarrier.init.shared::cta.b64 [%1], 128; fence.mbarrier_init.release.cluster;" :: "r"(done), "r"(taken) : "memory");
  }
  if (warp == 0) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;" :: "r"(sptr(&slot)) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  u32 tmem = *(volatile u32*)&slot, bytes = pieces * 16;
  if (warp == 5) {
    if (t == 160)
      for (int r = 0; r < rounds; ++r) {
        u32 s = r & 1;
        /*EMPTY*/wait(empty + 8 * s, ((r >> 1) & 1) ^ 1);/**/
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(full + 8 * s), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(base + s * bytes), "l"(image + r * pieces), "r"(bytes), "r"(full + 8 * s) : "memory");
      }
  } else if (warp == 4) {
    if (t == 128)
      for (int r = 0; r < rounds; ++r) {
        u32 s = r & 1;
        /*TAKEN*/if (r) wait(taken, (r - 1) & 1);/**/
        /*AFTER1*/asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");/**/
        /*FULL*/wait(full + 8 * s, (r >> 1) & 1);/**/
        for (int i = 0; i < 2; ++i) {
          Step p = steps[2 * s + i];
          asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" :: "r"(tmem), "l"(p.a), "l"(p.b), "r"(p.idesc), "r"(p.acc) : "memory");
        }
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(empty + 8 * s) : "memory");
        /*DONE*/asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(done) : "memory");/**/
      }
  } else {
    for (int r = 0; r < rounds; ++r) {
      /*WAIT*/wait(done, r & 1);/**/
      /*AFTER2*/asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");/**/
      for (int c = 0; c < 32; c += 4) {
        float v[4];
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4]; /*LD*/tcgen05.wait::ld.sync.aligned;/**/" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(tmem + (warp << 21) + c) : "memory");
        for (int i = 0; i < 4; ++i) out[(r * 32 + c + i) * 128 + t] = v[i];
      }
      /*LATE*//**/
      /*BEFORE*/asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");/**/
      arrive(taken);
    }
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  /*END*/__syncthreads();/**/
  /*FREE*/if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" :: "r"(tmem) : "memory");/**/
}
"""
)

LATE_LOAD = 'asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");'


def variant(changes: dict[str, str]) -> str:
    source = KERNEL
    for name, text in changes.items():
        source, count = re.subn(rf"/\*{name}\*/.*?/\*\*/", lambda _, text=text: text, source, flags=re.DOTALL)
        assert count == 1, name
    return source


def run(changes: dict[str, str], seed: int, adversary: str, races: bool = True) -> tuple[set[str], bool]:
    """The kinds of findings, with that of the fault that ended the launch, and whether the numbers are right."""
    a, b = (RNG.integers(-4, 5, (ROUNDS, rows, 32)).astype(np.float32) for rows in (128, 32))
    placed = [place_along_k(rows, 4, "64B") for rows in (128, 32)]
    size = sum(p.size for p in placed)
    image = np.zeros((ROUNDS, size), np.uint8)
    for r in range(ROUNDS):
        for at, where, values in ((0, placed[0], a[r]), (placed[0].size, placed[1], b[r])):
            halves = (values.view(np.uint32) >> 16).astype(np.uint16)
            put(image[r], at, where, halves.view(np.uint8).reshape(len(values), 4, 16))
    steps = np.zeros(4, STEP)
    for s in range(2):
        for i in range(2):
            steps["a"][2 * s + i] = placed[0].descriptor(s * size + 32 * i)
            steps["b"][2 * s + i] = placed[1].descriptor(s * size + placed[0].size + 32 * i)
    # static variables come first: the dynamic part begins at the next multiple of its alignment
    steps["a"] += 1024 >> 4
    steps["b"] += 1024 >> 4
    steps["idesc"], steps["acc"] = 1 << 4 | 1 << 7 | 1 << 10 | 32 >> 3 << 17 | 128 >> 4 << 24, [0, 1, 0, 1]
    out = np.zeros((ROUNDS, 32, 128), np.float32)
    device = Device(arch="sm_100a", seed=seed, adversary=adversary, race_detection=races, quantum=60)
    kinds = set()
    module, shared = cuda_module(variant(changes), "sm_100a"), 2 * size + 1024
    try:
        device.launch(module, "k", 1, 192, params=[image, size // 16, out, steps, ROUNDS], shared_bytes=shared)
    except EmulatorError as error:
        kinds.add(str(error).split(":")[0])
    kinds |= {f.kind for f in device.findings}
    return kinds, np.array_equal(out, np.einsum("rmk,rnk->rnm", a, b))


@pytest.mark.parametrize("adversary", ["earliest", "latest", "random"])
def test_complete_order_has_no_finding(adversary: str) -> None:
    for seed in range(100):
        kinds, right = run({}, seed, adversary)
        assert right
        assert not kinds


# waits until the copy before has landed, not until the product has read it
LANDED = "if (r > 1) wait(full + 8 * s, ((r >> 1) & 1) ^ 1);"


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"EMPTY": ""}, {"race", "mbarrier"}),
        ({"EMPTY": LANDED}, {"race"}),
        ({"FULL": ""}, {"race", "uninitialised-shared"}),
        ({"TAKEN": ""}, {"race", "deadlock"}),
        ({"WAIT": ""}, {"race", "uninitialised-tensor"}),
        ({"DONE": ""}, {"deadlock"}),
        ({"AFTER1": ""}, {"tensor-fence"}),
        ({"AFTER2": ""}, {"tensor-fence"}),
        ({"BEFORE": ""}, {"tensor-fence"}),
        ({"LD": ""}, {"load-in-flight"}),
        ({"LD": "", "LATE": LATE_LOAD}, {"load-in-flight"}),
        ({"END": ""}, {"race", "use-after-free"}),
        ({"FREE": ""}, {"tensor-leak"}),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_a_missing_link_is_found(changes: dict[str, str], kinds: set[str]) -> None:
    for seed in range(3):
        found, _ = run(changes, seed, "random")
        assert kinds & found, found


def test_a_stage_overwritten_while_a_product_reads_it_is_found_without_race_detection() -> None:
    found: set[str] = set()
    for seed in range(6):
        found |= run({"EMPTY": LANDED}, seed, "random", races=False)[0]
    assert "overwrite-in-flight" in found
