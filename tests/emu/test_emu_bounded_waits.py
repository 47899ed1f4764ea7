"""Waits inside a CTA end by the call's limit when what they wait for never comes, whoever is at fault: the kernel returns,
and what it reports is a time-out of such a wait."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.replay import Play, Scene, Schedule, record

TIMEOUT_NS = 60 * 10**9  # of the play's buffers
TIME_OUT = 1  # AbortCell::code: 1 + Fault
DISPATCH, PRODUCER, MATH, LIST, STAGE = 1, 2, 3, 5, 11  # sync/fault.cuh

ARRIVES = (r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, ", "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 ")
FAULTS = {
    "no fault": (r"^\b$", ""),
    "stages never fill": ARRIVES,
    "nothing is released": (r"mbarrier\.arrive\.shared::cta\.b64 _, [^;]*;", ""),
    "no list": (r"st\.release\.cta\.shared[^;]*;", ""),
    "the other CTA says nothing": (r"st\.release\.cluster\.shared[^;]*;", ""),
    "the tensor core never answers": (r"tcgen05\.commit[.:\w]* [^;]*;", ""),
}
CASES = [(target, fault) for target in ("sm_90a", "sm_90a, exchanging") for fault in list(FAULTS)[:4]]
CASES += [("sm_100a", fault) for fault in FAULTS]


# One CTA on an SM with many tokens to a tile: there the dispatch warps finish the tiles.
EXCHANGING = {"routed_tokens": 88, "num_ctas_per_sm": 1}


@cache
def scene(target: str, exchanges: bool = False) -> Scene:
    shape = WorldShape((), 4, 2, 384, 256, shared_tokens=4, shared_hidden=256, shared_intermediate=128)
    overrides = EXCHANGING if exchanges else {}
    options = Options("situ", None, 4.0, 25.0)
    play = Play("stuck", shape, options, "dense", ((5,),), 1, num_sms=2, overrides=overrides, target=target)
    return record(play)[0]


@pytest.mark.parametrize(("target", "fault"), CASES)
def test_a_cta_that_stands_still_reports_it_and_ends(target: str, fault: str) -> None:
    played = scene(target.split(",")[0], "exchanging" in target)
    ((entry, text),) = played.ptx.items()
    changed, sites = re.subn(*FAULTS[fault], text)
    assert bool(sites) == (fault != "no fault")
    outcome = played.replay({entry: changed}, Schedule(1, on_deadlock="time"), races=False, limit=20_000_000)
    assert outcome.fault == ""
    (cell,) = (m.bytes.view(torch.int32).tolist() for m in played.memory if m.name.startswith("error record"))
    code, role, what = cell[0], cell[2] >> 16, cell[2] & 0xFFFF
    if fault == "no fault":
        assert (code, outcome.differing, outcome.findings) == (0, [], [])
        return
    assert code == TIME_OUT
    assert role in (DISPATCH, PRODUCER, MATH) and what in (STAGE, LIST)
    if (target, fault) == ("sm_90a", "stages never fill"):
        # Time runs on in steps that double, so the limit is overshot, though not by much.
        assert role == MATH
        assert 2 * TIMEOUT_NS <= outcome.counters["virtual_ns"] < 8 * TIMEOUT_NS
