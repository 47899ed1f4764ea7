"""A job in one process per device: every process runs the same code, the first one prints and keeps the records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..mega.group import as_group
from ..testing.processes import ProcessWorld
from . import jobs, report

_LIMIT_S = 3600.0
_JOBS: dict[str, Callable[..., report.Run]] = {"producer": jobs.producer, "sweep": jobs.sweep}

Failures = list[dict[str, Any]]


def launch(
    size: int, name: str, arguments: tuple[Any, ...], setting: jobs.Setting, more: tuple[Any, ...] = ()
) -> list[Failures]:
    """The job ``name`` on ``size`` devices, on CPU in as many processes: ``name(*arguments, setting, *more)``. Gives what
    each rank has no time for."""
    with ProcessWorld(size, "nccl" if setting.device.type == "cuda" else "gloo") as world:
        return world.run(_body, name, arguments, setting, more, timeout_s=_LIMIT_S)


def _body(
    rank: int, size: int, name: str, arguments: tuple[Any, ...], setting: jobs.Setting, more: tuple[Any, ...]
) -> Failures:
    device = torch.device("cuda", rank) if setting.device.type == "cuda" else setting.device
    own = replace(setting, device=device, group=as_group(None))
    if rank > 0:
        own = replace(own, say=_nothing, json_path=None, plot_path=None)
    return _JOBS[name](*arguments, own, *more).failures


def _nothing(line: str) -> None:
    """Only one process speaks."""
