"""The problems in which the kernels' mutants run: small, and together through every path of the kernels."""

from __future__ import annotations

from .data import WorldShape
from .oracle import Options
from .replay import Play

_SITU = Options("situ", None, 4.0, 25.0)
_SHARED = {"shared_tokens": 4, "shared_hidden": 256, "shared_intermediate": 128}

PLAYS = {
    play.name: play
    for play in (
        # one CTA on an SM; without routed rows nothing but its own counters orders the shared expert's two halves; the
        # third act sends plain rows and counts routes by shares
        Play(
            "sp_rs",
            WorldShape((), 32, 16, 128, 128, **_SHARED),
            _SITU,
            "sp_rs",
            ((3, 4), (0, 0), (257, 2)),
            calls=2,
            overrides={"routed_tokens": 8, "shared_tokens": 16, "num_ctas_per_sm": 1},
            aborts=("no such expert", "refused by a host"),
        ),
        # longer K, cut in two
        Play(
            "splits",
            WorldShape((), 4, 2, 768, 256, **{**_SHARED, "shared_intermediate": 256}),
            _SITU,
            "dense",
            ((9, 0), (0, 0)),
            calls=2,
            overrides={
                "routed_tokens": 16,
                "num_stages": 3,
                "shared_tokens": 16,
                "num_ctas_per_sm": 1,
                "splits": {"routed_l1": 2, "routed_l2": 2, "shared_l1": 2, "shared_l2": 2},
            },
        ),
        # two CTAs on an SM; blocks of up to eight rows, which single warps multiply, and fuller ones
        Play(
            "two CTAs",
            WorldShape((), 4, 2, 512, 384, **{**_SHARED, "shared_tokens": 20, "shared_intermediate": 256}),
            _SITU,
            "rs",
            ((40, 5), (0, 0), (257, 2)),
            calls=2,
            overrides={"routed_tokens": 16, "shared_tokens": 64, "num_ctas_per_sm": 2},
        ),
        # no shared expert and few rows: the first tiles' tokens are gathered straight into stages, more than the ring has
        Play(
            "stages",
            WorldShape((), 4, 2, 1024, 128),
            Options("swiglu"),
            "routed",
            ((1, 1), (0, 1)),
            calls=2,
            num_sms=4,
            overrides={
                "routed_tokens": 8,
                "num_stages": 3,
                "num_ctas_per_sm": 1,
                "splits": {"routed_l1": 2, "routed_l2": 1},
            },
        ),
        # as many CTAs as the shared expert's first half has splits of tiles: they share the sums
        Play(
            "shares",
            WorldShape((), 4, 2, 128, 128, 20, 512, 128),
            _SITU,
            "dense",
            ((0,), (1,)),
            calls=2,
            num_sms=4,
            overrides={"routed_tokens": 8, "shared_tokens": 32, "num_ctas_per_sm": 1, "splits": {"shared_l1": 2}},
        ),
        # Blackwell: two CTAs that multiply together, and one alone with splits and without; tasks have more stages than the
        # ring
        Play(
            "pairs",
            WorldShape((), 8, 2, 384, 256, **{**_SHARED, "shared_intermediate": 256}),
            _SITU,
            "sp_rs",
            ((3, 4), (0, 0), (257, 2)),
            calls=2,
            overrides={"routed_tokens": 16, "shared_tokens": 16, "num_cluster_ctas": 2, "num_stages": 2},
            aborts=("refused by a host",),
            target="sm_100a",
        ),
        Play(
            "alone",
            WorldShape((), 4, 2, 768, 256, **{**_SHARED, "shared_intermediate": 256}),
            _SITU,
            "dense",
            ((8, 1), (0, 0)),
            calls=2,
            overrides={
                "routed_tokens": 16,
                "shared_tokens": 16,
                "num_cluster_ctas": 1,
                "num_stages": 2,
                "splits": {"routed_l1": 2, "routed_l2": 2, "shared_l1": 2, "shared_l2": 2},
            },
            aborts=("no such expert",),
            target="sm_100a",
        ),
        Play(
            "whole",
            WorldShape((), 4, 2, 384, 256, **_SHARED),
            _SITU,
            "rs",
            ((8, 1), (0, 0)),
            calls=2,
            overrides={"routed_tokens": 16, "shared_tokens": 16, "num_cluster_ctas": 1},
            target="sm_100a",
        ),
    )
}
