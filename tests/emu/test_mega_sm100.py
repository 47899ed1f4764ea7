"""The Blackwell kernel on the emulator, through the public calls: bit for bit the oracle's on inputs with exact sums."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from emu_support import fresh_emulator

from deep_gemm_k3._extension import ops
from deep_gemm_k3.emulator import service
from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.replay import Play, Schedule, record
from deep_gemm_k3.testing.routing import ROUTINGS
from deep_gemm_k3.testing.runner import RankCall, RankResult, RunOptions, Session, check_world, run_world
from deep_gemm_k3.testing.world import RankInput

SITU = Options("situ", None, 4.0, 25.0)
SWIGLU = Options("swiglu")
CLAMPED = Options("swiglu", activation_clamp=2048.0)
PAIR, ALONE = 2, 1  # SMs of a rank: an even number is used in pairs
ON_CPU: dict[str, Any] = {"device": "cpu", "timeout_s": 300}

ONE = WorldShape((40,), 4, 2, 256, 256, 40, 384, 256)
blackwell = fresh_emulator("sm_100a", autouse=True)


def check(
    shape: WorldShape, options: Options, mode: str, routing: str = "uniform", *, sms: int = PAIR, **how: Any
) -> list[RankResult]:
    ranks = make_world(shape, 1, routing, "exact", target="sm_100a")
    return check_world(ranks, options, mode, RunOptions(num_sms=sms, timeout_s=300, **how), bitwise=True)


# -------------------------------------------------------------------------------------------------------- counts and tiles
@pytest.mark.parametrize("sms", [PAIR, ALONE])
@pytest.mark.parametrize("tokens", [0, 1, 17, 100])
def test_token_counts(tokens: int, sms: int) -> None:
    check(replace(ONE, tokens=(tokens,), shared_tokens=None), SWIGLU, "routed", sms=sms)


@pytest.mark.parametrize("shared_tokens", [0, 1, 72, 130])
def test_shared_tokens_are_independent(shared_tokens: int) -> None:
    check(replace(ONE, tokens=(3,), shared_tokens=shared_tokens), SITU, "dense")


TILES = [(16, 128, 2), (32, 16, 2), (64, 64, 2), (96, 32, 2), (128, 32, 2), (192, 32, 2), (32, 64, 1), (192, 128, 1)]


def test_no_tile_of_the_model_is_left_out() -> None:
    """What Kimi K3 can choose, whatever the ranks; tiles do not depend on the other options."""
    for ranks, slice_of_shared in ((1, 6144), (8, 768), (16, 384)):
        problem = {
            "num_ranks": ranks, "num_experts": 896, "num_topk": 16, "hidden": 3584, "intermediate_hidden": 3072,
            "num_max_tokens_per_rank": 8448, "num_max_shared_tokens": 8448 * ranks, "shared_hidden": 7168,
            "shared_intermediate_hidden": slice_of_shared, "shared_output": "token_owner", "activation": "situ",
            "target": "sm_100a",
        }  # fmt: skip
        chosen = [entry["config"] for entry in json.loads(ops().all_configs(json.dumps(problem)))]
        assert {config["routed_tile"]["num_tokens"] for config in chosen} <= {routed for routed, _, _ in TILES}
        assert {config["shared_tile"]["num_tokens"] for config in chosen} <= {shared for _, shared, _ in TILES}


@pytest.mark.parametrize(("routed", "shared", "ctas"), TILES)
def test_every_tile(routed: int, shared: int, ctas: int) -> None:
    """A hot expert fills more than one block of it; rows of the shared expert end inside a tile."""
    shape = replace(ONE, tokens=(routed + 20,), shared_tokens=shared + 5)
    overrides = {"routed_tokens": routed, "shared_tokens": shared, "num_cluster_ctas": ctas}
    session = Session(shape, **ON_CPU, overrides=overrides, num_sms=PAIR)
    try:
        ranks = make_world(shape, 1, "hot_expert", "exact", target="sm_100a")
        check_world(ranks, SITU, "dense", bitwise=True, session=session)
    finally:
        session.close()


@pytest.mark.parametrize("ctas", [2, 1])
def test_widths_that_are_no_whole_tiles(ctas: int) -> None:
    """384 rows of L2 are three halves of tiles, 640 of the shared expert five."""
    shape = WorldShape((9,), 4, 2, 384, 128, 20, 640, 384)
    session = Session(shape, **ON_CPU, overrides={"num_cluster_ctas": ctas}, num_sms=PAIR)
    try:
        ranks = make_world(shape, 1, "uniform", "exact", target="sm_100a")
        check_world(ranks, SITU, "dense", bitwise=True, session=session)
    finally:
        session.close()


@pytest.mark.parametrize("ctas", [2, 1])
def test_splits_meet(ctas: int) -> None:
    splits = {"routed_l1": 2, "routed_l2": 3, "shared_l1": 2, "shared_l2": 2}
    shape = WorldShape((9,), 2, 1, 512, 512, 20, 512, 256)
    session = Session(shape, **ON_CPU, overrides={"splits": splits, "num_cluster_ctas": ctas}, num_sms=4)
    try:
        ranks = make_world(shape, 1, "uniform", "exact", target="sm_100a")
        check_world(ranks, SITU, "dense", RunOptions(calls=2), bitwise=True, session=session)
    finally:
        session.close()


@pytest.mark.parametrize("adversary", ["random", "earliest", "latest"])
def test_pairs_claim_their_tasks(adversary: str) -> None:
    """Full and nearly empty blocks alternate: two pairs that took turns would share the work badly. Every task but each
    pair's first is claimed once, and each pair asks once in vain. The second call clears what the first one counted."""
    shape = WorldShape((40,), 2, 1, 512, 1024)
    splits = {"routed_l1": 1, "routed_l2": 1, "shared_l1": 1, "shared_l2": 1}
    overrides = {"routed_tokens": 32, "num_cluster_ctas": 2, "splits": splits}
    session = Session(shape, **ON_CPU, overrides=overrides, num_sms=4)
    service.configure(seed=3, adversary=adversary, race_detection=True)
    try:
        ranks = make_world(shape, 1, "hot_expert", "exact", target="sm_100a")
        check_world(ranks, SWIGLU, "routed", RunOptions(calls=2), bitwise=True, session=session)
        memory = session.buffers[0]._memory.own.view(torch.uint8).flatten()
    finally:
        session.close()
    claims = memory[512:768].view(torch.int32)[[0, 32]].tolist()  # control::kTaskClaim, a line per parity
    num_blocks, num_l1_tiles, num_l2_tiles = 2, 2 * 1024 // 512, 512 // 512
    assert claims == [num_blocks * (num_l1_tiles + num_l2_tiles), 0]


