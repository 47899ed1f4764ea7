"""Lanes of a warp apart: the adversary that parts them wherever no instruction needs them together. What is correct without
a convergence that nobody promises stays so under any seed; what leans on one is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from emu_support import cuda_module

from deep_gemm_k3.emulator import Device, EmulatorError, Module

ADVERSARIES = ("random", "latest", "earliest")

HEAD = """
using u32 = unsigned; using u64 = unsigned long long;
extern "C" __global__ void k(const int* x, volatile int* y, u32* flag) {
  __shared__ volatile int tile[256]; __shared__ u64 bar; const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
"""
EXCHANGE = HEAD + "tile[t] = x[t]; SYNC y[t] = tile[t ^ 5]; }"
# Lane 0 of warp 0 speaks for its warp; warp 1 waits for its word.
MESSAGE = (
    HEAD
    + """if (warp == 0) { y[lane] = x[lane] + 1; SYNC
    if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(flag) : "memory");
  } else { u32 seen = 0;
    while (!seen) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    __syncwarp(); y[t] = y[lane] + 1; } }"""
)
# Lane 0 of the reading warp hands an mbarrier's slot back before its other lanes have seen it full: they may miss a phase.
RING = (
    HEAD
    + """u32 full = (u32)__cvta_generic_to_shared(&bar);
  auto arrive = [](u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory"); };
  auto wait = [](u32 at, u32 parity) { u32 done = 0; while (!done) asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at), "r"(parity) : "memory"); };
  volatile u32* taken = (volatile u32*)(tile + 64);
  if (t == 0) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full) : "memory"); *taken = 0; }
  __syncthreads();
  if (t == 32) { for (u32 i = 0; i < 6; ++i) { while (*taken != i) {} tile[0] = i; arrive(full); } }
  if (warp == 0) for (u32 i = 0; i < 6; ++i) { wait(full, i & 1); int v = tile[0]; SYNC if (lane == 0) *taken = i + 1; y[i * 32 + lane] = v; } }"""
)


def outcome(module: Module, seed: int, *, apart: bool, races: bool) -> tuple[set[str], np.ndarray]:
    device = Device(
        seed=seed,
        adversary=ADVERSARIES[seed % 3],
        race_detection=races,
        lanes_apart=apart,
        max_instructions=200000,
    )
    y = np.full(256, -1, np.int32)
    found: set[str] = set()
    try:
        device.launch(module, "k", 1, 64, params=[np.arange(256, dtype=np.int32), y, np.zeros(1, np.uint32)])
    except EmulatorError as error:
        found.add(str(error).split(":")[0])
    return found | {finding.kind for finding in device.findings}, y


def exchanged() -> np.ndarray:
    return np.arange(64) ^ 5


def told() -> np.ndarray:
    return np.concatenate([np.arange(32) + 1, np.arange(32) + 2])


def passed() -> np.ndarray:
    return np.repeat(np.arange(6), 32)


CASES = {"exchange": (EXCHANGE, exchanged), "message": (MESSAGE, told), "ring": (RING, passed)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("races", [False, True])
def test_synchronised_lanes_may_run_apart(name: str, races: bool) -> None:
    source, expected = CASES[name]
    module = cuda_module(source.replace("SYNC", "__syncwarp();"))
    want = expected()
    for seed in range(100):
        found, y = outcome(module, seed, apart=True, races=races and name != "ring")  # the ring's flags are weak
        assert not found, (seed, found)
        np.testing.assert_array_equal(y[: want.size], want)


@pytest.mark.parametrize("name", CASES)
def test_a_missing_warp_barrier_is_noticed(name: str) -> None:
    """And only with the lanes apart: together they are correct by what nobody promises."""
    source, expected = CASES[name]
    module, want = cuda_module(source.replace("SYNC", "")), expected()

    def is_noticed(seed: int, apart: bool) -> bool:
        found, y = outcome(module, seed, apart=apart, races=name == "message")
        return bool(found) or not np.array_equal(y[: want.size], want)

    assert any(is_noticed(seed, True) for seed in range(40))
    assert not any(is_noticed(seed, False) for seed in range(10))


def test_whole_warps_come_together_where_the_program_needs_them() -> None:
    """Barriers of the CTA, shuffles, votes and reductions in loops, with lanes that leave early."""
    source = (
        HEAD
        + """int sum = x[t]; for (int i = 1; i < 32; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
      tile[t] = sum; __syncthreads(); int other = tile[t ^ 32]; __syncthreads();
      u32 even = __ballot_sync(~0u, t % 2 == 0); if (lane < 3) { other += __reduce_add_sync(7u, (u32)lane); }
      for (u32 i = 0; i < lane % 4; ++i) other += 100; __syncwarp();
      y[t] = other + (even == 0x55555555u ? 1000 : 0) + __shfl_sync(~0u, (int)t, 0); }"""
    )
    module, lane = cuda_module(source), np.arange(64) % 32
    sums = np.repeat([np.arange(32, 64).sum(), np.arange(32).sum()], 32)
    want = sums + np.where(lane < 3, 3, 0) + 100 * (lane % 4) + 1000 + np.repeat([0, 32], 32)
    for seed in range(100):
        found, y = outcome(module, seed, apart=True, races=True)
        assert not found, (seed, found)
        np.testing.assert_array_equal(y[:64], want)


def test_a_seed_repeats_the_run() -> None:
    module = cuda_module(EXCHANGE.replace("SYNC", "__syncwarp();"))

    def digest(seed: int, apart: bool) -> int:
        device = Device(seed=seed, lanes_apart=apart)
        x, y, flag = np.arange(256, dtype=np.int32), np.zeros(256, np.int32), np.zeros(1, np.uint32)
        device.launch(module, "k", 1, 64, params=[x, y, flag])
        return device.schedule

    digests: Callable[[bool], list[int]] = lambda apart: [digest(seed, apart) for seed in range(8)]  # noqa: E731
    assert digests(True) == digests(True)
    assert digests(True) != digests(False)


def test_reached_lines_are_those_that_some_lane_executes() -> None:
    text = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y, .param .u64 flag) {
.reg .pred %p; .reg .b32 %r; .reg .b64 %rd;
mov.u32 %r, %tid.x;
setp.gt.u32 %p, %r, 100;
@%p bra over;
add.u32 %r, %r, 1;
@%p add.u32 %r, %r, 2;
bra end;
over:
add.u32 %r, %r, 3;
end:
ret; }"""
    device = Device(coverage=True)
    device.launch(Module(text), "k", 1, 64, params=[np.zeros(1, np.int32)] * 3)
    assert {6, 7, 9, 11, 15} <= device.reached_lines()
    assert not {8, 10, 13} & device.reached_lines()
