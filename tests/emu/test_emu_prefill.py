"""Tiles of many tokens on sm_90a: the dispatch warps finish routed L1 tiles beside the math warps, and an expert's rows are
shared among blocks of several widths."""

from __future__ import annotations

import pytest
from emu_support import fresh_emulator

from deep_gemm_k3.emulator import service
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RunOptions, Session, check_world

emulated = fresh_emulator()


# Two experts, or two a rank. 70 rows of each fill one block of 88 tokens, 110 rows two of 48 and 62, 100 rows three of 32, 32
# and 36; of the widest tile 300 rows fill two blocks of 144 and 156, 290 rows two of 130 and 160, 170 rows two of 88 and 82.
# With a linear beta of 1/32 warps have ups beyond the series of tanh, with one of 25 none has.
@pytest.mark.parametrize(
    ("tokens", "tile", "mode", "adversary", "linear_beta"),
    [
        pytest.param((70,), 88, "dense", "random", None, id="one block an expert, dense"),
        pytest.param((110,), 72, "routed", "random", None, id="two blocks an expert"),
        pytest.param((60, 45), 88, "rs", "latest", None, id="two ranks, published"),
        pytest.param((100,), 48, "routed", "earliest", 25.0, id="three blocks an expert, fast math"),
        pytest.param((100,), 48, "routed", "latest", 1 / 32, id="three blocks an expert, fast math, large ups"),
        pytest.param((300,), 160, "dense", "random", None, id="the widest tile, two widths"),
        pytest.param((170,), 160, "routed", "latest", None, id="the widest tile, its narrowest width"),
        pytest.param((290,), 160, "routed", "random", 25.0, id="the widest tile, fast math"),
        pytest.param((170,), 160, "routed", "earliest", 1 / 32, id="the widest tile, fast math, large ups"),
        pytest.param((150, 130), 160, "dense", "earliest", None, id="two ranks, the widest tile"),
    ],
)
def test_wide_tiles_give_the_oracles_bits(
    emulated: None, tokens: tuple[int, ...], tile: int, mode: str, adversary: str, linear_beta: float | None
) -> None:
    service.configure(seed=5, adversary=adversary, race_detection=True)
    shape = WorldShape(tokens, 2 * len(tokens), 2, 256, 256, 24, 512, 128)
    session = Session(shape, device="cpu", overrides={"routed_tokens": tile}, num_sms=2, target="sm_90a")
    try:
        fast_math = linear_beta is not None
        kind = "random" if fast_math else "exact"
        world = make_world(shape, 7, "uniform", kind, "sm_90a", "cpu")
        how = RunOptions(fast_math=fast_math, calls=2, num_sms=2, timeout_s=600.0)
        options = Options("situ", None, 4.0, linear_beta or 25.0)
        check_world(world, options, mode, how, bitwise=not fast_math, session=session)
    finally:
        session.close()


def test_hundreds_of_experts_on_a_rank_leave_narrow_tiles_to_the_math_warps(emulated: None) -> None:
    """Their cursors take the memory through which the dispatch warps would get a tile; blocks have several widths still."""
    service.configure(seed=3, race_detection=True)
    shape = WorldShape((110,), 896, 2, 256, 128)
    overrides = {"routed_tokens": 48, "num_ctas_per_sm": 1}
    session = Session(shape, device="cpu", overrides=overrides, num_sms=2, target="sm_90a")
    try:
        for routing in ("hot_expert", "uniform"):
            world = make_world(shape, 7, routing, "exact", "sm_90a", "cpu")
            how = RunOptions(num_sms=2, timeout_s=600.0)
            check_world(world, Options("swiglu"), "routed", how, bitwise=True, session=session)
    finally:
        session.close()