# ----------------------------------------------------------------------------------------------------- routings and modes
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_routings(routing: str) -> None:
    """Hot expert, empty slots, duplicates; statistics too."""
    check(replace(ONE, tokens=(33,)), SITU, "dense", routing, calls=2)


def test_clamp() -> None:
    check(replace(ONE, shared_tokens=None), CLAMPED, "routed")


@pytest.mark.parametrize("sms", [PAIR, ALONE])
@pytest.mark.parametrize("mode", ["rs", "sp_rs"])
def test_publication(mode: str, sms: int) -> None:
    """Two ranks, generations rotating; the second rank has no token of its own."""
    check(WorldShape((5, 0), 4, 2, 256, 256, 20, 512, 128), SITU, mode, sms=sms, calls=3)


def test_shards_that_tiles_straddle() -> None:
    """640 columns over four ranks: shards of 160."""
    check(WorldShape((5, 9, 0, 1), 8, 2, 256, 256, 20, 640, 128), SITU, "rs", "duplicates", calls=2)


@pytest.mark.parametrize(
    ("mode", "routing"), [("routed", "uniform"), ("routed", "hot_rank"), ("rs", "hot_rank"), ("sp_rs", "hot_expert")]
)
def test_eight_ranks(mode: str, routing: str) -> None:
    shared = None if mode == "routed" else 24
    options = SWIGLU if mode == "routed" else SITU
    check(WorldShape((5, 9, 0, 1, 2, 3, 4, 8), 16, 2, 256, 256, shared, 512, 128), options, mode, routing, calls=2)


def test_random_inputs() -> None:
    """Fast math, router weights; published bit for bit what the dense mode writes."""
    ranks = make_world(WorldShape((12, 30), 8, 4, 256, 256, 24, 512, 128), 3, "k3_router", target="sm_100a")
    check_world(ranks, SITU, "rs", RunOptions(fast_math=True, num_sms=PAIR, timeout_s=300))


# -------------------------------------------------------------------------------------------------- schedules and failures
SMALL = WorldShape((20, 0), 4, 2, 256, 256, 36, 256, 128)


def under_schedule(seed: int, adversary: str, sms: int) -> None:
    service.configure(seed=seed, adversary=adversary, race_detection=True)
    check(SMALL, SITU, "sp_rs", "holes", sms=sms, calls=2)


@pytest.mark.parametrize("adversary", ["random", "earliest", "latest"])
def test_schedules(adversary: str) -> None:
    under_schedule(11, adversary, PAIR)


