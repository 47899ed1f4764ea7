"""A whole world through the public calls: local ranks on the CPU or on one GPU, compared with the oracle.

One line for tests and benchmarks::

    check_world(make_world(shape, seed, kind="exact", target="sm_90a"), Options("situ", None, 4.0, 25.0), "rs")

A :class:`Session` keeps the ranks' threads and buffers for many calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from .._extension import ops
from ..mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from ..mega.group import Group
from ..mega.local_world import LocalRank, local_world
from ..mega.publication import PublicationWorkspace
from ..mega.weights import logical_shape
from . import metrics, oracle
from .data import WorldShape
from .oracle import Options
from .world import RankInput, RankOutput, mega_moe_reference

T = TypeVar("T")

MODES = ("routed", "dense", "rs", "sp_rs")


@dataclass(frozen=True)
class RunOptions:
    """How to run: ``calls`` back-to-back calls on one buffer (generations rotate), on ``num_sms`` SMs per rank (None: an
    equal share), with room for ``capacity`` tokens (None: what is needed)."""

    fast_math: bool = False
    batch_invariant: bool = False
    calls: int = 1
    num_sms: int | None = None
    capacity: int | None = None
    timeout_s: float | None = 60.0
    keyword: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the entry."""


@dataclass(frozen=True)
class RankResult:
    """Of the last call: ``y``, statistics added by all calls, dense shared output or the whole published workspace, and the
    generation that the last call wrote."""

    y: torch.Tensor
    stats: torch.Tensor
    shared_y: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    generation: int = 0


def make_buffer(group: object, shape: WorldShape, **options: Any) -> SymmBuffer:
    """One rank's buffer for calls of at most ``shape.tokens`` and ``shape.shared_tokens``. Collective."""
    if shape.shared_tokens is not None:
        options["bf16_shared_intermediate_hidden"] = shape.shared_intermediate
        options.setdefault("num_max_shared_tokens", max(shape.shared_tokens, 1))
    widths = (shape.experts, max(1, *shape.tokens, 0), shape.topk, shape.hidden, shape.intermediate)
    return get_symm_buffer_for_mega_moe(group, *widths, **options)


