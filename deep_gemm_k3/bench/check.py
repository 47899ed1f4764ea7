"""Comparison of a measured call's results with the oracle, on a sample of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..testing import metrics, oracle
from ..testing.oracle import RoutedInput
from .case import OPTIONS, Case
from .data import RankData
from .work import Shape


class CheckFailed(RuntimeError):
    """A result that no time may be printed for."""


@dataclass(frozen=True)
class Expected:
    """What the oracle computes for ``tokens`` of one rank and ``rows`` of the shared input.

    ``combined`` BF16 [tokens, H] before the norm, ``y`` after it (the same without a shared part), ``shared`` BF16
    [rows, Hs] of every rank's slice.
    """

    tokens: list[int]
    rows: list[int]
    combined: torch.Tensor
    y: torch.Tensor
    shared: list[torch.Tensor]


def sample_rows(count: int, limit: int) -> list[int]:
    """At most ``limit`` of ``count`` rows: the first, the last and evenly between."""
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)}) if limit > 1 else [0]


def expect(
    shape: Shape, sample: int, data: Sequence[RankData], inputs: Mapping[int, RoutedInput]
) -> dict[int, Expected]:
    """For every rank of ``inputs``; ``data`` holds all ranks' weights, in rank order."""
    tokens, rows = sample_rows(shape.tokens, sample), sample_rows(shape.shared_tokens, sample)
    chosen = {
        rank: RoutedInput(i.x[tokens], i.x_sf[tokens], i.topk_idx[tokens], i.topk_weights[tokens])
        for rank, i in inputs.items()
    }
    partials = [
        torch.full((len(tokens), shape.topk, shape.hidden), float("nan"), dtype=torch.bfloat16, device=i.x.device)
        for i in chosen.values()
    ]
    for owner, weights in enumerate(data):
        pair = weights.routed_set(0)
        oracle.run_local_experts(list(chosen.values()), pair, owner * shape.experts, OPTIONS, partials)
    shared = []
    if shape.shared_tokens:
        sets = [d.shared_set(0) for d in data]
        shared = [oracle.shared_expert(s.x[rows], s.l1, s.l2, OPTIONS) for s in sets]
    found = {}
    for (rank, i), partial in zip(chosen.items(), partials, strict=True):
        y = combined = oracle.combine(partial, i.topk_idx)
        if shape.shared_tokens:
            own = data[rank].shared_set(0)
            y = oracle.rms_norm(combined, own.rms_weight, own.rms_epsilon)
        found[rank] = Expected(tokens, rows, combined, y, shared)
    return found


def _published(case: Case, wanted: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank's workspace got from all source ranks, one after another, and the parts of the oracle's output that
    belong there."""
    assert case.published is not None
    view, ranks, parts = case.published.workspace[0], len(wanted.shared), []
    for source, full in enumerate(wanted.shared):
        if case.mode == "rs":
            shard = full.size(1) // ranks
            got = view[wanted.rows, source, :shard]
            want = full[:, case.rank * shard : (case.rank + 1) * shard]
        else:
            owned = case.shape.shared_tokens // ranks
            places = [i for i, row in enumerate(wanted.rows) if row // owned == case.rank]
            got = view[[wanted.rows[i] - case.rank * owned for i in places], source]
            want = full[places]
        parts.append((got, want))
    return torch.cat([got for got, _ in parts]), torch.cat([want for _, want in parts])


def compare(case: Case, wanted: Expected) -> float:
    """The last call's results against the oracle's; the largest relative error over the tensors."""
    pairs = [("y", case.y[wanted.tokens], wanted.combined if case.mode == "routed" else wanted.y)]
    if not bool(torch.isfinite(case.y).all()):
        raise CheckFailed(f"{case.mode}, rank {case.rank}: y: wanted finite numbers everywhere")
    if case.mode == "dense":
        assert case.shared_y is not None
        pairs.append(("shared_y", case.shared_y[wanted.rows], wanted.shared[case.rank]))
    elif case.mode != "routed":
        pairs.append(("what was published to it", *_published(case, wanted)))
    worst = 0.0
    for name, got, want in pairs:
        result = metrics.compare(got, want)
        if not result.within():
            raise CheckFailed(f"{case.mode}, rank {case.rank}: {name}: {result}")
        worst = max(worst, result.tensor)
    return worst


def check_same(case: Case, wanted: Sequence[torch.Tensor]) -> None:
    """The last call's outputs must be bit for bit those of the call that was compared with the oracle."""
    for got, want in zip(case.outputs(), wanted, strict=True):
        report = metrics.bitwise_report(got, want)
        if report is not None:
            raise CheckFailed(f"{case.mode}, rank {case.rank}: a timed call differs from the checked one: {report}")


def expert_rows(shape: Shape, rank: int, inputs: Sequence[RoutedInput]) -> tuple[int, int]:
    """Experts of ``rank`` that get a row from any rank, and the rows."""
    local = torch.cat([i.topk_idx.flatten() for i in inputs]) - rank * shape.experts
    local = local[(local >= 0) & (local < shape.experts)]
    return int(local.unique().numel()), int(local.numel())
