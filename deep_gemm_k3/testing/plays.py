"""The problems in which the kernels' mutants run: small, and together through every path of the kernels."""

from __future__ import annotations

from .data import WorldShape
from .oracle import Options
from .replay import Play

_SITU = Options("situ", None, 4.0, 25.0)


def _shape(experts: int, topk: int, **shared: int) -> WorldShape:
    return WorldShape(tokens=(), experts=experts, topk=topk, hidden=128, intermediate=128, **shared)


_SHARED = {"shared_tokens": 4, "shared_hidden": 256, "shared_intermediate": 128}

PLAYS = {
    play.name: play
    for play in (
        # the second act sends plain rows and counts routes by shares
        Play(
            "sp_rs",
            _shape(32, 16, **_SHARED),
            _SITU,
            "sp_rs",
            ((3, 4), (257, 2)),
            calls=2,
            overrides={"routed_tokens": 8, "shared_tokens": 16, "num_ctas_per_sm": 1},
        ),
        Play(
            "splits",
            WorldShape((), 4, 2, 256, 256, **_SHARED),
            _SITU,
            "dense",
            ((9, 0),),
            calls=2,
            overrides={
                "routed_tokens": 16,
                "shared_tokens": 16,
                "num_ctas_per_sm": 1,
                "splits": {"routed_l1": 2, "routed_l2": 2, "shared_l1": 2, "shared_l2": 2},
            },
        ),
        Play(
            "two CTAs",
            _shape(4, 2, **_SHARED),
            _SITU,
            "rs",
            ((12, 5),),
            calls=2,
            overrides={"routed_tokens": 32, "shared_tokens": 64, "num_ctas_per_sm": 2},
        ),
    )
}
