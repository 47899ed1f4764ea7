"""Reading the in-kernel timeline: names from the header, intervals between marks, a trace that tools can open."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from deep_gemm_k3.bench import report, trace


def timeline(ctas: int, tracks: dict[tuple[int, int], list[tuple[int, str, int]]]) -> torch.Tensor:
    """Memory as a kernel leaves it: (nanoseconds, event, argument) per (CTA, warp)."""
    where = trace.layout()
    words = torch.zeros(ctas, where.warps, where.records, 4, dtype=torch.int64)
    for (cta, warp), marks in tracks.items():
        words[cta, warp, 0, 3] = len(marks)
        for i, (ns, event, argument) in enumerate(marks):
            words[cta, warp, i + 1] = torch.tensor([ns & 0xFFFFFFFF, ns >> 32, where.events.index(event), argument])
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(torch.uint8).flatten()


def argument(phase: int, row_tile: int, block: int) -> int:
    return phase << 30 | row_tile << 20 | block


BASE = 5_000_000_000_123
MARKS = {
    (1, 0): [
        (BASE, "start", 0),
        (BASE + 2000, "task", argument(2, 3, 70_000)),
        (BASE + 5000, "multiplied", 0),
        (BASE + 6500, "finished", 0),
        (BASE + 7000, "tasks done", 0),
    ],
    (0, 8): [
        (BASE + 100, "start", 0),
        (BASE + 400, "asked", argument(1, 0, 5)),
        (BASE + 900, "ready", 0),
    ],
}


def test_layout_comes_from_the_header() -> None:
    where = trace.layout()
    assert where.events[:2] == ("start", "pushed")
    assert len(where.events) == 13
    assert where.num_bytes(2) == 2 * where.warps * where.records * 16


def test_marks_keep_time_and_task() -> None:
    found = list(trace.marks(timeline(2, MARKS)))
    assert len(found) == 8
    assert {m.event for m in found if m.cta == 0} == {"start", "asked", "ready"}
    task = next(m for m in found if m.event == "task")
    assert (task.cta, task.warp, task.us) == (1, 0, 2.0)
    assert trace.task_name(task.argument) == "routed L2 row 3 block 70000"


def test_trace_has_an_interval_between_marks(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    trace.write(timeline(2, MARKS), path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    by_name = {e["name"]: e for e in events}
    assert by_name["mainloop: routed L2 row 3 block 70000"]["dur"] == pytest.approx(3.0)
    assert by_name["wait for tokens: routed L1 row 0 block 5"]["dur"] == pytest.approx(0.5)
    assert {(e["pid"], e["tid"]) for e in events} == {(0, 8), (1, 0)}


def test_summary_adds_a_math_warps_intervals() -> None:
    sums = trace.summary(timeline(2, MARKS))
    assert sums["routed L2 mainloop"] == pytest.approx(3.0)
    assert sums["routed L2 epilogue"] == pytest.approx(1.5)
    assert sums["last finished at"] == pytest.approx(6.5)


def test_summary_says_what_was_lost_and_shares_what_is_left() -> None:
    where = trace.layout()
    memory = timeline(2, MARKS)
    memory.view(torch.int32).view(2, where.warps, where.records, 4)[0, 8, 0, 3] = where.records + 4
    assert trace.summary(memory)["lost"] == 5
    shares = trace.shares(trace.summary(timeline(2, MARKS)))
    assert shares == {
        "mainloops": pytest.approx(100 * 3.0 / 7.0),
        "epilogues": pytest.approx(100 * 1.5 / 7.0),
        "routed L2 wait": pytest.approx(100 * 2.0 / 7.0),
        "end of the list": pytest.approx(100 * 0.5 / 7.0),
    }
    line = report.timeline_line("dense", 8, trace.summary(timeline(2, MARKS)))
    assert "mainloops 42.9 %" in line and "last tile 6.5" in line and "lost" not in line


def test_a_full_track_keeps_what_fits() -> None:
    where = trace.layout()
    memory = timeline(1, {(0, 0): [(BASE, "start", 0)]})
    memory.view(torch.int32).view(1, where.warps, where.records, 4)[0, 0, 0, 3] = 10 * where.records
    assert len(list(trace.marks(memory))) == where.records - 1


def test_nothing_written() -> None:
    assert trace.chrome_trace(timeline(1, {}))["traceEvents"] == []
