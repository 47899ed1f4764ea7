"""Measured calls of all ranks: check, time, check again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ..mega.plan import Plan
from ..testing.oracle import RoutedInput
from .case import Case, Settings, pinned
from .check import CheckFailed, Expected, check_same, compare, expect, expert_rows
from .data import RankData, routed_input
from .timing import Timer, Times, interleaved, repeated, slowest, timer
from .work import Ceilings, Shape, work
from .world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How much is timed: ``calls`` in a captured graph, ``replays`` of it, ``eager`` single calls, for every seed.

    Graphs of long calls get fewer of them, at least three: no more than take some ``graph_us`` by the floor. Before each
    replay a device rests for ``rest_s``; 0: replays follow one another.
    """

    calls: int = 20
    replays: int = 7
    eager: int = 30
    seeds: tuple[int, ...] = (1, 2, 3)
    routing: str = "uniform"
    graph_us: float = 15_000.0
    rest_s: float = 0.2

    def calls_of(self, floor_us: float) -> int:
        return min(self.calls, max(3, int(self.graph_us / max(floor_us, 1e-3))))

    def rest_of(self, device: torch.device) -> float:
        """The seconds of rest on ``device``; the host has no clock that would recover."""
        return self.rest_s if device.type == "cuda" else 0.0


@dataclass(frozen=True)
class Samples:
    """What was found, one entry per seed."""

    graph: list[Times] = field(default_factory=list)
    eager: list[Times] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)


