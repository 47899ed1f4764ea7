"""The shared expert beside the routed ones on one rank: dense and both publication modes, the norm, generations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mega_support import DENSE, ONE_RANK, RS, SITU, SP_RS, Family, Signature, pairs

from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.routing import ROUTINGS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

FAST_DENSE = Signature("dense", SITU, fast_math=True)
COUNTS = [
    (0, 0),
    (0, 5),
    (5, 0),
    (1, 1),
    (2, 17),
    (16, 16),
    (65, 64),
    (7, 65),
    (64, 72),
    (129, 128),
    (500, 31),
    (31, 500),
    (768, 768),
]
RANDOM_COUNTS = [(1, 3), (40, 100), (300, 64), (129, 400)]
PUBLISHED_COUNTS = [(3, 0), (0, 9), (9, 1), (40, 100), (300, 64), (20, 768)]
BOTH_MODES = pairs((50,), (5, 130))
SMALL = Family(
    ONE_RANK, DENSE, RS, SP_RS, FAST_DENSE,
    counts={
        DENSE: [*COUNTS, *RANDOM_COUNTS, *BOTH_MODES, (60, 10), (30, 30)],
        RS: PUBLISHED_COUNTS + BOTH_MODES,
        SP_RS: PUBLISHED_COUNTS + BOTH_MODES,
        FAST_DENSE: RANDOM_COUNTS,
    },
)  # fmt: skip
# An odd number of 128-column tiles on both sides, a slice narrower than a row tile.
ODD_COUNTS = [(4, 20), (200, 100)]
ODD = Family(WorldShape((384,), 4, 2, 384, 384, 384, 1152, 128), DENSE, counts=ODD_COUNTS)
FAMILIES = (SMALL, ODD)


@pytest.mark.parametrize(("tokens", "shared_tokens"), COUNTS)
def test_dense(tokens: int, shared_tokens: int) -> None:
    """Shared tokens are independent of the routed ones: none, fewer, equal, more. The norm stays within tolerance."""
    SMALL.check(SMALL.world(tokens, shared_tokens, seed=tokens + 1), DENSE, calls=2)


@pytest.mark.parametrize(("tokens", "shared_tokens"), RANDOM_COUNTS)
@pytest.mark.parametrize("signature", [DENSE, FAST_DENSE], ids=str)
def test_random_inputs(tokens: int, shared_tokens: int, signature: Signature) -> None:
    ranks = SMALL.world(tokens, shared_tokens, kind="random", seed=tokens)
    SMALL.check(ranks, signature, bitwise=False)
    SMALL.check(ranks, replace(signature, options=Options("situ", None, 1.25, 1.5)), bitwise=False)


@pytest.mark.parametrize("signature", [RS, SP_RS], ids=str)
@pytest.mark.parametrize(("tokens", "shared_tokens"), PUBLISHED_COUNTS)
def test_published(signature: Signature, tokens: int, shared_tokens: int) -> None:
    """Four calls over three generations: the workspace holds exactly the fragments, everything else keeps its NaN."""
    SMALL.check(SMALL.world(tokens, shared_tokens, seed=tokens), signature, calls=4)


@pytest.mark.parametrize("signature", [RS, SP_RS], ids=str)
@pytest.mark.parametrize("shared_tokens", [5, 130])
def test_published_is_dense(signature: Signature, shared_tokens: int) -> None:
    """Random inputs: bit for bit what the dense mode writes, y too."""
    SMALL.check(SMALL.world(50, shared_tokens, kind="random"), signature, bitwise=False)


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_routings(routing: str) -> None:
    SMALL.check(SMALL.world(60, 10, routing), DENSE)


@pytest.mark.parametrize(("tokens", "shared_tokens"), ODD_COUNTS)
def test_odd_widths(tokens: int, shared_tokens: int) -> None:
    ODD.check(ODD.world(tokens, shared_tokens), DENSE, calls=2)


def test_no_routed_factor_reaches_the_shared_output() -> None:
    """Other routes and weights: the shared rows keep their bits."""
    ranks = SMALL.world(30, 30, kind="random")
    (first,) = SMALL.run(ranks, DENSE)
    routed = ranks[0].routed
    other = replace(routed, topk_idx=routed.topk_idx.flip(0), topk_weights=routed.topk_weights * 3.0)
    (second,) = SMALL.run([replace(ranks[0], routed=other)], DENSE)
    assert first.shared_y is not None and second.shared_y is not None
    metrics.assert_bitwise(second.shared_y, first.shared_y)
    assert not torch.equal(first.y, second.y)
