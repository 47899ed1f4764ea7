"""The oracle for a whole call: all ranks, dispatch and combine between them, publication into real destinations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from ..mega.weights import WeightPair, logical_shape
from . import oracle
from .oracle import Options, RoutedInput


@dataclass(frozen=True)
class SharedInput:
    """A rank's part of the shared expert and the norm.

    ``x`` BF16 [S, Hs], equal on all ranks when published; ``l1`` BF16 [2 * I, Hs] and ``l2`` BF16 [Hs, I] this rank's
    slice; ``rms_weight`` BF16 [H] and ``rms_epsilon`` for the routed output.
    """

    x: torch.Tensor
    l1: torch.Tensor
    l2: torch.Tensor
    rms_weight: torch.Tensor
    rms_epsilon: float


@dataclass(frozen=True)
class RankInput:
    """What one rank passes to a call. ``l1`` and ``l2`` are routed weight pairs in any layout."""

    routed: RoutedInput
    l1: WeightPair
    l2: WeightPair
    shared: SharedInput | None = None
    workspace: torch.Tensor | None = None
    """Publication only: BF16 [generations, tokens, ranks, columns] of this rank, written in place."""

    def to(self, device: str | torch.device) -> RankInput:
        """The same input with every tensor on ``device``."""

        def moved(part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                return part.to(device)
            if isinstance(part, tuple):
                return tuple(moved(item) for item in part)
            if is_dataclass(part) and not isinstance(part, type):
                return type(part)(*(moved(getattr(part, field.name)) for field in fields(part)))
            return part

        return RankInput(*(moved(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class RankOutput:
    """``y`` BF16 [T, H] (normed where the call has a shared part), ``counts`` int32 [E_local] received rows,
    ``shared_y`` BF16 [S, Hs] (what was published, in the publication modes)."""

    y: torch.Tensor
    counts: torch.Tensor
    shared_y: torch.Tensor | None


def mega_moe_reference(
    ranks: Sequence[RankInput], options: Options, publication: str | None = None, generation: int = 0
) -> list[RankOutput]:
    """All ranks' results of one call.

    ``publication`` is None (dense shared output), ``"rs"`` or ``"sp_rs"``; then every rank's ``workspace`` gets the
    fragments of all source ranks at ``generation``. Ranks without ``shared`` run the routed part only.
    """
    if publication not in (None, "rs", "sp_rs"):
        raise ValueError(f"publication: wanted None, rs or sp_rs, given {publication!r}")
    sources = [rank.routed for rank in ranks]
    partials = [
        torch.full((*s.topk_idx.shape, s.x.size(1)), float("nan"), dtype=torch.bfloat16, device=s.x.device)
        for s in sources
    ]
    counts = []
    for index, rank in enumerate(ranks):
        experts = logical_shape(*rank.l1)[0]
        counts.append(oracle.run_local_experts(sources, (rank.l1, rank.l2), index * experts, options, partials))
    outputs = []
    for index, rank in enumerate(ranks):
        y = oracle.combine(partials[index], rank.routed.topk_idx)
        shared_y = None
        if rank.shared is not None:
            y = oracle.rms_norm(y, rank.shared.rms_weight, rank.shared.rms_epsilon)
            shared_y = oracle.shared_expert(rank.shared.x, rank.shared.l1, rank.shared.l2, options)
            _publish(shared_y, ranks, index, publication, generation)
        outputs.append(RankOutput(y, counts[index], shared_y))
    return outputs


def _publish(
    shared_y: torch.Tensor, ranks: Sequence[RankInput], index: int, publication: str | None, generation: int
) -> None:
    if publication is None:
        return
    views = []
    for dest, rank in enumerate(ranks):
        if rank.workspace is None:
            raise ValueError(f"workspace: wanted one on every rank to publish, given None on rank {dest}")
        views.append(rank.workspace[generation])
    (oracle.publish_rs if publication == "rs" else oracle.publish_sp_rs)(shared_y, views, index)
