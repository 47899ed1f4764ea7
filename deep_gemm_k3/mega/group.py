"""Groups of ranks: who takes part in a buffer, and how its ranks talk on the host.

Three kinds share one interface: a rank on its own (`SingleRank`), one of several ranks inside this process
(`LocalRank`, see `local_world`), and one process of a torch process group (`ProcessGroupAdapter`).

The only host traffic is an exchange: every rank posts one record under the next sequence number and waits until all
have. A rank that cannot go on posts a refusal in place of its record, so that its peers raise at once instead of
waiting, and the sequence numbers of all ranks stay equal. Every wait has a limit; its error names the missing ranks.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .. import envs
from ..arguments import is_number, refuse_value


class GroupError(RuntimeError):
    """A collective of a group failed. `ranks` are the ranks that caused it."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class GroupTimeout(GroupError, TimeoutError):
    """Some ranks did not arrive in time."""


class GroupRefused(GroupError):
    """A rank took part only to say that it cannot go on."""


class GroupMismatch(GroupError):
    """Ranks are in different collectives, or passed values that must be equal and are not."""


class WrongThread(GroupError):
    """A rank of a local world was used from a thread that does not own it."""


class Unique:
    """Stands for something that peers know this rank by: neither copied nor sent to another process."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name}: wanted to be used where it was made, given to copy or pickle")


@dataclass(frozen=True)
class Record:
    """What one rank posts in an exchange: a payload, or the reason why it gives up."""

    tag: str
    payload: Any = None
    refusal: str | None = None


def check_timeout(timeout_s: float) -> float:
    """Return `timeout_s` if it is a finite positive number, else raise."""
    if not is_number(timeout_s) or not 0 < timeout_s < 1e9:
        raise refuse_value("timeout_s", "a number of seconds above 0 and below 1e9", timeout_s)
    return float(timeout_s)


def rank_list(ranks: tuple[int, ...]) -> str:
    """`rank 3` or `ranks 1, 3`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Group(Unique, ABC):
    """One rank's view of a group of ranks. `timeout_s` limits every wait that names no limit of its own."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank: wanted 0..{size - 1}, given {rank}")
        self.rank = rank
        self.size = size
        self.timeout_s = envs.TIMEOUT_S.get()

    @property
    def handle(self) -> object:
        """What the caller passed to `as_group`; this object unless it wraps another one."""
        return self

    @property
    def is_local(self) -> bool:
        """True when all ranks are in this process."""
        return True

    @abstractmethod
    def check_thread(self) -> None:
        """Raise `WrongThread` when the calling thread may not act for this rank."""

    @abstractmethod
    def channel(self, name: str) -> Group:
        """The same ranks with a sequence of exchanges of their own, for one purpose that all ranks name alike."""

    @abstractmethod
    def close(self) -> None:
        """This rank will not use the group, or channel, again. Not a collective."""

    def all_gather(
        self, obj: Any, tag: str, timeout_s: float | None = None, poll: Callable[[], None] | None = None
    ) -> list[Any]:
        """Give every rank's `obj`, in rank order. Ranks in one process share objects, others receive copies.

        `poll` is called now and then while waiting; what it raises ends the wait.
        """
        self.check_thread()
        limit = check_timeout(self.timeout_s if timeout_s is None else timeout_s)
        with self._turn():
            return [record.payload for record in self._exchange(Record(tag, obj), limit, poll)]

    def barrier(self, tag: str, timeout_s: float | None = None, poll: Callable[[], None] | None = None) -> None:
        """Return when every rank has come here."""
        self.all_gather(None, tag, timeout_s, poll)

    def refuse(self, message: str) -> None:
        """Take part in the next exchange by giving up: peers that wait in it, or come to it, raise at once."""
        self.check_thread()
        with self._turn():
            seq = self._begin()
            self._post(seq, Record("refusal", refusal=message))
            self._finish(seq, complete=False)

    def present(self) -> dict[int, Any]:
        """What peers have posted in the next exchange, to which this rank has not come. Waits for nothing."""
        return {rank: record.payload for rank, record in self._peek().items() if record.refusal is None}

    def _exchange(self, record: Record, timeout_s: float, poll: Callable[[], None] | None) -> list[Record]:
        seq = self._begin()
        complete = False
        try:
            self._post(seq, record)
            started = time.monotonic()
            seen = self._wait(seq, started + timeout_s, poll)
            refused = sorted(r for r, peer in seen.items() if peer.refusal is not None)
            if refused:
                reason = seen[refused[0]].refusal
                raise GroupRefused(f"{record.tag}: {rank_list((refused[0],))} cannot go on: {reason}", tuple(refused))
            missing = tuple(r for r in range(self.size) if r not in seen)
            if missing:
                reason = f"gave up after {time.monotonic() - started:.1f} s of waiting for {rank_list(missing)}"
                self._post(seq, Record(record.tag, refusal=reason))
                raise GroupTimeout(f"{record.tag}: rank {self.rank} {reason}", missing)
            complete = True
        finally:
            self._finish(seq, complete)
        self._check_tags(record, seen)
        return [seen[r] for r in range(self.size)]

    def _check_tags(self, own: Record, seen: Mapping[int, Record]) -> None:
        for rank, record in sorted(seen.items()):
            if record.tag != own.tag:
                raise GroupMismatch(
                    f"collective order: rank {self.rank} is in {own.tag!r}, rank {rank} in {record.tag!r}", (rank,)
                )

    @abstractmethod
    def _turn(self) -> threading.Lock | threading.RLock:  # type: ignore[valid-type]
        """The lock that keeps two threads of one rank out of each other's exchange."""

    @abstractmethod
    def _begin(self) -> int:
        """The sequence number of this rank's next exchange."""

    @abstractmethod
    def _post(self, seq: int, record: Record) -> None:
        """Show this rank's record to all ranks, replacing an earlier one of the same exchange."""

    @abstractmethod
    def _wait(self, seq: int, deadline: float, poll: Callable[[], None] | None) -> Mapping[int, Record]:
        """The records present when all have come, when one is a refusal, or at the deadline."""

    @abstractmethod
    def _peek(self) -> Mapping[int, Record]:
        """The records that there are of the exchange that `_begin` would number next."""

    @abstractmethod
    def _finish(self, seq: int, complete: bool) -> None:
        """Called once per exchange when this rank leaves it; `complete` when every rank has posted."""


