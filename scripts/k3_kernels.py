"""Every kernel that Kimi K3 can need: its widths over 1, 8 and 16 ranks, all entries and options, without duplicates."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

RANKS = (1, 8, 16)
OUTPUTS = ("none", "dense", "hidden_sharded", "token_owner")
SHARED_SLICE = {1: 6144, 8: 768, 16: 384}


def problems(target: str) -> Iterator[dict[str, Any]]:
    """Every combination of what a call of the model can choose."""
    for ranks, output in itertools.product(RANKS, OUTPUTS):
        activations = [("situ", False)] + ([("swiglu", False), ("swiglu", True)] if output == "none" else [])
        for (activation, clamp), fast, invariant, statistics_wanted in itertools.product(
            activations, (False, True), (False, True), (False, True)
        ):
            yield {
                "num_ranks": ranks, "num_experts": 896, "num_topk": 16, "hidden": 3584, "intermediate_hidden": 3072,
                "num_max_tokens_per_rank": 8448, "num_max_shared_tokens": 8448 * (ranks if output == "token_owner" else 1),
                "shared_hidden": 0 if output == "none" else 7168,
                "shared_intermediate_hidden": SHARED_SLICE[ranks], "shared_output": output, "activation": activation,
                "has_clamp": clamp, "fast_math": fast, "batch_invariant": invariant, "has_statistics": statistics_wanted,
                "target": target,
            }  # fmt: skip


def planned(target: str) -> str:
    return "sm_100a" if target == "sm_100f" else target


def name_of(literal: str) -> str:
    return hashlib.sha256(literal.encode()).hexdigest()[:12]


def configs(target: str) -> dict[str, dict[str, Any]]:
    """Configs without duplicates, by a name that says nothing, in the order of the names."""
    from deep_gemm_k3.mega.plan import all_configs

    found: dict[str, dict[str, Any]] = {}
    for problem in problems(target):
        for config in all_configs(problem):
            found.setdefault(name_of(config["literal"]), config)
    return dict(sorted(found.items()))
