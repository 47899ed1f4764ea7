"""What ranks do to each other through a buffer's control block: barriers, aborts and the first call of a signature."""

from __future__ import annotations

import ctypes
import re
import time

import pytest
from small_buffers import PATIENCE_S, make

from deep_gemm_k3._extension import ops
from deep_gemm_k3.mega.first_call import first_call
from deep_gemm_k3.mega.group import GroupMismatch, GroupRefused
from deep_gemm_k3.mega.local_world import LocalRank, local_world


def test_barrier_releases_the_interpreter_and_orders_memory() -> None:
    rounds = 200

    def body(group: LocalRank) -> None:
        buffer = make(group)
        row = buffer.topk_idx[: group.size, 0]
        peers = [base + buffer.layout.components["topk_idx"][0] for base in buffer.base_ptrs]
        for step in range(rounds):
            for base in peers:
                ctypes.c_int64.from_address(base + 16 * group.rank).value = step * 8 + group.rank
            ops().cpu_barrier(buffer.handle, 0)
            assert row.tolist() == [step * 8 + source for source in range(group.size)]
            ops().cpu_barrier(buffer.handle, 1)

    with local_world(4) as world:
        world.run(body)


def test_zeroing_an_idle_buffer_is_legal() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group)
        for round_ in range(3):
            for step in range(5 + round_):
                ops().cpu_barrier(buffer.handle, step % 4)
            group.barrier("idle")
            buffer.buffer.zero_()
            group.barrier("zeroed")

    with local_world(3) as world:
        world.run(body)


def test_a_missing_rank_is_named_on_all_and_the_buffer_refuses_work() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group, timeout_s=1.0)
        if group.rank == 1:
            time.sleep(2.0)
            expected = r"given one to be re-created: rank [02]: barrier: gave up after .* of waiting for ranks? [\d, ]*\b1\b in phase 2"
        else:
            expected = r"barrier: gave up after .* of waiting for ranks? [\d, ]*\b1\b in phase 2"
        with pytest.raises(RuntimeError, match=expected):
            ops().cpu_barrier(buffer.handle, 2)
        group.barrier("all know", PATIENCE_S)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"to be re-created: rank [02]: .* waiting for ranks? [\d, ]*\b1\b"):
                buffer.check()
        group.barrier("before zeroing", PATIENCE_S)
        buffer.buffer.zero_()
        group.barrier("zeroed", PATIENCE_S)
        with pytest.raises(RuntimeError, match="to be re-created"):
            ops().cpu_barrier(buffer.handle, 2)
        buffer.destroy()
        again = make(group)
        ops().cpu_barrier(again.handle, 0)

    with local_world(3) as world:
        world.run(body)


def test_a_host_error_of_one_rank_ends_the_waits_of_all() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group, timeout_s=PATIENCE_S)
        if group.rank == 2:
            time.sleep(0.1)
            buffer.abort_peers("shared_x: wanted bfloat16, given float32")
        else:
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=r"rank 2: shared_x: wanted bfloat16, given float32"):
                ops().cpu_barrier(buffer.handle, 0)
            assert time.monotonic() - started < PATIENCE_S / 2
        with pytest.raises(RuntimeError, match=r"rank 2: shared_x: wanted bfloat16, given float32"):
            buffer.check()

    with local_world(4) as world:
        world.run(body)


def test_an_abort_text_of_any_length_is_safe() -> None:
    def body(group: LocalRank) -> str:
        buffer = make(group)
        if group.rank == 0:
            buffer.abort_peers("long " * 1000)
        group.barrier("written")
        with pytest.raises(RuntimeError) as caught:
            buffer.check()
        return str(caught.value)

    with local_world(2) as world:
        own, peer = world.run(body)
    assert "long long" in own and "long long" in peer


def test_ranks_in_different_phases_are_told() -> None:
    def body(group: LocalRank) -> str:
        buffer = make(group, timeout_s=PATIENCE_S)
        with pytest.raises(RuntimeError) as caught:
            ops().cpu_barrier(buffer.handle, group.rank)
            ops().cpu_barrier(buffer.handle, group.rank)
        return str(caught.value)

    with local_world(2) as world:
        for message in world.run(body):
            assert re.search(r"barrier: rank [01] is in phase [01], rank [01] in phase [01]", message)


def test_a_failed_rank_does_not_strand_peers_inside_a_barrier() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group, timeout_s=PATIENCE_S)
        if group.rank == 0:
            raise ValueError("rank 0 broke")
        ops().cpu_barrier(buffer.handle, 0)

    with local_world(2) as world:
        started = time.monotonic()
        with pytest.raises(ValueError, match="rank 0 broke"):
            world.run(body)
        assert time.monotonic() - started < PATIENCE_S / 2


@pytest.mark.parametrize("phase", [-1, 4])
def test_barrier_phases_are_checked(phase: int) -> None:
    buffer = make()
    with pytest.raises(RuntimeError, match=rf"phase: wanted 0\.\.3, given {phase}"):
        ops().cpu_barrier(buffer.handle, phase)


def test_first_call_prepares_on_every_rank() -> None:
    def body(group: LocalRank) -> str:
        buffer = make(group)
        return first_call(buffer.handle, {"entry": "test", "hidden": 256}, lambda: f"kernel of {group.rank}")

    with local_world(3) as world:
        assert world.run(body) == ["kernel of 0", "kernel of 1", "kernel of 2"]


def test_first_call_compares_signatures() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group)
        prepared = []
        with pytest.raises(
            GroupMismatch, match=r"first call of test: fast_math must be equal .* 0 gave True, rank 1 gave F"
        ):
            first_call(buffer, {"entry": "test", "fast_math": group.rank == 0}, lambda: prepared.append(1))
        assert prepared == []
        assert first_call(buffer, {"entry": "test", "fast_math": True}, lambda: 7) == 7

    with local_world(2) as world:
        world.run(body)


def test_first_call_raises_one_ranks_failure_on_all() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group)

        def prepare() -> int:
            if group.rank == 1:
                raise OSError("no compiler")
            return 1

        kind: type[Exception] = OSError if group.rank == 1 else GroupRefused
        with pytest.raises(
            kind, match="no compiler" if group.rank == 1 else "rank 1 cannot go on: OSError: no compiler"
        ):
            first_call(buffer, {"entry": "test"}, prepare)
        assert first_call(buffer, {"entry": "test"}, lambda: 3) == 3

    with local_world(2) as world:
        world.run(body)


def test_an_abort_ends_a_first_call() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group)
        if group.rank == 1:
            time.sleep(0.1)
            buffer.abort_peers("y: wanted bfloat16, given float16")
            return
        with pytest.raises(RuntimeError, match="rank 1: y: wanted bfloat16, given float16"):
            first_call(buffer, {"entry": "test"}, lambda: None, PATIENCE_S)

    with local_world(2) as world:
        world.run(body)
        # The group itself is still in step.
        world.run(make)
