"""The fused call in plain torch: one rank's local work as pure functions, rounded where the kernels round.

Rounding points, in order, and nowhere else:

1. routed L1: exact products, FP32 accumulation; gate and up each to BF16 (SwiGLU may clamp them there);
2. activation in FP32, times the routing weight in FP32;
3. per row and 32 columns to E4M3 with a power-of-two scale, saturating;
4. routed L2: FP32 accumulation, each (token, slot) partial to BF16;
5. combine: FP32 sum in ascending slot order, empty slots skipped, to BF16;
6. RMSNorm of the BF16 sums in FP32, to BF16;
7. shared expert: BF16 operands, FP32 accumulation, gate and up to BF16, activation in FP32 to BF16, L2 to BF16.

Every function is deterministic. A row's bits do not depend on the other rows nor on their number: products are computed in
chunks of a fixed shape, so that the matrix library takes the same path each time. The order of FP32 accumulation is
the library's; a kernel's differs, which is what the tolerances allow for. ``fast_math`` has no meaning here: exponential,
tanh and division are the library's exact ones.

:mod:`deep_gemm_k3.testing.world` puts the functions together for all ranks of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..mega.weights import WeightPair, expert_weights, logical_shape
from ..utils.quantize import dequantize_e2m1, dequantize_e4m3, quantize_e4m3_blocks

CHUNK_ROWS = 32
"""Rows of one matrix product; fewer are padded with zeros."""

_EXPERT_ROWS = 1024
"""Rows of one expert in flight: bounds the memory for intermediates."""


@dataclass(frozen=True)
class Options:
    """What selects the arithmetic of a call; names and meaning as in the public entries."""

    activation: str = "swiglu"
    activation_clamp: float | None = None
    situ_beta: float | None = None
    situ_linear_beta: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in ("swiglu", "situ"):
            raise ValueError(f"activation: wanted swiglu or situ, given {self.activation!r}")
        if self.activation == "situ" and (self.situ_beta is None or self.situ_linear_beta is None):
            raise ValueError("situ_beta, situ_linear_beta: wanted two numbers for situ, given None")
        if self.activation == "situ" and self.activation_clamp is not None:
            raise ValueError(f"activation_clamp: wanted None for situ, given {self.activation_clamp}")


@dataclass(frozen=True)
class RoutedInput:
    """The routed tokens of one rank, exactly ``num_tokens`` rows.

    ``x`` E4M3 [T, H], ``x_sf`` int32 [T, H / 128] (packed UE8M0), ``topk_idx`` int64 [T, k] with -1 for an empty slot,
    ``topk_weights`` float32 [T, k].
    """

    x: torch.Tensor
    x_sf: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


# ---------------------------------------------------------------------------------------------------------- arithmetic
def gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x @ w.T`` for float32 [R, K] and [N, K] with FP32 accumulation, always in chunks of :data:`CHUNK_ROWS` rows."""
    rows = x.size(0)
    out = torch.empty((rows, w.size(0)), dtype=torch.float32, device=x.device)
    for begin in range(0, rows, CHUNK_ROWS):
        part = x[begin : begin + CHUNK_ROWS]
        if part.size(0) < CHUNK_ROWS:
            part = torch.nn.functional.pad(part, (0, 0, 0, CHUNK_ROWS - part.size(0)))
        product = part @ w.t()
        out[begin : begin + CHUNK_ROWS] = product[: rows - begin]
    return out


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    # One element on the operand's device: a plain number may be turned into a multiplication by its reciprocal, which is
    # infinite for a subnormal.
    return torch.full((1,), value, dtype=torch.float32, device=like.device)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x) / (torch.exp(-x) + 1.0)


def activate(gate: torch.Tensor, up: torch.Tensor, options: Options) -> torch.Tensor:
    """float32 [R, I] of BF16 ``gate`` and ``up`` [R, I].

    SwiGLU: ``(g / (1 + exp(-g))) * u`` after the optional clamp, g from above, u on both sides, in BF16.
    SiTU: ``((beta * tanh(g / beta)) * sigmoid(g)) * (linear_beta * tanh(u / linear_beta))``.
    """
    if options.activation == "swiglu":
        if options.activation_clamp is not None:
            limit = float(torch.tensor(options.activation_clamp, dtype=torch.bfloat16, device="cpu"))
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        g = gate.float()
        return (g / (torch.exp(-g) + 1.0)) * up.float()
    assert options.situ_beta is not None
    assert options.situ_linear_beta is not None
    g, u = gate.float(), up.float()
    beta, linear_beta = _constant(options.situ_beta, g), _constant(options.situ_linear_beta, g)
    return ((beta * torch.tanh(g / beta)) * _sigmoid(g)) * (linear_beta * torch.tanh(u / linear_beta))


def expert_partial(
    x: torch.Tensor, l1: torch.Tensor, l2: torch.Tensor, weight: torch.Tensor, options: Options
) -> torch.Tensor:
    """BF16 [R, H]: one routed expert applied to R rows.

    ``x`` float32 [R, H] dequantised tokens, ``l1`` float32 [2 * I, H] with rows [gate; up], ``l2`` float32 [H, I],
    ``weight`` float32 [R] routing weights.
    """
    parts = [x.new_empty((0, l2.size(0)), dtype=torch.bfloat16)]
    for begin in range(0, x.size(0), _EXPERT_ROWS):
        rows = slice(begin, begin + _EXPERT_ROWS)
        gate, up = gemm(x[rows], l1).to(torch.bfloat16).chunk(2, dim=1)
        hidden = activate(gate, up, options) * weight[rows].unsqueeze(1)
        codes, scales = quantize_e4m3_blocks(hidden)
        parts.append(gemm(dequantize_e4m3(codes, scales), l2).to(torch.bfloat16))
    return torch.cat(parts)


