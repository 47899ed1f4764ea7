"""Scales of tokens at the ends of UE8M0, executed: exact, or infinite, never another finite number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emu_support import fresh_emulator

import deep_gemm_k3 as dg
from deep_gemm_k3.mega.weights import transform_weights_for_mega_moe
from deep_gemm_k3.testing import data, metrics
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.world import RankInput, mega_moe_reference
from deep_gemm_k3.utils.quantize import pack_ue8m0, unpack_ue8m0

SHAPE = data.WorldShape((5,), 2, 2, 128, 128)
LARGEST_EXACT = {"sm_90a": 127 + 111, "sm_100a": 254}


def moved(target: str, by: int) -> tuple[RankInput, int]:
    """The exact world with tokens times 2^by and the weights of L1 divided by it, and the largest code of a token."""
    (l1, l1_sf), l2 = data.expert_range_weights(SHAPE, 1, range(SHAPE.experts), "exact")
    routed = data.make_routed(SHAPE, 2, 0, kind="exact")
    codes = unpack_ue8m0(routed.x_sf).int() + by
    assert int(codes.min()) >= 0 and int(codes.max()) < 255
    weights = transform_weights_for_mega_moe((l1, (l1_sf.int() - by).to(torch.uint8)), l2, target=target)
    return RankInput(replace(routed, x_sf=pack_ue8m0(codes.to(torch.uint8))), *weights), int(codes.max())


emulated = fresh_emulator(autouse=True)


@pytest.mark.parametrize("target", LARGEST_EXACT)
def test_token_scales(target: str) -> None:
    buffer = dg.get_symm_buffer_for_mega_moe(
        None, 2, 384, 2, 128, 128, bf16_shared_intermediate_hidden=128, num_sms=2, device="cpu", target=target
    )
    seen = []
    for by in (0, 90, 107, 109, 112, 116, 119, 123) if target == "sm_90a" else (-110, 0, 109, 116, 123):
        given, largest = moved(target, by)
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            getattr(buffer, name)[:5].copy_(getattr(given.routed, name))
        y = torch.full((5, 128), float("nan"), dtype=torch.bfloat16)
        dg.fp8_fp4_mega_moe(y, given.l1, given.l2, buffer)
        (want,) = mega_moe_reference([given], Options("swiglu"))
        seen.append(largest <= LARGEST_EXACT[target])
        kept = y.isfinite().all(1)
        assert bool(kept.all()) or not seen[-1], f"2^{by}: wanted finite rows, given {y}"
        if bool(kept.any()):
            metrics.assert_close(y[kept], want.y[kept], f"2^{by}")
    assert seen.count(True) >= 3 and (target == "sm_100a" or seen.count(False) >= 3)
    buffer.destroy()
