"""The fused call inside CUDA graphs: other inputs at replay, fewer live tokens, odd counts, several graphs, several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from mega_support import DENSE, DEVICE, EXACT_SWIGLU, FOUR_RANKS, ONE_RANK, RS, Family, pairs, rank_call

import deep_gemm_k3 as dg
from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.group import Group
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.runner import RankCall
from deep_gemm_k3.testing.world import RankInput, RankOutput, mega_moe_reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

SIZES = [(3, 0), (70, 20), (200, 130)]
ONE = Family(ONE_RANK, EXACT_SWIGLU, DENSE, counts={EXACT_SWIGLU: pairs((5, 7, 129)), DENSE: SIZES})
FOUR = Family(FOUR_RANKS, RS, counts=pairs((0, 5, 70, 129), (16,)))
FAMILIES = (ONE, FOUR)


def capture(body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Recorded on a stream of its own; other threads may go on using the device."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        body()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def refill(call: RankCall, given: Any, live: int | None = None) -> None:
    """Other inputs in the same places; rows from ``live`` on stand for missing tokens."""
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        value = getattr(given.routed, name)
        getattr(call.buffer, name)[: value.size(0)].copy_(value)
    if live is not None:
        call.buffer.topk_idx[live : call.y.size(0)] = -1


@pytest.mark.parametrize("tokens", [7, 129])
@pytest.mark.parametrize("calls", [1, 3])
def test_replay_with_other_inputs_and_fewer_tokens(tokens: int, calls: int) -> None:
    # Without a shared part, as the entry has none: the reference would norm y.
    worlds = [[replace(one, shared=None) for one in ONE.world(tokens, seed=seed)] for seed in range(3)]
    expected = [mega_moe_reference(world, EXACT_SWIGLU.options)[0] for world in worlds]

    def body(group: LocalRank, buffer: SymmBuffer) -> None:
        call = rank_call(buffer, worlds[0][0], EXACT_SWIGLU)
        call.options["cumulative_local_expert_recv_stats"] = call.stats
        dg.warmup(buffer, activation="swiglu", fast_math=False, has_statistics=True)
        call.fill()
        call.settle()
        allocated = []

        def recorded() -> None:
            allocated.append(torch.cuda.memory_allocated())
            for _ in range(calls):
                call.call()
            allocated.append(torch.cuda.memory_allocated())

        graph = capture(recorded)
        assert allocated[0] == allocated[1]
        for live in (tokens, tokens - 3, 0):
            for world, want in zip(worlds, expected, strict=True):
                refill(call, world[0], live)
                call.y.fill_(float("nan"))
                graph.replay()
                call.settle()
                metrics.assert_bitwise(call.y[:live], want.y[:live], f"{live} live tokens")
                assert not call.y[live:].view(torch.int16).any()

    ONE.each_rank(body)


def test_several_graphs_and_eager_calls_share_a_buffer() -> None:
    """Graphs of one, two and three calls of different shapes and entries, replayed in any order, eager calls between."""
    worlds = [ONE.world(tokens, shared, seed=tokens) for tokens, shared in SIZES]
    expected = [mega_moe_reference(world, DENSE.options)[0] for world in worlds]

    def body(group: LocalRank, buffer: SymmBuffer) -> None:
        calls = [rank_call(buffer, world[0], DENSE) for world in worlds]
        for call in calls:  # eager first calls: everything is ready
            refill(call, call.input)
            call.call()
            call.settle()
        graphs = [
            capture(lambda call=call, count=count: [call.call() for _ in range(count)])
            for count, call in enumerate(calls, 1)
        ]
        for which in (0, 1, 2, 2, 0, 1, 1, 0, 2):
            call, want = calls[which], expected[which]
            assert call.shared_y is not None and want.shared_y is not None
            for run in (graphs[which].replay, call.call):
                refill(call, call.input)
                call.y.fill_(float("nan"))
                call.shared_y.fill_(float("nan"))
                run()
                call.settle()
                metrics.assert_close(call.y, want.y, "y")
                metrics.assert_bitwise(call.shared_y, want.shared_y, "shared_y")

    ONE.each_rank(body)


def replay_publishing(
    group: Group, buffer: SymmBuffer, worlds: Sequence[Sequence[RankInput]], expected: Sequence[Sequence[RankOutput]]
) -> None:
    """One rank's part: three publishing calls a graph, generations moving inside it; an eager call before, four replays
    with changing routed inputs."""
    call = rank_call(buffer, worlds[0][group.rank], RS)
    call.fill()
    call.settle()
    group.barrier("ready")
    call.call()
    call.settle()
    group.barrier("warm")
    published = call.published
    assert published is not None

    def three() -> None:
        for _ in range(3):
            published.rotate()
            call.call()

    for rank in range(group.size):  # torch's own preparations for a capture, one rank at a time
        if rank == group.rank:
            graph = capture(three)
        group.barrier("captured")
    for replay in range(4):
        given, want = worlds[replay % 2][group.rank], expected[replay % 2]
        refill(call, given)
        published.workspace.fill_(float("nan"))
        call.y.fill_(float("nan"))
        call.settle()
        group.barrier("filled")
        graph.replay()
        call.settle()
        group.barrier("replayed")
        metrics.assert_close(call.y, want[group.rank].y, "y")
        shard = published.workspace.size(3)
        mine = slice(shard * group.rank, shard * (group.rank + 1))
        fragments = torch.stack([one.shared_y[:, mine] for one in want if one.shared_y is not None], 1)
        for generation in range(3):
            metrics.assert_bitwise(published.workspace[generation], fragments, f"generation {generation}")
        group.barrier("compared")
    call.destroy()


def two_worlds(family: Family, tokens: tuple[int, ...]) -> list[list[RankInput]]:
    """Inputs of all ranks, twice, with the same shared rows: their tensor is frozen into a graph."""
    first, second = (family.world(tokens, 16, seed=seed) for seed in range(2))
    return [first, [replace(one, shared=of.shared) for one, of in zip(second, first, strict=True)]]


def test_graphs_of_several_ranks() -> None:
    """Replayed by all ranks at once."""
    worlds = two_worlds(FOUR, (5, 0, 70, 129))
    expected = [mega_moe_reference(world, RS.options) for world in worlds]
    FOUR.each_rank(lambda group, buffer: replay_publishing(group, buffer, worlds, expected))


def test_an_unwarmed_signature_is_refused_inside_a_capture() -> None:
    def body(group: LocalRank, buffer: SymmBuffer) -> None:
        call = rank_call(buffer, ONE.world(5, kind="random")[0], EXACT_SWIGLU)
        call.options |= {"activation": "situ", "situ_beta": 1.0, "situ_linear_beta": 1.0, "fast_math": True}
        call.options.pop("activation_clamp")
        call.fill()
        call.settle()
        refused = []

        def body_of_graph() -> None:
            call.y.add_(0.0)  # a graph without any kernel draws a warning
            with pytest.raises(RuntimeError, match=r"deep_gemm_k3\.warmup\(sym_buffer, \.\.\.\)") as caught:
                call.call()
            refused.append(caught.value)

        capture(body_of_graph).replay()
        assert len(refused) == 1
        call.settle()

    ONE.each_rank(body)
    # The buffer is as usable as before.
    ONE.check(ONE.world(5), EXACT_SWIGLU)
    assert DEVICE.type == "cuda"