@pytest.mark.emu_full
@pytest.mark.parametrize("sms", [PAIR, ALONE])
@pytest.mark.parametrize("adversary", ["random", "earliest", "latest"])
@pytest.mark.parametrize("seed", range(20))
def test_many_schedules(seed: int, adversary: str, sms: int) -> None:
    under_schedule(seed, adversary, sms)


@pytest.mark.parametrize("sms", [PAIR, ALONE])
def test_what_a_kernel_finds_stops_all_ranks(sms: int) -> None:
    """Ranks that differ in the number of shared tokens: seen by the kernels alone."""
    shape = WorldShape((5, 4), 4, 2, 256, 256, 20, 256, 128)
    given = make_world(shape, 1, "uniform", "exact", target="sm_100a")
    session = Session(shape, device="cpu", num_sms=sms, timeout_s=60.0)

    def body(group: LocalRank, buffer: SymmBuffer) -> str:
        call = RankCall(buffer, given[group.rank], SITU, "sp_rs", RunOptions())
        if group.rank == 1 and call.input.shared is not None:
            shared = replace(call.input.shared, x=call.input.shared.x[:18])
            call.input = replace(call.input, shared=shared)
        call.fill()
        with pytest.raises(RuntimeError) as raised:
            call.call()
        return str(raised.value)

    try:
        said = session.run(body)
    finally:
        session.close()
    assert all("num_shared_tokens differs between ranks" in text for text in said), said


@pytest.mark.parametrize("ctas", [2, 1])
@pytest.mark.parametrize("adversary", ["random", "latest"])
def test_lanes_apart_and_calls_that_abort(adversary: str, ctas: int) -> None:
    """Recorded calls with the lanes of a warp apart; then with a rank that names no such expert, which only one CTA of a pair
    finds, and with abort cells that are set when the kernels start. Both end all ranks alike, at once: a wait that only its
    time limit ends is a deadlock here."""
    shape = WorldShape((), 4, 2, 256, 256, 20, 256, 128)
    overrides = {"routed_tokens": 16, "shared_tokens": 16, "num_cluster_ctas": ctas}
    play = Play(
        "",
        shape,
        SITU,
        "sp_rs",
        ((5, 4),),
        calls=2,
        num_sms=4,
        overrides=overrides,
        aborts=("no such expert", "refused by a host"),
        target="sm_100a",
    )
    for scene in record(play):
        outcome = scene.replay(schedule=Schedule(5, adversary, lanes_apart=True))
        assert not outcome, (scene.name, outcome)


def test_a_missing_rank_is_named_and_nothing_hangs() -> None:
    shape = WorldShape((3, 3), 4, 2, 256, 256)
    given = make_world(shape, 1, "uniform", "exact", target="sm_100a")
    session = Session(shape, device="cpu", num_sms=PAIR, timeout_s=2.0)

    def body(group: LocalRank, buffer: SymmBuffer) -> str:
        call = RankCall(buffer, given[group.rank], SWIGLU, "routed", RunOptions())
        call.fill()
        call.call()  # both ranks: the first call is collective
        if group.rank == 1:
            return ""
        with pytest.raises(RuntimeError) as raised:
            call.call()
        return str(raised.value)

    try:
        said = session.run(body)[0]
    finally:
        session.close()
    assert "rank 0: time-out: dispatch at header of rank 1" in said


def test_zero_tokens_everywhere_leave_y_untouched_but_shared_rows_computed() -> None:
    (result,) = check(replace(ONE, tokens=(0,), shared_tokens=17), SITU, "dense")
    assert result.y.shape == (0, 256)
    assert result.shared_y is not None
    assert torch.isfinite(result.shared_y.float()).all()


def test_inputs_of_another_target_are_refused() -> None:
    ranks: list[RankInput] = make_world(replace(ONE, shared_tokens=None), 1, "uniform", "exact", target="sm_90a")
    with pytest.raises((RuntimeError, ValueError), match=r"sm_90a"):
        run_world(ranks, SWIGLU, "routed", RunOptions(num_sms=PAIR, timeout_s=30))


def test_who_does_what() -> None:
    """The leaders' issuers multiply, producers copy, math warps and dispatch write to the peer; two messages in a row."""
    service.configure(seed=1, race_detection=True)
    check(WorldShape((5, 6), 4, 2, 256, 256, 20, 256, 128), SITU, "dense")
    report = service.report()
    of, total = report["roles"], report["counters"]
    assert of["issue"]["tensor_products"] == total["tensor_products"] > 0
    assert of["producer"]["tma_loads"] == total["tma_loads"] > 0
    assert of["dispatch"]["peer_written"] > 0 < of["math"]["peer_written"]
    assert of["producer"]["peer_written"] == of["issue"]["peer_written"] == total["peer_read"] == 0
    assert total["message_chain"] == 2  # a row to the expert, its partial back
