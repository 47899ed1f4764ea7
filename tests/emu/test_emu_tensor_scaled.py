"""tcgen05 on narrow types: every code, block scales of every kind, copies from shared memory, shifts; against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from tensor_support import (
    COPY,
    SHIFT,
    STEP,
    body_of_product,
    place_along_k,
    put,
    run_tensor,
)

from deep_gemm_k3.emulator import Device

RNG = np.random.default_rng(6)
# exponent bits, mantissa bits, bias
FORMATS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}
CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
WIDTH = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
SFA, SFB, A_COLUMN = 300, 340, 400


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """Values of a sign, exponent and mantissa format; NaN and infinity where it has them."""
    e, m, bias = FORMATS[name]
    codes = np.asarray(codes, np.int64)
    sign = np.where(codes >> (e + m) & 1, -1.0, 1.0)
    exponent, mantissa = codes >> m & ((1 << e) - 1), codes & ((1 << m) - 1)
    value = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias - m),
        (mantissa / 2.0**m + 1) * 2.0 ** (exponent - bias),
    )
    if name == "e4m3":
        value = np.where((exponent == 15) & (mantissa == 7), np.nan, value)
    if name == "e5m2":
        value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)
    return sign * value


def finite_codes(name: str) -> np.ndarray:
    codes = np.arange(1 << WIDTH[name])
    return codes[np.isfinite(decode(codes, name))]


def padded(codes: np.ndarray, name: str) -> np.ndarray:
    """Pieces of sixteen elements in 16 bytes: narrow ones packed at their beginning, the rest is of no value."""
    rows, k = codes.shape
    out = RNG.integers(0, 256, (rows, k // 16, 16)).astype(np.uint8)
    groups = codes.reshape(rows, k // 16, 16)
    width = WIDTH[name]
    if width == 8:
        return groups.astype(np.uint8)
    bits = (groups[..., None] >> np.arange(width)) & 1
    out[..., : 2 * width] = np.packbits(bits.reshape(rows, k // 16, -1).astype(np.uint8), axis=-1, bitorder="little")
    return out


def packed4(codes: np.ndarray) -> np.ndarray:
    low, high = codes[:, ::2], codes[:, 1::2]
    return (low | high << 4).astype(np.uint8).reshape(codes.shape[0], -1, 16)


def spread_scales(before: np.ndarray, column: int, scales: np.ndarray, first: int, *, halves: bool = False) -> None:
    """Scale bytes (row, block) of one CTA: rows along 32 lanes, then columns, the same in every quarter of the lanes.

    With halves the lower two quarters have the first half of the rows, the upper two the second.
    """
    rows = scales.shape[0] // (2 if halves else 1)
    for row in range(scales.shape[0]):
        for block in range(scales.shape[1]):
            for quarter in (2 * (row // rows), 2 * (row // rows) + 1) if halves else range(4):
                lane, at = quarter * 32 + row % rows % 32, column + row % rows // 32
                before[at, lane] &= np.uint32(~(0xFF << 8 * (first + block)) & 0xFFFFFFFF)
                before[at, lane] |= np.uint32(int(scales[row, block]) << 8 * (first + block))


def place_of(m: int, n: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    row, col = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    if group == 2 and m == 128:
        return row // 64, col % (n // 2), row % 64 + 64 * (col // (n // 2))
    return row // 128, col, row % 128


def run_narrow(
    kind: str, a: np.ndarray, b: np.ndarray, names: tuple[str, str], *, group: int = 1, swizzle: str = "32B",
    sa: np.ndarray | None = None, sb: np.ndarray | None = None, ids: tuple[int, int] = (0, 0), ue4m3: bool = False,
    d: np.ndarray | None = None, in_bytes: bool = False,
) -> np.ndarray:  # fmt: skip
    """D of one instruction; a and b are codes (rows x k), sa and sb scale bytes (rows x blocks)."""
    m, n = a.shape[0], b.shape[0]
    four = kind.startswith("mxf4")
    image = np.zeros((group, 32 * 1024), np.uint8)
    before = RNG.integers(0, 1 << 32, (group, 460, 128), dtype=np.uint64).astype(np.uint32)
    cta, col, lane = place_of(m, n, group)
    if d is not None:
        before[cta, col, lane] = d.astype(np.float32).view(np.uint32)
    at, bases = 0, []
    for codes, name in ((a, names[0]), (b, names[1])):
        share = codes.shape[0] // group
        pieces = packed4(codes) if four else padded(codes, name)
        placed = place_along_k(share, 2, swizzle)
        for c in range(group):
            put(image[c], at, placed, pieces[c * share : (c + 1) * share])
        bases.append(placed.descriptor(at))
        at += -(-placed.size // 1024) * 1024
    for c in range(group):
        if sa is not None and sb is not None:
            share = m // group
            spread_scales(before[c], SFA, sa[c * share : (c + 1) * share], ids[0])
            spread_scales(before[c], SFB, sb, ids[1], halves=group == 2 and m == 128)
        if in_bytes:
            shifted = a << 2 if names[0] == "e2m1" else a
            words = shifted.astype(np.uint8).view(np.uint32)
            before[c, A_COLUMN : A_COLUMN + 8, :] = words[c * 128 : c * 128 + 128].T
    idesc = n >> 3 << 17 | (1 if four else CODES[names[0]]) << 7 | (1 if four else CODES[names[1]]) << 10
    if sa is None:
        idesc |= 1 << 4 | m >> 4 << 24
    else:
        idesc |= m >> 7 << 27 | ids[0] << 29 | ids[1] << 4 | (0 if ue4m3 else 1) << 23
    steps = np.zeros(1, STEP)
    steps["a"], steps["b"], steps["idesc"], steps["sfa"], steps["sfb"] = bases[0], bases[1], idesc, SFA, SFB
    steps["at"], steps["acc"] = A_COLUMN, d is not None
    device = Device(arch="sm_100a", race_detection=True)
    body = body_of_product(kind, scaled=sa is not None, a_in_tensor=in_bytes)
    after = run_tensor(body, steps, image, before, n, group=group, device=device)
    assert not device.findings, device.findings
    return after[cta, col, lane].view(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["f8f6f4", "mxf8f6f4.block_scale", "mxf8f6f4.block_scale.scale_vec::1X"])
@pytest.mark.parametrize("as_a", [True, False])
def test_every_finite_code(name: str, kind: str, as_a: bool) -> None:
    codes = np.resize(finite_codes(name), (128, 32))
    ones = np.zeros((32, 32), np.int64)
    ones[np.arange(32), np.arange(32)] = 0x38  # 1.0 in E4M3
    scaled = "block" in kind
    sa, sb = (np.full((128, 1), 127), np.full((128, 1), 127)) if scaled else (None, None)
    if as_a:
        got = run_narrow(kind, codes, ones, (name, "e4m3"), sa=sa, sb=sb[:32] if scaled else None)
        assert np.array_equal(got, decode(codes, name).astype(np.float32))
    else:
        wide = np.zeros((128, 32), np.int64)
        wide[:32] = ones
        got = run_narrow(kind, wide, codes, ("e4m3", name), sa=sa, sb=sb)
        assert np.array_equal(got[:32], decode(codes, name).T.astype(np.float32))


@pytest.mark.parametrize(("name", "codes"), [("e4m3", [0x7F, 0xFF]), ("e5m2", [0x7C, 0xFC, 0x7D, 0x7E, 0x7F, 0xFF])])
def test_codes_that_are_no_number(name: str, codes: list[int]) -> None:
    a = np.zeros((128, 32), np.int64)
    a[: len(codes), 0] = codes
    b = np.zeros((16, 32), np.int64)
    b[:, 0] = 0x38
    got = run_narrow("f8f6f4", a, b, (name, "e4m3"))[:, 0]
    want = np.zeros(128)
    want[: len(codes)] = decode(np.array(codes), name)
    assert np.array_equal(got, want.astype(np.float32), equal_nan=True)


def small_codes(rows: int, k: int, name: str) -> np.ndarray:
    """Codes whose products add up exactly."""
    codes = finite_codes(name)
    value = decode(codes, name)
    keep = codes[(np.abs(value) <= 4) & ((np.abs(value) >= 0.5) | (value == 0))]
    return RNG.choice(keep, (rows, k))


PAIRS = [("e4m3", "e2m1"), ("e2m1", "e4m3"), ("e5m2", "e3m2"), ("e2m3", "e5m2"), ("e2m1", "e2m1"), ("e3m2", "e2m3")]


@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize(("group", "m", "n"), [(1, 128, 8), (1, 128, 200), (2, 256, 192), (2, 256, 16), (2, 128, 96)])
def test_block_scaled_products(names: tuple[str, str], group: int, m: int, n: int) -> None:
    a, b = small_codes(m, 32, names[0]), small_codes(n, 32, names[1])
    sa, sb = RNG.integers(120, 132, (m, 1)), RNG.integers(120, 132, (n, 1))
    d = RNG.integers(-100, 100, (m, n))
    ids = (int(RNG.integers(0, 4)), int(RNG.integers(0, 4)))
    swizzle = "32B" if n % 16 else str(RNG.choice(["none", "32B", "64B", "128B"]))
    got = run_narrow("mxf8f6f4.block_scale", a, b, names, group=group, sa=sa, sb=sb, ids=ids, d=d, swizzle=swizzle)
    want = (decode(a, names[0]) * 2.0 ** (sa - 127)) @ (decode(b, names[1]) * 2.0 ** (sb - 127)).T + d
    assert np.array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "blocks", "ids", "ue4m3"),
    [
        ("mxf4.block_scale", 2, (0, 2), False),
        ("mxf4.block_scale.scale_vec::2X", 2, (2, 0), False),
        ("mxf4nvf4.block_scale.scale_vec::2X", 2, (0, 0), False),
        ("mxf4nvf4.block_scale.scale_vec::4X", 4, (0, 0), False),
        ("mxf4nvf4.block_scale.scale_vec::4X", 4, (0, 0), True),
    ],
)
@pytest.mark.parametrize(("group", "m", "n"), [(1, 128, 64), (2, 256, 64), (2, 128, 64)])
def test_packed_four_bit_products(
    kind: str, blocks: int, ids: tuple[int, int], ue4m3: bool, group: int, m: int, n: int
) -> None:
    a, b = RNG.integers(0, 16, (m, 64)), RNG.integers(0, 16, (n, 64))
    low, high = (0x30, 0x48) if ue4m3 else (124, 130)
    sa, sb = RNG.integers(low, high, (m, blocks)), RNG.integers(low, high, (n, blocks))
    got = run_narrow(kind, a, b, ("e2m1", "e2m1"), group=group, sa=sa, sb=sb, ids=ids, ue4m3=ue4m3)
    fa, fb = (decode(sa, "e4m3"), decode(sb, "e4m3")) if ue4m3 else (2.0 ** (sa - 127), 2.0 ** (sb - 127))
    per = 64 // blocks
    want = (decode(a, "e2m1") * np.repeat(fa, per, 1)) @ (decode(b, "e2m1") * np.repeat(fb, per, 1)).T
    assert np.array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_narrow_a_in_tensor_memory_lies_in_bytes(name: str, group: int) -> None:
    a, b = small_codes(128 * group, 32, name), small_codes(32, 32, "e4m3")
    got = run_narrow("f8f6f4", a, b, (name, "e4m3"), group=group, in_bytes=True)
    assert np.array_equal(got, (decode(a, name) @ decode(b, "e4m3").T).astype(np.float32))


def test_every_scale_code() -> None:
    a = np.zeros((128, 32), np.int64)
    a[:, 0] = 0x38
    b = a[:8]
    for first in (0, 128):
        sa = np.arange(first, first + 128)[:, None]
        got = run_narrow("mxf8f6f4.block_scale", a, b, ("e4m3", "e4m3"), sa=sa, sb=np.full((8, 1), 127))[:, 0]
        want = np.where(sa[:, 0] == 255, np.nan, 2.0 ** (sa[:, 0].astype(float) - 127)).astype(np.float32)
        assert np.array_equal(got, want, equal_nan=True)


# ---- copies and shifts


def unpacked(piece: np.ndarray, expand: str) -> np.ndarray:
    if not expand:
        return piece
    width = 4 if "b4" in expand else 6
    bits = np.unpackbits(piece, axis=-1, bitorder="little")[..., : 16 * width].reshape(*piece.shape[:-1], 16, width)
    codes = (bits << np.arange(width, dtype=np.uint8)).sum(-1).astype(np.uint8)
    return codes << 2 if width == 4 else codes


COPIES = {
    "128x256b": (128, 2, lambda r: [r]),
    "4x256b": (4, 2, lambda r: [32 * r]),
    "128x128b": (128, 1, lambda r: [r]),
    "64x128b.warpx2::02_13": (64, 1, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 1, lambda r: [r % 32 + r // 32 * 64, r % 32 + r // 32 * 64 + 32]),
    "32x128b.warpx4": (32, 1, lambda r: [r, r + 32, r + 64, r + 96]),
}


@pytest.mark.parametrize("shape", COPIES)
@pytest.mark.parametrize("expand", ["", ".b8x16.b4x16_p64", ".b8x16.b6x16_p32"])
@pytest.mark.parametrize("group", [1, 2])
def test_copy_to_tensor_memory(shape: str, expand: str, group: int) -> None:
    rows, pieces, lanes = COPIES[shape]
    image = np.zeros((group, 8192), np.uint8)
    data = RNG.integers(0, 256, (group, rows, pieces, 16)).astype(np.uint8)
    before = RNG.integers(0, 1 << 32, (group, 16, 128), dtype=np.uint64).astype(np.uint32)
    placed = place_along_k(-(-rows // 8) * 8, pieces, "none" if rows >= 32 else "32B")
    placed.offsets = placed.offsets[:rows]
    for c in range(group):
        put(image[c], 1024, placed, data[c])
    steps = np.zeros(1, STEP)
    steps["a"], steps["d"] = placed.descriptor(1024), 5
    device = Device(arch="sm_100a", race_detection=True)
    after = run_tensor(COPY.replace("KIND", shape + expand), steps, image, before, 16, group=group, device=device)
    assert not device.findings
    want = before.copy()
    words = unpacked(data, expand).view(np.uint32)
    for row in range(rows):
        for lane in lanes(row):
            want[:, 5 : 5 + 4 * pieces, lane] = words[:, row].reshape(group, -1)
    assert np.array_equal(after, want)


def test_shift_moves_rows_within_quarters() -> None:
    before = RNG.integers(0, 1 << 32, (1, 16, 128), dtype=np.uint64).astype(np.uint32)
    steps = np.zeros(1, STEP)
    steps["d"] = 32 << 16 | 3
    after = run_tensor(SHIFT, steps, np.zeros((1, 1024), np.uint8), before, 16)
    want = before.copy()
    for quarter in range(1, 4):
        lanes = np.arange(quarter * 32, quarter * 32 + 31)
        want[0, 3:11, lanes] = before[0, 3:11, lanes + 1]
    assert np.array_equal(after, want)


def test_copies_run_before_the_products_that_follow() -> None:
    """Scales go through shared memory, as kernels do it: one copy for A, one for B, then the product, in one thread."""
    a, b = small_codes(128, 32, "e4m3"), small_codes(128, 32, "e2m1")
    sa, sb = RNG.integers(124, 130, (128, 4)), RNG.integers(124, 130, (128, 4))
    image = np.zeros((1, 16 * 1024), np.uint8)
    bases = []
    for at, codes, name in ((0, a, "e4m3"), (4096, b, "e2m1")):
        placed = place_along_k(128, 2, "32B")
        put(image[0], at, placed, padded(codes, name))
        bases.append(placed.descriptor(at))
    for at, scales in ((8192, sa), (9216, sb)):  # row r: 16 bytes at 16 * (r % 32), four of them for each r // 32
        for row in range(128):
            image[0, at + 16 * (row % 32) + 4 * (row // 32) :][:4] = scales[row]
    copies = [place_along_k(32, 1, "none").descriptor(at) for at in (8192, 9216)]
    body = "if (i < 2) {" + COPY.replace("KIND", "32x128b.warpx4") + "} else {"
    body += body_of_product("mxf8f6f4.block_scale", scaled=True) + "}"
    for adversary in ("earliest", "latest", "random"):
        for identifier in range(4):
            steps = np.zeros(3, STEP)
            steps["a"], steps["b"], steps["d"] = [*copies, bases[0]], bases[1], [SFA, SFB, 0]
            steps["idesc"] = (
                128 >> 3 << 17 | CODES["e2m1"] << 10 | 1 << 27 | identifier << 29 | identifier << 4 | 1 << 23
            )
            steps["sfa"], steps["sfb"] = SFA, SFB
            device = Device(arch="sm_100a", seed=identifier, adversary=adversary, race_detection=True)
            before = np.zeros((1, 0, 128), np.uint32)
            after = run_tensor(body, steps, image, before, 128, device=device)[0].T.view(np.float32)
            assert not device.findings, device.findings
            fa, fb = (2.0 ** (s[:, identifier, None] - 127) for s in (sa, sb))
            assert np.array_equal(after, ((decode(a, "e4m3") * fa) @ (decode(b, "e2m1") * fb).T).astype(np.float32))
