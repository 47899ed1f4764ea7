"""Timing of queued work: a captured graph of many calls, and calls queued one by one between events."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[int], None]
"""Queues call number ``i``."""

# What torch does to begin a capture (it waits for the device) is not allowed while another rank's thread captures.
_capturing = threading.Lock()
_HOLD_CYCLES_PER_CALL = 60_000  # keeps the device busy while the host queues: some 30 us a call
_HOLD_CALLS_PER_SAMPLE = 10  # for two replays and two events by a host that has just slept


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


class Timer(Protocol):
    """A batch of calls that can be queued again and again."""

    def prepare(self) -> None:
        """Whatever the batch needs once; the calls' own first time lies before it."""

    def queue(self) -> None:
        """Queue the whole batch."""

    def mark(self) -> Any:
        """A moment in the order of the queue."""

    def between(self, begin: Any, end: Any) -> float:
        """Microseconds per call of a batch that lies between two marks, once `settle` has returned."""

    def settle(self) -> None:
        """Wait for what was queued."""

    def hold(self, calls: int) -> None:
        """Keep the device busy for as long as the host takes to queue so many calls or replays."""

    def eager(self, calls: int) -> Times:
        """Single calls."""


class HostTimer:
    """Runs calls where there is no device: the wall clock around each."""

    def __init__(self, call: Call, calls: int) -> None:
        self._call, self._calls = call, calls

    def prepare(self) -> None:
        pass

    def queue(self) -> None:
        for i in range(self._calls):
            self._call(i)

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, begin: float, end: float) -> float:
        return 1e6 * (end - begin) / self._calls

    def settle(self) -> None:
        pass

    def hold(self, calls: int) -> None:
        pass

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
        with _capturing, torch.cuda.graph(graph, stream=capture, capture_error_mode="thread_local"):
            for i in range(self._calls):
                self._call(i)
        self._graph = graph

    def queue(self) -> None:
        assert self._graph is not None, "prepare() comes first"
        self._graph.replay()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return 1e3 * begin.elapsed_time(end) / self._calls

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def hold(self, calls: int) -> None:
        torch.cuda._sleep(_HOLD_CYCLES_PER_CALL * calls)

    def eager(self, calls: int) -> Times:
        """Time of single calls between events. The device is kept busy until all of them are queued."""
        stream = torch.cuda.current_stream(self._device)
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        self.hold(calls)
        for i in range(calls):
            starts[i].record(stream)
            self._call(i)
            ends[i].record(stream)
        stream.synchronize()
        return Times.of([1e3 * start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)])


def timer(call: Call, calls: int, device: torch.device) -> Timer:
    return DeviceTimer(call, calls, device) if device.type == "cuda" else HostTimer(call, calls)


def interleaved(timers: Sequence[Timer], rounds: int) -> list[list[float]]:
    """Samples of every timer, taken in turns: what drifts (clocks, temperature) is common to all.

    Every second round goes backwards, and a first one warms up and does not count.
    """
    marks: list[list[tuple[Any, Any]]] = [[] for _ in timers]
    for number in range(rounds + 1):
        order = range(len(timers)) if number % 2 else reversed(range(len(timers)))
        for i in order:
            begin = timers[i].mark()
            timers[i].queue()
            marks[i].append((begin, timers[i].mark()))
    timers[0].settle()
    return [[t.between(*pair) for pair in pairs[1:]] for t, pairs in zip(timers, marks, strict=True)]


def repeated(timed: Timer, replays: int, rest_s: float) -> Times:
    """One timer's batch, ``replays`` times, each after a rest and a batch that does not count.

    A device at its power limit lowers its clock within milliseconds, so batches back to back (``rest_s`` 0: all of them
    after a first one that does not count) tell how long it was idle before and how many there are. Ranks rest each by
    itself; the batch that does not count brings them together, and caches and clocks to work.
    """
    if not rest_s:
        return Times.of(interleaved([timed], replays)[0])
    marks = []
    for _ in range(replays):
        timed.settle()
        time.sleep(rest_s)
        timed.hold(_HOLD_CALLS_PER_SAMPLE)  # else a short batch could end before the next one is queued
        timed.queue()
        begin = timed.mark()
        timed.queue()
        marks.append((begin, timed.mark()))
    timed.settle()
    return Times.of([timed.between(*pair) for pair in marks])


def slowest(times: list[Times]) -> Times:
    """The ranks' times as one: each number is the slowest rank's."""
    return Times(
        max(t.median for t in times), max(t.low for t in times), max(t.high for t in times), min(t.count for t in times)
    )
