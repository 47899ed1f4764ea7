"""mma.sync in every shape and type against numpy, with the fragment layouts of the PTX documentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import run_ptx

RNG = np.random.default_rng(17)
BITS = {
    "f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1,
}  # fmt: skip
DTYPES = {
    "f64": torch.float64, "tf32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
}  # fmt: skip


def operand(shape: tuple[int, int], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and their codes: of floats small whole ones, of which every sum is exact, else all there are."""
    if kind in DTYPES:
        values = torch.from_numpy(RNG.integers(-4, 5, shape)).to(DTYPES[kind])
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        codes = values.view(words).numpy().astype(np.uint64)
        return values.double().numpy(), codes & np.uint64((1 << BITS[kind]) - 1 if BITS[kind] < 64 else 2**64 - 1)
    low = -(1 << (BITS[kind] - 1)) if kind[0] == "s" else 0
    values = RNG.integers(low, low + (1 << BITS[kind]), shape)
    return values, (values & ((1 << BITS[kind]) - 1)).astype(np.uint64)


def registers(codes: np.ndarray, bits: int, of_a: bool) -> np.ndarray:
    """(lane, register) of A (m x k) or B (k x 8): a group of four lanes has a row of A or a column of B, and each of its lanes
    the elements of one register after the other."""
    rows = codes if of_a else codes.T
    size, k = rows.shape
    per = max(1, 32 // bits)
    halves, steps = size // 8, k // (4 * per)
    out = np.zeros((32, steps * halves), np.uint64)
    for lane in range(32):
        for step in range(steps):
            for half in range(halves):
                first = step * 4 * per + lane % 4 * per
                for j, code in enumerate(rows[lane // 4 + 8 * half, first : first + per]):
                    out[lane, step * halves + half] |= np.uint64(int(code) << bits * j)
    return out if bits == 64 else out.astype(np.uint32)


def spread(matrix: np.ndarray) -> np.ndarray:
    """(lane, element) of C and D (m x 8)."""
    lane, i = np.meshgrid(np.arange(32), np.arange(matrix.shape[0] // 4), indexing="ij")
    return matrix[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2]


def run_mma(modifiers: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D's registers (lane, register) of `mma.sync.aligned.MODIFIERS`; as many as C has."""
    width = 8 * a.dtype.itemsize
    body = f".reg .b{width} %a<8>, %b<4>, %c<4>, %d<4>; .reg .b32 %t; .reg .b64 %x, %y; mov.u32 %t, %tid.x;"
    for name, values in (("a", a), ("b", b), ("c", c)):
        body += f"ld.param.u64 %x, [{name}]; mad.wide.u32 %x, %t, {values.itemsize * values.shape[1]}, %x;"
        for i in range(values.shape[1]):
            body += f"ld.global.b{width} %{name}{i}, [%x+{values.itemsize * i}];"
    lists = [
        "{" + ",".join(f"%{name}{i}" for i in range(x.shape[1])) + "}"
        for name, x in zip("dabc", (c, a, b, c), strict=True)
    ]
    body += f"mma.sync.aligned.{modifiers} {', '.join(lists)}; ld.param.u64 %y, [d]; mad.wide.u32 %y, %t, {c.itemsize * c.shape[1]}, %y;"
    body += "".join(f"st.global.b{width} [%y+{c.itemsize * i}], %d{i};" for i in range(c.shape[1]))
    d = np.zeros_like(c)
    given = [np.ascontiguousarray(x) for x in (a, b, c)]
    run_ptx(body, ", ".join(f".param .u64 {name}" for name in "abcd"), [*given, d])
    return d


FLOATS = [
    ("bf16", 16), ("bf16", 8), ("f16", 16), ("f16", 8), ("tf32", 8), ("tf32", 4), ("e4m3", 32), ("e5m2", 32), ("e4m3", 16),
    ("e5m2", 16),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "k"), FLOATS)
def test_floats(kind: str, k: int) -> None:
    (a, ca), (b, cb) = operand((16, k), kind), operand((k, 8), kind)
    c = RNG.integers(-100, 100, (16, 8)).astype(np.float32)
    fa, fb = registers(ca, BITS[kind], True), registers(cb, BITS[kind], False)
    got = run_mma(f"m16n8k{k}.row.col.f32.{kind}.{kind}.f32", fa, fb, spread(c).view(np.uint32))
    assert np.array_equal(got.view(np.float32), spread(a @ b + c))


@pytest.mark.parametrize("k", [16, 32])
def test_floats_of_two_kinds(k: int) -> None:
    (a, ca), (b, cb) = operand((16, k), "e5m2"), operand((k, 8), "e4m3")
    c = RNG.integers(-100, 100, (16, 8)).astype(np.float32)
    fa, fb = registers(ca, 8, True), registers(cb, 8, False)
    got = run_mma(f"m16n8k{k}.row.col.f32.e5m2.e4m3.f32", fa, fb, spread(c).view(np.uint32))
    assert np.array_equal(got.view(np.float32), spread(a @ b + c))


@pytest.mark.parametrize(("kind", "k"), [("f16", 8), ("f16", 16), ("e4m3", 32), ("e5m2", 16)])
def test_results_of_halves_lie_two_to_a_register(kind: str, k: int) -> None:
    (a, ca), (b, cb) = operand((16, k), kind), operand((k, 8), kind)
    c = RNG.integers(-100, 100, (16, 8)).astype(np.float16)
    fa, fb = registers(ca, BITS[kind], True), registers(cb, BITS[kind], False)
    got = run_mma(f"m16n8k{k}.row.col.f16.{kind}.{kind}.f16", fa, fb, np.ascontiguousarray(spread(c)).view(np.uint32))
    assert np.array_equal(got.view(np.float16), spread((a @ b + c).astype(np.float16)))


@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_doubles(m: int, k: int) -> None:
    (a, ca), (b, cb) = operand((m, k), "f64"), operand((k, 8), "f64")
    c = RNG.integers(-100, 100, (m, 8)).astype(np.float64)
    fa, fb = registers(ca, 64, True), registers(cb, 64, False)
    got = run_mma(f"m{m}n8k{k}.row.col.f64.f64.f64.f64", fa, fb, spread(c).view(np.uint64))
    assert np.array_equal(got.view(np.float64), spread(a @ b + c))


EIGHT = [(8, 16), (16, 16), (16, 32)]
FOUR = [(8, 32), (16, 32), (16, 64)]


@pytest.mark.parametrize("kinds", ["s8.s8", "s8.u8", "u8.s8", "u8.u8", "s4.s4", "s4.u4", "u4.s4", "u4.u4"])
@pytest.mark.parametrize("shape", range(3))
def test_integers(kinds: str, shape: int) -> None:
    first, second = kinds.split(".")
    m, k = (EIGHT if BITS[first] == 8 else FOUR)[shape]
    (a, ca), (b, cb) = operand((m, k), first), operand((k, 8), second)
    c = RNG.integers(-1000, 1000, (m, 8)).astype(np.int32)
    fa, fb = registers(ca, BITS[first], True), registers(cb, BITS[second], False)
    got = run_mma(f"m{m}n8k{k}.row.col.s32.{kinds}.s32", fa, fb, spread(c).view(np.uint32))
    assert np.array_equal(got.view(np.int32), spread(a @ b + c))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("kind", "k"), [("u8", 32), ("u4", 64)])
def test_integers_wrap_or_saturate(kind: str, k: int, saturate: bool) -> None:
    (a, ca), (b, cb) = operand((16, k), kind), operand((k, 8), kind)
    c = np.full((16, 8), 2**31 - 50, np.int32)
    fa, fb = registers(ca, BITS[kind], True), registers(cb, BITS[kind], False)
    name = f"m16n8k{k}.row.col.{'satfinite.' if saturate else ''}s32.{kind}.{kind}.s32"
    got = run_mma(name, fa, fb, spread(c).view(np.uint32)).view(np.int32)
    exact = a @ b + c.astype(np.int64)
    assert exact.max() > 2**31
    assert np.array_equal(got, spread(np.minimum(exact, 2**31 - 1) if saturate else (exact + 2**31) % 2**32 - 2**31))


@pytest.mark.parametrize("how", ["xor", "and"])
@pytest.mark.parametrize(("m", "k"), [(8, 128), (16, 128), (16, 256)])
def test_single_bits(m: int, k: int, how: str) -> None:
    (a, ca), (b, cb) = operand((m, k), "b1"), operand((k, 8), "b1")
    c = RNG.integers(-1000, 1000, (m, 8)).astype(np.int32)
    fa, fb = registers(ca, 1, True), registers(cb, 1, False)
    got = run_mma(f"m{m}n8k{k}.row.col.s32.b1.b1.s32.{how}.popc", fa, fb, spread(c).view(np.uint32))
    both = a[:, :, None] & b[None] if how == "and" else a[:, :, None] ^ b[None]
    assert np.array_equal(got.view(np.int32), spread(both.sum(1) + c))
