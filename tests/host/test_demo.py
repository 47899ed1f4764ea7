"""The demo at a small shape: it passes as it is, and every check fails when what it checks is wrong."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from deep_gemm_k3.__main__ import main
from deep_gemm_k3.demo import checks
from deep_gemm_k3.demo import cli as demo
from deep_gemm_k3.demo.cli import print_verdict
from deep_gemm_k3.demo.data import Layer, Problem, make_layer
from deep_gemm_k3.demo.run import Progress, RankResult, run
from deep_gemm_k3.emulator import service

SMALL = Problem(
    hidden=256, intermediate=256, shared_hidden=512, shared_slice=128, experts_per_rank=2, tokens=(3, 0, 6, 4)
)


@pytest.fixture(scope="module")
def ran() -> tuple[Layer, list[RankResult]]:
    layer = make_layer(SMALL)
    return layer, run(layer, "cpu", Progress())


def failed(layer: Layer, results: list[RankResult]) -> list[str]:
    return [row.check for row in checks.check(layer, results, lambda _: None) if not row.passed]


def test_it_passes(ran: tuple[Layer, list[RankResult]], capsys: pytest.CaptureFixture[str]) -> None:
    rows = checks.check(*ran, lambda _: None)
    print_verdict(rows)
    text = capsys.readouterr().out
    assert all(row.passed for row in rows), text
    assert text.count(" ok\n") == len(rows) == 12


@pytest.mark.parametrize(
    ("executed", "found", "code"), [(7, 0, 0), (7, 2, 1), (0, 0, 0)], ids=["clean", "findings", "no emulator"]
)
def test_what_the_emulator_finds_fails_the_command(
    executed: int, found: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = checks.Row("check", 1, "0", "0", True)
    monkeypatch.setattr(demo, "make_layer", lambda *_: None)
    monkeypatch.setattr(demo, "run", lambda *_: [])
    monkeypatch.setattr(demo, "check", lambda *_: [passed])
    report = {
        "counters": {"instructions": executed},
        "findings": [{"kind": "race", "count": 3, "text": "at k"}] * found,
    }
    monkeypatch.setattr(service, "report", lambda: report)
    assert main(["demo", "--device", "cpu"]) == code
    text = capsys.readouterr().out
    assert text.count("finding: race (3 times): at k") == found
    assert text.count("findings of the emulator") == (1 if executed else 0)


def test_a_wrong_published_value_is_found(ran: tuple[Layer, list[RankResult]]) -> None:
    for mode in ("rs", "sp_rs"):
        results = copy.deepcopy(ran[1])
        call = results[1].calls[mode, 1]
        call.shared[call.generation, 0, 2, 5] ^= 1
        assert failed(ran[0], results) == [f"{mode}: published values = dense"]


def test_a_write_elsewhere_is_found(ran: tuple[Layer, list[RankResult]]) -> None:
    for mode in ("rs", "sp_rs"):
        results = copy.deepcopy(ran[1])
        results[0].calls[mode, 1].shared[2, 0, 0, 0] = 0
        assert failed(ran[0], results) == [f"{mode}: all else untouched"]


def test_modes_that_differ_are_found(ran: tuple[Layer, list[RankResult]]) -> None:
    results = copy.deepcopy(ran[1])
    results[2].calls["rs", 0].y[4, 7] ^= 1
    assert failed(ran[0], results) == ["rs: routed output = dense mode's"]


def test_wrong_routed_numbers_are_found(ran: tuple[Layer, list[RankResult]]) -> None:
    results = copy.deepcopy(ran[1])
    for mode in ("dense", "rs", "sp_rs"):
        results[0].calls[mode, 0].y[0] = 0
    assert failed(ran[0], results) == ["routed output, float64 from bytes", "routed output, worst token"]


def test_a_token_without_experts_must_be_zero(ran: tuple[Layer, list[RankResult]]) -> None:
    results = copy.deepcopy(ran[1])
    for mode in ("dense", "rs", "sp_rs"):
        results[0].calls[mode, 0].y[1, 0] = 0x3A80
    assert "tokens without an expert are zero" in failed(ran[0], results)


def test_a_wrong_shared_slice_is_found(ran: tuple[Layer, list[RankResult]]) -> None:
    results = copy.deepcopy(ran[1])
    for result in results:
        for mode in ("rs", "sp_rs"):
            call = result.calls[mode, 1]
            call.shared[call.generation, :, 3] = np.roll(call.shared[call.generation, :, 3], 1, axis=0)
    assert {f"{mode}: fragments summed, unsharded float64" for mode in ("rs", "sp_rs")} <= set(failed(ran[0], results))


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_made(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "make_layer", lambda *_: pytest.fail("a layer was made"))
    assert main(["demo", "--device", device]) == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"--device: wanted one that torch can use here (no CUDA device was found), given '{device}'" in told