class SingleRank(Group):
    """A group of one."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._lock = threading.Lock()
        self._record: Record | None = None

    def check_thread(self) -> None:
        """Any thread may act for the only rank."""

    def channel(self, name: str) -> SingleRank:
        return SingleRank()

    def close(self) -> None:
        """Nothing is held."""

    def _turn(self) -> threading.Lock:
        return self._lock

    def _begin(self) -> int:
        return 0

    def _post(self, seq: int, record: Record) -> None:
        self._record = record

    def _wait(self, seq: int, deadline: float, poll: Callable[[], None] | None) -> Mapping[int, Record]:
        assert self._record is not None
        return {0: self._record}

    def _peek(self) -> Mapping[int, Record]:
        return {}

    def _finish(self, seq: int, complete: bool) -> None:
        self._record = None


def check_equal(gathered: list[Mapping[str, Any]], tag: str) -> None:
    """Raise `GroupMismatch`, naming field and both values, unless all ranks' fields are equal."""
    absent = "nothing"
    for name in dict.fromkeys(name for fields in gathered for name in fields):
        first = gathered[0].get(name, absent)
        for rank, fields in enumerate(gathered):
            given = fields.get(name, absent)
            if given != first:
                raise GroupMismatch(
                    f"{tag}: {name} must be equal on all ranks, rank 0 gave {first!r}, rank {rank} gave {given!r}",
                    (rank,),
                )


def as_group(group: object = None) -> Group:
    """Turn what callers pass as a group into a `Group`.

    A `Group` is returned as it is; a torch process group is wrapped. None means, as in torch, the default process
    group, and a group of one where none was set up. Starts no communication.
    """
    if isinstance(group, Group):
        return group
    from .process_group import wrap_process_group  # torch.distributed is loaded only where it is needed

    if (wrapped := wrap_process_group(group)) is not None:
        return wrapped
    if group is None:
        return SingleRank()
    raise TypeError(
        "group: wanted a torch.distributed process group that this process belongs to, a rank of a local world "
        f"or None, given {type(group).__name__}"
    )
