"""All ranks of a measured call, wherever they run: threads of this process, or one process for each device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..mega.group import Group
from ..mega.local_world import LocalWorld
from ..mega.memory import refusing
from .check import CheckFailed

T = TypeVar("T")
_PATIENCE_S = 120.0


class World:
    """``size`` ranks of which ``ranks`` are in this process; one rank alone needs no thread of its own."""

    def __init__(self, size: int, group: Group | None = None) -> None:
        self.size, self._group = size, group
        self._world = LocalWorld(size) if size > 1 and group is None else None
        self.ranks = list(range(size)) if group is None else [group.rank]
        self.processes = 1 if group is None else size

    @property
    def leads(self) -> bool:
        """The process that speaks for all."""
        return self.ranks[0] == 0

    def run(self, action: Callable[[Any, int], T]) -> list[T]:
        """``action(group, rank)`` on every rank here; results in rank order."""
        if self._world is not None:
            found: list[T] = self._world.run(lambda group: action(group, group.rank), timeout_s=_PATIENCE_S)
            return found
        if self._group is None:
            return [action(None, 0)]
        group = self._group
        return [refusing(group, lambda: action(group, group.rank), "bench")]

    def together(self, action: Callable[[int], T]) -> list[T]:
        """`run` once all ranks have come here."""

        def one(group: Any, rank: int) -> T:
            if group is not None:
                group.barrier("bench: begin", _PATIENCE_S)
            return action(rank)

        return self.run(one)

    def gather(self, values: list[T]) -> list[T]:
        """Every rank's value from the values of the ranks here."""
        if self._group is None:
            return values
        found: list[T] = self._group.all_gather(values[0], "bench: gather", _PATIENCE_S)
        return found

    def agreed(self, action: Callable[[], list[T]]) -> list[T]:
        """Every rank's value from ``action()``, which gives one for each rank here; what fails in one process fails in
        all."""
        if self._group is None:
            return action()
        value, error = None, ""
        try:
            value = action()[0]
        except RuntimeError as failed:
            error = str(failed) or type(failed).__name__
        verdicts = self.gather([(value, error)])
        for _, said in verdicts:
            if said:
                raise CheckFailed(said)
        return [value for value, _ in verdicts]  # type: ignore[misc]

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
