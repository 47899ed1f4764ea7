"""A local world: several ranks inside one process, each acting from a thread of its own."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, Protocol

from ..arguments import check_int, refuse_value
from .group import Group, GroupError, GroupTimeout, Record, WrongThread, check_timeout, rank_list

# More than any buffer takes; each is a thread.
MAX_RANKS = 1024
# How often a wait looks at what its caller wants looked at.
_POLL_S = 0.02
# How long the other ranks may finish on their own after one has failed, before waits in their buffers are aborted.
_GRACE_S = 0.5


class Abortable(Protocol):
    """Something that can make its peers' waits end, as a buffer can."""

    def abort_peers(self, message: str) -> None: ...


class _World:
    """What the ranks of a local world share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition(threading.RLock())
        self.failed: dict[int, str] = {}  # why a rank comes to no further exchange of this run
        self.owners: list[threading.Thread | None] = [None] * size
        self.boards: dict[str, _Board] = {}
        self.watched: weakref.WeakSet[Any] = weakref.WeakSet()

    def board(self, name: str) -> _Board:
        with self.changed:
            return self.boards.setdefault(name, _Board(self, name))

    def fail(self, rank: int, reason: str) -> None:
        with self.changed:
            self.failed.setdefault(rank, reason)
            self.changed.notify_all()

    def restart(self) -> None:
        """Forget exchanges that a failed run left behind. Legal while no rank is in one."""
        with self.changed:
            self.failed.clear()
            for board in self.boards.values():
                board.restart()

    def claim(self, rank: int) -> None:
        """Make the calling thread the owner of `rank`, or raise when that is another living thread."""
        me = threading.current_thread()
        if self.owners[rank] is me:
            return
        with self.changed:
            owner = self.owners[rank]
            if owner is not None and owner.is_alive():
                raise WrongThread(
                    f"thread: wanted {owner.name!r}, which owns rank {rank} of the local world, given {me.name!r}",
                    (rank,),
                )
            other = next((r for r, thread in enumerate(self.owners) if thread is me), None)
            if other is not None:
                raise WrongThread(
                    f"thread: wanted one thread per rank, given {me.name!r} for rank {rank}, which already owns rank "
                    f"{other} of the local world",
                    (rank,),
                )
            self.owners[rank] = me


class _Board:
    """One sequence of exchanges: the records of those in flight."""

    def __init__(self, world: _World, name: str) -> None:
        self.world = world
        self.name = name
        self.records: dict[int, dict[int, Record]] = {}
        self.left: dict[int, int] = {}
        self.next_seq = [0] * world.size
        self.closed: set[int] = set()

    def post(self, seq: int, rank: int, record: Record) -> None:
        with self.world.changed:
            self.records.setdefault(seq, {})[rank] = record
            self.world.changed.notify_all()

    def wait(self, seq: int, deadline: float, poll: Callable[[], None] | None) -> Mapping[int, Record]:
        world = self.world
        with world.changed:
            while True:
                if poll is not None:
                    poll()
                seen = dict(self.records[seq])
                for rank, reason in world.failed.items():
                    seen.setdefault(rank, Record("failed", refusal=reason))
                remaining = deadline - time.monotonic()
                if len(seen) == world.size or any(r.refusal is not None for r in seen.values()) or remaining <= 0:
                    return seen
                world.changed.wait(remaining if poll is None else min(remaining, _POLL_S))

    def finish(self, seq: int) -> None:
        with self.world.changed:
            self.left[seq] = self.left.get(seq, 0) + 1
            if self.left[seq] == self.world.size:
                del self.left[seq], self.records[seq]

    def restart(self) -> None:
        self.records.clear()
        self.left.clear()
        self.next_seq = [max(self.next_seq)] * self.world.size

    def close(self, rank: int) -> None:
        with self.world.changed:
            self.closed.add(rank)
            if len(self.closed) == self.world.size:
                self.world.boards.pop(self.name, None)


class LocalRank(Group):
    """One rank of a `LocalWorld`. The first thread that uses it owns it."""

    def __init__(self, world: _World, rank: int, name: str = "") -> None:
        super().__init__(rank, world.size)
        self._world = world
        self._board = world.board(name)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"LocalRank({self.rank} of {self.size})"

    def check_thread(self) -> None:
        self._world.claim(self.rank)

    def channel(self, name: str) -> LocalRank:
        channel = LocalRank(self._world, self.rank, f"{self._board.name}/{name}")
        channel.timeout_s = self.timeout_s
        return channel

    def close(self) -> None:
        self._board.close(self.rank)

    def watch(self, buffer: Abortable) -> None:
        """Have the waits of `buffer` aborted when a rank fails and strands its peers. Holds no reference."""
        self._world.watched.add(buffer)

    def _turn(self) -> threading.Lock:
        return self._lock

    def _begin(self) -> int:
        seq = self._board.next_seq[self.rank]
        self._board.next_seq[self.rank] = seq + 1
        return seq

    def _post(self, seq: int, record: Record) -> None:
        self._board.post(seq, self.rank, record)

    def _wait(self, seq: int, deadline: float, poll: Callable[[], None] | None) -> Mapping[int, Record]:
        return self._board.wait(seq, deadline, poll)

    def _peek(self) -> Mapping[int, Record]:
        with self._world.changed:
            return dict(self._board.records.get(self._board.next_seq[self.rank], {}))

    def _finish(self, seq: int, complete: bool) -> None:
        self._board.finish(seq)


def _serve(tasks: queue.SimpleQueue[Any]) -> None:
    """A rank's thread: run tasks until None comes. Holds no reference to the world."""
    while (task := tasks.get()) is not None:
        task()
        del task


