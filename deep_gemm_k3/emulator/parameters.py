"""Values for the parameters of a kernel, each as the bytes that its PTX type has."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from deep_gemm_k3.arguments import is_int, is_number, shown
from deep_gemm_k3.emulator._library import ArgumentError, refuse
from deep_gemm_k3.emulator.host_memory import Memory, is_array, memory_of
from deep_gemm_k3.emulator.tensor_map import TensorMap

Reach = Callable[[str, Memory], None]
"""Makes memory reachable for kernels under a name."""

_INTEGERS = {f"{sign}{8 * width}": width for sign in "bus" for width in (1, 2, 4, 8)} | {"b128": 16}
_FLOATS = {"f16": "<e", "bf16": "bf16", "f32": "<f", "f64": "<d"}
_EITHER = {"b32": "f32", "b64": "f64"}  # the type of bits that takes a float too, as which it is stored


def pack(kernel: str, wanted: Sequence[tuple[str, str, int, int]], values: Any, reach: Reach) -> bytes:
    """The parameter space of ``kernel``, whose parameters are (name, type, offset, bytes). Raises ``ArgumentError``."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray | memoryview):
        raise refuse("params", "a list of values", values)
    if len(wanted) != len(values):
        raise ArgumentError(f"params: {kernel} wants {len(wanted)}, given {len(values)}")
    out = bytearray()
    for number, ((parameter, kind, offset, size), value) in enumerate(zip(wanted, values, strict=True)):
        out += bytes(offset - len(out))
        data = _pack_one(f"params[{number}] of {kernel}", kind, size, value, reach)
        if len(data) != size:
            raise ArgumentError(f"params[{number}] ({parameter}): wanted {size} bytes, given {len(data)}")
        out += data
    return bytes(out)


def _pack_one(name: str, kind: str, size: int, value: Any, reach: Reach) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, TensorMap):
        if not is_int(value.tensor):
            reach(f"tensor map {name}", memory_of(f"tensor map {name}", value.tensor))
        return value.encoded
    if is_array(value) and (hasattr(value, "untyped_storage") or value.ndim):  # numpy's of no dimensions are numbers
        memory = memory_of(name, value)
        if kind in _FLOATS:
            raise refuse(name, f"a number for .{kind}", value)
        reach(name, memory)
        return struct.pack("<Q", memory.address)
    if kind in _FLOATS:
        if is_number(value):
            return _float(name, kind, value)
        raise refuse(name, f"a number for .{kind}", value)
    if _INTEGERS.get(kind) != size:  # an array of some type
        raise refuse(name, f"{size} bytes or a tensor map", value)
    if is_number(value) and not is_int(value) and kind in _EITHER:
        return _float(name, _EITHER[kind], value)
    if isinstance(value, bool) and size == 1:
        return bytes([value])
    if is_int(value) and -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
        return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    what = f"a number of {size} bytes" if kind in _EITHER else f"an integer of {size} bytes"
    pointer = ", a tensor or an array" if size == 8 else ""
    raise refuse(name, f"{what}{pointer} for .{kind}", value)


def _float(name: str, kind: str, value: Any) -> bytes:
    try:
        if kind != "bf16":
            return struct.pack(_FLOATS[kind], value)
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        if value != value:
            return struct.pack("<H", 0x7FFF)
        return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)  # to nearest, ties to even
    except (OverflowError, struct.error):
        raise ArgumentError(f"{name}: wanted a number in the range of .{kind}, given {shown(value)}") from None
