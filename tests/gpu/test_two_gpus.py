"""Two GPUs, a process for each: dispatch, combine and publication over the link between them, against the oracle.

The processes live through the module; bodies run in both, `body(rank, size, ...)`, and each checks its own rank.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from mega_support import DENSE, DEVICE, EXACT_SWIGLU, RS, SITU, SP_RS, SWIGLU, Family, Signature, bits, rank_call
from process_support import BACKEND, PROCESSES, ProcessFamily, Warm
from test_mega_bits import Repeats, rows_of
from test_mega_graphs import replay_publishing, two_worlds

from deep_gemm_k3._extension import ops
from deep_gemm_k3.mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from deep_gemm_k3.mega.group import Group, GroupError, as_group
from deep_gemm_k3.mega.publication import PublicationWorkspace
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.processes import ProcessWorld
from deep_gemm_k3.testing.routing import ROUTINGS

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(60)]

ON_GPU = DEVICE.type == "cuda"
TIMEOUT_S = 1.0
INVARIANT = [Signature("routed", SWIGLU, batch_invariant=True), Signature("dense", SITU, batch_invariant=True)]
K3_WIDTHS = (3584, 3072, 384, 7168, 768)

TWO = ProcessFamily(
    WorldShape((384,) * PROCESSES, 8, 4, 1024, 512, 384, 2048, 256), EXACT_SWIGLU, DENSE, RS, SP_RS, *INVARIANT
)
# A shard of 576 columns: the middle one of nine 128-column tiles goes to both ranks.
STRADDLING = ProcessFamily(
    WorldShape((384,) * PROCESSES, 4, 2, 512, 256, 384, 1152, 128),
    *(replace(one, batch_invariant=True) for one in (DENSE, RS)),  # one kernel each
)
HASTY = ProcessFamily(TWO.shape, EXACT_SWIGLU, RS, timeout_s=TIMEOUT_S)
K3 = ProcessFamily(WorldShape((384,) * PROCESSES, 112 * PROCESSES, 16, *K3_WIDTHS), SP_RS)
ALONE = Family(WorldShape((384,), 8, 4, 1024, 512, 384, 2048, 256), *INVARIANT)
BACKGROUND = Warm()
FAMILIES = (TWO, STRADDLING, HASTY, K3, ALONE)


class Worlds:
    """The processes of this module; new ones after a test that lost some."""

    def __init__(self) -> None:
        self.current: ProcessWorld | None = None

    def get(self) -> ProcessWorld:
        if self.current is None or not self.current.is_usable:
            self.close()
            self.current = ProcessWorld(PROCESSES, BACKEND)
        return self.current

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
        self.current = None


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@pytest.fixture
def world(worlds: Worlds) -> ProcessWorld:
    return worlds.get()


# ----------------------------------------------------------------------------------------------------------- every mode
def modes(rank: int, size: int, signature: Signature, calls: int) -> None:
    for tokens, shared_tokens in (((7, 40), 8), ((0, 9), 0), ((33, 0), 130), ((1, 1), 2), ((384, 384), 384)):
        TWO.check_here(TWO.world(tokens, shared_tokens, seed=tokens[0]), signature, calls=calls)


@pytest.mark.parametrize("signature", [EXACT_SWIGLU, DENSE, RS, SP_RS], ids=str)
def test_every_mode(world: ProcessWorld, signature: Signature) -> None:
    """Exact inputs, uneven and empty ranks, no shared token and many; four calls: every generation, every parity."""
    world.run(modes, signature, 4, timeout_s=50.0)


def routings(rank: int, size: int) -> None:
    """Hot expert, hot rank, empty slots, duplicates."""
    for routing in sorted(ROUTINGS):
        TWO.check_here(TWO.world((20, 60), routing=routing, seed=5), EXACT_SWIGLU, calls=2)


def test_routings(world: ProcessWorld) -> None:
    world.run(routings, timeout_s=50.0)


def published(rank: int, size: int, signature: Signature) -> None:
    for family, shared_tokens in ((TWO, 130), (STRADDLING, 64), (TWO, 130)):
        if family is STRADDLING and signature is not RS:
            continue
        given = family.world((50, 3), shared_tokens, kind="random")
        first, second = (one.shared for one in given)
        assert first is not None and second is not None and not torch.equal(first.l2, second.l2)
        one = replace(signature, batch_invariant=family is STRADDLING)
        family.check_here(given, one, bitwise=False, calls=4)


@pytest.mark.parametrize("signature", [RS, SP_RS], ids=str)
def test_published_values_are_the_dense_partials_of_every_rank(world: ProcessWorld, signature: Signature) -> None:
    """Random inputs, shared weights of its own on every rank: each destination bit for bit, twice, tiles that straddle
    shards included."""
    world.run(published, signature, timeout_s=50.0)


def widths_of_k3(rank: int, size: int) -> None:
    try:
        for tokens in (8, 64, 384):
            K3.check_here(K3.world(tokens, 8, "k3_router"), SP_RS)
    finally:
        K3.close()


def test_112_experts_a_rank_at_the_widths_of_the_model(world: ProcessWorld) -> None:
    world.run(widths_of_k3, timeout_s=55.0)


# --------------------------------------------------------------------------------------------------------------- bits
def late(rank: int, size: int, where: str) -> None:
    ranks = TWO.world((12, 21), 8, kind="random")

    def one(group: Group, buffer: SymmBuffer, late_rank: int | None) -> tuple[torch.Tensor, ...]:
        call = rank_call(buffer, ranks[group.rank], SP_RS)
        call.fill()
        call.settle()
        if group.rank == late_rank and where == "kernel":
            ops().set_debug(buffer.handle, int(1e8), 0)
        group.barrier("ready")
        if group.rank == late_rank and where == "host":
            time.sleep(0.1)
        begin = time.monotonic()
        call.call()
        call.settle()
        took = time.monotonic() - begin
        assert not ON_GPU or late_rank is None or took > 0.09 or (where, group.rank) == ("host", late_rank), took
        group.barrier("done")
        ops().set_debug(buffer.handle, 0, 0)
        result = call.result()
        assert result.workspace is not None
        call.destroy()
        return result.y, result.workspace

    expected = TWO.each_rank(lambda group, buffer: one(group, buffer, None))[0]
    for late_rank in range(size):
        got = TWO.each_rank(lambda group, buffer, late_rank=late_rank: one(group, buffer, late_rank))[0]
        for part, want in zip(got, expected, strict=True):
            metrics.assert_bitwise(part, want, f"rank {late_rank} late")


@pytest.mark.parametrize("where", ["kernel", "host"])
def test_a_rank_that_is_100_ms_late_changes_no_bit(world: ProcessWorld, where: str) -> None:
    world.run(late, where, timeout_s=40.0)


def a_thousand(rank: int, size: int) -> list[list[int]]:
    steps = 1000 if ON_GPU else 12
    tokens = ((5, 70), (70, 5), (0, 1), (129, 64))
    given = [TWO.world(count, 8 * (i + 1), kind="random", seed=i) for i, count in enumerate(tokens)]

    def body(group: Group, buffer: SymmBuffer) -> list[list[int]]:
        repeats = Repeats(group, buffer, [one[group.rank] for one in given], SP_RS)
        for step in range(steps):
            repeats.step(step * step % len(given) if step % 3 else step % len(given))
        return repeats.finish()

    return TWO.each_rank(body)[0]


def test_a_thousand_calls_in_a_row(world: ProcessWorld) -> None:
    for rank, wrong in enumerate(world.run(a_thousand, timeout_s=50.0)):
        assert not any(map(any, wrong)), f"rank {rank}: calls with other bits, by input and (y, published): {wrong}"


def invariance(rank: int, size: int) -> None:
    """The same experts and tokens on one rank, and dealt out to two."""
    for signature in INVARIANT:
        alone = ALONE.world(200, 40, kind="random")
        (whole,) = ALONE.run(alone, signature)
        deal = [torch.arange(200, device=DEVICE)[r::size][r:] for r in range(size)]
        ranks = [
            replace(weights, routed=rows_of(alone[0], rows, 40).routed)
            for weights, rows in zip(TWO.world(0, 40, kind="random"), deal, strict=True)
        ]
        got = TWO.run_here(ranks, signature)
        metrics.assert_bitwise(got.y, whole.y[deal[rank]], str(signature))
    ALONE.close()


def test_the_number_of_ranks_changes_no_bit(world: ProcessWorld) -> None:
    world.run(invariance, timeout_s=40.0)


def graphs(rank: int, size: int) -> None:
    worlds = two_worlds(TWO, (5, 129))
    expected = [TWO.expected(one, RS) for one in worlds]
    TWO.each_rank(lambda group, buffer: replay_publishing(group, buffer, worlds, expected))


def test_graphs(world: ProcessWorld) -> None:
    """Three publishing calls a graph, replayed with other inputs."""
    if ON_GPU:
        world.run(graphs, timeout_s=40.0)


# ------------------------------------------------------------------------------------------------------------- promises
def fifty(rank: int, size: int) -> int:
    def once() -> None:
        buffer = get_symm_buffer_for_mega_moe(None, 8, 96, 2, 256, 128, device=DEVICE)
        workspace = PublicationWorkspace(buffer, "rs", 64, 512)
        if rank:  # in either order on the ranks
            workspace.destroy()
        buffer.destroy()
        workspace.destroy()

    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    for _ in range(3):
        once()
    before = free() if ON_GPU else 0
    for _ in range(50):
        once()
    return before - free() if ON_GPU else 0


def test_create_and_destroy_fifty_times_does_not_grow(world: ProcessWorld) -> None:
    assert max(world.run(fifty, timeout_s=50.0)) < 2**24


def attempt(call: Any) -> tuple[str, float]:
    """How a call ends, and in how many seconds."""
    begin = time.monotonic()
    try:
        call.call()
        call.settle()
    except RuntimeError as caught:
        return str(caught), time.monotonic() - begin
    return "", time.monotonic() - begin


def bad_value(rank: int, size: int, what: str) -> tuple[str, float, str]:
    HASTY.run_here(HASTY.world(3, 8), RS)  # the first call, which is collective on the host
    given = HASTY.world(5, 8)

    def body(group: Group, buffer: SymmBuffer) -> tuple[str, float, str]:
        call = rank_call(buffer, given[group.rank], RS)
        call.fill()
        if group.rank == 1 and what.startswith("id"):
            buffer.topk_idx[2, 1] = 8
        call.settle()
        group.barrier("ready")
        if group.rank == 0 and what == "id, the other late":
            time.sleep(0.3)  # the bad id ends rank 1's kernel without anybody else
        if group.rank == 1 and what == "host":
            time.sleep(0.3)  # the other one is inside the call
            call.y = call.y.float()
        error, seconds = attempt(call)
        group.barrier("ended")
        return error, seconds, attempt(call)[0]

    try:
        return HASTY.each_rank(body)[0]  # type: ignore[no-any-return]
    finally:
        HASTY.drop_session()


@pytest.mark.parametrize(
    ("what", "words"),
    [(what, "expert id out of range") for what in ("id", "id, the other late")]
    + [("host", "y: wanted dtype bfloat16, given float32")],
)
def test_a_fault_of_one_rank_stops_the_other(world: ProcessWorld, what: str, words: str) -> None:
    for rank, (error, seconds, after) in enumerate(world.run(bad_value, what, timeout_s=40.0)):
        assert words in error if ON_GPU else error, f"rank {rank}: {error}"
        assert seconds < 5 * TIMEOUT_S
        assert "wanted one without an abort" in after or not ON_GPU or (what, rank) == ("host", 1), after


def killed(rank: int, size: int, when: str) -> tuple[str, float, str, int]:
    if when == "in the first call":
        family = ProcessFamily(TWO.shape, RS)
        as_group(None).barrier("together")  # a process that never came to the group cannot be told from a late one
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(GroupError) as caught:
            family.run_here(family.world(3, 8), RS)
        return str(caught.value), time.monotonic() - begin, "", 0
    HASTY.run_here(HASTY.world(3, 8), RS)
    given = HASTY.world(5, 8)

    def body(group: Group, buffer: SymmBuffer) -> tuple[str, float, str, int]:
        call = rank_call(buffer, given[group.rank], RS)
        call.fill()
        call.settle()
        if group.rank == 1 and when == "inside its kernel":
            ops().set_debug(buffer.handle, int(20e9), 0)
        group.barrier("ready")
        if group.rank == 1:
            if when == "inside its kernel":
                call.call()
                time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        error, seconds = attempt(call)
        after = attempt(call)[0]
        return error, seconds, after, int(torch.arange(5, device=DEVICE).sum())

    return HASTY.each_rank(body)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("when", ["before its call", "inside its kernel", "in the first call"])
def test_a_killed_rank_is_reported_by_the_other_within_the_limit(world: ProcessWorld, when: str) -> None:
    survivor, dead = world.outcomes(killed, when, timeout_s=40.0)
    assert dead.exit_code == -signal.SIGKILL, dead
    assert not survivor.error, survivor.error
    error, seconds, after, alive = survivor.value
    assert seconds < 5 * TIMEOUT_S, f"{seconds:.1f} s"
    if when == "in the first call":
        assert "rank 1 cannot go on: its process has ended" in error
    elif ON_GPU:
        assert "time-out" in error and re.search(r"(header|rank|from) 1\b", error), error
        assert "wanted one without an abort" in after
        assert alive == 10


def late_compiler(rank: int, size: int) -> float:
    from deep_gemm_k3 import ops as package_ops

    prepare = package_ops._prepare

    def slow(description: dict[str, Any]) -> None:
        time.sleep(3 * TIMEOUT_S)
        prepare(description)

    if rank == 1:
        package_ops._prepare = slow
    try:
        HASTY.drop_session()
        begin = time.monotonic()
        HASTY.check_here(HASTY.world(9, 8), RS)
        return time.monotonic() - begin
    finally:
        package_ops._prepare = prepare


def test_a_rank_that_compiles_late_is_waited_for(world: ProcessWorld) -> None:
    """Three times as long as the waits of the kernel may take."""
    if ON_GPU:
        assert min(world.run(late_compiler, timeout_s=40.0)) > 3 * TIMEOUT_S


def zeroed(rank: int, size: int, counts: Sequence[int]) -> None:
    ranks = TWO.world((70, 3), 8, kind="random")

    def body(group: Group, buffer: SymmBuffer) -> list[torch.Tensor]:
        call = rank_call(buffer, ranks[group.rank], RS)
        results = []
        for calls in counts:
            group.barrier("idle")
            buffer.buffer.zero_()
            call.fill()
            call.settle()
            group.barrier("zeroed")
            for _ in range(calls):
                call.call()
            call.settle()
            results.append(call.y.clone())
        group.barrier("done")
        call.destroy()
        return results

    first, *others = TWO.each_rank(body)[0]
    for other in others:
        assert torch.equal(bits(other), bits(first))


def test_zeroing_the_buffer_between_calls_is_legal(world: ProcessWorld) -> None:
    world.run(zeroed, (1, 2, 3, 1), timeout_s=40.0)
