"""Benchmark jobs whose ranks are processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from deep_gemm_k3 import __main__ as cli
from deep_gemm_k3.bench import check, report
from deep_gemm_k3.bench.cli import _conclude
from deep_gemm_k3.bench.world import World
from deep_gemm_k3.mega.group import as_group
from deep_gemm_k3.testing.processes import run_ranks

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
TINY = "--hidden 256 --intermediate 256 --shared-hidden 256 --shared-intermediate 128 --experts 2 --topk 2"
SHORT = "--device cpu --calls 1 --replays 1 --eager 0 --sample 4"


def test_sweep_over_two_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "sweep.json"
    options = f"{TINY} {SHORT} --tokens 3 --modes dense,sp_rs --seeds 1 --gpus 2 --json {saved}".split()
    assert cli.main(["bench", "sweep", *options]) == 0
    run = report.load(saved)
    assert [(r["mode"], r["shape"]["ranks"], r["processes"]) for r in run["rows"]] == [("dense", 2, 2), ("sp_rs", 2, 2)]
    assert all(r["checked"] and r["shape"]["shared_tokens"] == 4 for r in run["rows"])
    assert run["reduce_scatter"][0]["us"] > 0
    assert capfd.readouterr().out.count("\nsp_rs") == 1


def test_a_failure_in_processes_is_told_last_and_fails_the_command(tmp_path: Path) -> None:
    """Into a pipe, where lines are held back until they are asked for."""
    saved = tmp_path / "sweep.json"
    options = f"{TINY} {SHORT} --tokens 3 --modes dense --seeds 1 --gpus 2 --json {saved}".split()
    line = [sys.executable, "-m", "deep_gemm_k3", "bench", "sweep", *options, "--overrides", '{"nonsense": 1}']
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[-1] == "1 point has no time: dense M=3", done.stdout + done.stderr
    assert any(said.startswith("dense M=3: no time: ") for said in lines)
    assert [failure["mode"] for failure in report.load(saved)["failures"]] == ["dense"]


def test_a_failure_of_any_process_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"mode": "dense", "shape": {"tokens": 3}}
    _conclude([[], []])
    with pytest.raises(typer.Exit) as end:
        _conclude([[], [failed, failed]])
    assert end.value.exit_code == 1 and capsys.readouterr().out == "2 points have no time: dense M=3\n"


def _one_fails(rank: int, size: int) -> str:
    def action() -> list[int]:
        if rank == 1:
            raise check.CheckFailed("rank 1: y")
        return [rank]

    world = World(size, as_group(None))
    with pytest.raises(check.CheckFailed, match="rank 1: y"):
        world.agreed(action)
    return str(world.agreed(lambda: [rank]))


def test_what_fails_in_one_process_fails_in_all() -> None:
    outcomes = run_ranks(_one_fails, 2)
    assert [(o.error, o.value) for o in outcomes] == [("", "[0, 1]")] * 2
