"""Timing of queued work: a captured graph of many calls, and calls queued one by one between events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[int], None]
"""Queues call number ``i``."""

_HOLD_CYCLES_PER_CALL = 60_000  # keeps the device busy while the host queues: some 30 us a call


@dataclass(frozen=True)
class Times:
    """Microseconds per call: median and extremes of ``count`` samples."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))


class HostTimer:
    """Runs calls where there is no device: the wall clock around each."""

    def __init__(self, call: Call, calls: int) -> None:
        self._call, self._calls = call, calls

    def prepare(self) -> None:
        pass

    def graph(self, replays: int) -> Times:
        return self.eager(self._calls)

    def eager(self, calls: int) -> Times:
        samples = []
        for i in range(calls):
            start = time.perf_counter()
            self._call(i)
            samples.append((time.perf_counter() - start) * 1e6)
        return Times.of(samples)


class DeviceTimer:
    """Runs calls on the thread's current stream of ``device``. `prepare` captures ``calls`` of them in one graph."""

    def __init__(self, call: Call, calls: int, device: torch.device) -> None:
        self._call, self._calls, self._device = call, calls, device
        self._graph: torch.cuda.CUDAGraph | None = None

    def prepare(self) -> None:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        capture = torch.cuda.Stream(self._device)
        capture.wait_stream(stream)
        with torch.cuda.graph(graph, stream=capture, capture_error_mode="thread_local"):
            for i in range(self._calls):
                self._call(i)
        self._graph = graph

    def graph(self, replays: int) -> Times:
        """Time per call of the captured graph, one sample per replay. A first replay warms up and does not count."""
        assert self._graph is not None, "prepare() comes first"
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        stream = torch.cuda.current_stream(self._device)
        self._graph.replay()
        marks[0].record(stream)
        for mark in marks[1:]:
            self._graph.replay()
            mark.record(stream)
        stream.synchronize()
        return Times.of([1e3 * marks[i].elapsed_time(marks[i + 1]) / self._calls for i in range(replays)])

    def eager(self, calls: int) -> Times:
        """Time of single calls between events. The device is kept busy until all of them are queued."""
        stream = torch.cuda.current_stream(self._device)
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        torch.cuda._sleep(_HOLD_CYCLES_PER_CALL * calls)
        for i in range(calls):
            starts[i].record(stream)
            self._call(i)
            ends[i].record(stream)
        stream.synchronize()
        return Times.of([1e3 * start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)])


def timer(call: Call, calls: int, device: torch.device) -> HostTimer | DeviceTimer:
    return DeviceTimer(call, calls, device) if device.type == "cuda" else HostTimer(call, calls)


def slowest(times: list[Times]) -> Times:
    """The ranks' times as one: each number is the slowest rank's."""
    return Times(
        max(t.median for t in times), max(t.low for t in times), max(t.high for t in times), min(t.count for t in times)
    )
