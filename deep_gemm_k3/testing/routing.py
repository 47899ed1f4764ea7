"""Seeded routings: which experts the tokens of one rank choose, and with what weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RoutingShape:
    """Tokens of the rank, experts of the world, slots per token, ranks of the world."""

    tokens: int
    experts: int
    topk: int
    ranks: int = 1


Routing = tuple[torch.Tensor, torch.Tensor]
"""``topk_idx`` int64 [T, k] (-1: empty slot) and ``topk_weights`` float32 [T, k]."""


def _distinct(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of ``scores`` [T, n]; beyond n the slots stay empty."""
    n = scores.size(1)
    idx = scores.topk(min(k, n), dim=1).indices
    return torch.nn.functional.pad(idx, (0, max(k - n, 0)), value=-1)


def _weights(shape: RoutingShape, g: torch.Generator) -> torch.Tensor:
    raw = torch.rand(shape.tokens, shape.topk, generator=g) + 0.05
    return raw / raw.sum(dim=1, keepdim=True)


def uniform(shape: RoutingShape, g: torch.Generator) -> Routing:
    """Every token chooses distinct experts, all alike."""
    return _distinct(torch.rand(shape.tokens, shape.experts, generator=g), shape.topk), _weights(shape, g)


def hot_expert(shape: RoutingShape, g: torch.Generator) -> Routing:
    """Every token's first choice is one and the same expert, the others are uniform."""
    scores = torch.rand(shape.tokens, shape.experts, generator=g)
    scores[:, int(torch.randint(shape.experts, (1,), generator=g))] = 2.0
    return _distinct(scores, shape.topk), _weights(shape, g)


def hot_rank(shape: RoutingShape, g: torch.Generator) -> Routing:
    """All tokens choose among the experts of one rank (the last), and leave slots empty where it has too few."""
    local = shape.experts // shape.ranks
    idx = _distinct(torch.rand(shape.tokens, local, generator=g), shape.topk)
    return torch.where(idx >= 0, idx + (shape.experts - local), idx), _weights(shape, g)


def holes(shape: RoutingShape, g: torch.Generator) -> Routing:
    """Uniform with a third of the slots empty, and every fifth token without any expert."""
    idx, weights = uniform(shape, g)
    idx[torch.rand(idx.shape, generator=g) < 1 / 3] = -1
    idx[::5] = -1
    return idx, weights


def duplicates(shape: RoutingShape, g: torch.Generator) -> Routing:
    """Choices with repetition among few experts: the same id occurs several times in a token."""
    few = max(min(shape.experts, max(shape.topk // 2, 1)), 1)
    pool = torch.randperm(shape.experts, generator=g)[:few]
    return pool[torch.randint(few, (shape.tokens, shape.topk), generator=g)], _weights(shape, g)


def k3_router(shape: RoutingShape, g: torch.Generator) -> Routing:
    """The model's router: sigmoid of FP32 logits; the best of score + bias; weight = score over the sum of the chosen."""
    scores = torch.sigmoid(torch.randn(shape.tokens, shape.experts, generator=g))
    bias = torch.randn(shape.experts, generator=g) * 0.1
    idx = _distinct(scores + bias, shape.topk)
    chosen = torch.where(idx >= 0, scores.gather(1, idx.clamp_min(0)), torch.zeros(()))
    return idx, chosen / chosen.sum(dim=1, keepdim=True)


ROUTINGS: dict[str, Callable[[RoutingShape, torch.Generator], Routing]] = {
    "uniform": uniform,
    "hot_expert": hot_expert,
    "hot_rank": hot_rank,
    "holes": holes,
    "duplicates": duplicates,
    "k3_router": k3_router,
}
