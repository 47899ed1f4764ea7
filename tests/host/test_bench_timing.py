"""In which order batches are timed, and what a GPU does before each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deep_gemm_k3 import __main__ as cli
from deep_gemm_k3.bench import baselines, jobs, measure, report, timing
from deep_gemm_k3.bench.measure import Effort
from deep_gemm_k3.bench.timing import Times, interleaved, repeated
from deep_gemm_k3.bench.work import Ceilings, Shape

TINY = {"hidden": 256, "intermediate": 256, "shared_hidden": 256, "shared_intermediate": 128}
CPU = torch.device("cpu")


class ScriptedTimer:
    """Each batch takes what the script says, on a clock that all timers share."""

    clock = 0.0

    def __init__(self, name: str, costs: list[float], order: list[str]) -> None:
        self.name, self.costs, self.order = name, iter(costs), order

    def queue(self) -> None:
        self.order.append(self.name)
        ScriptedTimer.clock += next(self.costs)

    def mark(self) -> float:
        return ScriptedTimer.clock

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def settle(self) -> None:
        self.order.append("settled")

    def hold(self, calls: int) -> None:
        self.order.append("held")


def test_turns_go_there_and_back() -> None:
    order: list[str] = []
    timers = [ScriptedTimer("a", [9, 1, 2], order), ScriptedTimer("b", [9, 3, 4], order)]
    assert interleaved(timers, 2) == [[1, 2], [3, 4]]  # type: ignore[arg-type]
    assert order == ["b", "a", "a", "b", "b", "a", "settled"]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What timers and `sleep` do, in order. A rest takes 100 on the timers' clock."""
    happened: list[str] = []

    def sleep(seconds: float) -> None:
        happened.append(f"rest {seconds:g}")
        ScriptedTimer.clock += 100.0

    monkeypatch.setattr(timing.time, "sleep", sleep)
    return happened


def test_every_sample_rests_and_then_follows_a_batch_that_does_not_count(order: list[str]) -> None:
    timed = ScriptedTimer("a", [9, 1, 8, 3, 7, 2], order)
    assert repeated(timed, 3, 0.25) == Times(2, 1, 3, 3)  # type: ignore[arg-type]
    assert order == [*["settled", "rest 0.25", "held", "a", "a"] * 3, "settled"]


def test_without_rest_samples_follow_one_another(order: list[str]) -> None:
    timed = ScriptedTimer("a", [9, 1, 3, 2], order)
    assert repeated(timed, 3, 0.0) == Times(2, 1, 3, 3)  # type: ignore[arg-type]
    assert order == ["a", "a", "a", "a", "settled"]


def test_only_devices_rest(order: list[str]) -> None:
    effort = Effort(1, 2, 0, (1,), rest_s=0.25)
    assert [effort.rest_of(torch.device(kind)) for kind in ("cuda", "cpu")] == [0.25, 0.0]
    calls: list[int] = []
    baselines.Baselines(Shape(1, 1, 1, **TINY), CPU, effort)._time(calls.append, 1)
    assert len(calls) == 4 and not order  # one call, and two replays after one that does not count


@pytest.mark.parametrize("command", ["producer", "sweep", "cost", "tune"])
def test_the_rest_is_an_option_of_every_command_that_times(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []

    def job(*arguments: Any) -> report.Run:
        found.extend(part.effort.rest_s for part in arguments if isinstance(part, jobs.Setting))
        return report.Run(command, CPU, ["bench"], Ceilings())

    monkeypatch.setattr(jobs, command, job)
    points = tmp_path / "points.json"
    points.write_text("[]")
    line = ["bench", command, *([str(points)] if command == "tune" else []), "--device", "cpu"]
    for more in ([], ["--rest", "0.5"], ["--rest", "0"]):
        assert cli.main([*line, *more]) == 0
    assert found == [Effort().rest_s, 0.5, 0.0]
    assert cli.main([*line, "--rest", "-1"]) == 2


def test_baselines_rest_like_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands beside a single row starts from the same state."""
    given: list[float] = []

    def repeated(timed: object, replays: int, rest_s: float) -> Times:
        given.append(rest_s)
        return Times(1, 1, 1, replays)

    for module in (measure, baselines):
        monkeypatch.setattr(module, "repeated", repeated)
    monkeypatch.setattr(Effort, "rest_of", lambda self, device: self.rest_s)  # as if the host were a device
    setting = jobs.Setting(CPU, effort=Effort(1, 1, 0, (1,), rest_s=0.25), rounds=0, say=lambda _: None)
    run = jobs.sweep(Shape(2, 2, 1, shared_tokens=2, **TINY), jobs.Sweep([2], ("dense",)), setting)
    assert "sum_us" in run.data["rows"][0]["baselines"]
    assert len(given) > 9 and set(given) == {0.25}
    assert run.data["rows"][0]["rest_s"] == 0.25
    given.clear()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # torch has one of them or both
        monkeypatch.setattr(torch.distributed, name, lambda got, rows: got.copy_(rows), raising=False)
    assert baselines.reduce_scatter_us(2, Shape(2, 2, 1, **TINY), CPU, setting.effort) == 1
    assert given == [0.25]
