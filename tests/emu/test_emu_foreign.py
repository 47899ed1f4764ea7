"""PTX in other styles than this package's: calls, jump tables, cooperative groups, cuda::barrier and cuda::pipeline, clusters."""

from __future__ import annotations

import numpy as np
import pytest
from emu_support import HEADER, compile_cuda

from deep_gemm_k3.emulator import Device, EmulatorError, Module

ARCHITECTURES = ["sm_90a", "sm_100a"]


def launch(
    source: str, arch: str, kernel: str, grid: int, block: int, params: list[object], **options: object
) -> Device:
    device = Device(arch=arch, seed=3)
    device.launch(Module(compile_cuda(source, arch)), kernel, grid, block, params=params, **options)
    assert not device.findings
    return device


CALLS = """
struct Pair { float a, b; };
__noinline__ __device__ int twice(int x) { return 2 * x + 1; }
__noinline__ __device__ Pair swapped(Pair p, int times) {
    int scratch[8];
    for (int i = 0; i < 8; ++i) scratch[i] = twice(i + times);
    return {p.b + scratch[times & 7], p.a};
}
__noinline__ __device__ void store(float* to, float value) { if (value > 10.0f) return; *to = value; }
extern "C" __global__ void k(float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Pair p = {float(i), -1.0f};
    if (i % 3) p = swapped(p, i % 5);
    if (i % 2) p = swapped(p, 2);
    store(out + 2 * i, p.a);
    store(out + 2 * i + 1, p.b);
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_calls_of_functions(arch: str) -> None:
    """Calls with structures, local arrays, early returns, in diverged code; what they are called with differs per lane."""
    ptx = compile_cuda(CALLS, arch)
    assert ptx.count("call.uni") >= 5
    n, out = 100, np.full(200, 77.0, np.float32)
    launch(CALLS, arch, "k", 1, 128, [out, n])
    want = np.full(200, 77.0, np.float32)
    for i in range(n):
        a, b = float(i), -1.0
        if i % 3:
            a, b = b + 2 * (i % 5 + i % 5) + 1, a
        if i % 2:
            a, b = b + 2 * (2 + 2) + 1, a
        for at, value in ((2 * i, a), (2 * i + 1, b)):
            if value <= 10.0:
                want[at] = value
    np.testing.assert_array_equal(out, want)


def test_recursion_and_calls_without_a_body_are_errors() -> None:
    recursive = (
        HEADER
        + """.func f() { call.uni f, (); ret; }
.visible .entry k() { call.uni f, (); ret; }"""
    )
    with pytest.raises(EmulatorError, match=r"PTX line \d+: recursive calls of 'f' are not modelled"):
        Module(recursive).check()
    outside = (
        HEADER
        + """.extern .func g();
