"""Findings: each with a kernel that has the fault and a twin that has not."""

from __future__ import annotations

import numpy as np
import pytest
from emu_support import cuda_module
from test_emu_async import HELPERS

from deep_gemm_k3.emulator import Device, EmulatorError, Launch, Module

SEEDS = range(100)


def kinds(
    module: Module,
    params: list[object],
    seeds: range = SEEDS,
    *,
    grid: int = 1,
    block: int = 64,
    launches: int = 1,
    **options: object,
) -> set[str]:
    """The kinds found over the seeds, faults included."""
    found: set[str] = set()
    for seed in seeds:
        device = Device(
            seed=seed, race_detection=True, quantum=20, adversary=("random", "earliest", "latest")[seed % 3]
        )
        values = [p.copy() if isinstance(p, np.ndarray) else p for p in params]
        try:
            device.run(
                [
                    Launch(module, "k", grid, block, [r, *values] if launches > 1 else values, rank=r, **options)
                    for r in range(launches)
                ]
            )
        except EmulatorError as error:
            found.add(str(error).split(":")[0])
        found |= {finding.kind for finding in device.findings}
    return found


def twins(template: str, good: str, bad: str) -> tuple[Module, Module]:
    return cuda_module(HELPERS + template.replace("FAULT", good)), cuda_module(HELPERS + template.replace("FAULT", bad))


def test_race_on_shared_memory() -> None:
    good, bad = twins(
        """extern "C" __global__ void k(int* y) { __shared__ int s[64]; s[threadIdx.x] = threadIdx.x; FAULT y[threadIdx.x] = s[63 - threadIdx.x]; }""",
        "__syncthreads();", "",
    )  # fmt: skip
    y = np.zeros(64, np.int32)
    assert kinds(good, [y]) == set()
    assert "race" in kinds(bad, [y])


def test_race_between_bytes_is_exact() -> None:
    module = cuda_module('extern "C" __global__ void k(unsigned char* y) { y[threadIdx.x] = threadIdx.x; }')
    assert kinds(module, [np.zeros(64, np.uint8)]) == set()


def test_race_across_ranks_with_too_weak_a_scope() -> None:
    template = """extern "C" __global__ void k(int rank, int* x, unsigned* flag, int* out) {
      if (threadIdx.x) return;
      if (rank == 0) { x[0] = 5; asm volatile("st.release.FAULT.global.u32 [%0], 1;" :: "l"(flag) : "memory"); }
      else { unsigned v; do asm volatile("ld.acquire.FAULT.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (!v); out[0] = x[0]; }
    }"""
    good, bad = twins(template, "sys", "gpu")
    arrays = [np.zeros(1, np.int32), np.zeros(1, np.uint32), np.zeros(1, np.int32)]

    def run(module: Module) -> set[str]:
        found = set()
        for seed in SEEDS:
            for a in arrays:
                a[...] = 0
            device = Device(seed=seed, race_detection=True)
            device.run([Launch(module, "k", 1, 32, [r, *arrays], rank=r) for r in range(2)])
            found |= {f.kind for f in device.findings}
        return found

    assert run(good) == set()
    assert run(bad) == {"race"}


@pytest.mark.parametrize(
    ("writer", "reader", "is_race"),
    [
        ("__threadfence(); *(volatile int*)flag = 1;", "while (!*(volatile int*)flag) {} __threadfence();", False),
        ("__threadfence(); atomicExch(flag, 1);", "while (!atomicAdd(flag, 0)) {} __threadfence();", False),
        ("*(volatile int*)flag = 1;", "while (!*(volatile int*)flag) {} __threadfence();", True),
        ("__threadfence(); *(volatile int*)flag = 1;", "while (!*(volatile int*)flag) {}", True),
        ('asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(flag) : "memory");', 'int v; do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (!v);', False),
        ('asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(flag) : "memory");', 'int v; do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (!v);', True),
        ('asm volatile("red.release.cta.global.add.u32 [%0], 1;" :: "l"(flag) : "memory");', 'int v; do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (!v);', True),
    ],
)  # fmt: skip
def test_message_passing_between_ctas(writer: str, reader: str, is_race: bool) -> None:
    module = cuda_module(f"""extern "C" __global__ void k(int* x, int* flag, int* out) {{
      if (threadIdx.x) return;
      if (blockIdx.x == 0) {{ x[0] = 5; {writer} }} else {{ {reader} out[0] = x[0]; }}
    }}""")
    found = kinds(module, [np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)], grid=2, block=32)
    assert found == ({"race"} if is_race else set())


PIPELINE = """
extern "C" __global__ void k(const int* x, int* y, int steps) {
  __shared__ __align__(128) int tile[2][64], result[64];
  __shared__ u64 full[2], empty[2];
  int t = threadIdx.x;
  if (t == 0) { for (int i = 0; i < 2; ++i) { init(full + i, 1); init(empty + i, 32); } asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  __syncthreads();
  if (t == 32) {
    for (int i = 0; i < steps; ++i) {
      EMPTY
      expect(full + i % 2, BYTES);
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" :: "r"(sptr(tile[i % 2])), "l"(x + i * 64), "r"(sptr(full + i % 2)) : "memory");
    }
  } else if (t < 32) {
    for (int i = 0; i < steps; ++i) {
      FULL
      if (t == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
      for (int j = t; j < 64; j += 32) result[j] = tile[i % 2][j] + 1;
      ARRIVE
      PROXY
      __syncwarp();
      if (t == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" :: "l"(y + i * 64), "r"(sptr(result)) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
    DRAIN
  }
}"""
PARTS = {
    "EMPTY": "wait(empty + i % 2, (i / 2 & 1) ^ 1);",
    "FULL": "wait(full + i % 2, i / 2 & 1);",
    "PROXY": 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
    "DRAIN": 'if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");',
    "BYTES": "256",
    "ARRIVE": "arrive(empty + i % 2);",
}


