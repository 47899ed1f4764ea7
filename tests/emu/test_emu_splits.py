"""Tiles that several CTAs of the Hopper kernel compute along K: bit for bit the oracle's on inputs with exact sums."""

from __future__ import annotations

from typing import Any

import pytest
from emu_support import fresh_emulator

from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RunOptions, Session, check_world

SITU = Options("situ", None, 4.0, 25.0)
hopper = fresh_emulator("sm_90a", autouse=True)


def check(shape: WorldShape, mode: str, num_sms: int, overrides: dict[str, Any], routing: str = "uniform") -> None:
    session = Session(shape, device="cpu", overrides=overrides, timeout_s=300, num_sms=num_sms)
    try:
        ranks = make_world(shape, 1, routing, "exact", target="sm_90a")
        check_world(ranks, SITU, mode, RunOptions(calls=2), bitwise=True, session=session)
    finally:
        session.close()


@pytest.mark.parametrize(
    ("splits", "shared_tile", "shared_tokens", "num_sms"),
    [
        pytest.param(4, 64, 41, 12, id="a split sums two of eight groups, of which one has no tokens"),
        pytest.param(8, 64, 64, 32, id="a group each"),
        pytest.param(4, 16, 20, 16, id="more splits than groups, two token blocks"),
        pytest.param(3, 64, 50, 6, id="groups are shared out evenly or not at all"),
        pytest.param(4, 64, 41, 3, id="too few CTAs to split at once: not split"),
    ],
)
def test_shared_splits_share_the_sum(splits: int, shared_tile: int, shared_tokens: int, num_sms: int) -> None:
    shape = WorldShape((9,), 2, 1, 256, 256, shared_tokens, 512, 128)
    check(
        shape,
        "dense",
        num_sms,
        {"splits": {"shared_l1": splits, "shared_l2": 2, "routed_l1": 2, "routed_l2": 2}, "shared_tokens": shared_tile},
    )


@pytest.mark.parametrize(("routed_tokens", "splits"), [(8, 8), (16, 8), (32, 3)])
def test_the_last_split_sums_several_at_once(routed_tokens: int, splits: int) -> None:
    shape = WorldShape((9, 4), 2, 1, 1024, 1024, 20, 512, 128)
    check(shape, "sp_rs", 4, {"splits": {"routed_l1": splits, "routed_l2": splits}, "routed_tokens": routed_tokens})


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "routed_tokens", "routing"),
    [
        pytest.param((8,), 1, 1, 8, "uniform", id="one block"),
        pytest.param((13,), 1, 1, 8, "uniform", id="two blocks of an expert"),
        pytest.param((9, 0, 7), 3, 1, 16, "uniform", id="rows from other ranks"),
        pytest.param((7, 5), 4, 2, 8, "holes", id="empty slots"),
        pytest.param((3, 4), 4, 3, 16, "duplicates", id="a token twice in a block"),
    ],
)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_rows_are_gathered_into_stages(
    tokens: tuple[int, ...], experts: int, topk: int, routed_tokens: int, routing: str, num_stages: int
) -> None:
    """Four stages of a split: as many as the ring, or twice as many."""
    shape = WorldShape(tokens, experts, topk, 1024, 256, 20, 512, 128)
    splits = {"routed_l1": 2, "routed_l2": 2, "shared_l1": 2, "shared_l2": 1}
    overrides = {"splits": splits, "routed_tokens": routed_tokens, "num_stages": num_stages}
    check(shape, "sp_rs" if len(tokens) == 2 else "dense", 48, overrides, routing)
