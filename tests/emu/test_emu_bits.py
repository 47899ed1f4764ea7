"""Comparisons and selections of every type, and the rarer integer instructions, against Python's own integers and numpy."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest
from emu_support import one_op

RNG = np.random.default_rng(41)
INTEGERS = {"u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def numbers(dtype: type, count: int = 512) -> np.ndarray:
    """Of all sizes, with the ends of the range and many small ones."""
    size = np.dtype(dtype).itemsize
    raw = np.frombuffer(RNG.bytes(size * count), dtype).copy()
    info = np.iinfo(dtype)
    raw[:6] = [0, 1, info.max, info.min, info.max - 1, info.min + 1]
    raw[6::3] = RNG.integers(0, 4, len(raw[6::3])).astype(dtype)
    return raw


def flag(text: str, inputs: list[np.ndarray]) -> np.ndarray:
    (got,) = one_op(f"{text} selp.u32 %d0, 1, 0, %p;", np.uint32, inputs, registers=".reg .pred %p, %q;")
    return got.astype(bool)


@pytest.mark.parametrize("kind", INTEGERS)
def test_comparisons_of_integers(kind: str) -> None:
    a, b = numbers(INTEGERS[kind]), np.roll(numbers(INTEGERS[kind]), 3)
    for name, function in COMPARE.items():
        assert np.array_equal(flag(f"setp.{name}.{kind} %p, %a0, %a1;", [a, b]), function(a, b)), name
    if kind[0] == "u":
        for name, function in zip(("lo", "ls", "hi", "hs"), list(COMPARE.values())[2:], strict=True):
            assert np.array_equal(flag(f"setp.{name}.{kind} %p, %a0, %a1;", [a, b]), function(a, b)), name


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_comparisons_of_floats(kind: str) -> None:
    values = RNG.integers(-3, 4, 512).astype(np.float64)
    values[::7] = np.nan
    values[3::11] = np.inf
    a = values if kind == "f64" else values.astype(np.float16 if kind == "f16" else np.float32)
    codes = (a.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else a
    b, other = np.roll(a, 5), np.roll(codes, 5)
    nan = np.isnan(a) | np.isnan(b)
    with np.errstate(invalid="ignore"):
        for name, function in COMPARE.items():
            ordered = function(a, b) & ~nan
            assert np.array_equal(flag(f"setp.{name}.{kind} %p, %a0, %a1;", [codes, other]), ordered), name
            assert np.array_equal(flag(f"setp.{name}u.{kind} %p, %a0, %a1;", [codes, other]), ordered | nan), name
    assert np.array_equal(flag(f"setp.num.{kind} %p, %a0, %a1;", [codes, other]), ~nan)
    assert np.array_equal(flag(f"setp.nan.{kind} %p, %a0, %a1;", [codes, other]), nan)


@pytest.mark.parametrize("op", ["and", "or", "xor"])
@pytest.mark.parametrize("negated", ["", "!"])
def test_comparisons_joined_with_a_predicate(op: str, negated: str) -> None:
    a, b, c = numbers(np.int32), np.roll(numbers(np.int32), 9), RNG.integers(0, 2, 512).astype(np.uint32)
    q = c.astype(bool) ^ bool(negated)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[op]
    head = "setp.ne.u32 %q, %a2, 0;"
    assert np.array_equal(flag(f"{head} setp.lt.{op}.s32 %p, %a0, %a1, {negated}%q;", [a, b, c]), join(a < b, q))
    first, second = one_op(
        f"{head} setp.lt.{op}.s32 %p|%r, %a0, %a1, {negated}%q; selp.u32 %d0, 1, 0, %p; selp.u32 %d1, 1, 0, %r;",
        np.uint32, [a, b, c], outputs=2, registers=".reg .pred %p, %q, %r;",
    )  # fmt: skip
    assert np.array_equal(first, join(a < b, q)) and np.array_equal(second, join(a >= b, q))


def test_selections() -> None:
    a, b, c = numbers(np.int32), np.roll(numbers(np.int32), 9), RNG.integers(-2, 3, 512).astype(np.int32)
    f = RNG.integers(-2, 3, 512).astype(np.float32)
    f[::9], f[1::9] = np.nan, -0.0
    ones, floats, by_sign, by_float = one_op(
        "set.lt.u32.s32 %d0, %a0, %a1; set.ge.f32.s32 %f, %a0, %a1; mov.b32 %d1, %f; slct.b32.s32 %d2, %a0, %a1, %a2; mov.b32 %f, %a3; slct.b32.f32 %d3, %a0, %a1, %f;",
        np.uint32, [a, b, c, f.view(np.uint32)], outputs=4, registers=".reg .f32 %f;",
    )  # fmt: skip
    assert np.array_equal(ones, np.where(a < b, 0xFFFFFFFF, 0))
    assert np.array_equal(floats.view(np.float32), np.where(a >= b, 1.0, 0.0))
    assert np.array_equal(by_sign.view(np.int32), np.where(c >= 0, a, b))
    with np.errstate(invalid="ignore"):
        assert np.array_equal(by_float.view(np.int32), np.where(f >= 0, a, b))  # -0 is not less, NaN takes the second


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logical_not(bits: int) -> None:
    a = numbers({16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])
    (got,) = one_op(f"cnot.b{bits} %d0, %a0;", a.dtype, [a])
    assert np.array_equal(got, (a == 0).astype(a.dtype))


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


RARE: dict[str, Callable[[int, int, int], int]] = {
    "sad.u32 %d0, %a0, %a1, %a2;": lambda a, b, c: c + abs(a - b),
    "sad.s32 %d0, %a0, %a1, %a2;": lambda a, b, c: c + abs(signed(a, 32) - signed(b, 32)),
    "mul24.lo.u32 %d0, %a0, %a1;": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "mul24.lo.s32 %d0, %a0, %a1;": lambda a, b, c: signed(a, 24) * signed(b, 24),
    "mad.lo.s32 %d0, %a0, %a1, %a2;": lambda a, b, c: a * b + c,
    "mad.hi.u32 %d0, %a0, %a1, %a2;": lambda a, b, c: (a * b >> 32) + c,
    "mad.hi.s32 %d0, %a0, %a1, %a2;": lambda a, b, c: (signed(a, 32) * signed(b, 32) >> 32) + c,
    "mul.hi.s32 %d0, %a0, %a1;": lambda a, b, c: signed(a, 32) * signed(b, 32) >> 32,
    "bmsk.clamp.b32 %d0, %a0, %a1;": lambda a, b, c: ((1 << min(b, 32)) - 1) << min(a, 32),
    "bmsk.wrap.b32 %d0, %a0, %a1;": lambda a, b, c: ((1 << (b & 31)) - 1) << (a & 31),
    "szext.clamp.u32 %d0, %a0, %a1;": lambda a, b, c: a & ((1 << min(b, 32)) - 1),
    "szext.wrap.u32 %d0, %a0, %a1;": lambda a, b, c: a & ((1 << (b & 31)) - 1),
    "szext.clamp.s32 %d0, %a0, %a1;": lambda a, b, c: signed(a, min(b, 32)) if b else 0,
    "szext.wrap.s32 %d0, %a0, %a1;": lambda a, b, c: signed(a, b & 31) if b & 31 else 0,
    "lop3.b32 %d0, %a0, %a1, %a2, 0xca;": lambda a, b, c: (a & b) | (~a & c),
    "not.b32 %d0, %a0;": lambda a, b, c: ~a,
}


@pytest.mark.parametrize("text", RARE)
def test_rare_instructions(text: str) -> None:
    a, b, c = (numbers(np.uint32) for _ in range(3))
    if "bmsk" in text:
        a[::2] %= 40
    if "bmsk" in text or "szext" in text:
        b[::2] %= 40
    (got,) = one_op(text, np.uint32, [a, b, c])
    want = [RARE[text](*row) & 0xFFFFFFFF for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert got.tolist() == want


def test_find_nth_set() -> None:
    mask, base = numbers(np.uint32), RNG.integers(0, 32, 512).astype(np.uint32)
    offset = RNG.integers(-5, 6, 512).astype(np.int32)
    (got,) = one_op("fns.b32 %d0, %a0, %a1, %a2;", np.uint32, [mask, base, offset])
    for m, start, n, have in zip(mask.tolist(), base.tolist(), offset.tolist(), got.tolist(), strict=True):
        if n == 0:
            places = [start] if m >> start & 1 else []
            n = 1
        else:
            order = range(start, 32) if n > 0 else range(start, -1, -1)
            places = [i for i in order if m >> i & 1]
        assert have == (places[abs(n) - 1] if len(places) >= abs(n) else 0xFFFFFFFF)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_division(kind: str) -> None:
    a, b = numbers(INTEGERS[kind]), np.roll(numbers(INTEGERS[kind]), 5)
    b = np.where(b == 0, INTEGERS[kind](3), b).astype(INTEGERS[kind])
    quotient, rest = one_op(f"div.{kind} %d0, %a0, %a1; rem.{kind} %d1, %a0, %a1;", INTEGERS[kind], [a, b], outputs=2)
    for x, y, q, r in zip(a.tolist(), b.tolist(), quotient.tolist(), rest.tolist(), strict=True):
        want = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        bits = int(kind[1:])
        assert q == (signed(want, bits) if kind[0] == "s" else want)
        assert r == x - want * y