.visible .entry k() { call.uni g, (); ret; }"""
    )
    with pytest.raises(EmulatorError, match=r"PTX line \d+: calls of 'g' are not modelled: it has no body here"):
        Module(outside).check()


def test_jump_tables() -> None:
    """brx.idx, guarded, in diverged code."""
    text = (
        HEADER
        + """.visible .entry k(.param .u64 out) {
.reg .pred %p<3>; .reg .b32 %r<6>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.u64 %rd3, %rd1, %rd2;
rem.u32 %r2, %r1, 5;
setp.lt.u32 %p1, %r2, 3;
mov.u32 %r3, 100;
table: .branchtargets zero, one, two;
@%p1 brx.idx %r2, table;
bra done;
zero: mov.u32 %r3, 10; bra done;
one: mov.u32 %r3, 11;
two: add.u32 %r3, %r3, 12;
done: st.global.u32 [%rd3], %r3;
ret; }"""
    )
    out = np.zeros(32, np.uint32)
    Device().launch(Module(text), "k", 1, 32, params=[out])
    assert out.tolist() == [{0: 10, 1: 23, 2: 112}.get(i % 5, 100) for i in range(32)]


GROUPS = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;
extern "C" __global__ void k(const int* in, int* sums, int* scans, unsigned* counts) {
    auto block = cg::this_thread_block();
    auto tile = cg::tiled_partition<16>(block);
    int value = in[block.group_index().x * block.size() + block.thread_rank()];
    int total = cg::reduce(tile, value, cg::plus<int>());
    int before = cg::exclusive_scan(tile, value);
    int at = block.group_index().x * block.size() + block.thread_rank();
    sums[at] = total, scans[at] = before;
    if (value & 1) {
        auto odd = cg::coalesced_threads();
        int mine = cg::reduce(odd, value, cg::greater<int>());
        if (odd.thread_rank() == 0) atomicAdd(counts, odd.size()), atomicMax(counts + 1, unsigned(mine));
    }
    block.sync();
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cooperative_groups(arch: str) -> None:
    values = np.random.default_rng(1).integers(0, 1000, 256).astype(np.int32)
    sums, scans, counts = np.zeros(256, np.int32), np.zeros(256, np.int32), np.zeros(2, np.uint32)
    launch(GROUPS, arch, "k", 2, 128, [values, sums, scans, counts])
    tiles = values.reshape(-1, 16)
    np.testing.assert_array_equal(sums.reshape(-1, 16), np.repeat(tiles.sum(1)[:, None], 16, axis=1))
    np.testing.assert_array_equal(scans.reshape(-1, 16), np.cumsum(tiles, axis=1) - tiles)
    odd = values[values % 2 == 1]
    assert counts.tolist() == [len(odd), odd.max()]


PIPELINE = """
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
constexpr int kStages = 3, kTile = 128;
extern "C" __global__ void pipelined(const float* in, float* out, int tiles) {
    __shared__ float stage[kStages][kTile];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, kStages> state;
    auto block = cg::this_thread_block();
    auto pipe = cuda::make_pipeline(block, &state);
    float sum = 0;
    for (int issued = 0, used = 0; used < tiles; ++used) {
        for (; issued < tiles && issued < used + kStages; ++issued) {
            pipe.producer_acquire();
            cuda::memcpy_async(block, stage[issued % kStages], in + issued * kTile, sizeof(float) * kTile, pipe);
            pipe.producer_commit();
        }
        pipe.consumer_wait();
        sum += stage[used % kStages][(threadIdx.x + used) % kTile];
        pipe.consumer_release();
    }
    out[threadIdx.x] = sum;
}
using barrier = cuda::barrier<cuda::thread_scope_block>;
extern "C" __global__ void bulk(const float* in, float* out, int tiles) {
    __shared__ alignas(128) float stage[kTile];
    __shared__ barrier full;
    if (threadIdx.x == 0) init(&full, blockDim.x);
    __syncthreads();
    float sum = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        barrier::arrival_token token;
        if (threadIdx.x == 0) {
            cuda::device::memcpy_async_tx(stage, in + tile * kTile, cuda::aligned_size_t<16>(sizeof(stage)), full);
            token = cuda::device::barrier_arrive_tx(full, 1, sizeof(stage));
        } else {
            token = full.arrive();
        }
        full.wait(std::move(token));
        sum += stage[(threadIdx.x + tile) % kTile];
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["pipelined", "bulk"])
def test_cuda_pipelines_and_barriers(arch: str, kernel: str) -> None:
    """libcu++'s own pipeline, and its barrier with bulk copies."""
    tiles = 7
    values = np.random.default_rng(2).integers(-50, 50, (tiles, 128)).astype(np.float32)
    out = np.zeros(128, np.float32)
    launch(PIPELINE, arch, kernel, 1, 128, [values, out, tiles])
    want = sum(values[t][(np.arange(128) + t) % 128] for t in range(tiles))
    np.testing.assert_array_equal(out, want)


