"""The emulator as the target of CPU tensors: one machine for all ranks of the process.

``deep_gemm_k3.ops`` and the plan decide that calls come here; this module sets how the machine behaves and tells what
it has seen.
"""

from __future__ import annotations

import json
from typing import Any

from deep_gemm_k3 import envs
from deep_gemm_k3.emulator._library import library
from deep_gemm_k3.emulator.device import ADVERSARIES


def configure(seed: int = 0, adversary: str = "random", race_detection: bool = False, quantum: int = 0) -> None:
    """Chooses the schedule of later calls. No call may be running."""
    if adversary not in ADVERSARIES:
        raise ValueError(f"adversary: wanted one of {', '.join(ADVERSARIES)}, given {adversary!r}")
    library().emulator_service_configure(seed, ADVERSARIES.index(adversary), int(race_detection), quantum)


def apply_environment() -> None:
    """Follows DGK3_EMULATOR_SEED, DGK3_EMULATOR_ADVERSARY and DGK3_EMULATOR_RACES where one of them is set."""
    knobs = (envs.EMULATOR_SEED, envs.EMULATOR_ADVERSARY, envs.EMULATOR_RACES)
    if any(knob.is_set() for knob in knobs):
        configure(envs.EMULATOR_SEED.get(), envs.EMULATOR_ADVERSARY.get(), envs.EMULATOR_RACES.get())


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
