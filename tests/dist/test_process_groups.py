"""Groups and buffers whose ranks are processes: exchanges, time-outs, refusals, killed ranks, shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import PATIENCE_S, results, run_ranks

from deep_gemm_k3._extension import ops
from deep_gemm_k3.mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from deep_gemm_k3.mega.first_call import first_call
from deep_gemm_k3.mega.group import GroupError, GroupMismatch, GroupRefused, GroupTimeout, as_group
from deep_gemm_k3.mega.process_group import ProcessGroupAdapter

pytestmark = pytest.mark.dist


def make(group: Any = None, **changes: Any) -> SymmBuffer:
    arguments: dict[str, Any] = {
        "num_experts": 12,
        "num_max_tokens_per_rank": 96,
        "num_topk": 2,
        "hidden": 256,
        "intermediate_hidden": 128,
        **changes,
    }
    return get_symm_buffer_for_mega_moe(group or dist.group.WORLD, **arguments)


def world() -> ProcessGroupAdapter:
    group = as_group(None)
    assert isinstance(group, ProcessGroupAdapter)
    return group


def exchange(rank: int, size: int) -> None:
    group = world()
    assert (group.rank, group.size, group.is_local) == (rank, size, False)
    assert group.handle is dist.group.WORLD
    for step in range(30):
        assert group.all_gather({"rank": rank, "step": step}, "test") == [
            {"rank": peer, "step": step} for peer in range(size)
        ]
    group.barrier("end")


@pytest.mark.parametrize("size", [2, 4])
def test_all_gather(size: int) -> None:
    results(exchange, size)


def share_memory(rank: int, size: int) -> None:
    buffer = make(timeout_s=PATIENCE_S)
    assert buffer.device.type == "cpu" and buffer.group is dist.group.WORLD
    assert not buffer.buffer.any()
    offset = buffer.layout.components["topk_idx"][0]
    for step in range(50):
        for peer, base in enumerate(buffer.base_ptrs):
            ctypes.c_int64.from_address(base + offset + 16 * rank).value = 100 * step + 10 * rank + peer
        ops().cpu_barrier(buffer.handle, 0)
        assert buffer.topk_idx[:size, 0].tolist() == [100 * step + 10 * source + rank for source in range(size)]
        ops().cpu_barrier(buffer.handle, 1)
    buffer.destroy()


@pytest.mark.parametrize("size", [2, 4])
def test_every_process_addresses_every_process(size: int) -> None:
    results(share_memory, size)


def zero_while_idle(rank: int, size: int) -> None:
    buffer = make(timeout_s=PATIENCE_S)
    for round_ in range(3):
        for step in range(3 + round_):
            ops().cpu_barrier(buffer.handle, step % 2)
        dist.barrier()
        buffer.buffer.zero_()
        dist.barrier()


def test_zeroing_an_idle_buffer_is_legal() -> None:
    results(zero_while_idle, 2)


def late_rank(rank: int, size: int) -> None:
    group = world()
    group.barrier("together")
    if rank == 1:
        time.sleep(2.5)
        with pytest.raises(
            GroupRefused, match=r"slow: rank [02] cannot go on: gave up after .* for ranks? [\d, ]*\b1\b"
        ):
            group.barrier("slow")
    else:
        with pytest.raises((GroupTimeout, GroupRefused), match=r"gave up after .* of waiting for ranks? [\d, ]*\b1\b"):
            group.barrier("slow", 0.8)
    assert group.all_gather(rank, "after") == list(range(size))


def test_a_late_rank_is_named_and_the_group_stays_in_step() -> None:
    results(late_rank, 3)


def refusal(rank: int, size: int) -> None:
    if rank == 1:
        with pytest.raises(ValueError, match=r"num_topk: wanted 1\.\.32, given 99"):
            make(num_topk=99)
    else:
        started = time.monotonic()
        with pytest.raises(GroupRefused, match=r"rank 1 cannot go on: .*num_topk: wanted .* given 99"):
            make()
        assert time.monotonic() - started < PATIENCE_S / 2
    with pytest.raises(GroupMismatch, match=r"num_experts must be equal on all ranks, rank 0 gave 12, rank 1 gave 24"):
        make(num_experts=12 * (1 + (rank == 1)))
    make().check()


def test_a_refusal_raises_on_all_and_the_group_stays_usable() -> None:
    results(refusal, 3)


def killed_in_barrier(rank: int, size: int) -> str:
    buffer = make(timeout_s=3.0)
    ops().cpu_barrier(buffer.handle, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        ops().cpu_barrier(buffer.handle, 1)
    with pytest.raises(RuntimeError, match="to be re-created"):
        buffer.check()
    return str(caught.value)


def killed_in_creation(rank: int, size: int) -> str:
    group = world()
    group.barrier("together")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    group.timeout_s = PATIENCE_S
    started = time.monotonic()
    with pytest.raises(GroupError) as caught:
        make(group)
    assert time.monotonic() - started < PATIENCE_S / 2  # an ended process is noticed before the limit
    return str(caught.value)


def killed_in_first_call(rank: int, size: int) -> str:
    buffer = make()
    started = time.monotonic()
    with pytest.raises(GroupError) as caught:
        first_call(buffer, {"entry": "test"}, lambda: os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else None)
    assert time.monotonic() - started < PATIENCE_S / 2
    return str(caught.value)


@pytest.mark.parametrize(("body", "dead"), [(killed_in_barrier, 1), (killed_in_creation, 0), (killed_in_first_call, 2)])
def test_survivors_of_a_killed_process_name_it_and_nothing_is_left(body: Any, dead: int) -> None:
    def shared_files() -> set[str]:
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    before = shared_files()
    outcomes = run_ranks(body, 3)
    for rank, outcome in enumerate(outcomes):
        if rank == dead:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert not outcome.error, outcome.error
            # On a busy machine another survivor may be late in the barrier too.
            named = rf"of waiting for ranks? [\d, ]*\b{dead}\b|rank {dead} cannot go on: its process has ended"
            assert re.search(named, outcome.value), outcome.value
    assert shared_files() <= before
    results(share_memory, 2)


def aborts(rank: int, size: int) -> None:
    buffer = make(timeout_s=PATIENCE_S)
    if rank == 1:
        time.sleep(0.2)
        buffer.abort_peers("y: wanted bfloat16, given float32")
        return
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1: y: wanted bfloat16, given float32"):
        ops().cpu_barrier(buffer.handle, 0)
    assert time.monotonic() - started < PATIENCE_S / 2


def test_a_host_error_of_one_process_ends_the_waits_of_all() -> None:
    results(aborts, 3)


def overlapping(rank: int, size: int) -> None:
    members = {"left": [0, 1], "right": [1, 2, 3], "same": [0, 1], "outer": [0, 3]}
    groups = {name: dist.new_group(ranks) for name, ranks in members.items()}
    mine = [name for name, ranks in members.items() if rank in ranks]
    with pytest.raises(TypeError, match="process group that this process belongs to"):
        as_group(groups["outer"] if rank in (1, 2) else groups["right"] if rank == 0 else groups["left"])

    failures: list[BaseException] = []

    def traffic(name: str) -> None:
        try:
            group = as_group(groups[name])
            for step in range(20):
                expected = [(name, peer, step) for peer in members[name]]
                assert group.all_gather((name, rank, step), "test") == expected
        except BaseException as error:
            failures.append(error)

    # All groups at once, so that shared keys would show.
    threads = [threading.Thread(target=traffic, args=(name,)) for name in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []

    # Buffers of different groups at once: each has memory of its own.
    buffers = {name: make(groups[name]) for name in mine}
    for name, buffer in buffers.items():
        buffer.topk_idx.fill_(list(members).index(name))
    world().barrier("filled")
    for name, buffer in buffers.items():
        offset = buffer.layout.components["topk_idx"][0]
        for base in buffer.base_ptrs:
            assert ctypes.c_int64.from_address(base + offset).value == list(members).index(name)
    world().barrier("read")


def test_overlapping_groups_do_not_meet() -> None:
    results(overlapping, 4)


def recreated_groups(rank: int, size: int) -> None:
    for step in range(6):
        group = dist.new_group([0, 1])
        assert as_group(group).all_gather((rank, step), "test") == [(0, step), (1, step)]
        if step % 2:
            make(group).destroy()
        dist.destroy_process_group(group)
        del group
        gc.collect()


def test_groups_made_one_after_another_do_not_meet() -> None:
    results(recreated_groups, 2)


def set_up_twice(rank: int, size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    assert world().all_gather(("first", rank), "test") == [("first", 0), ("first", 1)]
    world().barrier("end of the first life")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for step in range(3):
        assert world().all_gather(("second", rank, step), "test") == [("second", 0, step), ("second", 1, step)]


def test_a_store_that_outlives_the_group_serves_the_next() -> None:
    results(set_up_twice, 2)


def growth(rank: int, size: int) -> None:
    def use() -> None:
        with make() as buffer:
            buffer.x.view(torch.int8).fill_(1)
            buffer.component("pool_x").fill_(1)
            ops().cpu_barrier(buffer.handle, 0)
            first_call(buffer, {"entry": "test"}, lambda: None)

    def measure() -> tuple[int, int, int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps, open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            mappings = sum(1 for _ in maps)
        world().barrier("before counting keys")
        keys = dist.distributed_c10d._get_default_store().num_keys()
        world().barrier("after counting keys")
        return len(os.listdir("/proc/self/fd")), mappings, resident, keys

    for _ in range(5):
        use()
    before = measure()
    for _ in range(50):
        use()
    after = measure()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 4
    assert after[2] <= before[2] + 2**24
    assert after[3] <= before[3] + 8


def test_create_and_destroy_fifty_times_does_not_grow() -> None:
    results(growth, 2)


def first_calls(rank: int, size: int) -> None:
    buffer = make()
    with pytest.raises(
        GroupMismatch, match=r"first call of test: hidden must be equal .* rank 0 gave 1, rank 1 gave 2"
    ):
        first_call(buffer, {"entry": "test", "hidden": 1 + (rank == 1)}, lambda: None)

    def prepare() -> str:
        if rank == 1:
            raise OSError("no compiler here")
        return "kernel"

    kind: type[Exception] = OSError if rank == 1 else GroupRefused
    with pytest.raises(kind, match="no compiler here"):
        first_call(buffer, {"entry": "test"}, prepare)
    assert first_call(buffer, {"entry": "test"}, lambda: rank) == rank


def test_first_call_over_processes() -> None:
    results(first_calls, 3)


def strays(rank: int, size: int) -> None:
    buffer = make(timeout_s=PATIENCE_S)
    known, new = {"entry": "call", "fast_math": True}, {"entry": "call", "fast_math": False}
    first_call(buffer, known, lambda: None)
    difference = "first call of call, .* nearest ready one in: fast_math is False, not True$"
    if rank == 1:
        with pytest.raises(RuntimeError, match=f"waited for rank 1; this rank was in the {difference}"):
            first_call(buffer, new, lambda: None)
    else:
        end = time.monotonic() + PATIENCE_S
        while not buffer.channel.present() and time.monotonic() < end:
            time.sleep(0.01)
        buffer.abort_peers("a kernel that waited for rank 1")
        with pytest.raises(RuntimeError, match=f"waited for rank 1; rank 1 is in the {difference}"):
            buffer.check()
    world().barrier("end")


def test_a_rank_that_alone_has_a_new_signature_is_named_with_the_field() -> None:
    results(strays, 2)


def lose_the_store(rank: int, size: int) -> str:
    # A store hosted by rank 0, as torch sets it up by default.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = world().all_gather(store.port if store else 0, "port")[0]
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = world()
    with pytest.raises(GroupError) as caught:
        group.barrier("together")  # rank 0 may be gone before rank 1 has read its record
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier("alone", 30.0)
    return str(caught.value)


def test_a_lost_store_is_reported() -> None:
    outcomes = run_ranks(lose_the_store, 2)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert not outcomes[1].error, outcomes[1].error
    assert "store does not answer" in outcomes[1].value