CLUSTER = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void __cluster_dims__(4, 1, 1) k(const int* in, int* out) {
    __shared__ int part[64];
    auto cluster = cg::this_cluster();
    int at = blockIdx.x * 64 + threadIdx.x;
    part[threadIdx.x] = in[at];
    cluster.sync();
    int sum = 0;
    for (unsigned rank = 0; rank < cluster.num_blocks(); ++rank) {
        int* theirs = cluster.map_shared_rank(part, rank);
        sum += theirs[threadIdx.x] * int(rank + 1);
    }
    atomicAdd(cluster.map_shared_rank(part, 0) + threadIdx.x, 0);
    cluster.sync();
    out[at] = sum;
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cluster_reductions_over_distributed_shared_memory(arch: str) -> None:
    values = np.arange(512, dtype=np.int32)
    out = np.zeros(512, np.int32)
    launch(CLUSTER, arch, "k", 8, 64, [values, out])
    parts = values.reshape(2, 4, 64)
    want = (parts * np.arange(1, 5)[None, :, None]).sum(1)
    np.testing.assert_array_equal(out.reshape(2, 4, 64), np.repeat(want[:, None], 4, axis=1))


VARIOUS = """
#include <cuda/atomic>
extern "C" __global__ void k(double* d, unsigned long long* w, float* f, int n) {
    int i = threadIdx.x;
    cuda::atomic_ref<unsigned long long, cuda::thread_scope_device> word(*w);
    word.fetch_add(i, cuda::std::memory_order_relaxed);
    double x = d[i];
    d[i] = fma(x, 0.5, sqrt(x)) / (1.0 + x);
    f[i] = sinf(f[i]) * expf(-f[i]) + __fdividef(f[i], 3.0f) + powf(f[i], 1.5f);
    if (i == n) printf("lane %d sees %.2f and %s\\n", i, d[i], "text");
    switch (i % 9) {
        case 0: f[i] += 1; break; case 1: f[i] -= 2; break; case 2: f[i] *= 3; break; case 3: f[i] += 4; break;
        case 4: f[i] -= 5; break; case 5: f[i] *= 6; break; case 6: f[i] += 7; break; default: f[i] = -f[i];
    }
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_libraries_printf_and_switches(arch: str) -> None:
    d = np.linspace(0.25, 20, 64)
    f = np.linspace(0.1, 3, 64).astype(np.float32)
    word = np.array([5], np.uint64)
    x, y = d.copy(), f.astype(np.float64)
    device = launch(VARIOUS, arch, "k", 1, 64, [d, word, f, 7])
    np.testing.assert_allclose(d, (x * 0.5 + np.sqrt(x)) / (1 + x), rtol=1e-15)
    assert word[0] == 5 + 64 * 63 // 2
    assert device.printed == f"lane 7 sees {d[7]:.2f} and text\n"
    y = np.sin(y) * np.exp(-y) + y / 3 + y**1.5
    change = [lambda v: v + 1, lambda v: v - 2, lambda v: v * 3, lambda v: v + 4, lambda v: v - 5, lambda v: v * 6]
    change += [lambda v: v + 7, lambda v: -v, lambda v: -v]
    np.testing.assert_allclose(f, [change[i % 9](v) for i, v in enumerate(y)], rtol=2e-6)


def test_groups_of_lanes_with_masks_of_their_own() -> None:
    """One shuffle, two member masks: both groups at once, and one of them late."""
    text = (
        HEADER
        + """.visible .entry k(.param .u64 out) {
.reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %laneid;
mul.wide.u32 %rd2, %r1, 4;
add.u64 %rd3, %rd1, %rd2;
setp.lt.u32 %p1, %r1, 8;
selp.b32 %r2, 0xff, 0xffffff00, %p1;
setp.gt.u32 %p2, %r1, 27;
mov.u32 %r3, %r1;
@!%p2 bra go;
add.u32 %r3, %r3, 100;
bra.uni go;
go: shfl.sync.bfly.b32 %r4, %r3, 1, 0x1f, %r2;
st.global.u32 [%rd3], %r4;
ret; }"""
    )
    want = [(lane ^ 1) + (100 if lane ^ 1 > 27 else 0) for lane in range(32)]
    for seed in range(8):
        out = np.zeros(32, np.uint32)
        device = Device(seed=seed)
        device.launch(Module(text), "k", 1, 32, params=[out])
        assert out.tolist() == want and not device.findings
