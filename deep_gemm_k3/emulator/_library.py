"""The emulator's C interface inside the host extension, typed for ctypes."""

from __future__ import annotations

import ctypes
import threading

from deep_gemm_k3 import _extension
from deep_gemm_k3.arguments import shown

_U32P = ctypes.POINTER(ctypes.c_uint32)
_U64P = ctypes.POINTER(ctypes.c_uint64)

# name -> (result, arguments)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "emulator_error": (ctypes.c_char_p, []),
    "emulator_supported": (ctypes.c_int, []),
    "emulator_module": (ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_uint64]),
    "emulator_module_free": (None, [ctypes.c_void_p]),
    "emulator_module_describe": (ctypes.c_char_p, [ctypes.c_void_p]),
    "emulator_module_check": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]),
    "emulator_instance": (ctypes.c_void_p, [ctypes.c_void_p]),
    "emulator_instance_free": (None, [ctypes.c_void_p]),
    "emulator_instance_base": (ctypes.c_uint64, [ctypes.c_void_p]),
    "emulator_machine": (
        ctypes.c_void_p,
        [ctypes.c_uint64, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64],
    ),
    "emulator_reached": (ctypes.c_char_p, [ctypes.c_void_p]),
    "emulator_machine_free": (None, [ctypes.c_void_p]),
    "emulator_memory_add": (
        None,
        [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int],
    ),
    "emulator_memory_remove": (None, [ctypes.c_void_p, ctypes.c_uint64]),
    "emulator_launch": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, _U32P, ctypes.c_char_p, ctypes.c_uint64],
    ),
    "emulator_run": (ctypes.c_int, [ctypes.c_void_p]),
    "emulator_observe": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]),
    "emulator_own": (None, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]),
    "emulator_trace": (ctypes.c_char_p, [ctypes.c_void_p]),
    "emulator_service_observe": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int]),
    "emulator_service_own": (None, [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]),
    "emulator_service_trace": (ctypes.c_char_p, []),
    "emulator_report": (ctypes.c_char_p, [ctypes.c_void_p]),
    "emulator_service_configure": (
        None,
        [ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64],
    ),
    "emulator_service_report": (ctypes.c_char_p, []),
    "emulator_service_record": (None, [ctypes.c_int]),
    "emulator_service_recorded": (ctypes.c_char_p, []),
    "emulator_service_clear": (None, []),
    "emulator_tensor_map": (ctypes.c_int, [ctypes.c_char_p, _U32P, ctypes.c_uint64, _U64P, _U64P]),
}

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


class EmulatorError(RuntimeError):
    """The emulator refused or stopped something; the text says what and where."""


class ArgumentError(EmulatorError, ValueError):
    """An argument of the emulator that cannot be: its name, what was wanted and what was given."""


def refuse(name: str, wanted: str, given: object, *, is_text: bool = False) -> ArgumentError:
    """The error for an argument; ``given`` as it is where it is text about the argument."""
    return ArgumentError(f"{name}: wanted {wanted}, given {given if is_text else shown(given)}")


def library() -> ctypes.CDLL:
    """The extension as a C library, loaded once."""
    global _library
    with _lock:
        if _library is None:
            _extension.load()
            loaded = ctypes.CDLL(str(_extension.LIBRARY))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
            if not loaded.emulator_supported():
                raise EmulatorError("the emulator needs a processor with AVX2 and FMA, this one has not")
            _library = loaded
    return _library


def error_text() -> str:
    text: bytes = library().emulator_error()
    return text.decode(errors="replace")
