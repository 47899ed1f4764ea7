"""Integer, bit and floating-point instructions against numpy and Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from emu_support import one_op

RNG = np.random.default_rng(7)
EDGES = [0, 1, 2, 3, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
WIDE_EDGES = [*EDGES, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 1 << 32]


def numbers(bits: int, count: int = 300) -> np.ndarray:
    kind = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    edges = [e & ((1 << bits) - 1) for e in WIDE_EDGES]
    rest = (
        RNG.integers(0, 1 << bits, count - len(edges), dtype=np.uint64)
        if bits < 64
        else RNG.integers(0, 1 << 63, count - len(edges), dtype=np.uint64) * 2 + 1
    )
    values = np.array([*edges, *rest.tolist()], dtype=np.uint64).astype(kind)
    return RNG.permutation(values)


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def py(values: np.ndarray, bits: int, is_signed: bool) -> list[int]:
    return [signed(int(v), bits) if is_signed else int(v) for v in values]


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul.lo": lambda a, b, n: a * b,
    "mul.hi": lambda a, b, n: (a * b) >> n,
    "min": lambda a, b, n: min(a, b),
    "max": lambda a, b, n: max(a, b),
    "div": lambda a, b, n: trunc_div(a, b) if b else -1,
    "rem": lambda a, b, n: a - b * trunc_div(a, b) if b else a,
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("op", BINARY)
def test_integer_binary(op: str, kind: str) -> None:
    bits, is_signed = int(kind[1:]), kind[0] == "s"
    a, b = numbers(bits), numbers(bits)
    (got,) = one_op(f"{op}.{kind} %d0, %a0, %a1;", a.dtype, [a, b])
    want = [
        BINARY[op](x, y, bits) & ((1 << bits) - 1)
        for x, y in zip(py(a, bits, is_signed), py(b, bits, is_signed), strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_multiply(kind: str) -> None:
    bits, is_signed = int(kind[1:]), kind[0] == "s"
    a, b = numbers(bits), numbers(bits)
    c = numbers(2 * bits)
    (got,) = one_op(f"mad.wide.{kind} %d0, %a0, %a1, %a2;", c.dtype, [a, b, c])
    mask = (1 << (2 * bits)) - 1
    assert got.tolist() == [
        (x * y + z) & mask
        for x, y, z in zip(py(a, bits, is_signed), py(b, bits, is_signed), py(c, 2 * bits, is_signed), strict=True)
    ]


def test_carry_chain() -> None:
    a, b = numbers(64), numbers(64)
    text = """mov.b64 {%x0,%x1}, %a0; mov.b64 {%y0,%y1}, %a1; add.cc.u32 %x0, %x0, %y0; addc.u32 %x1, %x1, %y1; mov.b64 %d0, {%x0,%x1};
    mov.b64 {%x0,%x1}, %a0; sub.cc.u32 %x0, %x0, %y0; subc.u32 %x1, %x1, %y1; mov.b64 %d1, {%x0,%x1};"""
    add, sub = one_op(text, np.uint64, [a, b], registers=".reg .b32 %x<2>, %y<2>;", outputs=2)
    assert np.array_equal(add, a + b)
    assert np.array_equal(sub, a - b)


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_neg_abs(kind: str) -> None:
    bits = int(kind[1:])
    a = numbers(bits)
    neg, absolute = one_op(f"neg.{kind} %d0, %a0; abs.{kind} %d1, %a0;", a.dtype, [a], outputs=2)
    mask = (1 << bits) - 1
    assert neg.tolist() == [-x & mask for x in py(a, bits, True)]
    assert absolute.tolist() == [abs(x) & mask for x in py(a, bits, True)]


def test_dot_products() -> None:
    a, b, c = numbers(32), numbers(32), numbers(32)
    for first in "us":
        for second in "us":
            (got,) = one_op(f"dp4a.{first}32.{second}32 %d0, %a0, %a1, %a2;", np.uint32, [a, b, c])
            x = a.view(np.uint8 if first == "u" else np.int8).reshape(-1, 4).astype(np.int64)
            y = b.view(np.uint8 if second == "u" else np.int8).reshape(-1, 4).astype(np.int64)
            assert np.array_equal(got, ((x * y).sum(1) + c.astype(np.int64)).astype(np.uint32))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_and_logic(bits: int) -> None:
    a, b, n = numbers(bits), numbers(bits), numbers(32)
    n[::2] %= 80
    mask = (1 << bits) - 1
    left, right, arithmetic = one_op(
        f"shl.b{bits} %d0, %a0, %a1; shr.u{bits} %d1, %a0, %a1; shr.s{bits} %d2, %a0, %a1;", a.dtype, [a, n], outputs=3
    )
    amounts = [min(int(x), bits) for x in n]
    assert left.tolist() == [(int(x) << k) & mask for x, k in zip(a, amounts, strict=True)]
    assert right.tolist() == [int(x) >> k for x, k in zip(a, amounts, strict=True)]
    assert arithmetic.tolist() == [(signed(int(x), bits) >> k) & mask for x, k in zip(a, amounts, strict=True)]
    both, either, differ, inverse = one_op(
        f"and.b{bits} %d0, %a0, %a1; or.b{bits} %d1, %a0, %a1; xor.b{bits} %d2, %a0, %a1; not.b{bits} %d3, %a0;",
        a.dtype,
        [a, b],
        outputs=4,
    )
    for got, want in ((both, a & b), (either, a | b), (differ, a ^ b), (inverse, ~a)):
        assert np.array_equal(got, want)


def test_lop3_every_table() -> None:
    a, b, c = (numbers(32, 64) for _ in range(3))
    for table in range(256):
        (got,) = one_op(f"lop3.b32 %d0, %a0, %a1, %a2, {table};", np.uint32, [a, b, c])
        want = np.zeros_like(a)
        for bit in range(32):
            index = ((a >> bit) & 1) * 4 + ((b >> bit) & 1) * 2 + ((c >> bit) & 1)
            want |= (((table >> index) & 1) << bit).astype(np.uint32)
        assert np.array_equal(got, want), table


def test_prmt() -> None:
    a, b, selector = numbers(32), numbers(32), numbers(32)
    (got,) = one_op("prmt.b32 %d0, %a0, %a1, %a2;", np.uint32, [a, b, selector])
    for x, y, s, g in zip(a.tolist(), b.tolist(), selector.tolist(), got.tolist(), strict=True):
        source = (y << 32 | x).to_bytes(8, "little")
        want = bytes(
            (0xFF if source[k & 7] & 0x80 else 0) if k & 8 else source[k & 7]
            for k in ((s >> 4 * i) & 15 for i in range(4))
        )
        assert g == int.from_bytes(want, "little")
    rows = {"f4e": ["0123", "1234", "2345", "3456"], "b4e": ["0765", "1076", "2107", "3210"], "rc8": ["0000", "1111", "2222", "3333"],
            "ecl": ["0123", "1123", "2223", "3333"], "ecr": ["0000", "0111", "0122", "0123"], "rc16": ["0101", "2323", "0101", "2323"]}  # fmt: skip
    for mode, table in rows.items():
        (got,) = one_op(f"prmt.b32.{mode} %d0, %a0, %a1, %a2;", np.uint32, [a, b, selector])
        for x, y, s, g in zip(a.tolist(), b.tolist(), selector.tolist(), got.tolist(), strict=True):
            source = (y << 32 | x).to_bytes(8, "little")
            assert g == int.from_bytes(bytes(source[int(k)] for k in table[s & 3]), "little"), mode


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int) -> None:
    a, b = numbers(bits), numbers(bits)
    position, length = RNG.integers(0, 70, len(a), dtype=np.uint32), RNG.integers(0, 70, len(a), dtype=np.uint32)
    unsigned, with_sign = one_op(
        f"bfe.u{bits} %d0, %a0, %a1, %a2; bfe.s{bits} %d1, %a0, %a1, %a2;", a.dtype, [a, position, length], outputs=2
    )
    (inserted,) = one_op(f"bfi.b{bits} %d0, %a0, %a1, %a2, %a3;", a.dtype, [a, b, position, length])
    top = bits - 1
    for x, y, p, n, u, s, f in zip(
        a.tolist(),
        b.tolist(),
        position.tolist(),
        length.tolist(),
        unsigned.tolist(),
        with_sign.tolist(),
        inserted.tolist(),
        strict=True,
    ):
        sign = (x >> min(p + n - 1, top)) & 1 if n else 0
        field = [(x >> (p + i)) & 1 if i < n and p + i <= top else None for i in range(bits)]
        assert u == sum((bit or 0) << i for i, bit in enumerate(field))
        assert s == sum((sign if bit is None else bit) << i for i, bit in enumerate(field))
        want = y
        for i in range(n):
            if p + i <= top:
                want = want & ~(1 << (p + i)) | ((x >> i) & 1) << (p + i)
        assert f == want


def test_counts() -> None:
    for bits in (32, 64):
        a = numbers(bits)
        pop, clz, find, shift = one_op(
            f"popc.b{bits} %d0, %a0; clz.b{bits} %d1, %a0; bfind.u{bits} %d2, %a0; bfind.shiftamt.s{bits} %d3, %a0;",
            np.uint32,
            [a],
            outputs=4,
        )
        (reverse,) = one_op(f"brev.b{bits} %d0, %a0;", a.dtype, [a])
        for x, p, z, f, s, r in zip(
            a.tolist(), pop.tolist(), clz.tolist(), find.tolist(), shift.tolist(), reverse.tolist(), strict=True
        ):
            assert (p, z) == (x.bit_count(), bits - x.bit_length())
            assert f == (x.bit_length() - 1) % (1 << 32)
            magnitude = x if not x >> (bits - 1) else ~x & ((1 << bits) - 1)
            assert s == (bits - magnitude.bit_length() if magnitude else 0xFFFFFFFF)
            assert r == int(f"{x:0{bits}b}"[::-1], 2)


def test_funnel_shift() -> None:
    a, b, n = numbers(32), numbers(32), numbers(32)
    n[::2] %= 40
    names = [
        f"shf.{side}.{mode}.b32 %d{i}, %a0, %a1, %a2;"
        for i, (side, mode) in enumerate((s, m) for s in "lr" for m in ("wrap", "clamp"))
    ]
    results = one_op("".join(names), np.uint32, [a, b, n], outputs=4)
    for i, (side, mode) in enumerate((s, m) for s in "lr" for m in ("wrap", "clamp")):
        for x, y, k, g in zip(a.tolist(), b.tolist(), n.tolist(), results[i].tolist(), strict=True):
            by = min(k, 32) if mode == "clamp" else k & 31
            both = y << 32 | x
            assert g == ((both << by) >> 32 if side == "l" else both >> by) & 0xFFFFFFFF


FLOATS = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-40,
        1.17549435e-38,
        3.4e38,
        -3.4e38,
        0.1,
        3.0,
        2.0**-126,
        16777217.0,
    ],
    dtype=np.float32,
)


def floats(count: int = 512) -> np.ndarray:
    pairs = RNG.standard_normal(count - 256).astype(np.float32) * np.float32(2.0) ** RNG.integers(
        -140, 120, count - 256
    ).astype(np.float32)
    return np.concatenate([np.repeat(FLOATS, 16), pairs.astype(np.float32)])


def same(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    integer = {2: np.uint16, 4: np.uint32, 8: np.uint64}[want.dtype.itemsize]
    assert np.array_equal(got.view(integer)[~nan], want.view(integer)[~nan])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("wide", [False, True])
def test_float_arithmetic(wide: bool) -> None:
    kind, name = (np.float64, "f64") if wide else (np.float32, "f32")
    a = floats().astype(kind)
    b = np.roll(np.concatenate([np.tile(FLOATS, 16), floats()[256:]]), 0).astype(kind)
    c = floats()[::-1].astype(kind)
    add, sub, mul, div, root = one_op(
        f"add.rn.{name} %d0, %a0, %a1; sub.{name} %d1, %a0, %a1; mul.{name} %d2, %a0, %a1; div.rn.{name} %d3, %a0, %a1; sqrt.rn.{name} %d4, %a0;",
        kind,
        [a, b],
        outputs=5,
    )
    same(add, a + b), same(sub, a - b), same(mul, a * b), same(div, a / b), same(root, np.sqrt(a))
    (fma,) = one_op(f"fma.rn.{name} %d0, %a0, %a1, %a2;", kind, [a, b, c])
    if not wide:  # the product is exact in double, and torch has no fused operation to compare with: use integers
        exact = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        from fractions import Fraction

        for x, y, z, g in list(
            zip(a[exact].tolist(), b[exact].tolist(), c[exact].tolist(), fma[exact].tolist(), strict=True)
        )[:200]:
            value = Fraction(x) * Fraction(y) + Fraction(z)
            if abs(value) > Fraction(2) ** 127 or value == 0:
                continue
            nearest = np.float32(g)
            error = abs(Fraction(float(nearest)) - value)
            for other in (np.nextafter(nearest, np.float32(np.inf)), np.nextafter(nearest, np.float32(-np.inf))):
                if np.isfinite(other):
                    assert error <= abs(Fraction(float(other)) - value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_float_rounding_modes_and_flags() -> None:
    a, b = floats(), np.tile(FLOATS, 32)
    results = dict(
        zip(
            ("rz", "rm", "rp"),
            one_op(
                "add.rz.f32 %d0,%a0,%a1; add.rm.f32 %d1,%a0,%a1; add.rp.f32 %d2,%a0,%a1;", np.float32, [a, b], outputs=3
            ),
            strict=True,
        )
    )
    exact = a.astype(np.float64) + b.astype(np.float64)
    usable = np.isfinite(exact) & (np.abs(exact) < 3e38) & ((exact - a) == b) & ((exact - b) == a)
    for mode, got in results.items():
        value = got[usable].astype(np.float64)
        wanted = exact[usable]
        above = np.nextafter(got[usable], np.float32(np.inf)).astype(np.float64)
        below = np.nextafter(got[usable], np.float32(-np.inf)).astype(np.float64)
        if mode == "rm":
            assert np.all((value <= wanted) & (above > wanted))
        elif mode == "rp":
            assert np.all((value >= wanted) & (below < wanted))
        else:
            assert np.all(np.abs(value) <= np.abs(wanted))
    flushed, saturated = one_op("add.ftz.f32 %d0,%a0,%a1; add.sat.f32 %d1,%a0,%a1;", np.float32, [a, b], outputs=2)

    def flush(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)

    same(flushed, flush(flush(a) + flush(b)))
    same(saturated, np.nan_to_num(np.clip(a + b, 0, 1), nan=0.0) + np.float32(0))


def test_float_min_max() -> None:
    a, b = np.repeat(FLOATS, 16), np.tile(FLOATS, 16)
    low, high, low_nan = one_op(
        "min.f32 %d0,%a0,%a1; max.f32 %d1,%a0,%a1; min.NaN.f32 %d2,%a0,%a1;", np.float32, [a, b], outputs=3
    )
    for x, y, p, q, r in zip(a, b, low, high, low_nan, strict=True):
        if np.isnan(x) or np.isnan(y):
            other = y if np.isnan(x) else x
            same(np.array([p, q]), np.array([other, other]))
            assert np.isnan(r)
        elif x == y:
            assert np.signbit(p) == (np.signbit(x) or np.signbit(y)) and np.signbit(q) == (
                np.signbit(x) and np.signbit(y)
            )
        else:
            assert (p, q, r) == (min(x, y), max(x, y), min(x, y))


def test_approximations() -> None:
    a = np.abs(RNG.standard_normal(512)).astype(np.float32) * 4 + np.float32(0.01)
    ex2, lg2, rcp, rsqrt, tanh, sin = one_op(
        "ex2.approx.ftz.f32 %d0,%a0; lg2.approx.f32 %d1,%a0; rcp.approx.ftz.f32 %d2,%a0; rsqrt.approx.f32 %d3,%a0; tanh.approx.f32 %d4,%a0; sin.approx.f32 %d5,%a0;",
        np.float32,
        [a],
        outputs=6,
    )
    x = a.astype(np.float64)
    for got, want, bound in (
        (ex2, 2**x, 2**-22),
        (rcp, 1 / x, 2**-23),
        (rsqrt, x**-0.5, 2**-22),
        (tanh, np.tanh(x), 2**-11),
    ):
        assert np.max(np.abs(got / want - 1)) <= bound
    assert np.max(np.abs(lg2 - np.log2(x))) <= 2**-21
    assert np.max(np.abs(sin - np.sin(x))) <= 2**-20
