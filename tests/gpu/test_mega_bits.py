"""Same inputs, same bits: under skew between ranks, over a thousand calls in a row, in every output mode, and in
batch-invariant mode whatever else is in the call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from mega_support import (
    DEVICE,
    EIGHT_RANKS,
    EXACT_SWIGLU,
    ONE_RANK,
    SITU,
    SP_RS,
    SWIGLU,
    TWO_RANKS,
    Family,
    Signature,
    bits,
    pairs,
    rank_call,
)

from deep_gemm_k3._extension import ops
from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.oracle import RoutedInput
from deep_gemm_k3.testing.runner import RankCall, RankResult
from deep_gemm_k3.testing.world import RankInput

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

DELAY_S = 0.1
INVARIANT_ROUTED = Signature("routed", SWIGLU, fast_math=True, batch_invariant=True)
INVARIANT_DENSE = Signature("dense", SITU, fast_math=True, batch_invariant=True)


def family(ranks: int, local_experts: int, *signatures: Signature) -> Family:
    return Family(WorldShape((384,) * ranks, local_experts * ranks, 4, 1024, 512, 384, 2048, 256), *signatures)


ONE = Family(ONE_RANK, EXACT_SWIGLU, counts=pairs((0, 5, 70, 384)))
TWO = Family(TWO_RANKS, SP_RS, counts=pairs((0, 1, 3, 5, 7, 12, 64, 70, 129, 300), (4, 8, 16, 24, 32)))
EIGHT = Family(EIGHT_RANKS, SP_RS, counts=pairs((0, 1, 2, 9, 64, *range(3, 75, 9)), (8, 16)))
INVARIANT = {ranks: family(ranks, 8 // ranks, INVARIANT_ROUTED, INVARIANT_DENSE) for ranks in (1, 2, 4)}
FAMILIES = (ONE, TWO, EIGHT, *INVARIANT.values())


# --------------------------------------------------------------------------------------------------------------- skew
def run_late(
    world: Family, ranks: Sequence[RankInput], signature: Signature, late: Callable[[int, SymmBuffer], None]
) -> list[RankResult]:
    def body(group: LocalRank, buffer: SymmBuffer) -> RankResult:
        call = rank_call(buffer, ranks[group.rank], signature)
        try:
            call.fill()
            call.settle()
            group.barrier("ready")
            late(group.rank, buffer)
            call.call()
            call.settle()
            group.barrier("done")
            return call.result()
        finally:
            ops().set_debug(buffer.handle, 0, 0)
            call.destroy()

    return world.each_rank(body)


@pytest.mark.parametrize("world", [TWO, EIGHT], ids=["2", "8"])
@pytest.mark.parametrize("where", ["kernel", "host"])
def test_a_late_rank_changes_no_bit(world: Family, where: str) -> None:
    size = world.shape.ranks
    ranks = world.world(tuple(range(3, 3 + 9 * size, 9)), 2 * size, kind="random")
    expected = run_late(world, ranks, SP_RS, lambda rank, buffer: None)
    for late_rank in (0, size - 1):

        def late(rank: int, buffer: SymmBuffer, late_rank: int = late_rank) -> None:
            if rank == late_rank and where == "host":
                time.sleep(DELAY_S)
            elif rank == late_rank:
                ops().set_debug(buffer.handle, int(DELAY_S * 1e9), 0)

        begin = time.monotonic()
        results = run_late(world, ranks, SP_RS, late)
        assert DEVICE.type == "cpu" or time.monotonic() - begin >= DELAY_S
        for got, want in zip(results, expected, strict=True):
            metrics.assert_bitwise(got.y, want.y, "y")
            assert got.workspace is not None and want.workspace is not None
            metrics.assert_bitwise(got.workspace, want.workspace, "workspace")


# ------------------------------------------------------------------------------------------------------------ repeats
class Repeats:
    """One rank's calls back to back, without a host wait: every call with another of a few inputs, each compared on the
    device with what that input gave the first time."""

    def __init__(self, group: LocalRank, buffer: SymmBuffer, given: Sequence[RankInput], signature: Signature) -> None:
        self.group, self.buffer = group, buffer
        self.calls = [rank_call(buffer, one, signature) for one in given]
        # All calls publish into one workspace, whose generation moves with every call.
        self.published = max(
            (call.published for call in self.calls), key=lambda p: 0 if p is None else p.num_max_tokens
        )
        for call in self.calls:
            call.published = self.published
        self.count = 0
        self.expected = [self._first(call) for call in self.calls]
        self.wrong = torch.zeros(len(given), 2, dtype=torch.int32, device=DEVICE)

    def _fill(self, call: RankCall) -> None:
        routed = call.input.routed
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            value = getattr(routed, name)
            getattr(self.buffer, name)[: value.size(0)].copy_(value)

    def _written(self, call: RankCall) -> torch.Tensor:
        if self.published is None:
            return call.y[:0]
        shared = call.input.shared
        assert shared is not None
        rows = shared.x.size(0) // self.group.size
        return self.published.workspace[self.count % self.published.num_generations, :rows]

    def _call(self, call: RankCall) -> tuple[torch.Tensor, torch.Tensor]:
        self._fill(call)
        call.call()
        outputs = call.y, self._written(call)
        if self.published is not None:
            self.published.rotate()
        self.count += 1
        return outputs

    def _first(self, call: RankCall) -> tuple[torch.Tensor, torch.Tensor]:
        call.settle()
        self.group.barrier("first: before")
        y, written = self._call(call)
        call.settle()
        self.group.barrier("first: after")
        return y.clone(), written.clone()

    def step(self, which: int) -> None:
        for part, (got, want) in enumerate(zip(self._call(self.calls[which]), self.expected[which], strict=True)):
            if got.numel():
                self.wrong[which, part] += (bits(got) != bits(want)).any()

    def finish(self) -> list[list[int]]:
        self.calls[0].settle()
        self.group.barrier("all calls")
        if self.published is not None:
            self.published.destroy()
        wrong: list[list[int]] = self.wrong.tolist()
        return wrong


@pytest.mark.parametrize(
    ("world", "signature", "tokens"),
    [
        (ONE, EXACT_SWIGLU, (5, 70, 0, 384)),
        (TWO, SP_RS, ((5, 70), (70, 5), (0, 1), (129, 64))),
        (EIGHT, SP_RS, ((1,) * 8, (0, 3, 9, 0, 64, 2, 0, 1))),
    ],
    ids=["1", "2", "8"],
)
def test_a_thousand_calls_in_a_row(world: Family, signature: Signature, tokens: Sequence[Any]) -> None:
    """Token counts, and with them tiles and splits, change from call to call on the same buffer."""
    steps = 1000 if DEVICE.type == "cuda" else 12
    given = [world.world(count, 8 * (i + 1), kind="random", seed=i) for i, count in enumerate(tokens)]

    def body(group: LocalRank, buffer: SymmBuffer) -> list[list[int]]:
        repeats = Repeats(group, buffer, [one[group.rank] for one in given], signature)
        for step in range(steps):
            repeats.step(step * step % len(given) if step % 3 else step % len(given))
        return repeats.finish()

    for rank, wrong in enumerate(world.each_rank(body, timeout_s=50.0)):
        assert not any(map(any, wrong)), f"rank {rank}: calls with other bits, by input and (y, published): {wrong}"


# ---------------------------------------------------------------------------------------------------- batch invariance
def rows_of(given: RankInput, rows: torch.Tensor, shared_rows: int) -> RankInput:
    """Some tokens of a rank, in another order."""
    r, shared = given.routed, given.shared
    routed = RoutedInput(
        r.x.view(torch.uint8)[rows].view(r.x.dtype), r.x_sf[rows], r.topk_idx[rows], r.topk_weights[rows]
    )
    return replace(given, routed=routed, shared=shared and replace(shared, x=shared.x[:shared_rows]))


@pytest.mark.parametrize("signature", [INVARIANT_ROUTED, INVARIANT_DENSE], ids=str)
def test_other_tokens_and_their_number_change_no_bit(signature: Signature) -> None:
    world = INVARIANT[1]
    given = world.world(384, 300, kind="random")
    (whole,) = world.check(given, signature, bitwise=False)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for count, shared_rows in ((1, 1), (9, 17), (130, 64), (384, 129)):
        rows = order[:count]
        (part,) = world.run([rows_of(given[0], rows, shared_rows)], signature)
        metrics.assert_bitwise(part.y, whole.y[rows], f"{count} tokens")
        if part.shared_y is not None and whole.shared_y is not None:
            metrics.assert_bitwise(part.shared_y, whole.shared_y[:shared_rows], f"{shared_rows} shared tokens")


@pytest.mark.parametrize("signature", [INVARIANT_ROUTED, INVARIANT_DENSE], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_the_number_of_ranks_changes_no_bit(signature: Signature, size: int) -> None:
    """The same eight experts and the same tokens, dealt out to more ranks."""
    alone = INVARIANT[1].world(200, 40, kind="random")
    (whole,) = INVARIANT[1].run(alone, signature)
    world = INVARIANT[size]
    deal = [torch.arange(200, device=DEVICE)[rank::size][rank:] for rank in range(size)]
    ranks = []
    for weights, rows in zip(world.world(0, 40, kind="random"), deal, strict=True):
        ranks.append(replace(weights, routed=rows_of(alone[0], rows, 40).routed))
    results = world.run(ranks, signature)
    for rank, (got, rows) in enumerate(zip(results, deal, strict=True)):
        metrics.assert_bitwise(got.y, whole.y[rows], f"rank {rank} of {size}")
    if signature is INVARIANT_DENSE:
        assert results[0].shared_y is not None and whole.shared_y is not None
        metrics.assert_bitwise(results[0].shared_y, whole.shared_y, "shared_y")


def test_copies_of_a_token_get_the_same_bits() -> None:
    """Without batch invariance too: all rows of an expert are summed alike, whoever sent them."""
    given = TWO.world((300, 7), 8, kind="random")
    first, second = given
    ranks = [first, replace(second, routed=rows_of(first, torch.arange(7, device=DEVICE), 0).routed)]
    results = TWO.run(ranks, SP_RS)
    metrics.assert_bitwise(results[1].y, results[0].y[:7], "copies")
