"""Groups in one process: one rank, and a local world with a thread per rank."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from deep_gemm_k3.mega.group import (
    GroupError,
    GroupMismatch,
    GroupRefused,
    GroupTimeout,
    SingleRank,
    WrongThread,
    as_group,
    check_equal,
)
from deep_gemm_k3.mega.local_world import LocalRank, LocalWorld, local_world

PATIENCE_S = 30.0


def test_none_is_a_group_of_one() -> None:
    group = as_group(None)
    assert (group.rank, group.size, group.is_local) == (0, 1, True)
    assert group.all_gather("mine", "test") == ["mine"]
    group.barrier("test")


def test_as_group_returns_groups_unchanged_and_refuses_others() -> None:
    group = SingleRank()
    assert as_group(group) is group
    with pytest.raises(TypeError, match=r"group: wanted .*process group.* given str"):
        as_group("world")


def test_single_rank_stays_usable_after_a_refusal() -> None:
    group = SingleRank()
    group.refuse("nothing to do")
    assert group.all_gather(1, "test") == [1]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_gather_gives_objects_in_rank_order(size: int) -> None:
    def body(group: LocalRank) -> list[list[int]]:
        return [group.all_gather(group.rank * 10 + step, "test") for step in range(20)]

    with local_world(size) as world:
        for result in world.run(body):
            assert result == [[rank * 10 + step for rank in range(size)] for step in range(20)]


def test_local_ranks_share_objects() -> None:
    with local_world(2) as world:
        first, second = world.run(lambda group: group.all_gather(object(), "test"))
    assert first[0] is second[0] and first[1] is second[1]


def test_barrier_lets_nobody_through_early() -> None:
    arrived: list[int] = []

    def body(group: LocalRank) -> int:
        time.sleep(0.05 * group.rank)
        arrived.append(group.rank)
        group.barrier("test")
        return len(arrived)

    with local_world(4) as world:
        assert world.run(body) == [4, 4, 4, 4]


def test_a_late_rank_is_named_and_the_group_stays_in_step() -> None:
    def body(group: LocalRank) -> list[int]:
        if group.rank == 1:
            time.sleep(0.8)
            with pytest.raises(GroupRefused, match=r"rank 0 cannot go on: gave up after .* of waiting for rank 1"):
                group.barrier("slow", PATIENCE_S)
        else:
            with pytest.raises(GroupTimeout, match=rf"slow: rank {group.rank} gave up .* for rank 1") as caught:
                group.barrier("slow", 0.2)
            assert caught.value.ranks == (1,)
        return group.all_gather(group.rank, "after", PATIENCE_S)

    with local_world(2) as world:
        assert world.run(body) == [[0, 1], [0, 1]]


def test_missing_ranks_are_all_named() -> None:
    over = threading.Event()

    def body(group: LocalRank) -> None:
        if group.rank != 2:
            over.wait(PATIENCE_S)
        else:
            with pytest.raises(GroupTimeout) as caught:
                group.barrier("alone", 0.1)
            assert caught.value.ranks == (0, 1, 3)
            assert "ranks 0, 1, 3" in str(caught.value)
            over.set()

    with local_world(4) as world:
        world.run(body)


def test_a_rank_whose_part_has_ended_is_not_awaited() -> None:
    def body(group: LocalRank) -> None:
        group.barrier("both", PATIENCE_S)
        if group.rank == 0:
            with pytest.raises(GroupRefused, match=r"alone: rank 1 cannot go on: its part of this run has ended"):
                group.barrier("alone", PATIENCE_S)

    with local_world(2) as world:
        world.run(body)
        assert world.run(lambda group: group.all_gather(group.rank, "next run", PATIENCE_S)) == [[0, 1], [0, 1]]


def test_a_refusal_ends_the_wait_of_all_peers_at_once() -> None:
    def body(group: LocalRank) -> list[int]:
        if group.rank == 2:
            time.sleep(0.1)
            group.refuse("hidden: wanted a multiple of 128, given 100")
        else:
            started = time.monotonic()
            with pytest.raises(GroupRefused, match=r"make: rank 2 cannot go on: hidden: wanted .* given 100") as caught:
                group.barrier("make", PATIENCE_S)
            assert caught.value.ranks == (2,)
            assert time.monotonic() - started < PATIENCE_S / 2
        return group.all_gather(group.rank, "after", PATIENCE_S)

    with local_world(3) as world:
        assert world.run(body) == [[0, 1, 2]] * 3


def test_ranks_in_different_collectives_are_told() -> None:
    def body(group: LocalRank) -> None:
        with pytest.raises(GroupMismatch, match=r"collective order: rank . is in .*, rank . in '(left|right)'"):
            group.barrier("left" if group.rank == 0 else "right", PATIENCE_S)

    with local_world(2) as world:
        world.run(body)


def test_channels_do_not_meet() -> None:
    def body(group: LocalRank) -> tuple[list[str], list[str], list[str]]:
        one, two = group.channel("one"), group.channel("two")
        if group.rank == 0:  # a rank that leaves a channel out of step does not disturb the others
            one.refuse("left early")
        two_result = two.all_gather(f"two-{group.rank}", "test", PATIENCE_S)
        own_result = group.all_gather(f"own-{group.rank}", "test", PATIENCE_S)
        if group.rank == 1:
            with pytest.raises(GroupRefused, match="left early"):
                one.barrier("test", PATIENCE_S)
        return two_result, own_result, one.all_gather("x", "test", PATIENCE_S)

    with local_world(2) as world:
        assert world.run(body) == [(["two-0", "two-1"], ["own-0", "own-1"], ["x", "x"])] * 2


def test_poll_can_end_a_wait() -> None:
    over = threading.Event()

    def body(group: LocalRank) -> None:
        if group.rank == 1:
            over.wait(PATIENCE_S)
            return
        calls = 0

        def poll() -> None:
            nonlocal calls
            calls += 1
            if calls > 3:
                raise RuntimeError("seen elsewhere")

        with pytest.raises(RuntimeError, match="seen elsewhere"):
            group.barrier("test", PATIENCE_S, poll)
        over.set()

    with local_world(2) as world:
        world.run(body)


def test_another_thread_may_not_act_for_a_rank() -> None:
    world = LocalWorld(2)

    def body(group: LocalRank) -> None:
        group.barrier("mine")

    world.run(body)
    with pytest.raises(WrongThread, match=r"thread: wanted 'rank-0', which owns rank 0 .* given '.+'"):
        world[0].barrier("not mine")
    world.close()


def test_one_thread_may_not_be_two_ranks() -> None:
    world = LocalWorld(2)
    world[0].check_thread()
    with pytest.raises(
        WrongThread, match=r"wanted one thread per rank, given .* for rank 1, which already owns rank 0"
    ):
        world[1].check_thread()


def test_a_rank_can_move_on_when_its_thread_has_ended() -> None:
    world = LocalWorld(1)
    thread = threading.Thread(target=world[0].check_thread)
    thread.start()
    thread.join()
    assert world[0].all_gather(1, "test") == [1]


def test_threads_of_the_caller_work_without_run() -> None:
    world = LocalWorld(3)
    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda group=group: results.append(group.all_gather(group.rank, "test")))
        for group in world
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == [[0, 1, 2]] * 3


def test_run_raises_the_first_exception_and_strands_nobody() -> None:
    def body(group: LocalRank) -> None:
        if group.rank == 1:
            raise ValueError("broken rank")
        group.barrier("never complete", PATIENCE_S)

    with local_world(4) as world:
        started = time.monotonic()
        with pytest.raises(ValueError, match="broken rank"):
            world.run(body)
        assert time.monotonic() - started < PATIENCE_S / 2
        # The next run starts with all ranks in step.
        assert world.run(lambda group: group.all_gather(group.rank, "again", PATIENCE_S)) == [[0, 1, 2, 3]] * 4


def test_run_has_a_limit_and_names_who_is_late() -> None:
    release = threading.Event()

    def body(group: LocalRank) -> None:
        if group.rank == 1:
            release.wait(PATIENCE_S)

    world = local_world(2)
    threading.Timer(2.0, release.set).start()
    with pytest.raises(GroupTimeout, match=r"local world: rank 1 still running after 1 s"):
        world.run(body, timeout_s=1.0)
    world.close()


def test_two_runs_at_once_are_refused() -> None:
    world = local_world(1)

    def body(group: LocalRank) -> None:
        with pytest.raises(GroupError, match="wanted one run at a time"):
            world.run(lambda group: None)

    world.run(body)
    world.close()


def test_run_keeps_its_threads() -> None:
    with local_world(2) as world:
        first = world.run(lambda group: threading.get_ident())
        assert world.run(lambda group: threading.get_ident()) == first
        assert len(set(first)) == 2


def test_a_forgotten_world_ends_its_threads() -> None:
    world = local_world(2)
    threads = world.run(lambda group: threading.current_thread())
    gone = weakref.ref(world)
    del world
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_exchanges_leave_nothing_behind() -> None:
    with local_world(3) as world:

        def body(group: LocalRank) -> int:
            for _ in range(100):
                group.barrier("test")
                channel = group.channel("short")
                channel.barrier("test")
                channel.close()
                group.barrier("closed")
            return 0

        world.run(body)
        assert list(world._world.boards) == [""]
        assert world._world.boards[""].records == {}


@pytest.mark.parametrize("given", [0, -1.0, float("inf"), float("nan"), True, "10"])
def test_time_outs_are_finite_and_positive(given: object) -> None:
    with pytest.raises(ValueError, match=r"timeout_s: wanted a number of seconds above 0"):
        SingleRank().barrier("test", given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, -1, 1.5, True])
def test_world_size_is_checked(given: object) -> None:
    with pytest.raises(ValueError, match=rf"size: wanted an integer in 1\.\.\d+, given {given}"):
        LocalWorld(given)  # type: ignore[arg-type]


def test_check_equal_names_field_and_values() -> None:
    check_equal([{"a": 1}, {"a": 1}], "test")
    with pytest.raises(GroupMismatch, match=r"test: a must be equal on all ranks, rank 0 gave 1, rank 2 gave 3"):
        check_equal([{"a": 1}, {"a": 1}, {"a": 3}], "test")
    with pytest.raises(GroupMismatch, match=r"b must be equal .* rank 0 gave 'nothing', rank 1 gave 2"):
        check_equal([{"a": 1}, {"a": 1, "b": 2}], "test")