class Session:
    """The threads and buffers of a local world, kept for many calls. ``shape.tokens`` and ``shape.shared_tokens`` are the
    most that a call may bring; ``overrides`` replace choices of the planner; further ``options`` are those of the buffer."""

    def __init__(
        self,
        shape: WorldShape,
        *,
        device: str | torch.device,
        overrides: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.shape, self.device = shape, torch.device(device)
        self._options = {"device": self.device, "timeout_s": 60.0, **options}
        self._world = local_world(shape.ranks)
        self.buffers: list[SymmBuffer] = self._world.run(self._make)
        if overrides:
            for buffer in self.buffers:
                ops().set_overrides(buffer.handle, json.dumps(overrides))

    def _make(self, group: LocalRank) -> SymmBuffer:
        return make_buffer(group, self.shape, **self._options)

    def run(self, body: Callable[[LocalRank, SymmBuffer], T], timeout_s: float = 120.0) -> list[T]:
        """``body(group, buffer)`` for every rank, in its thread; what this thread has queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        results: list[T] = self._world.run(lambda group: body(group, self.buffers[group.rank]), timeout_s=timeout_s)
        return results

    def close(self) -> None:
        self._world.run(lambda group: self.buffers[group.rank].destroy(), timeout_s=30.0)
        self._world.close()


class RankCall:
    """One rank's inputs, outputs and arguments around a buffer. Everything is allocated before the first call: while one
    rank's kernel waits for another's, nothing may synchronise the device."""

    def __init__(self, buffer: SymmBuffer, given: RankInput, options: Options, mode: str, how: RunOptions) -> None:
        self.mode, self.how, self.input, self.buffer = mode, how, given, buffer
        routed, shared = self.input.routed, self.input.shared
        self.device = routed.x.device
        tokens, hidden = routed.x.shape
        self.y = torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16, device=self.device)
        self.stats = torch.zeros(logical_shape(*self.input.l1)[0], dtype=torch.int32, device=self.device)
        self.shared_y: torch.Tensor | None = None
        self.published: PublicationWorkspace | None = None
        self.generation = 0
        if shared is not None and mode == "dense":
            self.shared_y = torch.full_like(shared.x, float("nan"))
        elif shared is not None and mode != "routed":
            self.published = PublicationWorkspace(self.buffer, mode, max(shared.x.size(0), 1), shared.x.size(1))
            self.published.workspace.fill_(float("nan"))
        self.options: dict[str, Any] = {"activation": options.activation, "fast_math": how.fast_math}
        self.options |= {"situ_beta": options.situ_beta, "situ_linear_beta": options.situ_linear_beta}
        self.options |= {"batch_invariant": how.batch_invariant, **how.keyword}
        if mode == "routed":
            self.options["activation_clamp"] = options.activation_clamp

    def fill(self) -> None:
        """Write the inputs; the rows above them get NaN and ids that must not be read."""
        routed = self.input.routed
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            view, value = getattr(self.buffer, name), getattr(routed, name)
            view.view(torch.uint8).fill_(0x7F)
            view[: value.size(0)].copy_(value)

    def call(self) -> None:
        from ..mega import api

        routed_part = (self.input.l1, self.input.l2)
        options = {**self.options, "cumulative_local_expert_recv_stats": self.stats}
        if self.mode == "routed":
            api.fp8_fp4_mega_moe(self.y, *routed_part, self.buffer, **options)
            return
        s = self.input.shared
        assert s is not None
        shared_part: tuple[Any, ...] = (s.x, s.l1, s.l2, s.rms_weight, s.rms_epsilon)
        if self.shared_y is not None:
            dense: Any = api.fp8_fp4_mega_moe_bf16_shared
            dense(self.y, self.shared_y, *routed_part, *shared_part, self.buffer, **options)
            return
        p = self.published
        assert p is not None
        entry: Any = (
            api.fp8_fp4_mega_moe_bf16_shared_rs if self.mode == "rs" else api.fp8_fp4_mega_moe_bf16_shared_sp_rs
        )
        entry(self.y, *routed_part, *shared_part, p.workspace, p.flags, p.peer_ptrs, self.buffer, **options)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.buffer.check()

    def result(self) -> RankResult:
        workspace = self.published.workspace.clone() if self.published is not None else None
        return RankResult(self.y, self.stats, self.shared_y, workspace, self.generation)

    def destroy(self) -> None:
        if self.published is not None:
            self.published.destroy()


def _buffer(group: Any, ranks: Sequence[RankInput], how: RunOptions) -> SymmBuffer:
    mine = ranks[group.rank]
    experts, two_inter, hidden = logical_shape(*mine.l1)
    tokens = max(1, *(rank.routed.x.size(0) for rank in ranks), how.capacity or 1)
    options: dict[str, Any] = {"device": mine.routed.x.device, "num_sms": how.num_sms, "timeout_s": how.timeout_s}
    if mine.shared is not None:
        options["bf16_shared_intermediate_hidden"] = mine.shared.l2.size(1)
        options["num_max_shared_tokens"] = max(1, *(r.shared.x.size(0) for r in ranks if r.shared), tokens)
    topk = mine.routed.topk_idx.size(1)
    return get_symm_buffer_for_mega_moe(group, experts * len(ranks), tokens, topk, hidden, two_inter // 2, **options)


def run_rank(
    group: Group, buffer: SymmBuffer, given: RankInput, options: Options, mode: str, how: RunOptions
) -> RankResult:
    """One rank's part of `run_world`: fill, call ``how.calls`` times, all ranks coming together around each call."""
    rank = RankCall(buffer, given, options, mode, how)
    try:
        rank.fill()
        for number in range(how.calls):
            if number and rank.published is not None:
                rank.published.rotate()
                rank.generation = number % rank.published.num_generations
            rank.settle()
            group.barrier("testing: before a call")
            rank.call()
            rank.settle()
            group.barrier("testing: after a call")
        return rank.result()
    finally:
        rank.destroy()


def run_world(
    ranks: Sequence[RankInput],
    options: Options,
    mode: str = "routed",
    how: RunOptions | None = None,
    session: Session | None = None,
) -> list[RankResult]:
    """Run all ranks of a local world, in threads, through the public entry that ``mode`` names.

    The routed weights are transformed already, for the target of the tensors' device. Raises what a call raises. With a
    ``session`` its buffers serve the call (``capacity``, ``num_sms`` and ``timeout_s`` are then the session's).
    """
    if mode not in MODES:
        raise ValueError(f"mode: wanted one of {', '.join(MODES)}, given {mode!r}")
    chosen = how or RunOptions()

    def one(group: Any, buffer: SymmBuffer) -> RankResult:
        return run_rank(group, buffer, ranks[group.rank], options, mode, chosen)

    def alone(group: Any) -> RankResult:
        buffer = _buffer(group, ranks, chosen)
        try:
            return one(group, buffer)
        finally:
            buffer.destroy()

    if session is not None:
        return session.run(one)
    if ranks[0].routed.x.is_cuda:
        torch.cuda.synchronize(ranks[0].routed.x.device)
    with local_world(len(ranks)) as world:
        results: list[RankResult] = world.run(alone)
        return results


def check_world(
    ranks: Sequence[RankInput],
    options: Options,
    mode: str = "routed",
    how: RunOptions | None = None,
    bitwise: bool = False,
    *,
    session: Session | None = None,
) -> list[RankResult]:
    """Run, and compare every output with the oracle: within the tolerances, or ``bitwise`` (exact-sum inputs; the normed y,
    whose sum of squares is not exact, stays within tolerance). Published fragments must be, in their place, bitwise what the
    oracle computes (``bitwise``) or what the dense mode does, and nothing else in the written generation may have changed.
    Statistics must be exact."""
    chosen = how or RunOptions()
    results = run_world(ranks, options, mode, chosen, session)
    asked = [replace(rank, shared=rank.shared if mode != "routed" else None) for rank in ranks]
    expected = mega_moe_reference(asked, options)
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        check_rank(got, want, f"{mode}, rank {rank}", chosen.calls, bitwise)
    if mode in ("rs", "sp_rs") and bitwise:
        check_published([one.shared_y for one in expected], mode, chosen.calls, dict(enumerate(results)))
    elif mode in ("rs", "sp_rs"):
        dense = run_world(ranks, options, "dense", replace(chosen, calls=1), session)
        check_published([one.shared_y for one in dense], mode, chosen.calls, dict(enumerate(results)))
        for rank, (got, also) in enumerate(zip(results, dense, strict=True)):
            metrics.assert_bitwise(got.y, also.y, f"{mode}: y of rank {rank} against dense")
            shared_y = expected[rank].shared_y
            assert also.shared_y is not None and shared_y is not None
            metrics.assert_close(also.shared_y, shared_y, f"{mode}, rank {rank}: shared_y")
    return results


def check_rank(got: RankResult, want: RankOutput, name: str, calls: int, bitwise: bool) -> None:
    """One rank's y, statistics and dense output against the oracle's; see `check_world`."""
    if bitwise and got.shared_y is None and got.workspace is None:
        metrics.assert_bitwise(got.y, want.y, f"{name}: y")
    metrics.assert_close(got.y, want.y, f"{name}: y")
    assert torch.equal(got.stats, calls * want.counts), f"{name}: statistics {got.stats} {want.counts}"
    if got.shared_y is not None and want.shared_y is not None:
        if bitwise:
            metrics.assert_bitwise(got.shared_y, want.shared_y, f"{name}: shared_y")
        metrics.assert_close(got.shared_y, want.shared_y, f"{name}: shared_y")


def check_published(
    shared: Sequence[torch.Tensor | None], mode: str, calls: int, results: Mapping[int, RankResult]
) -> None:
    """The whole workspaces of some ranks after ``calls`` calls, bit for bit. ``shared``: every rank's dense output."""
    publish = oracle.publish_rs if mode == "rs" else oracle.publish_sp_rs
    like = next(iter(results.values())).workspace
    assert like is not None
    wanted = [torch.full_like(like, float("nan")) for _ in shared]
    for number in range(max(0, calls - like.size(0)), calls):
        views = [w[number % w.size(0)] for w in wanted]
        for source, shared_y in enumerate(shared):
            assert shared_y is not None
            publish(shared_y, views, source)
    for rank, got in results.items():
        assert got.workspace is not None
        metrics.assert_bitwise(got.workspace, wanted[rank], f"{mode}: workspace of rank {rank}")
