"""mbarrier, asynchronous and bulk copies, tensor maps: against numpy's indexing and the swizzles' definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import cuda_module, run_ptx

from deep_gemm_k3.emulator import Device, EmulatorError, TensorMap

RNG = np.random.default_rng(5)
ADVERSARIES = ["random", "earliest", "latest"]

HELPERS = """
using u32 = unsigned; using u64 = unsigned long long;
__device__ u32 sptr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u64* b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(sptr(b)), "r"(n) : "memory"); }
__device__ void expect(u64* b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(sptr(b)), "r"(n) : "memory"); }
__device__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(sptr(b)) : "memory"); }
__device__ void wait(u64* b, u32 parity) { asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L; }" :: "r"(sptr(b)), "r"(parity) : "memory"); }
"""


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_bulk_copy_pipeline(adversary: str) -> None:
    module = cuda_module(
        HELPERS
        + """
    extern "C" __global__ void k(const int* x, int* y, int steps) {
      __shared__ __align__(128) int tile[2][256], result[2][256];
      __shared__ u64 full[2], empty[2];
      int t = threadIdx.x;
      if (t == 0) { for (int i = 0; i < 2; ++i) { init(full + i, 1); init(empty + i, 64); } asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
      __syncthreads();
      if (t == 64) {
        for (int i = 0; i < steps; ++i) {
          wait(empty + i % 2, (i / 2 & 1) ^ 1);
          expect(full + i % 2, 1024);
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" :: "r"(sptr(tile[i % 2])), "l"(x + i * 256), "r"(sptr(full + i % 2)) : "memory");
        }
      } else if (t < 64) {
        for (int i = 0; i < steps; ++i) {
          wait(full + i % 2, i / 2 & 1);
          if (i >= 2) { if (t == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); asm volatile("bar.sync 1, 64;"); }
          for (int j = t; j < 256; j += 64) result[i % 2][j] = tile[i % 2][j] * 3 + i;
          arrive(empty + i % 2);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          asm volatile("bar.sync 1, 64;");
          if (t == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" :: "l"(y + i * 256), "r"(sptr(result[i % 2])) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
          }
        }
        if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      }
    }"""
    )
    x = RNG.integers(0, 1 << 20, 12 * 256).astype(np.int32)
    for seed in range(6):
        y = np.zeros_like(x)
        device = Device(seed=seed, adversary=adversary, quantum=50)
        device.launch(module, "k", 1, 96, params=[x, y, 12])
        assert np.array_equal(y, x * 3 + np.repeat(np.arange(12), 256))
        assert not device.findings, device.findings


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_bulk_multicast_in_a_cluster(adversary: str) -> None:
    module = cuda_module(
        HELPERS
        + """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(const int* x, int* y) {
      __shared__ __align__(128) int tile[64];
      __shared__ u64 full;
      u32 rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      if (threadIdx.x == 0) { init(&full, 1); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); expect(&full, 256); }
      asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
      if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 128, [%2], %3;" :: "r"(sptr(tile + rank * 32)), "l"(x + rank * 32), "r"(sptr(&full)), "h"((unsigned short)3) : "memory");
      wait(&full, 0);
      for (int i = threadIdx.x; i < 64; i += 32) y[rank * 64 + i] = tile[i];
      asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }"""
    )
    x = RNG.integers(0, 1000, 64).astype(np.int32)
    for seed in range(4):
        y = np.zeros(128, np.int32)
        Device(seed=seed, adversary=adversary).launch(module, "k", 2, 32, params=[x, y])
        assert np.array_equal(y, np.tile(x, 2))


def test_async_copies_with_groups_and_zero_fill() -> None:
    module = cuda_module("""
    extern "C" __global__ void k(const int* x, int* y) {
      __shared__ __align__(16) int s[3][32 * 4];
      unsigned d = (unsigned)__cvta_generic_to_shared(&s[0][threadIdx.x * 4]);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(d), "l"(x + threadIdx.x * 4) : "memory");
      asm volatile("cp.async.commit_group;");
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(d + 512), "l"(x + 128 + threadIdx.x * 4), "r"((int)threadIdx.x % 5 * 4 % 20 > 16 ? 16 : (int)threadIdx.x % 5 * 4) : "memory");
      asm volatile("cp.async.commit_group;");
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(d + 1024), "l"(x + threadIdx.x) : "memory");
      asm volatile("cp.async.commit_group;");
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = s[0][threadIdx.x * 4 + i];
      asm volatile("cp.async.wait_all;" ::: "memory");
      for (int i = 0; i < 4; ++i) y[128 + threadIdx.x * 4 + i] = s[1][threadIdx.x * 4 + i];
      y[256 + threadIdx.x] = s[2][threadIdx.x * 4];
    }""")
    x = RNG.integers(1, 1000, 256).astype(np.int32)
    for adversary in ADVERSARIES:
        y = np.zeros(288, np.int32)
        Device(seed=1, adversary=adversary).launch(module, "k", 1, 32, params=[x, y])
        assert np.array_equal(y[:128], x[:128])
        lane, word = np.divmod(np.arange(128), 4)
        assert np.array_equal(y[128:256], np.where(word < lane % 5, x[128:256], 0))
        assert np.array_equal(y[256:], x[:32])


def test_st_async_and_remote_arrival() -> None:
    module = cuda_module(
        HELPERS
        + """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(int* y) {
      __shared__ __align__(16) int box[64];
      __shared__ u64 full, ready;
      u32 rank, peer, bar; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      if (threadIdx.x == 0) { init(&full, 1); init(&ready, 32); expect(&full, 256); }
      asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(sptr(box + 2 * threadIdx.x)), "r"(rank ^ 1));
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar) : "r"(sptr(&full)), "r"(rank ^ 1));
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" :: "r"(peer), "r"(rank * 100 + threadIdx.x), "r"(7), "r"(bar) : "memory");
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar) : "r"(sptr(&ready)), "r"(rank ^ 1));
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory");
      wait(&full, 0); wait(&ready, 0);
      y[rank * 64 + threadIdx.x * 2] = box[threadIdx.x * 2]; y[rank * 64 + threadIdx.x * 2 + 1] = box[threadIdx.x * 2 + 1];
      asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }"""
    )
    for seed in range(4):
        y = np.zeros(128, np.int32)
        Device(seed=seed).launch(module, "k", 2, 32, params=[y])
        assert np.array_equal(y[::2], np.concatenate([100 + np.arange(32), np.arange(32)]))
        assert np.all(y[1::2] == 7)


# ---- tensor maps

# bytes of a span, of the chunks that change places in it, and whether halves of 16 bytes change places in odd rows
SWIZZLES = {
    "none": (16, 16, False), "32B": (32, 16, False), "64B": (64, 16, False), "128B": (128, 16, False),
    "128B_atom_32B": (128, 32, False), "128B_atom_32B_flip_8B": (128, 32, True), "128B_atom_64B": (128, 64, False),
}  # fmt: skip


def swizzled(offset: np.ndarray, name: str) -> np.ndarray:
    """Where the bytes of a box lie: in each 128-byte row of shared memory the chunks of a span are numbered, and the row's
    number is added to theirs without carries."""
    span, chunk, flips = SWIZZLES[name]
    row, within = offset // 128, offset % span
    number = (within // chunk) ^ (row % (span // chunk))
    out = offset - within + number * chunk + within % chunk
    return np.where(flips & (row % 2 == 1), out ^ 8, out)


def tma_kernel(rank: int, store: str = "", reduce: str = "") -> str:
    """Parameters and body of a kernel that loads a box and copies it out, or copies one in and stores or reduces it."""
    coords = ", ".join(f"%c{i}" for i in range(rank))
    loads = " ".join(f"ld.param.s32 %c{i}, [c{i}];" for i in range(rank))
    params = ".param .align 64 .b8 map[128], .param .u64 out, .param .u32 bytes," + ",".join(
        f".param .s32 c{i}" for i in range(rank)
    )
    regs = ".reg .b32 %c<5>, %t, %n, %a, %v, %s; .reg .b64 %m, %o, %q; .reg .pred %p, %w; .shared .align 1024 .b8 box[65536]; .shared .align 8 .b64 bar;"
    head = f"""{regs} {loads} ld.param.u32 %n, [bytes]; ld.param.u64 %o, [out]; mov.u64 %q, map; cvta.param.u64 %m, %q; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;"""
    copy_in = """mad.wide.u32 %q, %t, 4, %o; mov.u32 %s, box; mad.lo.u32 %s, %t, 4, %s; mov.u32 %a, %t;
    IN: shl.b32 %v, %a, 2; setp.ge.u32 %w, %v, %n; @%w bra INEND; ld.global.b32 %v, [%q]; st.shared.b32 [%s], %v; add.u64 %q, %q, 128; add.u32 %s, %s, 128; add.u32 %a, %a, 32; bra IN; INEND: bar.warp.sync -1; fence.proxy.async.shared::cta;"""
    copy_out = """mad.wide.u32 %q, %t, 4, %o; mov.u32 %s, box; mad.lo.u32 %s, %t, 4, %s; mov.u32 %a, %t;
    OUT: shl.b32 %v, %a, 2; setp.ge.u32 %w, %v, %n; @%w bra OUTEND; ld.shared.b32 %v, [%s]; st.global.b32 [%q], %v; add.u64 %q, %q, 128; add.u32 %s, %s, 128; add.u32 %a, %a, 32; bra OUT; OUTEND:"""
    load = f"""@%p mbarrier.init.shared::cta.b64 [bar], 1; bar.warp.sync -1; @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %n;
    @%p cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%m, {{{coords}}}], [bar];
    TRY: mbarrier.try_wait.parity.shared::cta.b64 %w, [bar], 0; @!%w bra TRY;"""
    send = f"@%p {store or 'cp.async.bulk.tensor'}.{rank}d.global.shared::cta{reduce and '.' + reduce}.tile.bulk_group [%m, {{{coords}}}], [box]; @%p cp.async.bulk.commit_group; @%p cp.async.bulk.wait_group 0;"
    return params + "|" + head + (copy_in + send if store else load + copy_out)


def run_tma(
    tensor: torch.Tensor,
    dtype: str,
    box: list[int],
    at: list[int],
    swizzle: str,
    steps: list[int] | None = None,
    *,
    store: str = "",
    reduce: str = "",
    content: np.ndarray | None = None,
    nan: bool = False,
    seed: int = 0,
) -> np.ndarray:
    sizes = list(tensor.shape)[::-1]
    strides = [s * tensor.element_size() for s in list(tensor.stride())[::-1][1:]]
    map_ = TensorMap(tensor, dtype, sizes, strides, box, steps or (), swizzle, oob_nan=nan)
    counts = [-(-b // s) for b, s in zip(box, steps or [1] * len(box), strict=True)]
    size = int(np.prod(counts)) * tensor.element_size()
    memory = np.zeros((size + 127) // 128 * 128, np.uint8) if content is None else content
    params, body = tma_kernel(len(sizes), store, reduce).split("|")
    device = run_ptx(body, params, [map_, memory, size, *at], device=Device(seed=seed))
    assert not device.findings
    return memory[:size]


def reference_box(
    tensor: torch.Tensor, box: list[int], at: list[int], steps: list[int] | None, fill: float
) -> np.ndarray:
    rank = tensor.dim()
    steps = steps or [1] * rank
    index = [a + s * torch.arange(-(-b // s)) for a, b, s in zip(at, box, steps, strict=True)][::-1]
    inside = [(i >= 0) & (i < n) for i, n in zip(index, tensor.shape, strict=True)]
    picked = tensor[
        torch.meshgrid(*[i.clamp(0, n - 1) for i, n in zip(index, tensor.shape, strict=True)], indexing="ij")
    ]
    exists = torch.ones_like(picked, dtype=torch.bool)
    for d, mask in enumerate(inside):
        exists &= mask.reshape([-1 if i == d else 1 for i in range(rank)])
    return torch.where(exists, picked, torch.full_like(picked, fill)).contiguous().view(torch.uint8).numpy().ravel()


CASES = [  # shape (outermost first), box and coordinates (innermost first)
    ([300], [64], [3]), ([300], [64], [270]), ([40, 96], [32, 8], [5, 2]), ([40, 96], [32, 16], [80, 30]), ([40, 96], [32, 16], [-8, -3]),
    ([6, 20, 64], [32, 4, 2], [16, 18, 3]), ([3, 4, 10, 64], [16, 8, 2, 2], [40, -2, 3, 1]), ([2, 3, 4, 6, 64], [32, 3, 2, 2, 1], [32, 5, 1, 2, 1]),
]  # fmt: skip


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_tensor_load(case: int, swizzle: str) -> None:
    shape, box, at = CASES[case]
    box = [min(box[0], SWIZZLES[swizzle][0] // 2 if swizzle != "none" else 256), *box[1:]]
    tensor = torch.randint(-30000, 30000, shape, dtype=torch.int16)
    got = run_tma(tensor, "uint16", box, at, swizzle)
    want = np.zeros_like(got)
    offset = np.arange(len(got))
    want[swizzled(offset, swizzle)] = reference_box(tensor, box, at, None, 0)
    assert np.array_equal(got, want)


def test_tensor_load_with_traversal_strides_and_nan_fill() -> None:
    tensor = torch.randn(40, 64)
    got = run_tma(tensor, "float32", [32, 9], [-6, 33], "none", [2, 3], nan=True)
    want = reference_box(tensor, [32, 9], [-6, 33], [2, 3], float("nan"))
    a, b = got.view(np.float32), want.view(np.float32)
    assert np.array_equal(np.isnan(a), np.isnan(b)) and np.array_equal(a[~np.isnan(a)], b[~np.isnan(b)])


def test_tensor_maps_follow_the_drivers_rules() -> None:
    tensor = torch.zeros(64, 64, dtype=torch.bfloat16)
    for change, message in (
        ({"box": [512, 1]}, "box"),
        ({"strides": [100]}, "strides"),
        ({"box": [128, 8], "swizzle": "64B"}, "box"),
        ({"sizes": [0, 64]}, "dims"),
        ({"tensor": tensor.data_ptr() + 8}, "address"),
        ({"element_strides": [9, 1]}, "element_strides"),
    ):
        arguments = {
            "tensor": tensor,
            "dtype": "bfloat16",
            "sizes": [64, 64],
            "strides": [128],
            "box": [32, 8],
        } | change
        with pytest.raises(EmulatorError, match=message):
            TensorMap(**arguments)


# ---- faults of barriers


def test_transaction_overflow_and_unexpected_arrival() -> None:
    regs = ".shared .align 8 .b64 bar; .reg .b64 %s;"
    with pytest.raises(EmulatorError, match="transaction-overflow"):
        run_ptx(
            regs
            + "mbarrier.init.shared::cta.b64 [bar], 1; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048575; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1;",
            "",
            [],
            block=1,
        )
    with pytest.raises(EmulatorError, match="holds no initialised mbarrier"):
        run_ptx(regs + "mbarrier.arrive.shared::cta.b64 %s, [bar];", "", [], block=1)
    with pytest.raises(EmulatorError, match="arrival without expectation"):
        run_ptx(
            regs + "mbarrier.init.shared::cta.b64 [bar], 2; mbarrier.arrive.shared::cta.b64 %s, [bar], 3;",
            "",
            [],
            block=1,
        )


def test_deadlock_names_what_is_waited_for() -> None:
    body = ".shared .align 8 .b64 bar; .reg .pred %p; mbarrier.init.shared::cta.b64 [bar], 1; L: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra L;"
    with pytest.raises(
        EmulatorError,
        match=r"deadlock[\s\S]*warp 0[\s\S]*mbarrier.try_wait[\s\S]*mbarrier at shared offset 1024 .*1 of 1 arrivals",
    ):
        run_ptx(body, "", [], block=1)
    poll = ".reg .b32 %v; .reg .b64 %q; .reg .pred %p; ld.param.u64 %q, [x]; L: ld.acquire.gpu.global.u32 %v, [%q]; setp.eq.u32 %p, %v, 0; @%p bra L;"
    with pytest.raises(
        EmulatorError, match=r"deadlock[\s\S]*ld.acquire.gpu.global.u32: polls memory that does not change"
    ):
        run_ptx(poll, ".param .u64 x", [np.zeros(1, np.uint32)])
    with pytest.raises(EmulatorError, match=r"deadlock[\s\S]*named barrier"):
        run_ptx(
            ".reg .b32 %t; .reg .pred %p; mov.u32 %t, %tid.x; setp.ge.u32 %p, %t, 32; @%p bra E; bar.sync 1, 64; E:",
            "",
            [],
            block=64,
        )
