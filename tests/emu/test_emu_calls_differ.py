"""Ranks that call different things, each of them ready on all ranks, so that no host compares: the headers tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emu_support import fresh_emulator

from deep_gemm_k3 import envs
from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RankCall, RunOptions, Session
from deep_gemm_k3.testing.world import mega_moe_reference

SHAPE = WorldShape((5, 4), 4, 2, 256, 256, 6, 256, 128)
SITU, SWIGLU, CLAMPED = Options("situ", None, 4.0, 25.0), Options("swiglu"), Options("swiglu", activation_clamp=8.0)
EXACT, FAST = RunOptions(), RunOptions(fast_math=True)
emulated = fresh_emulator()

Call = tuple[str, Options, RunOptions]
WIDE = "shared hidden 256"
PAIRS: dict[str, tuple[Call, Call, str]] = {
    "rs and sp_rs": (
        ("rs", SITU, EXACT), ("sp_rs", SITU, EXACT),
        f"wanted rs, situ, rms norm, {WIDE}, given on rank 1 sp_rs, situ, rms norm, {WIDE}",
    ),
    "rs and dense": (
        ("rs", SITU, FAST), ("dense", SITU, FAST),
        f"wanted rs, situ, fast_math, rms norm, {WIDE}, given on rank 1 dense, situ, fast_math, rms norm, {WIDE}",
    ),
    "routed and dense": (
        ("routed", SITU, EXACT), ("dense", SITU, EXACT),
        f"wanted routed, situ, given on rank 1 dense, situ, rms norm, {WIDE}",
    ),
    "activations": (("routed", SWIGLU, EXACT), ("routed", SITU, EXACT), "wanted routed, swiglu, given on rank 1 routed, situ"),
    "clamp": (
        ("routed", SWIGLU, EXACT), ("routed", CLAMPED, EXACT),
        "wanted routed, swiglu, given on rank 1 routed, swiglu, clamp",
    ),
    "fast math": (
        ("routed", SITU, FAST), ("routed", SITU, EXACT), "wanted routed, situ, fast_math, given on rank 1 routed, situ",
    ),
}  # fmt: skip


def crossed(calls: tuple[Call, Call], target: str) -> list[str]:
    """What every rank's error says, once both calls went well on all ranks and then each rank makes another one."""
    given = make_world(SHAPE, 1, "uniform", "exact", target=target)
    session = Session(SHAPE, device="cpu", num_sms=2, timeout_s=60.0)

    def body(group: LocalRank, buffer: SymmBuffer) -> str:
        made = [RankCall(buffer, given[group.rank], options, mode, how) for mode, options, how in calls]
        for call in made:
            call.fill()
            call.call()
        with pytest.raises(RuntimeError) as raised:
            made[group.rank].call()
        with pytest.raises(RuntimeError, match="wanted one without an abort"):
            made[group.rank].call()
        return str(raised.value)

    try:
        return session.run(body)
    finally:
        session.close()


@pytest.mark.parametrize("name", PAIRS)
def test_ranks_that_call_different_things_are_told_what(
    name: str, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.CPU_TARGET.name, "sm_90a")
    *calls, words = PAIRS[name]
    first, second = words.removeprefix("wanted ").split(", given on rank 1 ")
    texts = [f"differ between ranks: wanted {first}, given on rank 1 {second}"]
    texts += [f"differ between ranks: wanted {second}, given on rank 0 {first}"]
    for said in crossed((calls[0], calls[1]), "sm_90a"):
        assert any(said.endswith(text) for text in texts), said


def test_ranks_of_sm100_that_call_different_things(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CPU_TARGET.name, "sm_100a")
    for said in crossed((("rs", SITU, EXACT), ("sp_rs", SITU, EXACT)), "sm_100a"):
        assert "entry or options differ between ranks: wanted" in said


@pytest.mark.parametrize("name", PAIRS)
def test_the_oracle_says_so_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CPU_EXECUTOR.name, "oracle")
    monkeypatch.setenv(envs.CPU_TARGET.name, "sm_90a")
    for said in crossed(PAIRS[name][:2], "sm_90a"):
        assert "entry or options differ between ranks: rank 1 has others than rank 0" in said


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("rows", [(6, 0), (3, 5)])
def test_dense_calls_take_as_many_shared_rows_as_each_rank_has(
    target: str, rows: tuple[int, int], emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense output stays at home, so what other ranks bring does not matter."""
    monkeypatch.setenv(envs.CPU_TARGET.name, target)
    given = []
    for rank, count in zip(make_world(SHAPE, 1, "uniform", "exact", target=target), rows, strict=True):
        assert rank.shared is not None
        given.append(replace(rank, shared=replace(rank.shared, x=rank.shared.x[:count])))
    session = Session(SHAPE, device="cpu", num_sms=2, timeout_s=60.0)

    def body(group: LocalRank, buffer: SymmBuffer) -> tuple[torch.Tensor, torch.Tensor]:
        call = RankCall(buffer, given[group.rank], SITU, "dense", EXACT)
        call.fill()
        call.call()
        call.settle()
        assert call.shared_y is not None
        return call.y, call.shared_y

    try:
        results = session.run(body)
    finally:
        session.close()
    for (y, shared_y), wanted, count in zip(results, mega_moe_reference(given, SITU), rows, strict=True):
        assert wanted.shared_y is not None and shared_y.size(0) == count
        assert torch.equal(shared_y, wanted.shared_y)
        torch.testing.assert_close(y.float(), wanted.y.float(), rtol=1e-2, atol=1e-2)
