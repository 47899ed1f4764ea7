"""Emulated ranks that wait while something outside the machine happens, or does not: a host writes, refuses, is late or
lets go; lanes and warps that nobody outside can help."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from emu_support import compile_cuda, fresh_emulator

import deep_gemm_k3 as dg
from deep_gemm_k3 import _extension
from deep_gemm_k3.emulator import Device, Module, service
from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.local_world import LocalRank, LocalWorld
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world

pytestmark = pytest.mark.timeout(120)

# Lane 0 alone executes a shuffle that wants its whole warp, whose other lanes wait for lane 0 at the CTA's barrier.
SHUFFLE_ALONE = """
extern "C" __global__ void k(int* out, volatile int* flag) {
    int value = threadIdx.x;
    if (threadIdx.x == 0) asm volatile("shfl.sync.idx.b32 %0, %0, 0, 31, -1;" : "+r"(value));
    __syncthreads();
    out[threadIdx.x] = value;
}"""

# Lane 0 waits for its warp inside a branch, the other lanes after it: they wait for each other, but independent thread
# scheduling brings them together at the warp's barrier. Another warp polls what the host writes.
APART = """
extern "C" __global__ void k(int* out, volatile int* flag) {
    if (threadIdx.x >= 32) { while (*flag == 0) {} }
    else if (threadIdx.x == 0) {
        out[64] = 7;
        asm volatile("bar.warp.sync -1;" ::: "memory");
    }
    if (threadIdx.x > 0 && threadIdx.x < 32) {
        asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
    }
    out[threadIdx.x] = threadIdx.x < 32 ? out[64] + threadIdx.x : *flag;
}"""

POLL = """
extern "C" __global__ void k(int* out, volatile int* flag) {
    while (*flag == 0) {}
    out[threadIdx.x] = *flag;
}"""
emulated = fresh_emulator(autouse=True, may_find=True)


def in_thread(body: Callable[[], Any]) -> Future[Any]:
    """What the body returns or raises; a body that hangs does not keep the tests from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(body())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def launch(source: str, threads: int, out: torch.Tensor, flag: torch.Tensor) -> Future[Any]:
    """The kernel through the launch layer, as one of a world that others may join at any time."""
    ptx = compile_cuda(source, "sm_90a", "--generate-line-info").encode() + b"\0"
    image = torch.frombuffer(bytearray(ptx), dtype=torch.uint8)
    ops = _extension.ops()
    handle = ops.register_kernel("emulator", f"stall {hash(source)} sm_90a", "k", "sm_90a", image, 16)
    params = torch.tensor([out.data_ptr(), flag.data_ptr()], dtype=torch.int64).view(torch.uint8)

    def run(_keep: tuple[torch.Tensor, ...] = (out, flag)) -> None:
        ops.launch_kernel(handle, [1, 1, 1, threads, 1, 1, 1, 1, 1, 0], params, False, False)

    return in_thread(run)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(128, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize("threads", [32, 128])
def test_what_nobody_outside_can_end_is_a_deadlock(threads: int) -> None:
    out, flag = tensors()
    with pytest.raises(RuntimeError, match="deadlock: no warp can go on") as caught:
        launch(SHUFFLE_ALONE, threads, out, flag).result(20)
    assert "lanes 0x1 at k" in str(caught.value) and "waits for the other lanes of its warp 0xfffffffe" in str(
        caught.value
    )
    assert "waits for a named barrier" in str(caught.value)
    assert not out.any()


def test_a_dead_cluster_is_found_beside_one_that_polls() -> None:
    """Two kernels on one machine: what the polling one waits for may come, yet the other can never end."""
    out, flag = tensors()
    polling = launch(POLL, 32, out, flag)
    with pytest.raises(RuntimeError, match="waits for a named barrier"):
        launch(SHUFFLE_ALONE, 64, *tensors()).result(20)
    with pytest.raises(RuntimeError, match="deadlock"):
        polling.result(20)


@pytest.mark.parametrize("seed", range(8))
def test_lanes_that_wait_crosswise_go_on(seed: int) -> None:
    out, flag = tensors()
    service.configure(seed=seed)
    running = launch(APART, 64, out, flag)
    time.sleep(0.05)
    assert not running.done()
    assert out[:32].tolist() == [7 + i for i in range(32)]  # while the other warp still polls
    flag[0] = 5
    running.result(20)
    assert out[32:64].tolist() == [5] * 32


@pytest.mark.parametrize(("before", "within"), [(0, 2), (3, 2), (4, 2), (7, 3), (0, 16), (9, 16)])
def test_whoever_polls_many_places_is_found_waiting(before: int, within: int) -> None:
    """Late copies are done only when nobody could run otherwise: here, once a warp is seen to poll ``within`` places in vain,
    however many it has looked at once, ``before``."""
    looks = " ".join(f"sum += ((volatile unsigned*)flag)[{i}];" for i in range(before))
    polls = " & ".join(f"((volatile unsigned*)flag)[{i}]" for i in range(within))
    source = f"""extern "C" __global__ void k(const unsigned* ones, unsigned* flag, unsigned* out) {{
      __shared__ __align__(16) unsigned tile[32];
      if (threadIdx.x == 0) {{
        for (int i = 0; i < 32; ++i) tile[i] = ones[i];
        unsigned from = (unsigned)__cvta_generic_to_shared(tile);
        asm volatile("fence.proxy.async.shared::cta; cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;"
                     "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" :: "l"(flag), "r"(from) : "memory");
      }} else if (threadIdx.x == 32) {{ unsigned sum = 0; {looks} while (!({polls})) {{}} out[0] = 1 + 0 * sum; }} }}"""
    module = Module(compile_cuda(source))
    for seed in range(4):
        out, flag = torch.zeros(1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        device = Device(seed=seed, adversary="latest", max_instructions=100_000)
        device.launch(module, "k", 1, 64, params=[torch.ones(32, dtype=torch.int32), flag, out])
        assert out.item() == 1


def test_crosswise_lanes_go_on_while_others_work() -> None:
    out, flag = tensors()
    flag[0] = 5
    for seed in range(8):
        out.zero_()
        Device(seed=seed).launch(Module(compile_cuda(APART)), "k", 1, 64, params=[out, flag])
        assert out[:64].tolist() == [7 + i for i in range(32)] + [5] * 32


@pytest.mark.parametrize("seed", range(4))
def test_a_poll_sees_what_a_host_writes(seed: int) -> None:
    service.configure(seed=seed)
    flags = [tensors() for _ in range(3)]
    running = [launch(POLL, 64, *pair) for pair in flags]
    for value, ((out, flag), one) in enumerate(zip(flags, running, strict=True), start=5):
        time.sleep(0.05)
        assert not one.done()
        flag[0] = value
        one.result(20)
        assert out[:64].tolist() == [value] * 64


def test_patience_ends_a_poll_without_a_limit() -> None:
    service.configure(patience_s=0.5)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="polls memory that does not change"):
        launch(POLL, 32, *tensors()).result(20)
    assert 0.5 <= time.monotonic() - begin < 10


# --------------------------------------------------------------------------------------------- calls of the package
RANKS = 3
SHAPE = WorldShape(tokens=(5, 3, 4), experts=6, topk=2, hidden=128, intermediate=128)
CALL = "fp8_fp4_mega_moe"


class Call:
    """One rank's buffer and tensors, ready for calls; the kernel has been compiled and loaded."""

    def __init__(self, group: LocalRank | Any, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.given = make_world(SHAPE, 1, target="sm_90a")[rank]
        self.buffer: SymmBuffer = dg.get_symm_buffer_for_mega_moe(
            group, 6, 384, 2, 128, 128, num_sms=2, timeout_s=timeout_s, target="sm_90a", device="cpu"
        )
        count = SHAPE.tokens[rank]
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            getattr(self.buffer, name)[:count].copy_(getattr(self.given.routed, name))
        self.first = self()

    def __call__(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        y = torch.full((SHAPE.tokens[self.rank], 128), float("nan"), dtype=dtype)
        dg.fp8_fp4_mega_moe(y, self.given.l1, self.given.l2, self.buffer)
        return y

    def error(self, dtype: torch.dtype = torch.bfloat16) -> str:
        try:
            self(dtype)
        except RuntimeError as error:
            return str(error)
        return ""


def each_rank(body: Callable[[Call, LocalRank], Any], timeout_s: float) -> list[Any]:
    with LocalWorld(RANKS) as world:
        return world.run(lambda group: body(Call(group, group.rank, timeout_s), group), timeout_s=60.0)


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.02, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_a_refusing_host_ends_the_others_calls(delay_s: float, seed: int) -> None:
    """Before their kernels start, while they work and while they wait."""
    service.configure(seed=seed)

    def body(call: Call, group: LocalRank) -> tuple[str, float]:
        group.barrier("ready")
        begin = time.monotonic()
        if group.rank == 1:
            time.sleep(delay_s)
            return call.error(torch.float32), 0.0
        return call.error(), time.monotonic() - begin

    for rank, (error, seconds) in enumerate(each_rank(body, timeout_s=30.0)):
        assert "y: wanted dtype bfloat16, given float32" in error and (rank == 1 or "rank 1" in error), (rank, error)
        assert seconds < 15.0


def test_a_late_rank_and_repeated_calls() -> None:
    """Some calls are entered late by one rank or the other; every one gives the bits of the first."""

    def body(call: Call, group: LocalRank) -> None:
        for turn in range(6):
            if turn % RANKS == group.rank:
                time.sleep(0.1)
            metrics.assert_bitwise(call(), call.first)

    each_rank(body, timeout_s=30.0)
    assert not service.report()["findings"]


def test_a_rank_that_lets_its_buffer_go_is_named() -> None:
    """Its memory outlives it; the others' limits end their waits."""

    def body(call: Call, group: LocalRank) -> str:
        group.barrier("ready")
        if group.rank != 2:
            return call.error()
        time.sleep(0.2)
        call.buffer.destroy()
        return ""

    errors = each_rank(body, timeout_s=1.0)
    assert all("time-out" in error and "2" in error for error in errors[:2]), errors


def test_a_message_from_another_thread_ends_a_call() -> None:
    def body(call: Call, group: LocalRank) -> tuple[str, float]:
        group.barrier("ready")
        begin = time.monotonic()
        if group.rank != 0:
            return call.error(), time.monotonic() - begin
        threading.Timer(0.2, call.buffer.abort_peers, ["enough"]).start()
        time.sleep(0.5)
        return "rank 0: enough", 0.0

    for error, seconds in each_rank(body, timeout_s=30.0):
        assert "rank 0: enough" in error and seconds < 15.0, error


def test_a_seed_repeats_the_run_of_all_ranks() -> None:
    """Whenever the hosts' threads come: the second rank's is late, yet not by much."""
    schedules: dict[tuple[int, int], int] = {}
    for turn in range(2):
        for seed in range(3):

            def body(call: Call, group: LocalRank, turn: int = turn, seed: int = seed) -> None:
                group.barrier("made")
                if group.rank == 0:
                    service.clear()
                    service.configure(seed=seed, race_detection=True)
                group.barrier("ready")
                if group.rank == turn:
                    time.sleep(0.002)
                call()

            each_rank(body, timeout_s=30.0)
            schedules[turn, seed] = service.report()["schedule"]
    for seed in range(3):
        assert schedules[0, seed] == schedules[1, seed]
    assert len(set(schedules.values())) == 3
