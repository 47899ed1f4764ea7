"""Seeded routings: which experts the tokens of one rank choose, and with what weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .draws import Draws


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


def _weights(shape: RoutingShape, g: Draws) -> torch.Tensor:
    raw = g.uniform(shape.tokens, shape.topk) + 0.05
    return raw / raw.sum(dim=1, keepdim=True)


def uniform(shape: RoutingShape, g: Draws) -> Routing:
    """Every token chooses distinct experts, all alike."""
    return _distinct(g.uniform(shape.tokens, shape.experts), shape.topk), _weights(shape, g)


def hot_expert(shape: RoutingShape, g: Draws) -> Routing:
    """Every token's first choice is one and the same expert, the others are uniform."""
    scores = g.uniform(shape.tokens, shape.experts)
    scores[:, int(g.integers(0, shape.experts, (1,)))] = 2.0
    return _distinct(scores, shape.topk), _weights(shape, g)


def hot_rank(shape: RoutingShape, g: Draws) -> Routing:
    """All tokens choose among the experts of one rank (the last), and leave slots empty where it has too few."""
    local = shape.experts // shape.ranks
    idx = _distinct(g.uniform(shape.tokens, local), shape.topk)
    return torch.where(idx >= 0, idx + (shape.experts - local), idx), _weights(shape, g)


def holes(shape: RoutingShape, g: Draws) -> Routing:
    """Uniform with a third of the slots empty, and every fifth token without any expert."""
    idx, weights = uniform(shape, g)
    idx[g.uniform(*idx.shape) < 1 / 3] = -1
    idx[::5] = -1
    return idx, weights


def duplicates(shape: RoutingShape, g: Draws) -> Routing:
    """Choices with repetition among few experts: the same id occurs several times in a token."""
    few = max(min(shape.experts, max(shape.topk // 2, 1)), 1)
    pool = g.permutation(shape.experts)[:few]
    return pool[g.integers(0, few, (shape.tokens, shape.topk))], _weights(shape, g)


def k3_router(shape: RoutingShape, g: Draws) -> Routing:
    """The model's router: sigmoid of FP32 logits; the best of score + bias; weight = score over the sum of the chosen."""
    scores = torch.sigmoid(g.normal(shape.tokens, shape.experts))
    bias = g.normal(shape.experts) * 0.1
    idx = _distinct(scores + bias, shape.topk)
    chosen = scores.gather(1, idx.clamp_min(0)).masked_fill_(idx < 0, 0.0)
    return idx, chosen / chosen.sum(dim=1, keepdim=True)


ROUTINGS: dict[str, Callable[[RoutingShape, Draws], Routing]] = {
    "uniform": uniform,
    "hot_expert": hot_expert,
    "hot_rank": hot_rank,
    "holes": holes,
    "duplicates": duplicates,
    "k3_router": k3_router,
}
