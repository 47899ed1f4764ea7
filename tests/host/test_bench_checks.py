"""A wrong result gets no time, whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_gemm_k3 import __main__ as cli
from deep_gemm_k3.bench import case, check, data, jobs, measure, report
from deep_gemm_k3.bench.cli import points_of
from deep_gemm_k3.bench.measure import Bench, Effort, World
from deep_gemm_k3.bench.work import Shape
from deep_gemm_k3.mega.plan import Plan

TINY = {"hidden": 256, "intermediate": 256, "shared_hidden": 256, "shared_intermediate": 128}
CPU = torch.device("cpu")


def small_bench() -> Bench:
    shape = Shape(3, 2, 2, shared_tokens=2, **TINY)
    return Bench(World(1), shape, [data.rank_data(shape, 1, 0, CPU, "sm_90a", 2)], CPU, case.Settings())


@pytest.mark.parametrize("name", ["y", "shared_y"])
def test_a_wrong_result_gets_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, called = small_bench(), case.Case.call

    def wrong(self: case.Case, number: int) -> None:
        called(self, number)
        getattr(self, name)[-1].mul_(1.05)

    monkeypatch.setattr(case.Case, "call", wrong)
    with pytest.raises(check.CheckFailed, match=name):
        bench.measure("dense", Effort(1, 1, 0, (1,)))
    bench.destroy()


def test_a_failure_is_recorded_and_the_next_mode_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, called = small_bench(), case.Case.call

    def aborted(self: case.Case, number: int) -> None:
        if self.mode == "dense":
            raise RuntimeError("sym_buffer: an abort\nmore")
        called(self, number)

    monkeypatch.setattr(case.Case, "call", aborted)
    said: list[str] = []
    setting = jobs.Setting(CPU, effort=Effort(1, 1, 0, (1,)), say=said.append)
    run, first = setting.run("producer"), bench.cases[0]
    assert jobs._measure(bench, "dense", setting, run) is None
    assert said == ["dense M=3: no time: RuntimeError: sym_buffer: an abort"]
    assert run.data["failures"][0]["error"].endswith("more")
    assert bench.cases[0] is not first
    assert jobs._measure(bench, "rs", setting, run) is not None
    bench.destroy()


TUNE = "POINTS --device cpu --calls 1 --replays 1"
REST = "--device cpu --calls 1 --replays 1 --eager 0 --sample 4 --experts 2 --topk 1 --shared-tokens 2 " + " ".join(
    f"--{name.replace('_', '-')} {width}" for name, width in TINY.items()
)


@pytest.mark.parametrize(
    ("line", "wrong", "last", "timed"),
    [
        (f"producer {REST} --tokens 3 --modes dense --no-warm", "", "dense ", 1),
        (
            f"producer {REST} --tokens 3 --modes dense,rs --no-warm --rounds 1",
            "rs",
            "2 points have no time: rs M=3, in turns M=3",
            1,
        ),
        (
            f"sweep {REST} --tokens 1,2 --modes routed --no-baselines",
            "routed",
            "2 points have no time: routed M=1, routed M=2",
            0,
        ),
        (f"cost {REST} --tokens 2 --vary topk=1,2", "dense", "2 points have no time: dense M=2", 0),
        (f"tune {TUNE}", "routed", "1 point has no time: routed M=1", 1),
    ],
)
def test_what_has_no_time_is_told_last_and_fails_the_command(
    line: str, wrong: str, last: str, timed: int,
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def compare(one: case.Case, wanted: check.Expected) -> float:
        if one.mode == wrong:
            raise check.CheckFailed("y: wanted something else")
        return check.compare(one, wanted)

    monkeypatch.setattr(measure, "compare", compare)
    small, tune = Shape(2, 2, 1, shared_tokens=2, **TINY), jobs.tune
    monkeypatch.setattr(jobs, "tune", lambda _, points, setting: tune(small, points, setting))
    saved, points = tmp_path / "run.json", tmp_path / "points.json"
    points.write_text(json.dumps([{"tokens": 2}, {"tokens": 1, "mode": "routed"}]))
    arguments = line.replace("POINTS", str(points)).split()
    assert cli.main(["bench", *arguments, "--json", str(saved)]) == (1 if wrong else 0)
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    run = report.load(saved)
    assert len(run["rows"]) == timed
    assert len(run.get("failures", ())) == (int(last.split()[0]) if wrong else 0)


def test_unfused_parts_without_a_time_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("")  # says nothing

    monkeypatch.setattr(jobs.Baselines, "all", wrong)
    said: list[str] = []
    setting = jobs.Setting(CPU, effort=Effort(1, 1, 0, (1,)), rounds=0, say=said.append)
    run = jobs.sweep(Shape(2, 2, 1, shared_tokens=2, **TINY), jobs.Sweep([2], ("dense",)), setting)
    assert len(run.data["rows"]) == 1 and "        unfused: no times: RuntimeError" in said
    assert report.failure_line(run.failures) == "1 point has no time: unfused M=2"


@pytest.mark.parametrize("mode", ["rs", "sp_rs"])
def test_a_wrong_publication_gets_no_time(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, called = small_bench(), case.Case.call

    def wrong(self: case.Case, number: int) -> None:
        called(self, number)
        assert self.published is not None
        self.published.workspace[0, -1].mul_(1.05)

    monkeypatch.setattr(case.Case, "call", wrong)
    with pytest.raises(check.CheckFailed, match="what was published to it"):
        bench.measure(mode, Effort(1, 1, 0, (1,)))
    bench.destroy()


def test_a_call_that_changes_its_result_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, called, count = small_bench(), case.Case.call, iter(range(100))

    def unsteady(self: case.Case, number: int) -> None:
        called(self, number)
        if next(count) > 0:
            self.y.view(torch.int16)[0, 0] += 1

    monkeypatch.setattr(case.Case, "call", unsteady)
    with pytest.raises(check.CheckFailed, match="differs from the checked one"):
        bench.measure("dense", Effort(1, 1, 0, (1,)))
    bench.destroy()


def test_weight_copies_hold_the_same_values_elsewhere() -> None:
    shape = Shape(3, 2, 2, shared_tokens=2, **TINY)
    found = data.rank_data(shape, 1, 0, CPU, "sm_90a", 2)
    (a, _), (b, _) = found.routed
    assert torch.equal(a[0], b[0])
    assert a[0].data_ptr() != b[0].data_ptr()
    again = data.rank_data(shape, 1, 0, CPU, "sm_90a", 1)
    assert torch.equal(again.routed[0][0][0], a[0])
    other = data.rank_data(shape, 1, 1, CPU, "sm_90a", 1)
    assert not torch.equal(other.routed[0][0][0], a[0])


def test_a_job_compiles_its_kernels_and_the_traced_modes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_plans(plans: list[Plan], traced: list[Plan]) -> str:
        compiled.append(([p.literal for p in plans], [p.literal for p in traced]))
        return "done"

    monkeypatch.setattr(jobs, "compile_plans", compile_plans)
    device = type("Properties", (), {"multi_processor_count": 132})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    points: list[tuple[Shape, str, dict[str, Any]]] = [
        (Shape(m, shared_tokens=m), mode, {}) for m in (8, 512) for mode in ("dense", "routed")
    ]
    for where in (False, True):
        jobs._prepare(points, jobs.Setting(torch.device("cuda", 0), where=where, say=lambda _: None))
    (plans, nothing), (again, traced) = compiled
    assert plans == again and len(set(plans)) == 4 and not nothing
    assert traced == [plans[0], plans[2]]


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"token": 2}, r"points\[1\]: name: wanted 'tokens', .* or 'overrides', given 'token'"),
        ({"mode": "both"}, r"points\[1\].mode: wanted 'routed', .* or 'sp_rs', given 'both'"),
        ({"tokens": "2"}, r"points\[1\].tokens: wanted an integer in 0\.\.\d+, given '2'"),
        ({"experts": 0}, r"points\[1\].experts: wanted an integer in 1\.\.\d+, given 0"),
        ({"overrides": [1]}, r"points\[1\].overrides: wanted choices by name, given \[1\]"),
    ],
)
def test_points_of_tune_are_checked_before_any_runs(point: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    file.write_text(json.dumps([{"tokens": 1, "overrides": {"routed_tokens": 8}}, point]))
    with pytest.raises(ValueError, match=f"^{words}"):
        points_of(file)


def test_a_plan_that_cannot_be_launched_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU the oracle would run it all the same; on a GPU it is not even compiled."""
    faulty = Plan.make(
        num_ranks=1, num_experts=8, num_topk=2, num_max_tokens_per_rank=384, num_tokens=8, hidden=256,
        intermediate_hidden=256, target="sm_90a", overrides={"num_stages": 1},
    )  # fmt: skip
    assert case.compile_plans([faulty], [faulty]).startswith("0 kernels")
    line = f'sweep {REST} --tokens 1 --modes routed --no-baselines --overrides {{"num_stages":1}}'
    assert cli.main(["bench", *line.split()]) == 1
    said = capsys.readouterr().out
    assert "given overrides {'num_stages': 1}: fewer than two pipeline stages fit into shared memory" in said
    assert said.splitlines()[-1] == "1 point has no time: routed M=1"