def _stop(queues: list[queue.SimpleQueue[Any]]) -> None:
    for tasks in queues:
        tasks.put(None)


class LocalWorld:
    """`size` ranks in this process. Index it for rank objects, or let `run` start a thread for each.

    A caller with threads of its own uses `world[rank]` in the thread that acts for that rank. The threads of `run`
    live as long as the world, so buffers made in one run can be used in the next.
    """

    def __init__(self, size: int) -> None:
        size = check_int("size", size, 1, MAX_RANKS)
        self._world = _World(size)
        self._ranks = tuple(LocalRank(self._world, rank) for rank in range(size))
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._running = threading.Lock()
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank: int) -> LocalRank:
        return self._ranks[rank]

    def __iter__(self) -> Iterator[LocalRank]:
        return iter(self._ranks)

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """Call `fn(rank, *args)` for every rank in its thread; give the results in rank order.

        The first exception of any rank is raised here after all ranks have ended; ranks that wait for the failed one
        are told, so none is stranded. When ranks are still running after `timeout_s`, `GroupTimeout` names them.
        """
        limit = check_timeout(timeout_s)
        if not callable(fn):
            raise refuse_value("fn", "a function of a rank", fn)
        if self._process != os.getpid():
            raise GroupError(
                "local world: wanted the process that made it, given one forked from it, without its threads"
            )
        if not self._running.acquire(blocking=False):
            raise GroupError("local world: wanted one run at a time, given a second one while the first goes on")
        try:
            self._start_threads()
            self._world.restart()
            order: list[BaseException] = []
            futures = [Future[Any]() for _ in self._ranks]
            for rank, future in enumerate(futures):
                self._queues[rank].put(self._task(rank, future, order, fn, args))
            self._join(futures, order, time.monotonic() + limit, limit)
            if order:
                raise order[0]
            return [future.result() for future in futures]
        finally:
            self._running.release()

    def close(self) -> None:
        """End the threads of `run`. The ranks stay usable from other threads."""
        _stop(self._queues)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._queues, self._threads = [], []

    def _start_threads(self) -> None:
        if self._threads:
            return
        self._queues = [queue.SimpleQueue() for _ in self._ranks]
        for rank, tasks in enumerate(self._queues):
            thread = threading.Thread(target=_serve, args=(tasks,), name=f"rank-{rank}", daemon=True)
            self._threads.append(thread)
            thread.start()
        weakref.finalize(self, _stop, self._queues)

    def _task(
        self, rank: int, future: Future[Any], order: list[BaseException], fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> Callable[[], None]:
        world, group = self._world, self._ranks[rank]

        def task() -> None:
            try:
                world.claim(rank)
                result = fn(group, *args)
            except BaseException as error:  # handed to the caller of run, SystemExit and KeyboardInterrupt too
                order.append(error)
                world.fail(rank, f"it ended with {type(error).__name__}: {error}")
                future.set_exception(error)
            else:
                world.fail(rank, "its part of this run has ended")
                future.set_result(result)

        return task

    def _join(self, futures: list[Future[Any]], order: list[BaseException], deadline: float, limit: float) -> None:
        wait(futures, timeout=max(0.0, deadline - time.monotonic()), return_when="FIRST_EXCEPTION")
        if order:
            wait(futures, timeout=_GRACE_S)
        running = [rank for rank, future in enumerate(futures) if not future.done()]
        if running:
            reason = f"{type(order[0]).__name__}: {order[0]}" if order else f"the run passed its {limit:g} s"
            if not order:
                for rank in running:
                    self._world.fail(rank, f"it was still running after {limit:g} s")
            for buffer in list(self._world.watched):
                buffer.abort_peers(f"a rank of the local world failed: {reason}")
            wait(futures, timeout=max(_GRACE_S, min(30.0, deadline - time.monotonic())))
        stuck = tuple(rank for rank, future in enumerate(futures) if not future.done())
        if stuck or (running and not order):
            late = stuck or tuple(running)
            error = GroupTimeout(f"local world: {rank_list(late)} still running after {limit:g} s", late)
            raise error from (order[0] if order else None)


def local_world(size: int) -> LocalWorld:
    """A world of `size` ranks in this process: `local_world(4).run(fn)` calls `fn(rank)` in four threads."""
    return LocalWorld(size)
