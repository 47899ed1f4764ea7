"""Tiles of many tokens on sm_90a: the dispatch warps finish routed L1 tiles beside the math warps, and an expert's rows are
shared among blocks of several widths."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from deep_gemm_k3 import _extension
from deep_gemm_k3.emulator import service
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RunOptions, Session, check_world


@pytest.fixture
def emulated() -> Iterator[None]:
    service.clear()
    yield
    service.configure()


# Two experts, or two a rank. 70 rows of each fill one block of 72 tokens, 100 rows three of about 33; of the widest tile 300
# rows fill two blocks of 144 and 156, 170 rows two of 80 and 90.
@pytest.mark.parametrize(
    ("tokens", "tile", "mode", "adversary", "fast_math"),
    [
        pytest.param((70,), 72, "dense", "random", False, id="one block an expert, dense"),
        pytest.param((60, 45), 72, "rs", "latest", False, id="two ranks, published"),
        pytest.param((100,), 48, "routed", "earliest", True, id="three blocks an expert, fast math"),
        pytest.param((300,), 160, "dense", "random", False, id="the widest tile, two widths"),
        pytest.param((170,), 160, "routed", "latest", False, id="the widest tile, its narrowest width"),
        pytest.param((150, 130), 160, "dense", "earliest", False, id="two ranks, the widest tile"),
    ],
)
def test_wide_tiles_give_the_oracles_bits(
    emulated: None, tokens: tuple[int, ...], tile: int, mode: str, adversary: str, fast_math: bool
) -> None:
    service.configure(seed=5, adversary=adversary, race_detection=True)
    shape = WorldShape(tokens, 2 * len(tokens), 2, 256, 256, 24, 512, 128)
    session = Session(shape, device="cpu", num_sms=2, target="sm_90a")
    try:
        for buffer in session.buffers:
            _extension.ops().set_overrides(buffer.handle, json.dumps({"routed_tokens": tile}))
        kind = "random" if fast_math else "exact"
        world = make_world(shape, 7, "uniform", kind, "sm_90a", "cpu")
        how = RunOptions(fast_math=fast_math, calls=2, num_sms=2, timeout_s=600.0)
        check_world(world, Options("situ", None, 4.0, 25.0), mode, how, bitwise=not fast_math, session=session)
    finally:
        session.close()
    assert not service.report()["findings"]


def test_hundreds_of_experts_on_a_rank_leave_narrow_tiles_to_the_math_warps(emulated: None) -> None:
    """Their cursors take the memory through which the dispatch warps would get a tile; blocks have several widths still."""
    service.configure(seed=3, race_detection=True)
    shape = WorldShape((110,), 896, 2, 256, 128)
    session = Session(shape, device="cpu", num_sms=2, target="sm_90a")
    try:
        overrides = {"routed_tokens": 48, "num_ctas_per_sm": 1}
        _extension.ops().set_overrides(session.buffers[0].handle, json.dumps(overrides))
        for routing in ("hot_expert", "uniform"):
            world = make_world(shape, 7, routing, "exact", "sm_90a", "cpu")
            how = RunOptions(num_sms=2, timeout_s=600.0)
            check_world(world, Options("swiglu"), "routed", how, bitwise=True, session=session)
    finally:
        session.close()
    assert not service.report()["findings"]
