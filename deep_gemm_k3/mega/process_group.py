"""A torch process group as a `Group`, over the key-value store that came with it.

No collective of the process group itself is used: with the store, time-outs, refusals and ended peers are ours to
report, and nothing on the device is touched. Keys live below the store prefix that torch gives each process group, so
overlapping groups do not meet. A record is removed by its writer once all ranks are known to have read it.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from .group import Group, GroupError, Record
from .processes import has_ended, identity

_POLL_FIRST_S = 0.0005
_POLL_LAST_S = 0.02
# How often a wait asks whether the processes it waits for still run.
_LIVENESS_S = 0.5


class _Channel:
    """One sequence of exchanges of a process group in this process."""

    def __init__(self, store: Any, rank: int, size: int, parent: _Channel | None = None) -> None:
        self.lock = threading.Lock()
        self.rank = rank
        self.size = size
        self._base = store
        self._parent = parent
        self._store: Any = None
        self._seq = 0
        self._posted: list[int] = []
        self._garbage: list[tuple[int, Any, str]] = []  # sequence number, store and key of closed channels' records

    @property
    def store(self) -> Any:
        """The store below a prefix that also counts set-ups of a group of this name on a store that outlives them."""
        if self._parent is not None:
            return self._base
        if self._store is None:
            life = self._base.add(f"deep_gemm_k3/opened/{self.rank}", 1)
            self._store = dist.PrefixStore(f"deep_gemm_k3/{life}", self._base)
            self._store.set(f"process/{self.rank}", identity())
        return self._store

    def child(self, name: str) -> _Channel:
        return _Channel(dist.PrefixStore(name, self.store), self.rank, self.size, self)

    def close(self) -> None:
        """Leave this channel's last records to the parent: peers may still read them."""
        parent = self._parent
        if parent is None:
            return
        parent._garbage += [(parent._seq, self._base, f"{seq}/{self.rank}") for seq in self._posted]
        self._posted.clear()

    def begin(self) -> int:
        self._seq += 1
        return self._seq

    def post(self, seq: int, record: Record) -> None:
        self.store.set(f"{seq}/{self.rank}", pickle.dumps(record))
        if seq not in self._posted:
            self._posted.append(seq)
        if record.refusal is not None:
            self.store.set(f"{seq}/refused", str(self.rank))

    def wait(self, seq: int, deadline: float, poll: Callable[[], None] | None) -> Mapping[int, Record]:
        keys = [f"{seq}/{rank}" for rank in range(self.size)]
        pause = _POLL_FIRST_S
        next_look = time.monotonic() + _LIVENESS_S
        while True:
            if self.store.check(keys):
                return {rank: self._read(key) for rank, key in enumerate(keys)}
            if self.store.check([f"{seq}/refused"]) or time.monotonic() >= deadline:
                return self._present(keys)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LIVENESS_S
                if ended := self._ended(keys):
                    return {**ended, **self._present(keys)}
            if poll is not None:
                poll()
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, _POLL_LAST_S)

    def peek(self) -> dict[int, Record]:
        """The records that there are of the exchange after this rank's last one."""
        return self._present([f"{self._seq + 1}/{rank}" for rank in range(self.size)])

    def finish(self, seq: int, complete: bool) -> None:
        """All ranks have posted `seq`, so all have left what came before it."""
        if not complete:
            return
        for old in [s for s in self._posted if s < seq]:
            self.store.delete_key(f"{old}/{self.rank}")
            if self.rank == 0:
                self.store.delete_key(f"{old}/refused")
            self._posted.remove(old)
        # A peer that has posted here since has left the exchanges of a channel that this rank had closed before.
        for old, store, key in [entry for entry in self._garbage if entry[0] < seq]:
            store.delete_key(key)
            self._garbage.remove((old, store, key))

    def _present(self, keys: list[str]) -> dict[int, Record]:
        return {rank: self._read(key) for rank, key in enumerate(keys) if self.store.check([key])}

    def _ended(self, keys: list[str]) -> dict[int, Record]:
        """A refusal in the place of each rank that has posted nothing and whose process has ended."""
        processes = (self._parent or self).store
        ended = {}
        for rank, key in enumerate(keys):
            who = f"process/{rank}"
            if self.store.check([key]) or not processes.check([who]):
                continue
            if has_ended(processes.get(who).decode()) and not self.store.check([key]):
                ended[rank] = Record("ended", refusal="its process has ended")
        return ended

    def _read(self, key: str) -> Record:
        record = pickle.loads(self.store.get(key))
        assert isinstance(record, Record)
        return record


# Weak keys, so that a new process group at the address of a dead one starts afresh.
_channels: weakref.WeakKeyDictionary[Any, _Channel] = weakref.WeakKeyDictionary()
_channels_lock = threading.Lock()


def _channel_of(group: Any) -> _Channel:
    from torch.distributed import distributed_c10d as c10d

    with _channels_lock:
        channel = _channels.get(group)
        if channel is None:
            channel = _Channel(c10d._get_process_group_store(group), group.rank(), group.size())
            _channels[group] = channel
        return channel


class ProcessGroupAdapter(Group):
    """One process of a torch process group, gloo or nccl."""

    def __init__(self, process_group: Any, channel: _Channel | None = None) -> None:
        super().__init__(process_group.rank(), process_group.size())
        self.process_group = process_group
        self._channel = channel or _channel_of(process_group)

    def __repr__(self) -> str:
        return f"ProcessGroupAdapter({self.rank} of {self.size}, {self.process_group.group_name!r})"

    @property
    def handle(self) -> object:
        return self.process_group

    @property
    def is_local(self) -> bool:
        """False for a single process too: what goes through the store comes back as a copy."""
        return False

    def check_thread(self) -> None:
        """Any thread of the process may act for its rank; exchanges take turns."""

    def channel(self, name: str) -> ProcessGroupAdapter:
        adapter = ProcessGroupAdapter(self.process_group, self._channel.child(name))
        adapter.timeout_s = self.timeout_s
        return adapter

    def close(self) -> None:
        self._channel.close()

    def _turn(self) -> threading.Lock:
        return self._channel.lock

    def _begin(self) -> int:
        return self._channel.begin()

    def _post(self, seq: int, record: Record) -> None:
        try:
            self._channel.post(seq, record)
        except dist.DistError as error:
            raise self._store_gone(record.tag, error) from error

    def _wait(self, seq: int, deadline: float, poll: Callable[[], None] | None) -> Mapping[int, Record]:
        try:
            return self._channel.wait(seq, deadline, poll)
        except dist.DistError as error:
            raise self._store_gone("wait", error) from error

    def _peek(self) -> Mapping[int, Record]:
        try:
            return self._channel.peek()
        except dist.DistError as error:
            raise self._store_gone("look", error) from error

    def _finish(self, seq: int, complete: bool) -> None:
        try:
            self._channel.finish(seq, complete)
        except dist.DistError as error:
            raise self._store_gone("clean-up", error) from error

    @staticmethod
    def _store_gone(tag: str, error: Exception) -> GroupError:
        return GroupError(
            f"{tag}: the process group's key-value store does not answer; the process that hosts it (usually "
            f"global rank 0) has probably ended: {error}"
        )


def wrap_process_group(group: Any) -> ProcessGroupAdapter | None:
    """An adapter for a process group, for the default one when `group` is None; None when there is nothing to wrap."""
    if not dist.is_available():
        return None
    if group is None:
        return ProcessGroupAdapter(dist.group.WORLD) if dist.is_initialized() else None
    if isinstance(group, dist.ProcessGroup):
        return ProcessGroupAdapter(group)
    return None
