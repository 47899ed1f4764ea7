"""Tensor maps for the emulator: the arguments of cuTensorMapEncodeTiled, with the driver's rules checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deep_gemm_k3.arguments import check_bool, check_choice, check_int
from deep_gemm_k3.emulator._library import EmulatorError, error_text, library, refuse
from deep_gemm_k3.emulator.host_memory import address_of

TYPES = {
    "uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9, "float32_ftz": 10, "tfloat32": 11, "tfloat32_ftz": 12, "16u4_align8b": 13,
    "16u4_align16b": 14, "16u6_align16b": 15,
}  # fmt: skip
SWIZZLES = {
    "none": 0,
    "32B": 1,
    "64B": 2,
    "128B": 3,
    "128B_atom_32B": 4,
    "128B_atom_32B_flip_8B": 5,
    "128B_atom_64B": 6,
}

_MAX_RANK = 5


def _check_numbers(name: str, values: Any, high: int) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise refuse(name, "a list of integers", values)
    for value in values:
        check_int(name, value, 0, high)


@dataclass
class TensorMap:
    """A tiled tensor map over ``tensor`` (a torch tensor, a numpy array or an address).

    ``sizes`` and ``box`` run from the innermost dimension outwards, as the driver wants them; ``strides`` are the byte
    strides of dimensions 1 and up, one fewer than there are dimensions.
    """

    tensor: Any
    dtype: str
    sizes: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    element_strides: Sequence[int] = ()
    swizzle: str = "none"
    interleave: int = 0
    oob_nan: bool = False
    encoded: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, table, value in (("dtype", TYPES, self.dtype), ("swizzle", SWIZZLES, self.swizzle)):
            check_choice(f"tensor map: {name}", value, table)
        check_bool("tensor map: oob_nan", self.oob_nan)
        check_int("tensor map: interleave", self.interleave, 0, 2)
        limits = {"sizes": 2**64, "strides": 2**64, "box": 2**32, "element_strides": 2**32}
        for name, limit in limits.items():
            _check_numbers(f"tensor map: {name}", getattr(self, name), limit - 1)
        rank = len(self.sizes)
        if not 1 <= rank <= _MAX_RANK:
            raise refuse("tensor map: sizes", f"1 to {_MAX_RANK} numbers", rank)
        steps = list(self.element_strides) or [1] * rank
        for name, values, wanted in (
            ("strides", self.strides, rank - 1),
            ("box", self.box, rank),
            ("element_strides", steps, rank),
        ):
            if len(values) != wanted:
                raise ValueError(f"tensor map: {name}: wanted {wanted} numbers, given {len(values)}")

        def pad(values: Sequence[int]) -> list[int]:
            return [*values, *[0] * (5 - len(values))]

        numbers = (ctypes.c_uint32 * 16)(
            TYPES[self.dtype],
            rank,
            self.interleave,
            SWIZZLES[self.swizzle],
            0,
            int(self.oob_nan),
            *pad(self.box),
            *pad(steps),
        )
        out = ctypes.create_string_buffer(128)
        done = library().emulator_tensor_map(
            out,
            numbers,
            address_of("tensor map: tensor", self.tensor),
            (ctypes.c_uint64 * 5)(*pad(self.sizes)),
            (ctypes.c_uint64 * 5)(*pad(self.strides)),
        )
        if not done:
            raise EmulatorError(error_text())
        self.encoded = out.raw
