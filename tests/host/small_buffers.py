"""A small symmetric buffer in CPU memory, for tests."""

from __future__ import annotations

from typing import Any

from deep_gemm_k3.mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from deep_gemm_k3.mega.group import Group, SingleRank

PATIENCE_S = 30.0
SMALL: dict[str, Any] = {
    "num_experts": 12,
    "num_max_tokens_per_rank": 96,
    "num_topk": 2,
    "hidden": 256,
    "intermediate_hidden": 128,
    "device": "cpu",
}


def make(group: Group | None = None, **changes: Any) -> SymmBuffer:
    return get_symm_buffer_for_mega_moe(group or SingleRank(), **{**SMALL, **changes})