def pipeline(**changes: str) -> Module:
    source = PIPELINE
    for name, text in {**PARTS, **changes}.items():
        source = source.replace(name, text)
    return cuda_module(HELPERS + source)


def test_pipeline_without_fault_has_no_finding_over_100_seeds() -> None:
    assert kinds(pipeline(), [np.arange(512, dtype=np.int32), np.zeros(512, np.int32), 8], range(100)) == set()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"FULL": PARTS["FULL"] + PARTS["ARRIVE"], "ARRIVE": ""}, {"race"}),  # a stage released before it is read
        ({"PROXY": ""}, {"proxy"}),
        ({"DRAIN": ""}, {"exit-in-flight"}),
        ({"EMPTY": ""}, {"mbarrier", "deadlock"}),
        ({"FULL": ""}, {"mbarrier", "deadlock", "uninitialised-shared"}),
        ({"ARRIVE": ""}, {"deadlock"}),
        ({"BYTES": "512"}, {"deadlock"}),
        ({"BYTES": "128"}, {"deadlock", "race"}),
    ],
)
def test_pipeline_mutations_are_found(changes: dict[str, str], expected: set[str]) -> None:
    found = kinds(pipeline(**changes), [np.arange(512, dtype=np.int32), np.zeros(512, np.int32), 8], range(12))
    assert expected & found, found


def test_out_of_bounds_use_after_free_and_misalignment() -> None:
    module = cuda_module('extern "C" __global__ void k(int* x, int at) { x[at] = 1; }')
    x = np.zeros(100, np.int32)
    assert kinds(module, [x, 99], range(1), block=1) == set()
    with pytest.raises(
        EmulatorError,
        match=r"out-of-bounds: global access of 4 bytes at .*: 0 bytes past the end of 'params\[0\] of k' \(400 bytes\)",
    ):
        Device().launch(module, "k", 1, 1, params=[x, 100])
    device = Device()
    device.launch(module, "k", 1, 1, params=[x, 0])
    device.unregister(x.ctypes.data)
    with pytest.raises(EmulatorError, match="use-after-free"):
        device.launch(module, "k", 1, 1, params=[int(x.ctypes.data), 0])
    with pytest.raises(EmulatorError, match="misaligned"):
        odd = Device()
        odd.register(x.ctypes.data, 400, "x")
        odd.launch(module, "k", 1, 1, params=[int(x.ctypes.data) + 2, 0])


def test_uninitialised_shared_memory() -> None:
    good, bad = twins(
        """extern "C" __global__ void k(int* y) { extern __shared__ int s[]; FAULT __syncthreads(); y[threadIdx.x] = s[threadIdx.x]; }""",
        "s[threadIdx.x] = 1;", "if (threadIdx.x != 33) s[threadIdx.x] = 1;",
    )  # fmt: skip
    y = np.zeros(64, np.int32)
    assert kinds(good, [y], shared_bytes=256) == set()
    assert kinds(bad, [y], shared_bytes=256) == {"uninitialised-shared"}


def test_a_seed_reproduces_a_run_exactly() -> None:
    module = cuda_module(
        'extern "C" __global__ void k(int* next, int* order) { if (threadIdx.x == 0) order[atomicAdd(next, 1)] = blockIdx.x; }'
    )
    runs = []
    for seed in (1, 1, 2):
        next_, order = np.zeros(1, np.int32), np.zeros(16, np.int32)
        Device(seed=seed).launch(module, "k", 16, 32, params=[next_, order])
        runs.append(order.tolist())
    assert runs[0] == runs[1] != runs[2]


def test_the_schedule_of_a_seed_is_reproduced_exactly() -> None:
    """Warps, CTAs and ranks are picked, and copies complete, in the same order; another seed gives another order."""
    module, x = pipeline(), np.arange(512, dtype=np.int32)

    def digest(seed: int, adversary: str) -> int:
        device = Device(seed=seed, adversary=adversary, quantum=20)
        device.run([Launch(module, "k", 3, 64, [x, np.zeros(512, np.int32), 8], rank=r) for r in range(2)])
        return device.schedule

    for adversary in ("random", "earliest", "latest"):
        digests = [digest(seed, adversary) for seed in range(8)]
        assert digests == [digest(seed, adversary) for seed in range(8)]
        assert len(set(digests)) == 8
    assert len({digest(1, adversary) for adversary in ("random", "earliest", "latest")}) == 3


def test_a_sleeper_is_no_deadlock() -> None:
    """Whoever only sleeps is waited for; whoever sleeps between looks at memory that nobody changes is not."""
    template = """extern "C" __global__ void k(volatile int* y) {
      if (threadIdx.x == 0) { FAULT y[1] = 1; }
      if (threadIdx.x == 32) { while (!y[1]) __nanosleep(100); y[2] = 1; } }"""
    good, bad = twins(
        template, "long long start = clock64(); while (clock64() - start < 50000) __nanosleep(1000);", "while (!y[2]) __nanosleep(50);"
    )  # fmt: skip
    y = np.zeros(64, np.int32)
    assert kinds(good, [y], range(100)) == set()
    assert kinds(bad, [y], range(6)) == {"deadlock"}
