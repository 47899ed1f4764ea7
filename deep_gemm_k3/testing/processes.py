"""Ranks in processes of their own, for tests and benchmarks: started from a warm parent, every wait bounded, and each
one's end reported.

    with ProcessWorld(2, "nccl") as world:           # rank r on CUDA device r
        values = world.run(body, 3, timeout_s=60.0)  # body(rank, size, 3) in both, for a top-level function

The processes stay for further runs, so what a body keeps in its module is there for the next one.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from typing import Any

import torch
import torch.distributed as dist

from .. import envs

START_S = 120.0
# How long ranks may go on after one has failed: their own limits end them, with a better report than a kill.
GRACE_S = 30.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "deep_gemm_k3.testing.runner", "deep_gemm_k3.mega.first_call"])


def warm_up() -> None:
    """Start what processes are forked from; its imports go on while the caller does something else."""
    forkserver.ensure_running()


@dataclass
class Outcome:
    """What a rank made of a run: what it returned, or the traceback, or neither when its process ended."""

    value: Any = None
    error: str = ""
    exit_code: int | None = None


class RanksFailed(RuntimeError):
    """Some ranks raised, ended or did not finish; the text has every one's traceback."""


@dataclass(frozen=True)
class _Place:
    """What a rank is told when its process starts."""

    rank: int
    size: int
    port: int
    executor: str  # the fork server remembers the environment of its own start
    device: int | None  # None: gloo on the CPU
    is_hidden: bool  # the process sees no other device


@dataclass
class _Child:
    process: Any
    pipe: connection.Connection
    is_done: bool = False  # nothing more comes from it


class ProcessWorld:
    """``size`` processes joined in a process group of ``backend``; with nccl rank r uses CUDA device ``devices[r]`` (None:
    device r), and sees no other one if they are ``hidden``.

    The store lives in the calling process, so that any rank may be killed.
    """

    def __init__(
        self, size: int, backend: str = "gloo", *, devices: Sequence[int] | None = None, hidden: bool = False
    ) -> None:
        self.size = size
        chosen = (devices or range(size)) if backend == "nccl" else [None] * size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._children: list[_Child] = []
        for rank in range(size):
            here, there = _context.Pipe()
            place = _Place(rank, size, self._store.port, envs.CPU_EXECUTOR.get(), chosen[rank], hidden)
            process = _context.Process(target=_serve, args=(there, place), daemon=True, name=f"rank-{rank}")
            process.start()
            there.close()
            self._children.append(_Child(process, here))

    def __enter__(self) -> ProcessWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_usable(self) -> bool:
        """Whether every rank can take part in another run."""
        return bool(self._children) and not any(child.is_done for child in self._children)

    def outcomes(self, body: Callable[..., Any], *args: Any, timeout_s: float = START_S) -> list[Outcome]:
        """Call ``body(rank, size, *args)`` in every process, which sends back what it returns; never raises for a rank.

        Ranks still running after ``timeout_s``, or `GRACE_S` after another one's failure, are killed.
        """
        if not self.is_usable:
            raise RanksFailed(
                "process world: wanted one whose ranks all live, given one that was closed or lost a rank"
            )
        task = pickle.dumps((body, args))
        for child in self._children:
            try:
                child.pipe.send_bytes(task)
            except OSError:
                child.is_done = True
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < self.size:
            waiting = {child.pipe: rank for rank, child in enumerate(self._children) if rank not in found}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                found[rank] = self._receive(rank)
                if found[rank].error or found[rank].exit_code is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in [r for r in range(self.size) if r not in found]:
            self._end(rank)
            found[rank] = Outcome(error=f"killed: still running after {timeout_s:g} s or a peer's failure")
        return [found[rank] for rank in range(self.size)]

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = START_S) -> list[Any]:
        """`outcomes` for bodies that must succeed everywhere: what they returned, in rank order."""
        outcomes = self.outcomes(body, *args, timeout_s=timeout_s)
        bad = [(r, o) for r, o in enumerate(outcomes) if o.error or o.exit_code is not None]
        if bad:
            raise RanksFailed("\n".join(f"rank {r}: exit code {o.exit_code}\n{o.error}" for r, o in bad))
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End all processes; those that do not end by themselves at once are killed."""
        for child in self._children:
            try:
                child.pipe.send_bytes(pickle.dumps(None))
            except OSError:
                child.is_done = True
        for rank in range(len(self._children)):
            self._end(rank, patience_s=2.0)
            self._children[rank].process.close()
        self._children = []

    def _receive(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self._children[rank].pipe.recv_bytes())
            return outcome
        except (EOFError, OSError):
            return Outcome(exit_code=self._end(rank, patience_s=5.0))

    def _end(self, rank: int, patience_s: float = 0.0) -> int | None:
        child = self._children[rank]
        child.is_done = True
        child.process.join(patience_s)
        if child.process.is_alive():
            child.process.kill()
            child.process.join(10.0)
        child.pipe.close()
        code: int | None = child.process.exitcode
        return code


def run_ranks(body: Callable[..., Any], size: int, *args: Any, timeout_s: float = START_S) -> list[Outcome]:
    """One run in fresh gloo processes."""
    with ProcessWorld(size) as world:
        return world.outcomes(body, *args, timeout_s=timeout_s)


def _serve(pipe: connection.Connection, place: _Place) -> None:
    """A rank's process: run tasks until None comes or the parent is gone."""
    failure = ""
    try:
        _join(place)
    except BaseException:
        failure = traceback.format_exc()
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        outcome = Outcome(error=failure)
        if not failure:
            try:
                unpickled = pickle.loads(task)
                if unpickled is None:
                    break
                body, args = unpickled
                outcome.value = body(place.rank, place.size, *args)
            except BaseException:
                outcome.error = traceback.format_exc()
        with contextlib.suppress(OSError):  # nobody reads on
            sys.stdout.flush()  # before the caller goes on; the process's abrupt end drops what is held back
        try:
            reply = pickle.dumps(outcome)
        except Exception:
            reply = pickle.dumps(Outcome(error=traceback.format_exc()))
        pipe.send_bytes(reply)
    os._exit(0)  # no orderly end of the process group: peers may be dead


def _join(place: _Place) -> None:
    envs.CPU_EXECUTOR.set(place.executor)
    if place.device is not None:
        envs.prepare_cuda_rank(place.device if place.is_hidden else None)
        torch.cuda.set_device(0 if place.is_hidden else place.device)
    patience = timedelta(seconds=START_S)
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=patience)
    backend = "gloo" if place.device is None else "nccl"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=patience)
