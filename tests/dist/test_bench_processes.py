"""Benchmark jobs whose ranks are processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_gemm_k3 import __main__ as cli
from deep_gemm_k3.bench import check, report
from deep_gemm_k3.bench.world import World
from deep_gemm_k3.mega.group import as_group
from deep_gemm_k3.testing.processes import run_ranks

pytestmark = pytest.mark.dist

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
