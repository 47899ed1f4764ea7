"""Tensor maps: one specification, with the driver's rules checked on every target."""

from __future__ import annotations

import json

import pytest

from deep_gemm_k3 import _extension


@pytest.fixture(scope="module")
def ops():
    return _extension.ops()


MAP = {"name": "x", "address": 4096, "dims": [256, 64], "strides": [512], "box": [64, 32]}
U4_ALIGN8, U4_ALIGN16 = 13, 14


def test_emulated_map_holds_the_specification(ops) -> None:
    data = bytes.fromhex(ops.encode_tensor_map("emulator", json.dumps(MAP)))
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, 88, 8)]
    assert data[:8] == b"DG3KTMAP" and len(data) == 128
    assert words[1:] == [4096, 256, 64, 0, 0, 0, 512, 0, 0, 0]
    assert data[88:92] == bytes([64, 0, 32, 0])
    assert list(data[98:100]) == [1, 1]
    assert list(data[103:109]) == [9, 2, 0, 3, 3, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": 0}, "address: wanted one that is not null"),
        ({"address": 4104}, "address: wanted a multiple of 16, given 4104"),
        ({"dims": [0, 64]}, r"dims\[0\]: wanted 1..2\^32, given 0"),
        ({"dims": [256, 2**32 + 1]}, r"dims\[1\]: wanted 1..2\^32"),
        ({"strides": [520]}, r"strides\[0\]: wanted a multiple of 16, given 520"),
        ({"strides": [2**40]}, r"strides\[0\]: wanted less than 2\^40"),
        ({"strides": [256]}, r"strides\[0\]: wanted at least the 512 bytes of a row, given 256"),
        ({"box": [64, 257]}, r"box\[1\]: wanted 1..256, given 257"),
        ({"box": [64, 0]}, r"box\[1\]: wanted 1..256, given 0"),
        ({"box": [60, 32]}, r"box\[0\]: wanted a multiple of 16 bytes, given 60"),
        ({"box": [72, 32]}, r"box\[0\]: wanted at most the 128 bytes of the swizzle, given 72"),
        ({"box": [64, 32], "swizzle": 1}, r"box\[0\]: wanted at most the 32 bytes of the swizzle"),
        ({"element_strides": [1, 9]}, r"element_strides\[1\]: wanted 1..8, given 9"),
        ({"swizzle": 7}, "swizzle: wanted 0..6, given 7"),
        ({"type": 16}, "type: wanted a type of the driver, given 16"),
        ({"type": 0, "fill": 1}, "fill: wanted zeros for a type that is no float"),
        ({"interleave": 1}, "rank: wanted 3..5, given 2"),
        ({"interleave": 2, "dims": [16, 8, 8], "strides": [512, 4096], "box": [16, 8, 8]}, "swizzle: wanted 32 bytes"),
        ({"type": U4_ALIGN16, "box": [64, 32]}, r"box\[0\]: wanted 128 for this packed type, given 64"),
        ({"type": U4_ALIGN16, "address": 4112, "box": [128, 32]}, "address: wanted a multiple of 32"),
        ({"type": U4_ALIGN16, "dims": [192, 64], "box": [128, 32]}, r"dims\[0\]: wanted a multiple of 128"),
        ({"type": U4_ALIGN16, "box": [128, 32], "swizzle": 2}, "swizzle: wanted none, 128 bytes or"),
        ({"type": U4_ALIGN8, "dims": [255, 64], "box": [32, 32]}, r"dims\[0\]: wanted a multiple of 2"),
    ],
)
@pytest.mark.parametrize("where", ["emulator", "null"])
def test_broken_rules_are_named(ops, where: str, changes: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"tensor map x: {message}"):
        ops.encode_tensor_map(where, json.dumps(MAP | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"box": [256, 32], "swizzle": 0},
        {"type": 0, "dims": [512, 64], "box": [128, 256]},
        {"type": U4_ALIGN16, "box": [128, 32]},
        {"type": U4_ALIGN8, "dims": [512, 64], "strides": [256], "box": [256, 16]},
        {"dims": [64, 8, 2, 100], "strides": [128, 65536, 1024], "box": [64, 8, 2, 8]},
        {"dims": [256], "strides": [], "box": [64]},
    ],
)
def test_legal_maps_pass(ops, changes: dict) -> None:
    assert len(ops.encode_tensor_map("emulator", json.dumps(MAP | changes))) == 256