class Bench:
    """One shape on all ranks, measured in one mode after another. ``data`` holds every rank's weights."""

    def __init__(
        self, world: World, shape: Shape, data: Sequence[RankData], device: torch.device, how: Settings
    ) -> None:
        self.world, self.shape, self.device, self.how = world, replace(shape, ranks=world.size), device, how
        self.data = data
        self.cases: dict[int, Case] = {}
        self.renew()
        self._expected: dict[tuple[int, str], tuple[list[RoutedInput], dict[int, Expected]]] = {}

    def renew(self) -> None:
        """Buffers and outputs anew."""
        self.destroy()
        made = self.world.run(lambda group, rank: Case(group, self.shape, self.data[rank], self.device, self.how))
        self.cases = {case.rank: case for case in made}

    def destroy(self) -> None:
        if self.cases:
            self.together(lambda case: case.destroy())
            self.cases = {}

    def each(self, action: Callable[[Case], T]) -> list[T]:
        """On the ranks of this process, which need not wait for others."""
        return self.world.run(lambda _, rank: action(self.cases[rank]))

    def together(self, action: Callable[[Case], T]) -> list[T]:
        """`each` once all ranks have come to it."""
        return self.world.together(lambda rank: action(self.cases[rank]))

    def _inputs(self, seed: int, routing: str) -> tuple[list[RoutedInput], dict[int, Expected]]:
        """Every rank's tokens, and what the oracle makes of them; kept, since modes share both."""
        key = (seed, routing)
        if key not in self._expected:
            inputs = [routed_input(self.shape, seed, r, self.device, routing) for r in range(self.world.size)]
            own = {rank: inputs[rank] for rank in self.world.ranks}
            self._expected[key] = inputs, expect(self.shape, self.how.sample, self.data, own)
        return self._expected[key]

    def run_checked(self, seed: int, routing: str) -> tuple[float, list[list[torch.Tensor]]]:
        """New inputs, one call, the oracle's verdict: the error, and the outputs that later calls must repeat."""
        inputs, wanted = self._inputs(seed, routing)
        self.each(lambda case: case.renew_inputs(inputs[case.rank]))
        self.together(lambda case: case.call_and_settle())  # peers write into what was just cleared
        errors = self.world.agreed(lambda: [compare(case, wanted[rank]) for rank, case in self.cases.items()])
        return max(errors), [[t.clone() for t in case.outputs()] for case in self.cases.values()]

    def recheck(self, outputs: list[list[torch.Tensor]]) -> None:
        """The last call's results against those of the checked one."""
        self.each(lambda case: case.settle())

        def same() -> list[None]:
            for case, wanted in zip(self.cases.values(), outputs, strict=True):
                check_same(case, wanted)
            return [None] * len(outputs)

        self.world.agreed(same)

    def timers(self, mode: str, effort: Effort) -> dict[int, Timer]:
        floor = self._work(mode, *self._load(effort.seeds[0], effort.routing)).floor_us
        calls = effort.calls_of(floor)
        return {rank: timer(case.call, calls, self.device) for rank, case in self.cases.items()}

    def measure(self, mode: str, effort: Effort, ceilings: Ceilings | None = None) -> dict[str, Any]:
        """One record. Raises `CheckFailed` instead of giving a time for a wrong result."""
        plan = self.each(lambda case: case.use(mode))[0]
        timers, rest_s = self.timers(mode, effort), effort.rest_of(self.device)
        found = Samples()
        for seed in effort.seeds:
            error, outputs = self.run_checked(seed, effort.routing)
            found.errors.append(error)
            found.loads.append(self._load(seed, effort.routing))
            if len(found.errors) == 1:  # after the first call, which compiles
                self.each(lambda case: timers[case.rank].prepare())
            times = self.together(lambda case: repeated(timers[case.rank], effort.replays, rest_s))
            found.graph.append(slowest(self.world.gather(times)))
            self.recheck(outputs)
            if effort.eager:
                times = self.together(lambda case: timers[case.rank].eager(effort.eager))
                found.eager.append(slowest(self.world.gather(times)))
                self.recheck(outputs)
        return self._record(mode, plan, effort, found, ceilings)

    def in_turns(
        self, modes: Sequence[str], effort: Effort, rounds: int, beside: Mapping[str, Timer] = MappingProxyType({})
    ) -> dict[str, list[float]]:
        """Samples of all ``modes`` and of the prepared timers ``beside`` them, taken in turns; each is the slowest rank's.
        The modes are checked before and after."""
        timers: dict[str, dict[int, Timer]] = {}
        outputs = {}
        for mode in modes:
            self.each(lambda case, mode=mode: case.use(mode))  # type: ignore[misc]
            timers[mode] = self.timers(mode, effort)
            outputs[mode] = self.run_checked(effort.seeds[0], effort.routing)[1]
            self.each(lambda case, mode=mode: timers[mode][case.rank].prepare())  # type: ignore[misc]
        taken = self.together(
            lambda case: interleaved([*(timers[mode][case.rank] for mode in modes), *beside.values()], rounds)
        )
        for mode in modes:
            self.each(lambda case, mode=mode: case.use(mode))  # type: ignore[misc]
            self.each(lambda case: case.clear())
            self.together(lambda case, mode=mode: timers[mode][case.rank].queue())  # type: ignore[misc]
            self.recheck(outputs[mode])
        by_rank = self.world.gather(taken)
        return {
            mode: [max(samples) for samples in zip(*(ranks[i] for ranks in by_rank), strict=True)]
            for i, mode in enumerate((*modes, *beside))
        }

    def _load(self, seed: int, routing: str) -> tuple[int, int]:
        """Experts with rows, and rows, of the rank that has most."""
        inputs, _ = self._inputs(seed, routing)
        loads = [expert_rows(self.shape, rank, inputs) for rank in range(self.world.size)]
        return max(loads, key=lambda load: load[1])

    def _work(self, mode: str, experts: int, rows: int, ceilings: Ceilings | None = None) -> Any:
        shape = self.shape if mode != "routed" else replace(self.shape, shared_tokens=0)
        return work(shape, experts, rows, ceilings)

    def _record(
        self, mode: str, plan: Plan, effort: Effort, found: Samples, ceilings: Ceilings | None
    ) -> dict[str, Any]:
        shape = self.shape if mode != "routed" else replace(self.shape, shared_tokens=0)
        us = statistics.median(t.median for t in found.graph)
        experts, rows = (round(statistics.mean(load[i] for load in found.loads)) for i in range(2))
        return {
            "mode": mode,
            "shape": asdict(shape),
            "processes": self.world.processes,
            "routing": effort.routing,
            "seeds": list(effort.seeds),
            "rest_s": effort.rest_of(self.device),
            "copies": len(next(iter(self.cases.values())).data.routed),
            "checked": True,
            "relative_error": max(found.errors),
            "us": us,
            "graph": [asdict(t) for t in found.graph],
            "eager_us": statistics.median(t.median for t in found.eager) if found.eager else None,
            "eager": [asdict(t) for t in found.eager],
            "experts_hit": experts,
            "rows": rows,
            "work": self._work(mode, experts, rows, ceilings).row(us),
            "plan": {**pinned(plan), "grid": plan.data["grid"]},
        }


__all__ = ["Bench", "CheckFailed", "Effort", "World"]
