"""The operators of the host extension as torch sees them: fake implementations, and the functions lent to C++.

``torch.ops.deep_gemm_k3.mega_moe`` stands behind all four public entries. Importing this module loads the extension and
sets its callbacks; everything is safe to use from several threads.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from typing import Any

import torch

from ._extension import load
from .mega.first_call import first_call

log = logging.getLogger("deep_gemm_k3")

load()
mega_moe = torch.ops.deep_gemm_k3.mega_moe.default


@torch.library.register_fake("deep_gemm_k3::mega_moe")
def _fake_mega_moe(*arguments: Any, **named: Any) -> None:
    """Writes into its arguments and returns nothing, so there is no shape to derive.

    A tensor on the meta device that traces nothing would make the call a silent nothing: refused.
    """
    given = [*arguments, *named.values()]
    if any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in given):
        from torch._subclasses.fake_tensor import FakeTensor

        if not any(isinstance(value, FakeTensor) for value in given):
            raise RuntimeError("mega_moe: wanted tensors with memory, given one on device meta [type]")


# ------------------------------------------------------------------------------------------------------ lent functions
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)


class _Pending(threading.local):
    """The exception of this thread's last callback: C++ carries only its text."""

    error: BaseException | None = None


_pending = _Pending()
_oracle_notice = threading.Lock()
_oracle_announced = False


def take_pending() -> BaseException | None:
    """The exception behind the error that a callback of this thread has just reported, once."""
    error, _pending.error = _pending.error, None
    return error


def _reported(error: BaseException, out: int, size: int) -> int:
    _pending.error = error
    text = (str(error) or type(error).__name__).encode()[: size - 1] + b"\0"
    ctypes.memmove(out, text, len(text))
    return 1


def _execute(_handle: int, record: bytes, error_out: int, error_size: int) -> int:
    try:
        from .testing import executor

        executor.run(record.decode())
    except BaseException as error:
        return _reported(error, error_out, error_size)
    return 0


def _first_call(handle: int, description: bytes, error_out: int, error_size: int) -> int:
    try:
        given = json.loads(description)
        first_call(handle, given["signature"], lambda: _prepare(given))
    except BaseException as error:
        return _reported(error, error_out, error_size)
    return 0


def _prepare(description: dict[str, Any]) -> None:
    """Make a signature ready on this rank.

    On a GPU every config that token counts can choose is compiled and loaded. On the emulator it is the config of this
    call's counts: other counts compile theirs when they come, while the peers' kernels wait.
    """
    entry, place, text = description["signature"]["entry"], description["place"], json.dumps(description["signature"])
    problem = description["problem"]
    if place.startswith("cuda"):
        from .mega.plan import load_kernels

        log.info("%s: on %s, %s: %s", entry, place, load_kernels(problem, place), text)
        return
    if place == "emulator":
        from .mega.plan import load_kernel

        load_kernel(place=place, **{name: problem[name] for name in ("target", "literal", "traced")})
        place = f"CPU tensors, by the emulator executing PTX for {problem['target']}"
    elif place == "oracle":
        _announce_oracle()
        place = "CPU tensors, computed by the oracle"
    log.info("%s: on %s: %s", entry, place, text)


def _load_kernel(_handle: int, wanted: bytes, error_out: int, error_size: int) -> int:
    try:
        from .mega.plan import load_kernel

        load_kernel(**json.loads(wanted))
    except BaseException as error:
        return _reported(error, error_out, error_size)
    return 0


def _announce_oracle() -> None:
    global _oracle_announced
    with _oracle_notice:
        if _oracle_announced:
            return
        _oracle_announced = True
    log.warning("CPU tensors are computed by the oracle (plain torch), as DGK3_CPU_EXECUTOR asks, not by a kernel")


_lent = {
    "execute": _CALLBACK(_execute),
    "first_call": _CALLBACK(_first_call),
    "load_kernel": _CALLBACK(_load_kernel),
}
for _name, _function in _lent.items():
    torch.ops.deep_gemm_k3.set_callback(_name, ctypes.cast(_function, ctypes.c_void_p).value)