def combine(partials: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """BF16 [T, H] from ``partials`` BF16 [T, k, H]: FP32 sum over ascending slots whose ``topk_idx`` [T, k] is not -1.

    What stands in an empty slot does not matter, NaN included; a token without any slot gives zeros.
    """
    total = torch.zeros((partials.size(0), partials.size(2)), dtype=torch.float32, device=partials.device)
    for slot in range(partials.size(1)):
        used = (topk_idx[:, slot] >= 0).unsqueeze(1)
        total = torch.where(used, total + partials[:, slot].float(), total)
    return total.to(torch.bfloat16)


def rms_norm(v: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """BF16 [T, H] of BF16 ``v`` [T, H] and ``gamma`` [H]: ``(v * gamma) * rsqrt(sum(v^2) / H + epsilon)`` in FP32."""
    f = v.float()
    inverse = torch.rsqrt(f.square().sum(dim=1, keepdim=True) / f.size(1) + epsilon)
    return ((f * gamma.float()) * inverse).to(torch.bfloat16)


def shared_expert(x: torch.Tensor, l1: torch.Tensor, l2: torch.Tensor, options: Options) -> torch.Tensor:
    """BF16 [S, H] of the shared expert: BF16 ``x`` [S, H], ``l1`` [2 * I, H] with rows [gate; up], ``l2`` [H, I]."""
    gate, up = gemm(x.float(), l1.float()).to(torch.bfloat16).chunk(2, dim=1)
    hidden = activate(gate, up, options).to(torch.bfloat16)
    return gemm(hidden.float(), l2.float()).to(torch.bfloat16)


# ------------------------------------------------------------------------------------------------------------- routing
def dequantize_expert(pair: WeightPair, expert: int, gated: bool) -> torch.Tensor:
    """float32 [N, K] of one expert of a weight pair in any layout, rows in checkpoint order."""
    return dequantize_e2m1(*expert_weights(*pair, expert, gated))


def rows_by_expert(
    topk_idx: torch.Tensor, first_expert: int, num_experts: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """``{local expert: (tokens, slots)}`` for the experts ``first_expert`` .. + ``num_experts`` that got any row.

    ``tokens`` and ``slots`` are int64 [R] with ascending (token, slot); a token may occur more than once.
    """
    flat = topk_idx.flatten() - first_expert
    rows = ((flat >= 0) & (flat < num_experts)).nonzero().flatten()
    experts, order = torch.sort(flat[rows], stable=True)
    rows = rows[order]
    found, counts = torch.unique_consecutive(experts, return_counts=True)
    result, begin = {}, 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        mine = rows[begin : begin + count]
        result[expert] = mine // topk_idx.size(1), mine % topk_idx.size(1)
        begin += count
    return result


def run_local_experts(
    sources: Sequence[RoutedInput],
    weights: tuple[WeightPair, WeightPair],
    first_expert: int,
    options: Options,
    partials: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Apply one rank's experts to the rows that all ranks send it.

    ``weights`` are L1 and L2 of the experts ``first_expert`` .. + E_local in any layout. The partial of token t, slot j of
    rank r goes to ``partials[r][t, j]`` (BF16 [at least T_r, k, H]), nothing else is written. Returns the number of rows
    per local expert, int32 [E_local].
    """
    experts = logical_shape(*weights[0])[0]
    routes = [rows_by_expert(source.topk_idx, first_expert, experts) for source in sources]
    counts = torch.zeros(experts, dtype=torch.int32, device=weights[0][0].device)
    for expert in range(experts):
        users = [(rank, *route[expert]) for rank, route in enumerate(routes) if expert in route]
        if not users:
            continue
        x = torch.cat([dequantize_e4m3(sources[rank].x[t], sources[rank].x_sf[t]) for rank, t, _ in users])
        weight = torch.cat([sources[rank].topk_weights[t, j] for rank, t, j in users])
        l1, l2 = (dequantize_expert(pair, expert, gated) for pair, gated in zip(weights, (True, False), strict=True))
        result = expert_partial(x, l1, l2, weight, options)
        counts[expert] = result.size(0)
        for (rank, t, j), rows in zip(users, result.split([t.numel() for _, t, _ in users]), strict=True):
            partials[rank][t, j] = rows
    return counts


# --------------------------------------------------------------------------------------------------------- publication
def publish_rs(shared: torch.Tensor, workspaces: Sequence[torch.Tensor], rank: int) -> None:
    """Hidden-sharded publication of ``shared`` BF16 [S, H] by source ``rank``.

    ``workspaces[d]`` is the written generation on rank d, BF16 [>= S tokens, ranks, H / ranks]; it gets columns
    d * shard .. of every row at [token, rank]. Nothing else is written.
    """
    rows, shard = shared.size(0), shared.size(1) // len(workspaces)
    for dest, workspace in enumerate(workspaces):
        workspace[:rows, rank, :shard] = shared[:, dest * shard : (dest + 1) * shard]


def publish_sp_rs(shared: torch.Tensor, workspaces: Sequence[torch.Tensor], rank: int) -> None:
    """Token-owner publication of ``shared`` BF16 [S, H], S a multiple of the number of ranks, by source ``rank``.

    ``workspaces[d]`` is the written generation on rank d, BF16 [>= S / ranks local tokens, ranks, H]; it gets the rows of
    the tokens that rank d owns at [local token, rank]. Nothing else is written.
    """
    owned = shared.size(0) // len(workspaces)
    for dest, workspace in enumerate(workspaces):
        workspace[:owned, rank] = shared[dest * owned : (dest + 1) * owned]
