"""Floors, options and records of the benchmark commands, with tiny runs on CPU tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_gemm_k3 import __main__ as cli
from deep_gemm_k3.bench import case, check, jobs, peers, report, table
from deep_gemm_k3.bench.baselines import compared
from deep_gemm_k3.bench.cli import numbers, overrides_of, varied_of
from deep_gemm_k3.bench.measure import Effort
from deep_gemm_k3.bench.timing import Times, slowest
from deep_gemm_k3.bench.work import Ceilings, Shape, expected_experts, work

TINY = {"hidden": 256, "intermediate": 256, "shared_hidden": 256, "shared_intermediate": 128}
CPU = torch.device("cpu")


def options(**values: Any) -> list[str]:
    merged = {**TINY, "device": "cpu", "calls": 1, "replays": 1, "eager": 0, "sample": 4, **values}
    return [part for name, value in merged.items() for part in (f"--{name.replace('_', '-')}", str(value))]


# --------------------------------------------------------------------------------------------------------------- floors
def test_k3_expert_and_floors() -> None:
    shape = Shape(64, shared_tokens=64)
    assert shape.expert_parameters == 33_030_144
    assert shape.shared_parameters == 16_515_072
    all_experts = work(Shape(64), 112, 1024)
    assert all_experts.memory_us == pytest.approx(432.0, rel=0.005)
    assert work(Shape(1), 16, 16).memory_us == pytest.approx(62, rel=0.01)


def test_producer_floor() -> None:
    found = work(Shape(8, 1, 1, shared_tokens=64), 1, 8)
    assert found.bytes == pytest.approx(50.6e6 + 1.9e6, rel=0.01)
    assert found.memory_us == pytest.approx(11.5, rel=0.02)
    assert found.floor_us == found.memory_us


def test_operations_and_rates() -> None:
    shape, c = Shape(2, 4, 2, hidden=128, intermediate=128), Ceilings(1000.0, 1.0)
    found = work(shape, 3, 4, c)
    assert found.operations == 2 * 4 * 3 * 128 * 128
    assert found.tensor_us == pytest.approx(found.operations * 1e-6)
    row = found.row(2 * found.floor_us)
    assert row["percent_of_floor"] == pytest.approx(50)
    assert row["gb_s"] == pytest.approx(found.bytes / (2 * found.floor_us) * 1e-3)


def test_shared_weights_count_only_with_shared_tokens() -> None:
    assert Shape(8).shared_parameters == 0
    more = work(Shape(8, shared_tokens=8), 5, 128).bytes - work(Shape(8), 5, 128).bytes
    assert more == 2 * 3 * 7168 * 768 + 2 * 8 * 2 * 7168


@pytest.mark.parametrize(("tokens", "wanted"), [(0, 0), (1, 16), (8, 78.7), (2048, 112)])
def test_expected_experts(tokens: int, wanted: float) -> None:
    assert expected_experts(Shape(tokens)) == pytest.approx(wanted, rel=0.01, abs=1e-9)


# -------------------------------------------------------------------------------------------------------- peers, options
def test_best_public_and_goals() -> None:
    assert peers.best(8, 112, 16) == (392, "FlashInfer CuTe-DSL")
    assert peers.best(8, 1, 1) == (42.4, "DeepGEMM FP8 MegaMoE")
    assert peers.best(64, 1, 1) is None
    assert peers.best(8, 56, 16) is None
    assert peers.goal(2048, 112, 16) == 3000
    assert peers.goal(8, 1, 1) == 28
    assert set(peers.SWEEP) == set(peers.GOALS)


def test_best_public_on_two_devices() -> None:
    assert peers.best(8, 112, 16, 2) == (700, "DeepGEMM FP8 MegaMoE")
    assert peers.best(8, 1, 1, 2) == (56, "DeepGEMM FP8 MegaMoE")
    assert peers.goal(512, 112, 16, 2) == 1030
    assert peers.goal(8, 1, 1, 2) == 30
    for found in (peers.best(1, 112, 16, 2), peers.best(8, 112, 16, 4), peers.best(8, 112, 16, 0)):
        assert found is None
    assert peers.goal(2048, 112, 16, 2) is None


def test_option_parsers() -> None:
    assert numbers("1, 8,64", "--tokens") == [1, 8, 64]
    assert varied_of("tokens=1,8 ranks=2") == {"tokens": [1, 8], "ranks": [2]}
    assert overrides_of('{"routed_tokens": 16}') == {"routed_tokens": 16}


@pytest.mark.parametrize(
    "arguments",
    [
        ["sweep", "--tokens", "1,x"],
        ["sweep", "--tokens", ""],
        ["sweep", "--modes", "fast"],
        ["producer", "--overrides", "[1]"],
        ["producer", "--overrides", "{"],
        ["cost", "--vary", "speed=1"],
    ],
)
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments, "--device", "cpu"]) == 2
    assert "wanted" in capsys.readouterr().err


def test_no_device_is_a_clear_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "producer"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_cold_copies_outgrow_the_cache() -> None:
    assert jobs.cold_copies(Shape(8, 1, 1, shared_tokens=64)) == 8
    assert jobs.cold_copies(Shape(2048, shared_tokens=2048)) == 2


def test_samples_and_slowest() -> None:
    assert check.sample_rows(3, 8) == [0, 1, 2]
    assert check.sample_rows(100, 4) == [0, 33, 66, 99]
    assert check.sample_rows(9, 1) == [0]
    assert slowest([Times(1, 1, 5, 3), Times(2, 0.5, 2, 3)]) == Times(2, 1, 5, 3)


def test_peers_stand_only_beside_their_own_kind_of_device() -> None:
    row = {"shape": {"tokens": 8, "experts": 112, "topk": 16, "ranks": 2}, "processes": 2}
    run = report.Run("sweep", CPU, ["bench"], Ceilings())
    assert run.add(row)["best_public"] is None
    run.data["machine"]["device"] = "NVIDIA H200"
    assert run.add(row)["best_public"] == (700, "DeepGEMM FP8 MegaMoE")
    assert run.add(row)["goal_us"] == 365
    assert run.add({**row, "processes": 1})["goal_us"] is None


def test_overhead_is_the_median_of_the_rounds_ratios() -> None:
    drifting = [100.0 * 1.1**i for i in range(8)]
    samples = {"dense": drifting, "rs": [1.01 * us for us in drifting], "sp_rs": [*drifting[:-1], 1e6]}
    rs, sp_rs = report.overheads(samples)
    assert (rs["mode"], rs["overhead_percent"], rs["rounds"]) == ("rs", pytest.approx(1.0), 8)
    assert rs["quartiles"] == [pytest.approx(1.0)] * 2
    assert sp_rs["overhead_percent"] == pytest.approx(0.0)


def test_long_calls_come_in_small_graphs() -> None:
    effort = Effort(calls=20, graph_us=15_000.0)
    assert [effort.calls_of(us) for us in (0.0, 10, 750, 3000, 100_000)] == [20, 20, 20, 5, 3]


def test_every_sum_is_compared_with_a_time_that_was_taken_like_it() -> None:
    row: dict[str, Any] = {"mode": "dense", "us": 20.0}
    parts = {"sum_us": 30.0, "gemms_sum_us": 20.0, "norm_us": 1.0}
    alone = compared(row, parts)
    assert alone["compared_us"] == {"sum_us": 20.0, "gemms_sum_us": 20.0}
    assert alone["not_slower_than"] == {"sum_us": True, "gemms_sum_us": True}
    found = compared({**row, "in_turns_us": {"dense": 22.0, "routed": 18.0, "apart": 3.0}}, parts)
    assert found["baselines"] == {**parts, "own_sum_us": 21.0}
    assert found["compared_us"] == {"own_sum_us": 22.0, "sum_us": 20.0, "gemms_sum_us": 20.0}
    assert found["not_slower_than"] == {"own_sum_us": False, "sum_us": True, "gemms_sum_us": True}
    assert "own_sum NO, sum yes" in report.baseline_line(found["baselines"], found["not_slower_than"])


def test_one_line_says_whether_the_fused_call_is_ever_slower() -> None:
    def row(tokens: int, **sums: bool) -> dict[str, object]:
        return {"shape": {"tokens": tokens}, "not_slower_than": sums}

    fast = [row(1, own_sum_us=True, sum_us=True, gemms_sum_us=False), {"shape": {"tokens": 1}}]
    assert report.verdict_line(fast) == (
        "fused slower than the sum of its own routed part, cuBLAS, gating and norm: at none of 1 token counts; torch's parts: at "
        "none of 1 token counts"
    )
    slow = [*fast, row(8, own_sum_us=False, sum_us=True), row(64, own_sum_us=False)]
    assert "norm: M=8, 64 of 3 token counts; torch's parts: at none of 2" in report.verdict_line(slow)
    assert report.verdict_line([]).endswith("nothing was compared")


def test_token_owners_own_equally_many_rows() -> None:
    assert [jobs.Sweep([1], ("sp_rs",)).rows_beside(m, 4) for m in (1, 4, 5)] == [4, 4, 8]
    assert jobs.Sweep([1], ("rs",)).rows_beside(5, 4) == 5
    assert jobs.Sweep([1], ("sp_rs",), 64).rows_beside(5, 4) == 64


# ----------------------------------------------------------------------------------------------------------------- plans
def test_overrides_reach_the_plan() -> None:
    shape = Shape(8, shared_tokens=64)
    wanted = {
        "routed_tokens": 32,
        "shared_tokens": 32,
        "shared_rows": 128,
        "num_ctas_per_sm": 1,
        "num_stages": 3,
        "splits": {"routed_l1": 2, "routed_l2": 3, "shared_l1": 4, "shared_l2": 5},
        "narrow_widths": {"middle": 24, "least": 8},
    }
    chosen = case.plan_of(shape, "dense", case.Settings(wanted))
    assert case.pinned(chosen) == wanted
    free = case.plan_of(shape, "dense", case.Settings())
    assert case.pinned(free) != wanted
    assert case.pinned(case.plan_of(shape, "dense", case.Settings(case.pinned(free)))) == case.pinned(free)


@pytest.mark.parametrize("tokens", [1, 64, 512, 1024, 2048])
def test_pinned_plan_is_one_kernel(tokens: int) -> None:
    from deep_gemm_k3.mega.plan import all_configs

    shape = Shape(tokens, shared_tokens=tokens)
    plan = case.plan_of(shape, "dense", case.Settings())
    problem = {"num_ranks": 1, "num_experts": 112, "num_topk": 16, "num_max_tokens_per_rank": tokens, "hidden": 3584}
    problem |= {"intermediate_hidden": 3072, "shared_intermediate_hidden": 768, "num_max_shared_tokens": tokens}
    problem |= {"shared_output": "dense", "shared_hidden": 7168, "overrides": case.pinned(plan)}
    assert {entry["literal"] for entry in all_configs(problem)} == {plan.literal}


# ------------------------------------------------------------------------------------------------------------------ runs
def test_producer_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = options(tokens=3, shared_tokens=4, experts=2, topk=2, ranks=2, eager=1, rounds=2)
    assert cli.main(["bench", "producer", *shape, "--no-warm", "--json", str(tmp_path / "run.json")]) == 0
    run = report.load(tmp_path / "run.json")
    assert [row["mode"] for row in run["rows"]] == ["dense", "rs", "sp_rs"]
    for row in run["rows"]:
        assert row["checked"] is True
        assert row["relative_error"] < 2e-3
        assert row["us"] > 0 and row["eager_us"] > 0
        assert row["cold"] is True and row["copies"] > 1
        assert row["work"]["floor_us"] > 0
        assert row["shape"]["ranks"] == 2
        assert set(row["plan"]) >= {"routed_tokens", "num_stages", "splits", "grid"}
    assert [found["mode"] for found in run["publication"]] == ["rs", "sp_rs"]
    assert all(found["dense_us"] > 0 and found["cold"] for found in run["publication"])
    assert set(run) >= {"schema", "kind", "command", "date", "commit", "kernels", "machine", "ceilings", "rows"}
    assert "rs " in capsys.readouterr().out


def test_sweep_run_plot_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = options(tokens="1,2", experts=2, topk=1, seeds=1, rounds=1)
    saved, picture = tmp_path / "sweep.json", tmp_path / "sweep.png"
    assert cli.main(["bench", "sweep", *shape, "--json", str(saved), "--plot", str(picture)]) == 0
    rows = report.load(saved)["rows"]
    assert [(r["mode"], r["shape"]["tokens"], r["shape"]["shared_tokens"]) for r in rows] == [
        ("dense", 1, 1),
        ("routed", 1, 0),
        ("dense", 2, 2),
        ("routed", 2, 0),
    ]
    assert all(len(r["graph"]) == 1 and r["rest_s"] == 0 for r in rows)
    parts = rows[0]["baselines"]
    assert {"grouped_gemms_us", "publication_copy_us", "shared_us", "routed_us"} <= set(parts)
    assert parts["gemms_sum_us"] == parts["grouped_gemms_us"] + parts["shared_gemms_us"]
    around = ("gather_us", "gating_us", "slots_us", "norm_us", "shared_gating_us")
    assert parts["sum_us"] == pytest.approx(parts["gemms_sum_us"] + sum(parts[name] for name in around))
    turns = rows[0]["in_turns_us"]
    assert turns["apart"] > 0 and parts["own_sum_us"] == turns["routed"] + turns["apart"]
    singles = {"sum_us": rows[0]["us"], "gemms_sum_us": rows[0]["us"]}
    assert rows[0]["compared_us"] == {"own_sum_us": turns["dense"], **singles}
    assert set(rows[0]["not_slower_than"]) == set(rows[0]["compared_us"])
    assert picture.stat().st_size > 1000
    assert cli.main(["bench", "plot", str(saved), str(tmp_path / "again.svg")]) == 0
    capsys.readouterr()
    assert cli.main(["bench", "table", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    us = [f"{row['us']:.1f} ({row['graph'][0]['low']:.1f})" for row in rows]
    sustained = " / ".join(f"{rows[0]['in_turns_us'][mode]:.1f}" for mode in ("dense", "routed"))
    assert lines[0].startswith(
        "| tokens | everything fused, dense, us (lowest replay) | routed alone, us (lowest replay) |"
    )
    assert lines[2].startswith(f"| 1 | {us[0]} | {us[1]} | {sustained} |")
    assert len(lines[0].split("|")) == len(lines[2].split("|"))
    run = report.load(saved)  # a token count whose first mode has no time keeps its others
    del run["rows"][0]
    lines = table.markdown(run).splitlines()
    assert lines[2].startswith(f"| 1 |  | {us[1]} | - / - | ") and lines[3].startswith("| 2 | ")
    assert len({len(line.split("|")) for line in lines[:4]}) == 1


def test_a_budget_ends_a_job_between_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "sweep.json"
    shape = options(tokens="1,2,3", experts=2, topk=1, seeds=1, modes="routed", budget=1e-6)
    assert cli.main(["bench", "sweep", *shape, "--no-baselines", "--json", str(saved)]) == 0
    run = report.load(saved)
    assert [row["shape"]["tokens"] for row in run["rows"]] == [1]
    assert run["left_out"] == ["M=2", "M=3"]
    assert "being over: M=2, M=3" in capsys.readouterr().out
    assert table.markdown(run).startswith("| tokens | routed alone, us (lowest replay) |")


def test_cost_and_tune_runs(tmp_path: Path) -> None:
    saved = tmp_path / "cost.json"
    shape = options(tokens=2, shared_tokens=2, experts=4, topk=2)
    vary = "experts=2,4 ranks=2 topk=2"
    assert cli.main(["bench", "cost", *shape, "--vary", vary, "--json", str(saved), "--plot", f"{saved}.png"]) == 0
    rows = report.load(saved)["rows"]
    assert [(r["varied"], r["shape"]["experts"], r["shape"]["ranks"]) for r in rows] == [
        ("experts", 2, 1),
        ("experts", 4, 1),
        ("topk", 4, 1),  # measured once
        ("ranks", 2, 2),
    ]
    assert rows[1]["us"] == rows[2]["us"]
    setting = jobs.Setting(CPU, effort=Effort(1, 1, 0, (1,)), json_path=tmp_path / "tune.json")
    points = [{"tokens": 2, "overrides": {"routed_tokens": 16}}, {"tokens": 1, "experts": 2, "mode": "routed"}]
    jobs.tune(Shape(2, 4, 2, shared_tokens=2, **TINY), points, setting)
    rows = report.load(tmp_path / "tune.json")["rows"]
    assert rows[0]["plan"]["routed_tokens"] == 16
    assert rows[1]["shape"]["experts"] == 2 and rows[1]["mode"] == "routed"


def test_tables_of_a_producer_and_of_costs() -> None:
    row = {
        "mode": "rs", "us": 20.04, "eager_us": None, "copies": 1, "varied": "topk", "shape": Shape(8, 1, 1).__dict__,
        "work": work(Shape(8, 1, 1), 1, 8).row(20.0), "best_public": (42.4, "x"), "goal_us": None,
    }  # fmt: skip
    compared = {"tokens": 8, "cold": True, "mode": "rs", "us": 20.2, "dense_us": 20.0}
    compared |= {"overhead_percent": 1.0, "quartiles": [0.9, 1.1]}
    data = {"kind": "producer", "rows": [row], "publication": [compared]}
    data["reduce_scatter"] = [{"shared_tokens": 64, "us": 14.7}]
    text = table.markdown(data)
    assert "| warm | `rs` | 20.0 |  | 4 / 1 | 19 % | 42.4 |  |" in text
    assert "| 8 | cold | `rs` | 20.20 | 20.00 | +1.00 % (+0.90 .. +1.10) |" in text
    assert "| 64 | 14.7 |" in text
    assert "| topk | 8 | 1 | 1 | 1 | 20.0 | 3.9 |" in table.markdown({"kind": "cost", "rows": [row]})
    row["shape"] = Shape(8, 1, 1, ranks=4).__dict__  # that share the device
    assert "| topk | 8 | 1 | 1 | 4 | 20.0 | 15.5 |" in table.markdown({"kind": "cost", "rows": [row]})
    with pytest.raises(ValueError, match="wanted one of sweep, producer, cost, given 'tune'"):
        table.markdown({"kind": "tune", "rows": []})


def test_a_table_goes_to_its_place_in_a_document(tmp_path: Path) -> None:
    run, document = tmp_path / "a.json", tmp_path / "doc.md"
    saved = report.Run("cost", CPU, ["bench", "cost"], Ceilings())
    timed = {"shape": Shape(8, 1, 1).__dict__, "work": work(Shape(8, 1, 1), 1, 8).row(20.0), "us": 20.0}
    saved.data["rows"].append({**timed, "varied": "topk"})
    saved.save(run)
    document.write_text("before\n<!-- a.json -->\nold\n<!-- end -->\nafter <!-- end -->\n")
    for _ in range(2):
        assert cli.main(["bench", "table", str(run), "--into", str(document)]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- a.json -->\ncpu, torch ") and text.endswith(
        "<!-- end -->\nafter <!-- end -->\n"
    )
    assert "old" not in text and text.count("    bench cost\n") == 1 and text.count("| varied |") == 1
    assert " UTC, replays back to back:\n" in text
    saved.data["rows"][0]["rest_s"] = 0.2
    table.put(saved.data, "a.json", document)
    assert " UTC, each replay after 0.2 s of rest:\n" in document.read_text()
    document.write_text("<!-- b.json -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="wanted a place"):
        table.put(saved.data, "a.json", document)


@pytest.mark.parametrize("kind", ["sweep", "producer", "cost", "tune"])
def test_a_run_without_times_has_no_table_and_no_picture(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, picture = tmp_path / "a.json", tmp_path / "a.png"
    report.Run(kind, CPU, ["bench", kind], Ceilings()).save(run)
    for arguments in (["table", str(run)], ["plot", str(run), str(picture)]):
        assert cli.main(["bench", *arguments]) == 1
        assert "wanted a run with times, given one with none" in capsys.readouterr().err
    assert not picture.exists()


def test_a_recorded_command_has_no_paths() -> None:
    given = ["/x/__main__.py", "bench", "sweep", "--json", "/x/a.json", "--where", "--plot=/x/b.svg", "--tokens", "1,2"]
    assert " ".join(report.command_line(given)) == "python -m deep_gemm_k3 bench sweep --where --tokens 1,2"


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"schema": "other"}))
    with pytest.raises(ValueError, match="wanted schema"):
        report.load(path)
