"""The SiTU regression on a GPU: the script that every machine can run, with its kernels compiled beside those of the other
modules."""

from __future__ import annotations

import pytest
import test_mega_moe_situ as situ
from mega_support import SITU, SWIGLU, Signature, WithoutStatistics

from deep_gemm_k3.testing.data import WorldShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


ROUTED = WorldShape((situ.CAPACITY,), situ.NUM_EXPERTS, situ.NUM_TOPK, situ.HIDDEN, situ.INTERMEDIATE)
WIDTHS = (situ.HIDDEN, situ.INTERMEDIATE, 384, situ.SHARED_HIDDEN, situ.SHARED_INTERMEDIATE)
SHARED = WorldShape((situ.NUM_TOKENS,), situ.NUM_EXPERTS, situ.NUM_TOPK, *WIDTHS)
FAMILIES = (
    WithoutStatistics(
        ROUTED,
        *(Signature("routed", kind, fast) for kind in (SWIGLU, SITU) for fast in (True, False)),
        counts=[(situ.NUM_TOKENS, 0)],
    ),
    WithoutStatistics(
        SHARED,
        *(Signature(mode, SITU, True) for mode in ("routed", "dense", "rs", "sp_rs")),
        counts=[(situ.NUM_TOKENS, situ.NUM_SHARED_TOKENS)],
    ),
)


def test_the_situ_regression() -> None:
    situ.main()
