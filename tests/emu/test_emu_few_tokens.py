"""Blocks of up to eight tokens where two CTAs share an SM: single warps multiply them (mma.sync), others in the same call
are multiplied by warpgroups (wgmma). Bit for bit the oracle's on inputs with exact sums; the same bits either way on others."""

from __future__ import annotations

from typing import Any

import pytest
from emu_support import fresh_emulator

from deep_gemm_k3.emulator import service
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RankResult, RunOptions, Session, check_world

SITU = Options("situ", None, 4.0, 25.0)
NO_SPLITS = {"routed_l1": 1, "routed_l2": 1, "shared_l1": 1, "shared_l2": 1}
emulated = fresh_emulator("sm_90a", autouse=True)


def results(
    shape: WorldShape,
    mode: str,
    overrides: dict[str, Any],
    kind: str,
    routing: str = "uniform",
    adversary: str = "random",
) -> list[RankResult]:
    service.configure(seed=11, adversary=adversary, race_detection=True)
    session = Session(shape, device="cpu", overrides=overrides, timeout_s=300, num_sms=3)
    try:
        ranks = make_world(shape, 5, routing, kind, target="sm_90a")
        return check_world(ranks, SITU, mode, RunOptions(calls=2), bitwise=kind == "exact", session=session)
    finally:
        session.close()


# Two experts of four a token. Uniform: 7 tokens leave each expert 3 or 4 rows, 40 leave 20, in tiles of 16 blocks of 16 and 4.
# Of 23 tokens the hot expert has all, blocks of 16 and 7. L2's last row tile is half a tile, which leaves the second warpgroup
# nothing.
@pytest.mark.parametrize(
    ("tokens", "tile", "mode", "routing", "adversary"),
    [
        pytest.param((7,), 8, "dense", "uniform", "random", id="one block an expert"),
        pytest.param((40,), 8, "routed", "uniform", "latest", id="three blocks an expert"),
        pytest.param((7,), 16, "routed", "uniform", "earliest", id="half of a tile"),
        pytest.param((23,), 16, "dense", "hot_expert", "random", id="whole tiles and halves"),
        pytest.param((40,), 16, "routed", "uniform", "random", id="a whole one and a half of every expert"),
        pytest.param((9, 14), 16, "sp_rs", "holes", "latest", id="two ranks, empty slots, published"),
    ],
)
def test_few_tokens_give_the_oracles_bits(
    tokens: tuple[int, ...], tile: int, mode: str, routing: str, adversary: str
) -> None:
    shape = WorldShape(tokens, 4, 2, 384, 512, 24, 512, 128)
    results(shape, mode, {"routed_tokens": tile}, "exact", routing, adversary)


@pytest.mark.parametrize("tile", [8, 16])
def test_warps_and_warpgroups_give_the_same_bits(tile: int) -> None:
    """One CTA on an SM multiplies by wgmma alone, as tiles of 32 tokens do."""
    shape = WorldShape((13,), 4, 2, 384, 512, 24, 512, 128)
    wanted, *others = (
        results(shape, "dense", {"routed_tokens": tokens, "num_ctas_per_sm": ctas, "splits": NO_SPLITS}, "random")
        for tokens, ctas in ((tile, 2), (tile, 1), (32, 2))
    )
    for other in others:
        metrics.assert_bitwise(other[0].y, wanted[0].y, "y")


@pytest.mark.parametrize("phase", ["routed_l1", "routed_l2"])
def test_splits_of_sixteen_tokens_have_the_bits_of_warpgroups(phase: str) -> None:
    """Where routed L1 is split, warps multiply blocks of more than eight tokens as well: the hot expert has all 13."""
    shape = WorldShape((13,), 4, 2, 512, 512, 24, 512, 128)
    splits = {**NO_SPLITS, "routed_l1": 2, phase: 2}
    found = [
        results(
            shape, "dense", {"routed_tokens": 16, "num_ctas_per_sm": ctas, "splits": splits}, "random", "hot_expert"
        )
        for ctas in (2, 1)
    ]
    metrics.assert_bitwise(found[0][0].y, found[1][0].y, "y")
