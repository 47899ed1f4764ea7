"""Ranks in processes of their own, for tests: started from a warm parent, bounded, and each one's end reported."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

PATIENCE_S = 120.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "deep_gemm_k3.mega.buffer", "deep_gemm_k3.mega.first_call"])


@dataclass
class Outcome:
    """How a process ended: what it returned, or the traceback, or neither when it was killed."""

    value: Any = None
    error: str = ""
    exit_code: int | None = None


def run_ranks(body: Callable[..., Any], size: int, *args: Any) -> list[Outcome]:
    """Call the top-level function `body(rank, size, *args)` in `size` processes joined in a gloo group.

    The store lives in the calling process, so that any rank may be killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(size):
        here, there = _context.Pipe()
        process = _context.Process(target=_child, args=(there, body, store.port, rank, size, args), daemon=True)
        process.start()
        there.close()
        children.append((process, here))
    deadline = time.monotonic() + PATIENCE_S
    outcomes = [_outcome(here, deadline) for _, here in children]
    for (process, here), outcome in zip(children, outcomes, strict=True):
        here.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()
        outcome.exit_code = process.exitcode
        process.close()
    return outcomes


def results(body: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """`run_ranks` for bodies that must succeed everywhere: what they returned."""
    outcomes = run_ranks(body, size, *args)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0 and not outcome.error, f"rank {rank}: exit {outcome.exit_code}\n{outcome.error}"
    return [outcome.value for outcome in outcomes]


def _child(pipe: Connection, body: Callable[..., Any], port: int, rank: int, size: int, args: tuple[Any, ...]) -> None:
    outcome = Outcome()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE_S))
        outcome.value = body(rank, size, *args)
    except BaseException:
        outcome.error = traceback.format_exc()
    pipe.send(outcome)
    pipe.poll(PATIENCE_S)  # until all ranks are done: peers may still need this one's connections
    os._exit(0)  # no orderly end of gloo: peers may be dead


def _outcome(pipe: Connection, deadline: float) -> Outcome:
    try:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return Outcome(error=f"still running after {PATIENCE_S:g} s")
        outcome: Outcome = pipe.recv()
        return outcome
    except EOFError:
        return Outcome()  # it was killed
