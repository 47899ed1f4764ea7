"""The emulator as the target of CPU tensors: one machine for all ranks of the process.

``deep_gemm_k3.ops`` and the plan decide that calls come here; this module sets how the machine behaves and tells what
it has seen.
"""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from deep_gemm_k3 import envs
from deep_gemm_k3.arguments import (
    check_bool,
    check_choice,
    check_int,
    check_output,
    check_text,
    is_number,
    refuse_value,
)
from deep_gemm_k3.emulator._library import library
from deep_gemm_k3.emulator.device import ADVERSARIES

log = logging.getLogger("deep_gemm_k3")

# Warps of a CTA of the fused kernel, in order; the last one exists on sm_100a only.
PACKAGE_ROLES = "math*8,producer,dispatch*3,issue"


def configure(
    seed: int = 0, adversary: str = "random", race_detection: bool = False, quantum: int = 0, patience_s: float = 0.0
) -> None:
    """Chooses the schedule of later calls. No call may be running.

    A kernel that waits for ranks outside this process, or not yet in a call, is given up as deadlocked when it has had no
    effect for ``patience_s``; 0: for four times the time-out of its call, and some more.
    """
    check_choice("adversary", adversary, ADVERSARIES)
    if not is_number(patience_s) or not 0 <= patience_s < 1e9:
        raise refuse_value("patience_s", "seconds in 0..1e9", patience_s)
    library().emulator_service_configure(
        check_int("seed", seed, 0, 2**64 - 1),
        ADVERSARIES.index(adversary),
        int(check_bool("race_detection", race_detection)),
        check_int("quantum", quantum, 0, 2**32 - 1),
        int(patience_s * 1e9),
    )


@cache
def _observe_once() -> None:
    """Roles from the first kernel on, and a trace of the process's calls where DGK3_EMULATOR_TRACE names a file. Raises
    ``ValueError`` where it names no file that can be written."""
    path = envs.EMULATOR_TRACE.get()
    if path:
        check_output(envs.EMULATOR_TRACE.name, path)
    observe(trace=bool(path))
    if path:
        atexit.register(_write_trace, path)


def apply_environment() -> None:
    """Follows the variables DGK3_EMULATOR_* where one of them is set."""
    _observe_once()
    knobs = (envs.EMULATOR_SEED, envs.EMULATOR_ADVERSARY, envs.EMULATOR_RACES)
    if any(knob.is_set() for knob in knobs):
        configure(envs.EMULATOR_SEED.get(), envs.EMULATOR_ADVERSARY.get(), envs.EMULATOR_RACES.get())


def observe(trace: bool = False, roles: str = PACKAGE_ROLES) -> None:
    """Names the roles of a CTA's warps and says whether to keep a trace, from the next call on."""
    check_bool("trace", trace)
    if not library().emulator_service_observe(check_text("roles", roles).encode(), int(trace)):
        raise ValueError(f"roles: wanted name*count,name,..., given {roles!r}")


class Ownership:
    """Memory that rank r of a group has at ``bases[r]``: what other ranks read or write there counts as a peer's, as long as
    this object lives."""

    def __init__(self, bases: Sequence[int], num_bytes: int) -> None:
        self._bases = list(bases)
        self._tell = library().emulator_service_own
        for rank, base in enumerate(self._bases):
            self._tell(base, num_bytes, rank)

    def __del__(self) -> None:
        for base in self._bases:
            self._tell(base, 0, 0)


def trace() -> str:
    """What calls did since the last ``clear`` or ``trace``, as JSON for Chrome's or Perfetto's viewer."""
    return bytes(library().emulator_service_trace()).decode()


def _write_trace(path: str) -> None:
    try:
        Path(path).write_text(trace())
    except OSError as error:  # at exit nobody is left to catch it
        log.error("%s: %s could not be written: %s", envs.EMULATOR_TRACE.name, path, error.strerror or error)


def report() -> dict[str, Any]:
    """Findings, counters and printed text since the last ``clear``."""
    found: dict[str, Any] = json.loads(library().emulator_service_report())
    return found


def clear() -> None:
    library().emulator_service_clear()


def record(on: bool) -> None:
    """Starts keeping what every launch is given, dropping what was kept; or stops."""
    library().emulator_service_record(int(on))


def recorded() -> list[dict[str, Any]]:
    """The launches since ``record``, in the order in which they came: kernel, entry, grid, block, cluster, shared_bytes,
    rank and params (hexadecimal)."""
    launches: list[dict[str, Any]] = json.loads(library().emulator_service_recorded())
    return launches
