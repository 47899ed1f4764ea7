"""Whole worlds through the public calls on CPU tensors: every mode, several numbers of ranks, uneven and empty ranks."""

from __future__ import annotations

import pytest
import torch

from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RunOptions, check_world, run_world

SITU = Options("situ", None, 4.0, 25.0)
TARGET = "sm_90a"
TOKENS = {1: (9,), 2: (0, 7), 4: (5, 0, 3, 8)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mode", ["routed", "dense", "rs", "sp_rs"])
def test_modes(ranks: int, mode: str) -> None:
    shape = WorldShape(TOKENS[ranks], 8, 3, 256, 128, 8, 512, 128)
    world = make_world(shape, 3, "holes", "exact", TARGET)
    check_world(world, SITU, mode, RunOptions(calls=2), bitwise=True)


@pytest.mark.parametrize("options", [Options("swiglu"), Options("swiglu", 0.75)])
def test_swiglu_on_random_inputs(options: Options) -> None:
    shape = WorldShape((4, 6), 4, 2, 256, 256)
    check_world(make_world(shape, 5, "duplicates", target=TARGET), options)


def test_shared_tokens_without_routed_ones_and_the_reverse() -> None:
    for tokens, shared in (((0, 0), 4), ((3, 2), 0)):
        shape = WorldShape(tokens, 4, 2, 256, 128, shared, 256, 128)
        check_world(make_world(shape, 7, target=TARGET), SITU, "dense")


def test_runs_agree_bit_for_bit() -> None:
    shape = WorldShape((4, 6), 4, 2, 256, 256, 4, 256, 128)
    world = make_world(shape, 9, target=TARGET)
    first, second = (run_world(world, SITU, "dense", RunOptions(calls=calls)) for calls in (1, 3))
    for a, b in zip(first, second, strict=True):
        metrics.assert_bitwise(b.y, a.y)
        assert torch.equal(b.stats, 3 * a.stats)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed bit in one partial fails the comparison."""
    from deep_gemm_k3.testing import executor, oracle

    def wrong(partials: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        y = oracle.combine(partials, topk_idx)
        y.view(torch.int16)[0, 0] ^= 1
        return y

    class Wrong:
        def __getattr__(self, name: str) -> object:
            return wrong if name == "combine" else getattr(oracle, name)

    monkeypatch.setattr(executor, "oracle", Wrong())
    shape = WorldShape((4,), 4, 2, 256, 128)
    with pytest.raises(AssertionError, match=r"routed, rank 0: y: 1 of 1024 elements differ"):
        check_world(make_world(shape, 3, kind="exact", target=TARGET), SITU, bitwise=True)
    with pytest.raises(ValueError, match="mode: wanted one of routed, dense, rs, sp_rs, given 'both'"):
        run_world([], SITU, "both")
