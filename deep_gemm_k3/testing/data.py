"""Seeded inputs for calls: random ones through the package's own quantisers, and inputs whose sums are exact.

:func:`make_world` builds all ranks' inputs of one call. Unless asked otherwise everything is made on the CPU from one
seed, so every device and every number of processes sees the same bits; routed weights depend on the seed and the global expert number alone,
tokens on the seed and the rank.

**Exact sums.** ``kind="exact"`` gives inputs for which every sum of the call, in either GEMM, in the combine and in the
shared expert, has one FP32 result whatever the order, so any correct implementation agrees bit for bit (with
``fast_math=False``; the norm's sum of squares is not covered). How:

* Every 128 columns of a token are +- one of eight Walsh codes, and so is every L1 weight row in at most eight of its
  128-column blocks (zero elsewhere). Codes are orthogonal: a block contributes 0 or +-128 times 8, and gate and up are
  integers below 9 times 1024. Each partial sum is a multiple of 8 below 2^24 for widths up
  to 2^21. One wrong, missing or doubled element breaks a zero.
* sigmoid and tanh are saturated at multiples of 1024: 0 or +-1 exactly. SiTU gives 0 or +-beta * linear_beta (betas up
  to 100), SwiGLU products of two such integers (clamps: 1024, 2048 or 4096). Quantising either to E4M3 rounds an exact
  number.
* L2 rows have at most 512 non-zero weights, 0, +-1, +-2, +-3 times a power of two of the output column. In units of
  the smallest term a partial is below 240 * 3 * 512, and a sum of 32 of them with routing weights 1, 1/2 or 1/4 stays
  below 2^24 for what the activations can be (:func:`exact_bound`).
* The same number is held by different codes and scales: the exponent is split between code and scale at random for
  every block, so scales differ along K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..mega.weights import WeightPair, transform_weights_for_mega_moe
from ..utils.layout import transform_sf_into_required_layout
from ..utils.quantize import float_to_e4m3, pack_e2m1, pack_ue8m0, per_token_cast_to_fp4, per_token_cast_to_fp8
from .draws import Draws
from .oracle import RoutedInput
from .routing import ROUTINGS, RoutingShape
from .world import RankInput, SharedInput

_BLOCK = 128
_CODES = 8
_ACTIVE_L1_BLOCKS = 8
_ACTIVE_L2_COLUMNS = 512
_LOG2_X = 1  # magnitude of a token's element
_LOG2_W = 2  # magnitude of an L1 weight; their product 8 times 128 is the unit 1024 of gate and up


@dataclass(frozen=True)
class WorldShape:
    """Shapes of one call. ``tokens`` per rank, ``experts`` of the world; ``shared_tokens`` None: no shared expert."""

    tokens: tuple[int, ...]
    experts: int
    topk: int
    hidden: int
    intermediate: int
    shared_tokens: int | None = None
    shared_hidden: int = 256
    shared_intermediate: int = 128

    @property
    def ranks(self) -> int:
        return len(self.tokens)


# -------------------------------------------------------------------------------------------------------------- random
def random_tokens(tokens: int, hidden: int, g: Draws, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """N(0, scale) tokens: E4M3 [T, H] and packed UE8M0 int32 [T, H / 128]."""
    x = g.normal(tokens, hidden).mul_(scale).to(torch.bfloat16)
    return per_token_cast_to_fp8(x, True, 32, True)


def random_expert(n: int, k: int, g: Draws, scale: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    """N(0, scale) weights of one expert: packed E2M1 int8 [N, K / 2], float32 power-of-two scales [N, K / 32]."""
    return per_token_cast_to_fp4(g.normal(n, k).mul_(scale), True, 32)


def _stack(experts: list[tuple[torch.Tensor, torch.Tensor]], n: int, k: int) -> WeightPair:
    weight, sf = torch.stack([w for w, _ in experts]), torch.stack([s for _, s in experts])
    return weight, sf if sf.dtype == torch.uint8 else transform_sf_into_required_layout(sf, n, k, (1, 32), len(experts))


# --------------------------------------------------------------------------------------------------------------- exact
def _walsh(device: torch.device) -> torch.Tensor:
    """int8 [8, 128]: eight orthogonal +-1 codes of different shapes."""
    h = torch.ones(1, 1, dtype=torch.int8, device=device)
    while h.size(0) < _BLOCK:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h[[1, 2, 7, 31, 64, 85, 100, 127]]


def _codewords(rows: int, k: int, g: Draws, active: int) -> torch.Tensor:
    """int8 [rows, K] in {-1, 0, 1}: a signed code in ``active`` random blocks of every row, zero in the others."""
    blocks = k // _BLOCK
    pick = g.integers(0, _CODES, (rows, blocks))
    sign = g.integers(0, 2, (rows, blocks), torch.int8) * 2 - 1
    if active < blocks:
        chosen = g.uniform(rows, blocks).topk(active, dim=1).indices
        sign *= torch.zeros_like(sign).scatter_(1, chosen, 1)
    return (_walsh(g.device)[pick] * sign.unsqueeze(2)).view(rows, k)


def exact_tokens(tokens: int, hidden: int, g: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the exact kind: E4M3 [T, H] and packed UE8M0 int32 [T, H / 128]; every element is +-2."""
    signs = _codewords(tokens, hidden, g, hidden // _BLOCK).float()
    split = g.integers(-3, 5, (tokens, hidden // 32))
    values = signs.view(tokens, hidden // 32, 32) * torch.exp2(split.float()).unsqueeze(2)
    return float_to_e4m3(values.view(tokens, hidden)), pack_ue8m0((127 + _LOG2_X - split).to(torch.uint8))


def _encode(signed: torch.Tensor, table: torch.Tensor, split: torch.Tensor) -> torch.Tensor:
    """Packed E2M1 of ``signed`` int8 [N, K]; ``table[split, magnitude]`` is the code, ``split`` [N, K / 32]."""
    n, k = signed.shape
    magnitude = signed.abs().long().view(n, k // 32, 32)
    codes = table.flatten()[split.unsqueeze(2) * table.size(1) + magnitude].view(n, k)
    return pack_e2m1(codes + (signed < 0).to(torch.uint8) * 8).view(torch.int8)


def exact_l1(n: int, k: int, g: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """L1 of one expert of the exact kind: packed E2M1 int8 [N, K / 2] and UE8M0 codes uint8 [N, K / 32]."""
    signed = _codewords(n, k, g, min(_ACTIVE_L1_BLOCKS, k // _BLOCK))
    split = g.integers(0, 4, (n, k // 32))  # code 0.5, 1, 2 or 4
    table = torch.tensor([[0, 1], [0, 2], [0, 4], [0, 6]], dtype=torch.uint8, device=g.device)
    return _encode(signed, table, split), (127 + _LOG2_W - (split - 1)).to(torch.uint8)


def _small_integers(n: int, k: int, g: Draws) -> torch.Tensor:
    """int8 [N, K] in -3 .. 3 with at most 512 columns of a row, in whole blocks of 32, not zero."""
    values = g.integers(-3, 4, (n, k), torch.int8)
    blocks, active = k // 32, _ACTIVE_L2_COLUMNS // 32
    if active < blocks:
        chosen = g.uniform(n, blocks).topk(active, dim=1).indices
        mask = torch.zeros(n, blocks, dtype=torch.int8, device=g.device).scatter_(1, chosen, 1)
        values = (values.view(n, blocks, 32) * mask.unsqueeze(2)).view(n, k)
    return values


def _column_exponent(n: int, device: torch.device) -> torch.Tensor:
    """Powers of two of the output columns, the same for all experts: int64 [N, 1] in -6 .. 2."""
    return ((torch.arange(n, device=device) * 5) % 9 - 6).unsqueeze(1)


def exact_l2(n: int, k: int, g: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """L2 of one expert of the exact kind: packed E2M1 int8 [N, K / 2] and UE8M0 codes uint8 [N, K / 32]."""
    split = g.integers(0, 3, (n, k // 32))  # unit 0.5, 1 or 2
    table = torch.tensor([[0, 1, 2, 3], [0, 2, 4, 5], [0, 4, 6, 7]], dtype=torch.uint8, device=g.device)
    scale = 127 + _column_exponent(n, g.device) - (split - 1)
    return _encode(_small_integers(n, k, g), table, split), scale.to(torch.uint8)


def exact_bound(topk: int) -> int:
    """Largest possible sum of a combine, in units of its smallest term; below 2^24, so it is exact in any order.

    An activation is at most 64 units (two factors below 9, or one value with the 4 significant bits of E4M3: 15).
    """
    bound = 64 * 3 * _ACTIVE_L2_COLUMNS * 4 * topk
    assert bound < 1 << 24, f"topk: wanted at most {(1 << 24) // (64 * 3 * _ACTIVE_L2_COLUMNS * 4)}, given {topk}"
    return bound


def _exact_shared(shape: WorldShape, g: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = 2 * shape.shared_intermediate, shape.shared_hidden
    l1 = _codewords(n, k, g, min(_ACTIVE_L1_BLOCKS, k // _BLOCK)).float() * 2.0**_LOG2_W
    l2 = _small_integers(k, shape.shared_intermediate, g).float() * torch.exp2(_column_exponent(k, g.device).float())
    return l1.to(torch.bfloat16), l2.to(torch.bfloat16)


# --------------------------------------------------------------------------------------------------------------- world
def expert_range_weights(
    shape: WorldShape,
    seed: int,
    experts: range,
    kind: str = "random",
    target: str | None = None,
    *,
    drawn_on: str | torch.device = "cpu",
) -> tuple[WeightPair, WeightPair]:
    """L1 and L2 of some experts, transformed for ``target`` (None: checkpoint layout), on the device ``drawn_on``."""
    n1, hidden, inter = 2 * shape.intermediate, shape.hidden, shape.intermediate
    make_l1, make_l2 = (exact_l1, exact_l2) if kind == "exact" else (random_expert, random_expert)
    l1 = _stack([make_l1(n1, hidden, Draws(seed, 1, e, device=drawn_on)) for e in experts], n1, hidden)
    l2 = _stack([make_l2(hidden, inter, Draws(seed, 2, e, device=drawn_on)) for e in experts], hidden, inter)
    if target is None:
        return l1, l2
    done1, done2 = transform_weights_for_mega_moe(l1, l2, target=target)
    assert isinstance(done1, tuple)
    assert isinstance(done2, tuple)
    return done1, done2


def make_routed(
    shape: WorldShape,
    seed: int,
    rank: int,
    routing: str = "uniform",
    kind: str = "random",
    *,
    drawn_on: str | torch.device = "cpu",
) -> RoutedInput:
    """Tokens and routing of one rank, on the device ``drawn_on``."""
    g = Draws(seed, 3, rank, device=drawn_on)
    tokens = shape.tokens[rank]
    x, x_sf = (exact_tokens if kind == "exact" else random_tokens)(tokens, shape.hidden, g)
    idx, weights = ROUTINGS[routing](RoutingShape(tokens, shape.experts, shape.topk, shape.ranks), g)
    if kind == "exact":
        exact_bound(shape.topk)
        weights = torch.exp2(-g.integers(0, 3, tuple(weights.shape)).float())
    return RoutedInput(x, x_sf, idx, weights)


def make_shared(
    shape: WorldShape,
    seed: int,
    rank: int,
    kind: str = "random",
    epsilon: float = 1e-5,
    *,
    drawn_on: str | torch.device = "cpu",
) -> SharedInput:
    """Shared part of one rank, on the device ``drawn_on``: the same rows on every rank, a slice of the intermediate of its
    own."""
    g, mine = Draws(seed, 4, device=drawn_on), Draws(seed, 5, rank, device=drawn_on)
    rows = shape.shared_tokens or 0
    gamma = Draws(seed, 6, device=drawn_on).normal(shape.hidden).mul_(0.1).add_(1.0).to(torch.bfloat16)
    if kind == "exact":
        x = (_codewords(rows, shape.shared_hidden, g, shape.shared_hidden // _BLOCK) * 2**_LOG2_X).to(torch.bfloat16)
        return SharedInput(x, *_exact_shared(shape, mine), gamma, epsilon)
    n, k = 2 * shape.shared_intermediate, shape.shared_hidden
    x = g.normal(rows, k).mul_(0.5).to(torch.bfloat16)
    l1 = mine.normal(n, k).mul_(0.03).to(torch.bfloat16)
    l2 = mine.normal(k, n // 2).mul_(0.03).to(torch.bfloat16)
    return SharedInput(x, l1, l2, gamma, epsilon)


def make_world(
    shape: WorldShape,
    seed: int,
    routing: str = "uniform",
    kind: str = "random",
    target: str | None = None,
    device: str | torch.device = "cpu",
    *,
    drawn_on: str | torch.device = "cpu",
) -> list[RankInput]:
    """All ranks' inputs of one call, on ``device``. ``routing`` is a name of :data:`.routing.ROUTINGS`, ``kind`` "random"
    or "exact", ``target`` the layout of the routed weights (None: the checkpoint's). ``drawn_on`` a GPU is faster by
    orders of magnitude, but gives other numbers than the CPU's."""
    local = shape.experts // shape.ranks
    ranks = []
    for rank in range(shape.ranks):
        experts = range(rank * local, (rank + 1) * local)
        l1, l2 = expert_range_weights(shape, seed, experts, kind, target, drawn_on=drawn_on)
        shared = make_shared(shape, seed, rank, kind, drawn_on=drawn_on) if shape.shared_tokens is not None else None
        routed = make_routed(shape, seed, rank, routing, kind, drawn_on=drawn_on)
        ranks.append(RankInput(routed, l1, l2, shared).to(device))
    return ranks
