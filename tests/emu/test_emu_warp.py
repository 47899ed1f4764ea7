"""Divergence, warp-synchronous instructions, barriers, atomics, clusters: CUDA C++ through NVRTC against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from emu_support import cuda_module, run_ptx

from deep_gemm_k3.emulator import Device, EmulatorError, Launch

RNG = np.random.default_rng(3)
ADVERSARIES = ["random", "earliest", "latest"]


def test_divergent_loops_and_reconvergence() -> None:
    module = cuda_module("""
    extern "C" __global__ void k(const int* x, int* y, unsigned* masks) {
      int i = threadIdx.x, n = x[i], steps = 0;
      while (n != 1) { if (n & 1) n = 3 * n + 1; else n >>= 1; ++steps; if (steps > 500) break; }
      y[i] = steps;
      masks[i] = __activemask();
      if (i % 3 == 0) { y[i] += 1000; if (i % 2) return; y[i] += 1000; }
      y[i] = -y[i];
    }""")
    x = RNG.integers(1, 10000, 128).astype(np.int32)
    y, masks = np.zeros(128, np.int32), np.zeros(128, np.uint32)
    for seed in range(5):
        Device(seed=seed).launch(module, "k", 1, 128, params=[x, y, masks])
        want = []
        for i, start in enumerate(x.tolist()):
            n, steps = start, 0
            while n != 1 and steps <= 500:
                n = 3 * n + 1 if n & 1 else n >> 1
                steps += 1
            if i % 3 == 0:
                steps += 1000
                if i % 2:
                    want.append(steps)
                    continue
                steps += 1000
            want.append(-steps)
        assert y.tolist() == want
        assert np.all(masks == 0xFFFFFFFF)


def test_spin_lock_between_lanes_of_one_warp() -> None:
    module = cuda_module("""
    extern "C" __global__ void k(int* lock, int* total) {
      bool done = false;
      while (!done) if (atomicCAS(lock, 0, 1) == 0) { __threadfence(); *(volatile int*)total = *(volatile int*)total + threadIdx.x; __threadfence(); atomicExch(lock, 0); done = true; }
    }""")
    for seed in range(5):
        lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
        Device(seed=seed).launch(module, "k", 2, 64, params=[lock, total])
        assert total[0] == 2 * sum(range(64))


def test_lane_waits_for_lane_of_its_own_warp() -> None:
    module = cuda_module("""
    extern "C" __global__ void k(volatile int* flag, int* out) {
      if (threadIdx.x == 0) { while (flag[0] == 0) {} out[0] = flag[0]; }
      else if (threadIdx.x == 7) { flag[0] = 41; out[7] = 7; }
      out[threadIdx.x] += 1;
    }""")
    for seed in range(10):
        flag, out = np.zeros(1, np.int32), np.zeros(32, np.int32)
        Device(seed=seed).launch(module, "k", 1, 32, params=[flag, out])
        assert out[0] == 42 and out[7] == 8 and out.sum() == 42 + 8 + 30


def test_shuffles() -> None:
    module = cuda_module("""
    extern "C" __global__ void k(const int* x, int* y) {
      int v = x[threadIdx.x], i = threadIdx.x;
      y[i] = __shfl_sync(~0u, v, i * 7 + 3); y[32 + i] = __shfl_up_sync(~0u, v, 5); y[64 + i] = __shfl_down_sync(~0u, v, 9);
      y[96 + i] = __shfl_xor_sync(~0u, v, 21); y[128 + i] = __shfl_sync(~0u, v, i + 2, 8); y[160 + i] = __shfl_down_sync(~0u, v, 3, 16);
      y[192 + i] = __reduce_add_sync(~0u, v); y[224 + i] = __reduce_max_sync(~0u, v);
      y[256 + i] = __match_any_sync(~0u, v & 3); y[288 + i] = __ballot_sync(~0u, v > 0); y[320 + i] = __any_sync(~0u, v == x[5]) + 2 * __all_sync(~0u, v == x[5]);
    }""")
    x, y = RNG.integers(-1000, 1000, 32).astype(np.int32), np.zeros(352, np.int32)
    Device().launch(module, "k", 1, 32, params=[x, y])
    lane = np.arange(32)
    rows = y.reshape(11, 32)
    want = [
        x[(lane * 7 + 3) % 32], np.where(lane >= 5, x[lane - 5], x), np.where(lane + 9 < 32, x[(lane + 9) % 32], x), x[lane ^ 21],
        x[lane // 8 * 8 + (lane + 2) % 8], np.where(lane % 16 + 3 < 16, x[(lane + 3) % 32], x), np.full(32, x.sum()), np.full(32, x.max()),
        [int(sum(1 << j for j in range(32) if x[j] & 3 == x[i] & 3)) for i in range(32)], np.full(32, sum(1 << j for j in range(32) if x[j] > 0)),
        np.full(32, 1),
    ]  # fmt: skip
    for got, row in zip(rows, want, strict=True):
        assert np.array_equal(got.view(np.uint32), np.asarray(row).astype(np.int64).astype(np.uint32))


def test_elect_and_partial_masks() -> None:
    body = """.reg .pred %p, %q; .reg .b32 %t, %e, %m, %v; .reg .b64 %ptr;
    mov.u32 %t, %tid.x; ld.param.u64 %ptr, [out]; mad.wide.u32 %ptr, %t, 4, %ptr;
    setp.lt.u32 %q, %t, 12; mov.u32 %v, 0;
    @%q bra LOW;
    elect.sync %e|%p, 0xfffff000; @%p add.u32 %v, %e, 100;
    bra END;
    LOW: elect.sync %e|%p, 0xfff; @%p add.u32 %v, %e, 200;
    END: st.global.u32 [%ptr], %v;"""
    for seed in range(4):
        out = np.zeros(32, np.uint32)
        run_ptx(body, ".param .u64 out", [out], device=Device(seed=seed))
        want = np.zeros(32, np.uint32)
        want[0], want[12] = 200, 112
        assert np.array_equal(out, want)


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_block_reduction_with_barriers(adversary: str) -> None:
    module = cuda_module("""
    extern "C" __global__ void k(const int* x, int* y) {
      __shared__ int s[256];
      s[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
      __syncthreads();
      for (int step = 128; step; step >>= 1) { if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step]; __syncthreads(); }
      if (threadIdx.x == 0) y[blockIdx.x] = s[0];
      int many = __syncthreads_count(x[blockIdx.x * 256 + threadIdx.x] > 0);
      if (threadIdx.x == 1) y[64 + blockIdx.x] = many;
    }""")
    x = RNG.integers(-1000, 1000, 64 * 256).astype(np.int32)
    for seed in range(3):
        y = np.zeros(128, np.int32)
        device = Device(seed=seed, adversary=adversary)
        device.launch(module, "k", 64, 256, params=[x, y])
        assert np.array_equal(y[:64], x.reshape(64, 256).sum(1))
        assert np.array_equal(y[64:], (x.reshape(64, 256) > 0).sum(1))
        assert not device.findings


def test_named_barriers_between_producers_and_consumers() -> None:
    module = cuda_module("""
    extern "C" __global__ void k(int* y) {
      __shared__ int s[64];
      int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      for (int i = 0; i < 20; ++i) {
        if (warp == 0) {
          asm volatile("barrier.sync.aligned 1, 96;" ::: "memory");
          s[lane] = i * 100 + lane;
          asm volatile("bar.arrive 2, 96;" ::: "memory");
        } else {
          asm volatile("bar.arrive 1, 96;" ::: "memory");
          asm volatile("bar.sync 2, 96;" ::: "memory");
          y[i * 64 + threadIdx.x - 32] = s[lane];
        }
      }
    }""")
    for seed in range(4):
        y = np.zeros(20 * 64, np.int32)
        device = Device(seed=seed, quantum=7)
        device.launch(module, "k", 1, 96, params=[y])
        want = (np.arange(20)[:, None] * 100 + np.tile(np.arange(32), 2)[None, :]).ravel()
        # a consumer's barrier 1 of round i + 1 comes after its read of round i
        assert np.array_equal(y, want)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "f32", "f64"])
def test_atomics(kind: str) -> None:
    bits = int(kind[1:])
    dtype = {"u": f"u{bits // 8}", "s": f"i{bits // 8}", "f": f"f{bits // 8}"}[kind[0]]
    ops = ["add"] if kind[0] == "f" else ["add", "min", "max"]
    for op in ops:
        body = f""".reg .b32 %t; .reg .b{bits} %v, %o; .reg .b64 %x, %y, %z;
        mov.u32 %t, %ctaid.x; mad.lo.u32 %t, %t, 32, 0; mov.u32 %t, %tid.x;
        ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; ld.param.u64 %z, [z]; mad.wide.u32 %x, %t, {bits // 8}, %x; mad.wide.u32 %z, %t, {bits // 8}, %z;
        ld.global.b{bits} %v, [%x]; atom.relaxed.gpu.global.{op}.{kind} %o, [%y], %v; red.global.{op}.{kind} [%y+{bits // 8}], %v; st.global.b{bits} [%z], %o;"""
        x = RNG.integers(0, 100, 64).astype(dtype)
        y, z = np.array([50, 50], dtype), np.zeros(64, dtype)
        run_ptx(body, ".param .u64 x, .param .u64 y, .param .u64 z", [x, y, z], block=64)
        want = {"add": x.sum() + y.dtype.type(50), "min": min(x.min(), 50), "max": max(x.max(), 50)}[op]
        assert y[0] == want and y[1] == want
        if op == "add":  # the values returned are the partial sums in some order
            order = np.argsort(z, kind="stable")
            assert z[order[0]] == 50 and set((z + x).tolist()) >= set(z.tolist()) - {50}


def test_cas_exchange_and_wide_atomics() -> None:
    module = cuda_module("""
    extern "C" __global__ void k(unsigned* a, unsigned long long* b, float* f) {
      unsigned old = a[0], seen;
      do { seen = old; old = atomicCAS(a, seen, seen * 3 + 1); } while (old != seen);
      atomicInc(a + 1, 9); atomicXor(a + 2, 1u << threadIdx.x); atomicAdd(b, 1ull << 40); atomicAdd(f, 0.5f);
      if (atomicExch(a + 3, 1) == 0) a[4] = threadIdx.x + 1;
    }""")
    a, b, f = np.zeros(5, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.float32)
    Device(seed=2).launch(module, "k", 1, 32, params=[a, b, f])
    want = 0
    for _ in range(32):
        want = (want * 3 + 1) & 0xFFFFFFFF
    assert a[0] == want and a[1] == 32 % 10 and a[2] == 0xFFFFFFFF and a[3] == 1 and 1 <= a[4] <= 32
    assert b[0] == 32 << 40 and f[0] == 16


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_cluster_reduction_over_distributed_shared_memory(adversary: str) -> None:
    module = cuda_module("""
    #include <cooperative_groups.h>
    namespace cg = cooperative_groups;
    extern "C" __global__ void __cluster_dims__(4, 1, 1) k(const int* x, int* y) {
      __shared__ int s;
      auto cluster = cg::this_cluster();
      int v = x[blockIdx.x * 32 + threadIdx.x];
      for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
      if (threadIdx.x == 0) s = v;
      cluster.sync();
      int sum = 0;
      for (unsigned r = 0; r < cluster.num_blocks(); ++r) sum += *cluster.map_shared_rank(&s, r);
      if (threadIdx.x == 0) y[blockIdx.x] = sum * 10 + cluster.block_rank();
      cluster.sync();
    }""")
    x, y = RNG.integers(0, 1000, 16 * 32).astype(np.int32), np.zeros(16, np.int32)
    device = Device(seed=5, adversary=adversary)
    device.launch(module, "k", 16, 32, params=[x, y])
    sums = x.reshape(4, 128).sum(1)
    assert np.array_equal(y, np.repeat(sums, 4) * 10 + np.tile(np.arange(4), 4))
    assert not device.findings


def test_two_ranks_exchange_through_flags() -> None:
    module = cuda_module("""
    extern "C" __global__ void k(int rank, int* mine, int* peer, int* out) {
      if (threadIdx.x == 0) {
        peer[1] = 100 + rank;
        asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(peer), "r"(1) : "memory");
        unsigned seen;
        do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory"); while (!seen);
        out[rank] = mine[1];
      }
    }""")
    for seed in range(10):
        first, second, out = np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)
        Device(seed=seed).run(
            [
                Launch(module, "k", 1, 32, [0, first, second, out], rank=0),
                Launch(module, "k", 1, 32, [1, second, first, out], rank=1),
            ]
        )
        assert out.tolist() == [101, 100]


def test_printf() -> None:
    module = cuda_module("""

    extern "C" __global__ void k(int n) { if (threadIdx.x < 2) printf("lane %d of %u: %s %.2f %llx %c\\n", threadIdx.x, n, "text", 1.5, 1ull << 40, 'z'); }""")
    device = Device()
    device.launch(module, "k", 1, 32, params=[7])
    assert sorted(device.printed.splitlines()) == [f"lane {i} of 7: text 1.50 10000000000 z" for i in range(2)]


def test_trap_and_assertion_name_the_place() -> None:
    module = cuda_module("""

    extern "C" __global__ void t(int n) { if (threadIdx.x == n) __trap(); }
    extern "C" __global__ void a(int n) { assert(threadIdx.x != n); }""")
    with pytest.raises(EmulatorError, match=r"trap: .*\n.*rank 0 CTA \(0,0,0\) warp 1 .*PTX line \d+"):
        Device().launch(module, "t", 1, 64, params=[33])
    with pytest.raises(EmulatorError, match=r"assertion: .*threadIdx.x != n"):
        Device().launch(module, "a", 1, 64, params=[33])
