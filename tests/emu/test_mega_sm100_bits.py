"""Where the arithmetic is specified the Blackwell kernel gives the bits of the Hopper kernel, and a pair those of a CTA alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emu_support import fresh_emulator

from deep_gemm_k3 import envs
from deep_gemm_k3.mega.weights import transform_weights_for_mega_moe
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.draws import Draws
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RankResult, RunOptions, run_world
from deep_gemm_k3.testing.world import RankInput, SharedInput

SITU = Options("situ", None, 4.0, 25.0)
CLAMPED = Options("swiglu", activation_clamp=1.5)
SHAPE = WorldShape((21, 6), 8, 2, 256, 256, 20, 384, 128)
blackwell = fresh_emulator("sm_100a", autouse=True)


def one_of_each_row(codes: torch.Tensor, g: Draws) -> torch.Tensor:
    """Packed E2M1 ``codes`` [N, K / 2] with one element of every row left, of magnitude 2 at least, half of them negative."""
    n, half = codes.shape
    kept = torch.zeros_like(codes)
    code = g.integers(4, 8, (n,), torch.int8) | g.integers(0, 2, (n,), torch.int8) * 8
    shift = g.integers(0, 2, (n,), torch.int8) * 4
    kept[torch.arange(n), g.integers(0, half, (n,))] = code << shift
    return kept


def one_term_per_sum(shape: WorldShape, seed: int, target: str) -> list[RankInput]:
    """Random tokens, scales and routing; weights of which one element of each row is not zero, so that every sum along K
    has one term: equal in any order, and of any value."""
    ranks = []
    for number, rank in enumerate(make_world(shape, seed, "k3_router")):
        g = Draws(seed, 9, number, device="cpu")
        pairs = [
            (torch.stack([one_of_each_row(expert, g) for expert in codes]), scales)
            for codes, scales in (rank.l1, rank.l2)
        ]
        l1, l2 = transform_weights_for_mega_moe(*pairs, target=target)
        assert isinstance(l1, tuple)
        assert isinstance(l2, tuple)
        shared = rank.shared
        if shared is not None:
            kept = [torch.zeros_like(weights) for weights in (shared.l1, shared.l2)]
            for weights in kept:
                columns = g.integers(0, weights.size(1), (weights.size(0),))
                weights[torch.arange(weights.size(0)), columns] = g.normal(weights.size(0)).mul_(3).to(torch.bfloat16)
            shared = SharedInput(shared.x, *kept, shared.rms_weight, shared.rms_epsilon)
        ranks.append(replace(rank, l1=l1, l2=l2, shared=shared))
    return ranks


def run_on(
    monkeypatch: pytest.MonkeyPatch, target: str, mode: str, options: Options, fast: bool, kind: str
) -> list[RankResult]:
    monkeypatch.setenv(envs.CPU_TARGET.name, target)
    shape = replace(SHAPE, shared_tokens=None if mode == "routed" else SHAPE.shared_tokens)
    ranks = (
        one_term_per_sum(shape, 2, target) if kind == "one term" else make_world(shape, 2, kind="exact", target=target)
    )
    return run_world(ranks, options, mode, RunOptions(fast_math=fast, num_sms=2, timeout_s=300))


def assert_same(mine: RankResult, other: RankResult) -> None:
    assert torch.equal(mine.stats, other.stats)
    for name in ("y", "shared_y", "workspace"):
        one, two = getattr(mine, name), getattr(other, name)
        assert (one is None) == (two is None)
        if one is not None:
            metrics.assert_bitwise(one, two, name)


@pytest.mark.parametrize(
    ("kind", "mode", "options", "fast"),
    [
        ("exact", "dense", SITU, False),
        ("exact", "rs", SITU, False),
        ("one term", "routed", CLAMPED, False),
        ("one term", "dense", SITU, True),
        ("one term", "sp_rs", SITU, False),
    ],
)
def test_both_architectures_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, mode: str, options: Options, fast: bool
) -> None:
    """Activation, quantised activations, combine, norm, publication: of sums that have one value in any order."""
    hopper = run_on(monkeypatch, "sm_90a", mode, options, fast, kind)
    mine = run_on(monkeypatch, "sm_100a", mode, options, fast, kind)
    for one, other in zip(mine, hopper, strict=True):
        assert_same(one, other)
        assert one.y.float().abs().max() > 0
    if kind == "one term":  # values of every kind, not the few of the exact inputs
        assert torch.cat([one.y.flatten() for one in mine]).unique().numel() > 500


def test_a_pair_gives_the_bits_of_a_cta_alone() -> None:
    """Random inputs: the order of the sums along K is the same."""
    ranks = make_world(WorldShape((40,), 4, 2, 256, 256, 40, 384, 256), 5, target="sm_100a")
    pair, alone = (
        run_world(ranks, SITU, "dense", RunOptions(fast_math=True, num_sms=sms, timeout_s=300))[0] for sms in (2, 1)
    )
    assert_same(pair, alone)
