"""Seeded inputs of the demo: a layer as a checkpoint stores it, and uneven tokens for every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deep_gemm_k3.demo import reference
from deep_gemm_k3.utils import per_token_cast_to_fp4, per_token_cast_to_fp8, transform_sf_into_required_layout
from deep_gemm_k3.utils.quantize import float_to_ue8m0

Bits: TypeAlias = NDArray[np.uint16]


@dataclass(frozen=True)
class Problem:
    """The demo's shape. `parts` groups of `ranks` slices make up the whole shared expert; one call computes one group."""

    hidden: int = 3584
    intermediate: int = 3072
    shared_hidden: int = 7168
    shared_slice: int = 768
    parts: int = 2
    experts_per_rank: int = 2
    topk: int = 4
    tokens: tuple[int, ...] = (5, 0, 19, 12)
    shared_tokens: int = 24
    seed: int = 0
    beta: float = 4.0
    linear_beta: float = 25.0
    epsilon: float = 1e-5

    @classmethod
    def for_device(cls, device: str, seed: int = 0) -> Problem:
        """Kimi K3's widths on a GPU. On CPU tensors, whose kernels are emulated, widths and counts that take seconds; the
        counts of all ranks lead to one kernel per mode, so that little is compiled."""
        if device.startswith("cuda"):
            return cls(seed=seed)
        return cls(
            hidden=512, intermediate=384, shared_hidden=1024, shared_slice=128, experts_per_rank=4, tokens=(4, 0, 3, 2),
            shared_tokens=16, seed=seed,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank

    @property
    def shared_width(self) -> int:
        return self.shared_slice * self.ranks * self.parts


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return np.asarray(tensor.contiguous().view(torch.uint8).numpy())


def bits_of(tensor: torch.Tensor) -> Bits:
    """Bit patterns of a BF16 tensor, copied."""
    return tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16).copy()


@dataclass
class Tokens:
    """What one rank puts into its symmetric buffer."""

    x: torch.Tensor
    x_sf: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass
class Experts:
    """Routed experts of one rank: packed E2M1 and UE8M0 scales as in a checkpoint."""

    l1: torch.Tensor
    l1_codes: torch.Tensor
    l2: torch.Tensor
    l2_codes: torch.Tensor

    def pairs(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """(weight, scales) of both layers, the scales in the layout that the transform takes."""
        pairs = []
        for weight, codes in ((self.l1, self.l1_codes), (self.l2, self.l2_codes)):
            groups, n, half = weight.shape
            pairs.append((weight, transform_sf_into_required_layout(codes, n, 2 * half, (1, 32), groups)))
        return pairs[0], pairs[1]


@dataclass
class Layer:
    """All inputs of all ranks."""

    problem: Problem
    experts: list[Experts]
    tokens: list[Tokens]
    gamma: torch.Tensor
    shared_x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def shared_slice(self, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slice of the shared expert that ``rank`` holds in ``part``: [gate; up] rows and down columns."""
        width = self.problem.shared_slice
        at = (part * self.problem.ranks + rank) * width
        piece = slice(at, at + width)
        return torch.cat((self.gate[piece], self.up[piece])), self.down[:, piece].contiguous()


def _quantised(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A random MXFP4 matrix and its UE8M0 codes; row scales differ by up to 2^6."""
    values = torch.empty(rows, columns).normal_(0.0, 1.2 * columns**-0.5, generator=generator)
    values *= torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float()) / 2
    packed, scales = per_token_cast_to_fp4(values, True, 32)
    return packed, float_to_ue8m0(scales)


def make_experts(problem: Problem, rank: int) -> Experts:
    generator = torch.Generator().manual_seed(problem.seed * 1000 + rank)
    l1 = [_quantised(2 * problem.intermediate, problem.hidden, generator) for _ in range(problem.experts_per_rank)]
    l2 = [_quantised(problem.hidden, problem.intermediate, generator) for _ in range(problem.experts_per_rank)]
    return Experts(*(torch.stack([pair[i] for pair in pairs]) for pairs in (l1, l2) for i in (0, 1)))


def make_tokens(problem: Problem, rank: int) -> Tokens:
    """Distinct experts per token, weights that sum to one; some slots are empty and one id appears twice."""
    generator = torch.Generator().manual_seed(problem.seed * 1000 + 500 + rank)
    count = problem.tokens[rank]
    x = torch.empty(count, problem.hidden).normal_(generator=generator)
    values, scales = per_token_cast_to_fp8(x, True, 32, True)
    scores = torch.rand(count, problem.experts, generator=generator)
    weights, choice = scores.topk(problem.topk, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    if count > 2:
        choice[0, -1] = -1
        choice[1, :] = -1
        choice[2, 1] = choice[2, 0]
    return Tokens(values, scales, choice, weights)


def make_layer(problem: Problem, progress: Callable[[str], None] = lambda _: None) -> Layer:
    """The whole layer; every rank has its own seed."""
    generator = torch.Generator().manual_seed(problem.seed * 1000 + 900)

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0.0, deviation, generator=generator).bfloat16()

    experts = []
    for rank in range(problem.ranks):
        experts.append(make_experts(problem, rank))
        progress(f"quantised the {problem.experts_per_rank} routed experts of rank {rank}")
    width, hidden = problem.shared_width, problem.shared_hidden
    gamma = (1.0 + 0.1 * torch.empty(problem.hidden).normal_(generator=generator)).bfloat16()
    return Layer(
        problem=problem,
        experts=experts,
        tokens=[make_tokens(problem, rank) for rank in range(problem.ranks)],
        gamma=gamma,
        shared_x=normal(problem.shared_tokens, hidden, 1.0),
        gate=normal(width, hidden, 1.2 * hidden**-0.5),
        up=normal(width, hidden, 1.2 * hidden**-0.5),
        down=normal(hidden, width, width**-0.5),
    )


def reference_routed(layer: Layer) -> list[NDArray[np.float64]]:
    """Normed routed outputs of every rank's tokens, computed as one batch by ``reference``."""
    problem = layer.problem
    experts = [
        reference.Expert(*(_bytes_of(part[i]) for part in (e.l1, e.l1_codes, e.l2, e.l2_codes)))
        for e in layer.experts
        for i in range(problem.experts_per_rank)
    ]
    x = np.concatenate([reference.decode_fp8(_bytes_of(t.x), _bytes_of(t.x_sf)) for t in layer.tokens])
    choice = np.concatenate([t.topk_idx.numpy() for t in layer.tokens])
    weights = np.concatenate([t.topk_weights.numpy().astype(np.float64) for t in layer.tokens])
    situ = reference.Situ(problem.beta, problem.linear_beta)
    sums = reference.routed(x, choice, weights, experts, situ)
    normed = reference.rms_norm(sums, reference.decode_bf16(bits_of(layer.gamma)), problem.epsilon)
    return np.split(normed, np.cumsum(problem.tokens)[:-1])


def reference_shared(layer: Layer) -> NDArray[np.float64]:
    """The whole shared expert, unsharded and unrounded."""
    situ = reference.Situ(layer.problem.beta, layer.problem.linear_beta)
    x = reference.decode_bf16(bits_of(layer.shared_x))
    return reference.shared(x, bits_of(layer.gate), bits_of(layer.up), bits_of(layer.down), situ)
