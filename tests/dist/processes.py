"""Ranks in processes of their own, for tests: started from a warm parent, bounded, and each one's end reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deep_gemm_k3.testing.processes import START_S, ProcessWorld, run_ranks

PATIENCE_S = START_S
__all__ = ["PATIENCE_S", "results", "run_ranks"]


def results(body: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """`body(rank, size, *args)` in fresh processes, where it must succeed everywhere: what they returned."""
    with ProcessWorld(size) as world:
        return world.run(body, *args)
