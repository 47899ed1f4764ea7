"""What the public entries ask of plain arguments, in the one message form: name, what was wanted, what was given.

An argument is never converted from another kind: no number, None or tensor stands for True or False, and no boolean for a
number. Integers and numbers may be numpy's.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

ACTIVATIONS = ("swiglu", "situ")
TARGETS = ("sm_90a", "sm_100a")

_PLAIN = (str, bytes, bool, int, float, complex, type(None))


def shown(given: object) -> str:
    """``given`` on one short line: its value where that is plain, else its type (of a tensor dtype and shape too)."""
    if hasattr(given, "dtype") and hasattr(given, "shape"):
        kind = str(given.dtype).removeprefix("torch.")
        return f"{type(given).__name__} {kind} {list(given.shape)}"
    if isinstance(given, tuple | list) and not all(isinstance(item, _PLAIN) for item in given):
        return f"{type(given).__name__} of {', '.join(type(item).__name__ for item in given[:4])}"
    if not isinstance(given, (*_PLAIN, tuple, list)):
        return type(given).__name__
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(given).__name__})"


def refuse_value(name: str, wanted: str, given: object) -> ValueError:
    """The error for an argument: its name, what was wanted and what was given."""
    return ValueError(f"{name}: wanted {wanted}, given {shown(given)}")


def is_int(given: object) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool)


def is_number(given: object) -> bool:
    """A real number that is no boolean; tensors are none."""
    return isinstance(given, Real) and not isinstance(given, bool)


def check_int(name: str, given: Any, low: int, high: int, multiple: int = 1) -> int:
    """``given`` if it is an integer in low..high and divisible by ``multiple``, else an error that says so."""
    if is_int(given):
        value = int(given)
        if low <= value <= high and value % multiple == 0:
            return value
    what = f"a multiple of {multiple}" if multiple > 1 else "an integer"
    raise refuse_value(name, f"{what} in {low}..{high}", given)


def check_int32(name: str, given: Any) -> int:
    """An integer whose range is for the host library to say."""
    if not is_int(given) or not -(2**31) <= given < 2**31:
        raise refuse_value(name, "a 32-bit integer", given)
    return int(given)


def check_bool(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise refuse_value(name, "True or False", given)
    return given


def check_text(name: str, given: Any) -> str:
    """A string; whether it is one of those that are known is for the host library to say."""
    if not isinstance(given, str):
        raise refuse_value(name, "a string", given)
    return given


def check_choice(name: str, given: Any, choices: Iterable[str], hint: str = "") -> str:
    """``given`` if it is one of the strings ``choices``."""
    names = list(choices)
    if not isinstance(given, str) or given not in names:
        quoted = " or ".join(
            [", ".join(map(repr, names[:-1])), repr(names[-1])] if len(names) > 1 else [repr(names[0])]
        )
        raise refuse_value(name, quoted + hint, given)
    return given


def is_device(name: str) -> bool:
    """Whether ``name`` is one that torch takes for the CPU or a CUDA device; there need not be such a device."""
    import torch

    try:
        return torch.device(name).type in ("cpu", "cuda")
    except RuntimeError:
        return False


def check_tensor(name: str, given: Any) -> Any:
    """``given`` if it is a tensor."""
    import torch

    if not isinstance(given, torch.Tensor):
        raise refuse_value(name, "a tensor", given)
    return given


def check_output(name: str, given: str | Path) -> Path:
    """``given`` as a path if a file can be written there. What is not there yet is not there afterwards either."""
    path = Path(given)
    try:
        is_new = not path.exists()
        with path.open("ab"):
            pass
    except OSError as error:
        what = f"{str(path)!r}: {error.strerror or error}"
        raise ValueError(f"{name}: wanted a file that can be written, given {what}") from error
    if is_new:
        with suppress(OSError):
            path.unlink()
    return path
