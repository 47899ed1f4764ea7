"""A buffer takes one call at a time, from whatever threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from small_buffers import PATIENCE_S
from small_ranks import Rank, alone

import deep_gemm_k3 as dg
from deep_gemm_k3.testing import executor

REFUSED = r"^sym_buffer: wanted no call inside it, given a second one \[sym_buffer\.busy\]$"


@pytest.mark.parametrize(
    "second",
    [Rank.routed, Rank.dense, lambda rank: rank.routed(y=rank.y.float()), lambda rank: dg.warmup(rank.buffer)],
    ids=["same entry", "another entry", "bad argument", "warm-up"],
)
def test_a_second_call_is_refused_and_the_first_goes_on(
    second: Callable[[Rank], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, leave = threading.Event(), threading.Event()
    run = executor.run

    def held(record: str) -> None:
        inside.set()
        assert leave.wait(PATIENCE_S)
        run(record)

    monkeypatch.setattr(executor, "run", held)
    rank = alone()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(rank.routed)
        assert inside.wait(PATIENCE_S)
        try:
            with pytest.raises(RuntimeError, match=REFUSED):
                second(rank)
            rank.buffer.check()
            assert rank.y.isnan().all()
        finally:
            leave.set()
        first.result(PATIENCE_S)
    assert not rank.y.isnan().any()
    wanted = rank.y.clone()
    rank.y.fill_(float("nan"))
    rank.routed()
    assert rank.y.equal(wanted)


def test_threads_may_take_turns() -> None:
    rank, turn = alone(), threading.Lock()

    def calls(_: int) -> None:
        for _ in range(5):
            with turn:
                rank.dense()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(calls, range(3)))
    assert not rank.y.isnan().any()


def test_a_call_that_fails_leaves_no_call_behind() -> None:
    rank = alone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"y: wanted .* \[y\.dtype\]"):
            rank.routed(y=rank.y.float())
    rank.routed()


def test_calls_without_turns_are_served_or_refused() -> None:
    rank, together = alone(), threading.Barrier(2)
    rank.routed()

    def call(_: int) -> Any:
        together.wait(PATIENCE_S)
        try:
            return rank.routed()
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(10):
            found = list(threads.map(call, range(2)))
            assert None in found, found
            assert all(one is None or "given a second one" in one for one in found), found
    rank.buffer.check()
    rank.routed()
