"""Measured calls of all ranks of a local world: check, time, check again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch

from ..mega.local_world import LocalWorld
from ..mega.plan import Plan
from .case import Case, CheckFailed, Settings, check_against_oracle, check_same, pinned
from .data import RankData, routed_input
from .timing import Times, slowest, timer
from .work import Ceilings, Shape, work

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How much is timed: ``calls`` in a captured graph, ``replays`` of it, ``eager`` single calls, for every seed."""

    calls: int = 20
    replays: int = 7
    eager: int = 30
    seeds: tuple[int, ...] = (1, 2, 3)
    routing: str = "uniform"


@dataclass(frozen=True)
class Samples:
    """What was found, one entry per seed."""

    graph: list[Times] = field(default_factory=list)
    eager: list[Times] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)


class World:
    """All ranks in this process; one rank needs no thread of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._world = LocalWorld(size) if size > 1 else None

    def run(self, action: Callable[[Any, int], T]) -> list[T]:
        """``action(group, rank)`` on every rank; results in rank order."""
        if self._world is None:
            return [action(None, 0)]
        results: list[T] = self._world.run(lambda group: action(group, group.rank), timeout_s=120.0)
        return results

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


class Bench:
    """One shape on all ranks, measured in one mode after another."""

    def __init__(
        self, world: World, shape: Shape, data: Sequence[RankData], device: torch.device, how: Settings
    ) -> None:
        self.world, self.shape, self.device, self.how = world, replace(shape, ranks=world.size), device, how
        self.cases = world.run(lambda group, rank: Case(group, self.shape, data[rank], device, how))

    def destroy(self) -> None:
        self.world.run(lambda _, rank: self.cases[rank].destroy())

    def _each(self, action: Callable[[Case], T]) -> list[T]:
        """On all ranks, which come together before and after."""

        def one(group: Any, rank: int) -> T:
            case = self.cases[rank]
            if group is not None:
                group.barrier("bench: begin")
            result = action(case)
            if group is not None:
                group.barrier("bench: end")
            return result

        return self.world.run(one)

    def run_checked(self, seed: int, routing: str) -> tuple[float, list[list[torch.Tensor]]]:
        """New inputs, one call, the oracle's verdict: the error, and the outputs that later calls must repeat."""
        shape, device = self.shape, self.device
        self._each(lambda case: case.fill(routed_input(shape, seed, case.rank, device, routing)))
        self._each(lambda case: case.clear())
        self._each(lambda case: case.settle())
        self._each(lambda case: case.call_and_settle())
        error = check_against_oracle(self.cases)
        return error, [[t.clone() for t in case.outputs()] for case in self.cases]

    def _recheck(self, outputs: list[list[torch.Tensor]]) -> None:
        self._each(lambda case: case.settle())
        for case, wanted in zip(self.cases, outputs, strict=True):
            check_same(case, wanted)

    def measure(self, mode: str, effort: Effort, ceilings: Ceilings | None = None) -> dict[str, Any]:
        """One record. Raises `CheckFailed` instead of giving a time for a wrong result."""
        plan = self._each(lambda case: case.use(mode))[0]
        timers = [timer(case.call, effort.calls, self.device) for case in self.cases]
        found = Samples()
        for seed in effort.seeds:
            error, outputs = self.run_checked(seed, effort.routing)
            found.errors.append(error)
            inputs = [case.input for case in self.cases if case.input is not None]
            found.loads.append(max((case.expert_rows(inputs) for case in self.cases), key=lambda load: load[1]))
            if len(found.errors) == 1:  # after the first call, which compiles
                self._each(lambda case: timers[case.rank].prepare())
            found.graph.append(slowest(self._each(lambda case: timers[case.rank].graph(effort.replays))))
            self._recheck(outputs)
            if effort.eager:
                found.eager.append(slowest(self._each(lambda case: timers[case.rank].eager(effort.eager))))
                self._recheck(outputs)
        return self._record(mode, plan, effort, found, ceilings)

    def _record(
        self,
        mode: str,
        plan: Plan,
        effort: Effort,
        found: Samples,
        ceilings: Ceilings | None,
    ) -> dict[str, Any]:
        shape = self.shape if mode != "routed" else replace(self.shape, shared_tokens=0)
        us = statistics.median(t.median for t in found.graph)
        experts, rows = (round(statistics.mean(load[i] for load in found.loads)) for i in range(2))
        return {
            "mode": mode,
            "shape": asdict(shape),
            "routing": effort.routing,
            "seeds": list(effort.seeds),
            "copies": len(self.cases[0].data.routed),
            "checked": True,
            "relative_error": max(found.errors),
            "us": us,
            "graph": [asdict(t) for t in found.graph],
            "eager_us": statistics.median(t.median for t in found.eager) if found.eager else None,
            "eager": [asdict(t) for t in found.eager],
            "experts_hit": experts,
            "rows": rows,
            "work": work(shape, experts, rows, ceilings).row(us),
            "plan": {**pinned(plan), "grid": plan.data["grid"]},
        }


__all__ = ["Bench", "CheckFailed", "Effort", "World"]
