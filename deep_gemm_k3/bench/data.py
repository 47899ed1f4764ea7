"""Inputs of K3's size in a moment: codes and scales are random bytes drawn on the device, not quantised numbers.

Weights are drawn from one seed, tokens and routing from another, so one set of weights serves all routings. Copies of a
weight set hold the same values at other addresses: results stay comparable bit for bit while nothing stays in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..mega.weights import WeightPair, transform_weights_for_mega_moe
from ..testing.draws import Draws
from ..testing.oracle import RoutedInput
from ..testing.routing import ROUTINGS, RoutingShape
from ..testing.world import SharedInput
from ..utils.quantize import per_token_cast_to_fp8
from .work import Shape

_CHUNK_EXPERTS = 8
# Codes of weight scales. Random E2M1 codes have a root mean square of 2.9: with scales around 2^-7.5 gate and up are of
# the order of 1 at K3's widths.
_SCALES = (127 - 9, 127 - 6)
RMS_EPSILON = 1e-5


@dataclass
class RankData:
    """One rank's weights, ``copies`` of each at different addresses, and its shared tokens."""

    routed: list[tuple[WeightPair, WeightPair]]
    shared: list[SharedInput] = field(default_factory=list)

    def routed_set(self, call: int) -> tuple[WeightPair, WeightPair]:
        return self.routed[call % len(self.routed)]

    def shared_set(self, call: int) -> SharedInput:
        return self.shared[call % len(self.shared)]


class DeviceDraws:
    """A seeded stream of random tensors on one device."""

    def __init__(self, device: torch.device, *key: int) -> None:
        self.device = device
        state = 1469598103934665603
        for part in key:
            state = ((state ^ part) * 1099511628211) % (1 << 63)
        self._generator = torch.Generator(device=device).manual_seed(state)

    def bytes(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """uint8 in [low, high)."""
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self._generator)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """BF16 of N(0, scale)."""
        drawn = torch.randn(shape, dtype=torch.float32, device=self.device, generator=self._generator)
        return drawn.mul_(scale).to(torch.bfloat16)


def _weights(shape: Shape, experts: int, g: DeviceDraws, target: str) -> tuple[WeightPair, WeightPair]:
    raw = []
    for n, k in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)):
        raw.append((g.bytes(0, 256, experts, n, k // 2), g.bytes(*_SCALES, experts, n, k // 32)))
    l1, l2 = transform_weights_for_mega_moe(raw[0], raw[1], target=target)
    assert isinstance(l1, tuple) and isinstance(l2, tuple)
    return l1, l2


def routed_weights(
    shape: Shape, seed: int, rank: int, device: torch.device, target: str
) -> tuple[WeightPair, WeightPair]:
    """L1 and L2 of one rank's experts, in ``target``'s layout, made a few experts at a time."""
    g = DeviceDraws(device, seed, 1, rank)
    parts = []
    for first in range(0, shape.experts, _CHUNK_EXPERTS):
        parts.append(_weights(shape, min(_CHUNK_EXPERTS, shape.experts - first), g, target))
    pairs = []
    for which in range(2):
        pairs.append(tuple(torch.cat([part[which][i] for part in parts]) for i in range(2)))
    return pairs[0], pairs[1]  # type: ignore[return-value]


def shared_input(shape: Shape, seed: int, rank: int, device: torch.device) -> SharedInput:
    """Rows and norm weights that are equal on all ranks, and the rank's own slice of the intermediate."""
    common, own = DeviceDraws(device, seed, 2), DeviceDraws(device, seed, 3, rank)
    x = common.normal(shape.shared_tokens, shape.shared_hidden, scale=0.5)
    gamma = common.normal(shape.hidden, scale=0.1) + 1.0
    l1 = own.normal(2 * shape.shared_intermediate, shape.shared_hidden, scale=0.03)
    l2 = own.normal(shape.shared_hidden, shape.shared_intermediate, scale=0.03)
    return SharedInput(x, l1, l2, gamma, RMS_EPSILON)


def rank_data(shape: Shape, seed: int, rank: int, device: torch.device, target: str, copies: int) -> RankData:
    """Everything of one rank but tokens and routing."""
    first = routed_weights(shape, seed, rank, device, target)
    routed = [first]
    for _ in range(copies - 1):
        routed.append(((first[0][0].clone(), first[0][1].clone()), (first[1][0].clone(), first[1][1].clone())))
    if not shape.shared_tokens:
        return RankData(routed)
    s = shared_input(shape, seed, rank, device)
    shared = [s]
    for _ in range(copies - 1):
        shared.append(SharedInput(s.x, s.l1.clone(), s.l2.clone(), s.rms_weight, s.rms_epsilon))
    return RankData(routed, shared)


def with_shared_tokens(data: RankData, shape: Shape, seed: int) -> RankData:
    """``data`` with another number of shared rows, over the same weights."""
    if not shape.shared_tokens:
        return RankData(data.routed)
    x = DeviceDraws(data.shared[0].x.device, seed, 2).normal(shape.shared_tokens, shape.shared_hidden, scale=0.5)
    return RankData(data.routed, [SharedInput(x, s.l1, s.l2, s.rms_weight, s.rms_epsilon) for s in data.shared])


def routed_input(shape: Shape, seed: int, rank: int, device: torch.device, routing: str = "uniform") -> RoutedInput:
    """Tokens and routing of one rank for one seed."""
    x, x_sf = per_token_cast_to_fp8(
        DeviceDraws(device, seed, 4, rank).normal(shape.tokens, shape.hidden), True, 32, True
    )
    choose = RoutingShape(shape.tokens, shape.experts * shape.ranks, shape.topk, shape.ranks)
    idx, weights = ROUTINGS[routing](choose, Draws(seed, 5, rank))
    return RoutedInput(x, x_sf, idx.to(device), weights.to(device))
