"""Integer helpers of the host code, and upstream's import path for the quantisers."""

from __future__ import annotations

from typing import Any

_QUANTIZERS = ("per_token_cast_to_fp8", "per_token_cast_to_fp4")


def ceil_div(x: int, y: int) -> int:
    """Smallest integer that is at least ``x / y``; ``y`` is positive."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Smallest multiple of ``y`` that is at least ``x``."""
    return ceil_div(x, y) * y


def is_power_of_two(x: int) -> bool:
    """Whether ``x`` is 1, 2, 4, ..."""
    return x > 0 and x & (x - 1) == 0


def __getattr__(name: str) -> Any:
    # Upstream keeps its quantisers in utils.math; quantize.py needs this module, so the alias is resolved late.
    if name in _QUANTIZERS:
        from . import quantize

        return getattr(quantize, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
