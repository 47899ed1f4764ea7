"""Warm-ups and plans of what no call can be: refused by name, and peers that wait in the warm-up are told."""

from __future__ import annotations

import time
from typing import Any

import pytest
from small_ranks import Rank, alone, outcomes, small

import deep_gemm_k3 as dg
from deep_gemm_k3._extension import ops
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.testing.data import make_world

IMPOSSIBLE = [
    ({"shared_output": "rs"}, ValueError, "shared_output: wanted 'none', 'dense', .*, given 'rs'"),
    ({"activation": "relu"}, RuntimeError, "activation: wanted 'swiglu' or 'situ', given 'relu'"),
    ({"activation": "situ", "has_clamp": True}, RuntimeError, "has_clamp: wanted false with activation 'situ'"),
    ({"shared_output": "dense"}, RuntimeError, "shared_hidden: wanted a multiple of 128 in .*, given 0"),
    (
        {"shared_output": "dense", "shared_hidden": 128, "activation": "swiglu"},
        RuntimeError,
        "activation: wanted 'situ' with a BF16 shared expert, given 'swiglu'",
    ),
    ({"shared_hidden": "wide"}, ValueError, "shared_hidden: wanted an integer in 0.*, given 'wide'"),
]


@pytest.mark.parametrize(("options", "kind", "words"), IMPOSSIBLE, ids=str)
def test_a_warm_up_that_no_call_can_need(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    rank = alone()
    with pytest.raises(kind, match=words):
        dg.warmup(rank.buffer, **options)
    dg.warmup(rank.buffer)
    rank.routed()
    assert not rank.y.isnan().any()


def test_only_buffers_are_warmed_up() -> None:
    with pytest.raises(TypeError, match="sym_buffer: wanted a SymmBuffer, given 'buffer'"):
        dg.warmup("buffer")  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "kind", "words"), IMPOSSIBLE[:2] + IMPOSSIBLE[-1:], ids=str)
def test_peers_in_the_warm_up_are_told(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    shape = small(2)
    given = make_world(shape, 6, target="sm_90a")

    def body(group: LocalRank) -> None:
        rank = Rank(group, given[group.rank], shape, timeout_s=30.0)
        group.barrier("made")
        if group.rank == 1:
            with pytest.raises(kind, match=words):
                dg.warmup(rank.buffer, **options)
            group.barrier("ended")
            return
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=f"rank 1: .*{words}"):
            dg.warmup(rank.buffer)
        assert time.monotonic() - begin < 20.0
        group.barrier("ended")

    assert outcomes(body) == [None, None]


PROBLEM: dict[str, Any] = {
    "num_ranks": 3, "num_experts": 6, "num_topk": 2, "num_max_tokens_per_rank": 384, "hidden": 256,
    "intermediate_hidden": 128, "shared_hidden": 256, "shared_intermediate_hidden": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared_output": "hidden_sharded"}, "shared_hidden: wanted a multiple of 8 columns for each of the 3 ranks"),
        ({"shared_output": "dense", "activation": "swiglu"}, "activation: wanted 'situ' with a BF16 shared expert"),
        ({"activation": "situ", "has_clamp": True}, "has_clamp: wanted false with activation 'situ', given true"),
        ({"situ_betas": 4.0}, "problem: wanted names among num_ranks, .*, given situ_betas"),
        ({"overrides": {"stages": 3}}, "overrides: wanted names among routed_tokens, .*, given stages"),
        ({"overrides": {"splits": {"l1": 3}}}, "splits: wanted names among routed_l1, .*, given l1"),
        ({"overrides": {"narrow_widths": {"most": 8}}}, "narrow_widths: wanted names among middle, least, given most"),
    ],
)
def test_a_plan_of_what_no_call_can_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{words}"):
        dg.Plan.make(**{**PROBLEM, **changes})


def test_overrides_of_a_buffer_are_read_by_name() -> None:
    rank = alone()
    with pytest.raises(RuntimeError, match=r"overrides: wanted names among .*, given routed_rows"):
        ops().set_overrides(rank.buffer.handle, '{"routed_rows": 8}')
