"""Every entry at small widths with one kernel each: what scripts/sanitize.sh runs under compute-sanitizer."""

from __future__ import annotations

import pytest
from mega_support import SITU, SWIGLU, Family, Signature

from deep_gemm_k3.testing.data import WorldShape

# No time limit of its own: scripts/sanitize.sh gives one on the command line, which a mark would override.
pytestmark = pytest.mark.gpu

# The batch-invariant mode has one kernel for all token counts.
KINDS = [Signature("routed", SWIGLU, batch_invariant=True)]
KINDS += [Signature(mode, SITU, batch_invariant=True) for mode in ("dense", "rs", "sp_rs")]
# Few CTAs: instrumented kernels need more of an SM than the launch knows of, and all CTAs must be resident.
NUM_SMS = 16
WORLDS = {
    1: Family(WorldShape((384,), 4, 2, 384, 128, 384, 256, 128), *KINDS, num_sms=NUM_SMS),
    2: Family(WorldShape((384,) * 2, 4, 2, 384, 128, 384, 256, 128), *KINDS, num_sms=NUM_SMS),
}
FAMILIES = tuple(WORLDS.values())


@pytest.mark.parametrize("signature", KINDS, ids=str)
@pytest.mark.parametrize("tokens", [0, 5, 70])
def test_one_rank(signature: Signature, tokens: int) -> None:
    WORLDS[1].check(WORLDS[1].world(tokens, tokens + 2, "holes"), signature, calls=2)


@pytest.mark.parametrize("signature", KINDS, ids=str)
@pytest.mark.parametrize("tokens", [(3, 3), (0, 40)], ids=str)
def test_two_ranks(signature: Signature, tokens: tuple[int, int]) -> None:
    """More than a few tokens go by plain rows with flags, few by words that validate themselves."""
    WORLDS[2].check(WORLDS[2].world(tokens, 6, "duplicates"), signature, calls=2)
