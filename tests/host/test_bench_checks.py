"""A wrong result gets no time, whatever is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_gemm_k3.bench import case, check, data, jobs
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
