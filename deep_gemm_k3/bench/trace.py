"""The in-kernel timeline as a Chrome trace, which Perfetto opens: a process per CTA, a track per warp.

Records come from a kernel of its own (``mega_sm90_traced``): the one that is timed never contains the marks.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..jit.source import INCLUDE_DIR, PACKAGE

_PHASES = ("shared L1", "routed L1", "routed L2", "shared L2")
_RECORD_BYTES = 16


@dataclass(frozen=True)
class Layout:
    """What debug/timeline.cuh says about its memory."""

    warps: int
    records: int
    events: tuple[str, ...]

    def num_bytes(self, ctas: int) -> int:
        return ctas * self.warps * self.records * _RECORD_BYTES


@cache
def layout() -> Layout:
    """Read from the header, which is the only home of these numbers."""
    text = (INCLUDE_DIR / PACKAGE / "debug" / "timeline.cuh").read_text()

    def number(name: str) -> int:
        found = re.search(rf"{name} = (\d+);", text)
        assert found, name
        return int(found.group(1))

    names = re.search(r"kEventNames\[kNumEvents\] = \{([^}]*)\}", text)
    assert names
    return Layout(number("kTimelineWarps"), number("kTimelineRecords"), tuple(re.findall(r'"([^"]*)"', names.group(1))))


@dataclass(frozen=True)
class Mark:
    cta: int
    warp: int
    us: float
    event: str
    argument: int


def marks(memory: torch.Tensor) -> Iterator[Mark]:
    """All events of a timeline (uint8, any device), times from the first one on."""
    where = layout()
    words = memory.cpu().view(torch.int32).view(-1, where.warps, where.records, 4).numpy().astype("int64") & 0xFFFFFFFF
    counts = words[:, :, 0, 3].clip(max=where.records - 1)
    start = None
    found = []
    for cta, warp in zip(*counts.nonzero(), strict=True):
        for low, high, event, argument in words[cta, warp, 1 : counts[cta, warp] + 1].tolist():
            ns = high << 32 | low
            start = ns if start is None else min(start, ns)
            found.append((int(cta), int(warp), ns, where.events[event], argument))
    for cta, warp, ns, event, argument in found:
        yield Mark(cta, warp, (ns - (start or 0)) * 1e-3, event, argument)


def task_name(argument: int) -> str:
    return f"{_PHASES[argument >> 30]} row {argument >> 20 & 0x3FF} block {argument & 0xFFFFF}"


# What a warp does between two events: named by the event that ends it, or by the task that goes on.
_ENDS = {
    "pushed": "push",
    "headers": "wait for headers",
    "listed": "list",
    "gathered": "gather",
    "multiplied": "mainloop",
    "finished": "epilogue",
    "ready": "wait for tokens",
    "combined": "combine",
    "end": "wait for the CTA",
    "task": "wait for the first stage",
    "asked": "copies",
    "tasks done": "end of the list",
}


def chrome_trace(memory: torch.Tensor, rank: int = 0) -> dict[str, Any]:
    """Complete events (``ph`` X) for every pair of neighbouring marks of a warp."""
    events: list[dict[str, Any]] = []
    last: dict[tuple[int, int], tuple[float, str]] = {}
    for mark in marks(memory):
        track = (mark.cta, mark.warp)
        if track in last:
            begin, task = last[track]
            name = _ENDS.get(mark.event, mark.event)
            events.append(
                {
                    "ph": "X",
                    "pid": rank * 1000 + mark.cta,
                    "tid": mark.warp,
                    "ts": round(begin, 3),
                    "dur": round(mark.us - begin, 3),
                    "name": f"{name}: {task}" if task and mark.event in ("multiplied", "finished", "ready") else name,
                }
            )
        task = task_name(mark.argument) if mark.event in ("task", "asked") else last.get(track, (0.0, ""))[1]
        last[track] = (mark.us, task)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def summary(memory: torch.Tensor) -> dict[str, float]:
    """Where the time goes: mean microseconds per CTA that a math warp (the first) spends in each kind of interval."""
    totals: dict[str, float] = {}
    last: dict[tuple[int, int], tuple[float, int]] = {}
    ends: dict[str, float] = {}
    ctas = set()
    for mark in marks(memory):
        track = (mark.cta, mark.warp)
        ends[mark.event] = max(ends.get(mark.event, 0.0), mark.us)
        if mark.warp != 0:
            continue
        ctas.add(mark.cta)
        begin, phase = last.get(track, (mark.us, -1))
        if mark.event == "task":
            phase = mark.argument >> 30
        name = _ENDS.get(mark.event, mark.event)
        if mark.event in ("task", "multiplied", "finished"):
            name = f"{_PHASES[phase]} {name}"
        totals[name] = totals.get(name, 0.0) + mark.us - begin
        last[track] = (mark.us, phase)
    shown = {name: total / max(len(ctas), 1) for name, total in totals.items() if total > 0}
    return {**shown, **{f"last {event} at": us for event, us in ends.items()}}


def write(memory: torch.Tensor, path: Path, rank: int = 0) -> None:
    """As JSON, compressed where the name ends in .gz; Perfetto opens both."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(chrome_trace(memory, rank), separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)
