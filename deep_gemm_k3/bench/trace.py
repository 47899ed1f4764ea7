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

import numpy as np
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
    """Where the time goes: mean microseconds per CTA that a math warp (the first) spends in each kind of interval, and
    when the last warp passed each event. ``lost`` counts events beyond the tracks' ends."""
    where = layout()
    words = memory.cpu().view(torch.int32).view(-1, where.warps, where.records, 4).numpy().astype("int64") & 0xFFFFFFFF
    wanted = words[:, :, 0, 3]
    counts = wanted.clip(max=where.records - 1)
    valid = np.arange(1, where.records)[None, None, :] <= counts[:, :, None]
    if not valid.any():
        return {}
    ns, event, argument = (
        words[:, :, 1:, 1] << 32 | words[:, :, 1:, 0], words[:, :, 1:, 2], words[:, :, 1:, 3],
    )  # fmt: skip
    us = (ns - ns[valid].min()) * 1e-3
    totals: dict[str, float] = {}
    for cta in range(words.shape[0]):
        _add_intervals(totals, *(part[cta, 0][valid[cta, 0]] for part in (us, event, argument)))
    ctas = max(int((counts[:, 0] > 0).sum()), 1)
    found = {name: total / ctas for name, total in totals.items() if total > 0}
    for number, name in enumerate(where.events):
        chosen = us[valid & (event == number)]
        if chosen.size:
            found[f"last {name} at"] = float(chosen.max())
    lost = int((wanted - counts).sum())
    return found | ({"lost": float(lost)} if lost else {})


def _add_intervals(totals: dict[str, float], us: Any, event: Any, argument: Any) -> None:
    """One warp's intervals, named by the event that ends them and the task they belong to."""
    names, phase = layout().events, -1
    for i in range(1, len(us)):
        name = names[event[i]]
        if name == "task":
            phase = int(argument[i]) >> 30
        kind = _ENDS.get(name, name)
        if name in ("task", "multiplied", "finished"):
            kind = f"{_PHASES[phase]} {kind}"
        totals[kind] = totals.get(kind, 0.0) + float(us[i] - us[i - 1])


def shares(sums: dict[str, float]) -> dict[str, float]:
    """A `summary` in percent of a CTA's time: products, epilogues, waits for the first stage of a task by phase, the rest."""
    kinds = {name: us for name, us in sums.items() if not name.startswith("last ") and name != "lost"}
    whole = sum(kinds.values()) or 1.0
    found = {"mainloops": 0.0, "epilogues": 0.0}
    for name, us in kinds.items():
        short = name.replace("wait for the first stage", "wait")
        key = "mainloops" if name.endswith("mainloop") else "epilogues" if name.endswith("epilogue") else short
        found[key] = found.get(key, 0.0) + 100.0 * us / whole
    return {name: share for name, share in found.items() if share >= 0.05}


def write(memory: torch.Tensor, path: Path, rank: int = 0) -> None:
    """As JSON, compressed where the name ends in .gz; Perfetto opens both."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(chrome_trace(memory, rank), separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)
