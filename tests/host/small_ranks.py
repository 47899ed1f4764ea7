"""Ranks with inputs and outputs at small widths, for tests of the public calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import deep_gemm_k3 as dg
from deep_gemm_k3.mega.local_world import LocalRank, local_world
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.world import RankInput

SITU = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
ENTRIES = (
    "fp8_fp4_mega_moe",
    "fp8_fp4_mega_moe_bf16_shared",
    "fp8_fp4_mega_moe_bf16_shared_rs",
    "fp8_fp4_mega_moe_bf16_shared_sp_rs",
)
BF16 = torch.bfloat16


class Rank:
    """One rank's buffer, inputs and outputs at small widths."""

    def __init__(
        self, group: Any, given: RankInput, shape: WorldShape, device: str | torch.device = "cpu", **options: Any
    ) -> None:
        self.given, self.shape = given.to(device), shape
        self.buffer = dg.get_symm_buffer_for_mega_moe(
            group, shape.experts, 384, shape.topk, shape.hidden, shape.intermediate,
            bf16_shared_intermediate_hidden=shape.shared_intermediate, device=device, **options,
        )  # fmt: skip
        routed = given.routed
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            getattr(self.buffer, name)[: routed.x.size(0)].copy_(getattr(routed, name))
        self.y = torch.full((routed.x.size(0), shape.hidden), float("nan"), dtype=BF16, device=device)
        rows = shape.shared_tokens or 0
        self.shared_y = torch.full((rows, shape.shared_hidden), float("nan"), dtype=BF16, device=device)

    def routed(self, **changes: Any) -> None:
        arguments = {"y": self.y, "l1_weights": self.given.l1, "l2_weights": self.given.l2, "sym_buffer": self.buffer}
        dg.fp8_fp4_mega_moe(**{**arguments, **changes})

    def dense(self, **changes: Any) -> None:
        shared = self.given.shared
        assert shared is not None
        arguments = {
            "y": self.y, "shared_y": self.shared_y, "l1_weights": self.given.l1, "l2_weights": self.given.l2,
            "shared_x": shared.x, "shared_l1_weights": shared.l1, "shared_l2_weights": shared.l2,
            "rms_weight": shared.rms_weight, "rms_epsilon": 1e-5, "sym_buffer": self.buffer, **SITU,
        }  # fmt: skip
        dg.fp8_fp4_mega_moe_bf16_shared(**{**arguments, **changes})


def small(ranks: int = 1, **changes: Any) -> WorldShape:
    shape: dict[str, Any] = {
        "tokens": (3,) * ranks,
        "experts": 2 * ranks,
        "topk": 2,
        "hidden": 128,
        "intermediate": 128,
    }
    return WorldShape(**{**shape, "shared_tokens": 4, "shared_hidden": 128, "shared_intermediate": 128, **changes})


def alone(**options: Any) -> Rank:
    shape = small()
    return Rank(None, make_world(shape, 1, target="sm_90a")[0], shape, **options)


def outcomes(body: Callable[[LocalRank], Any], ranks: int = 2) -> list[Any]:
    """Every rank's result, or the exception it raised."""

    def guarded(group: LocalRank) -> Any:
        try:
            return body(group)
        except Exception as error:
            return error

    with local_world(ranks) as world:
        return world.run(guarded)
