"""cvt: every narrow code, rounding and saturation, against torch, numpy and enumerations of the formats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from emu_support import one_op

RNG = np.random.default_rng(11)


def wild(count: int = 4096) -> np.ndarray:
    values = RNG.standard_normal(count).astype(np.float32) * np.exp2(RNG.integers(-30, 20, count)).astype(np.float32)
    values[:12] = [0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 57344, 61440, 1e-9, -1e-9]
    return values


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (mantissa + (1 << mantissa_bits)) * 2.0 ** (exponent - bias - mantissa_bits)


NARROW = {  # name -> exponent bits, mantissa bits, bias, largest magnitude code
    "e4m3x2": (4, 3, 7, 0x7E),
    "e5m2x2": (5, 2, 15, 0x7B),
    "e2m3x2": (2, 3, 1, 0x1F),
    "e3m2x2": (3, 2, 3, 0x1F),
}


@pytest.mark.parametrize("name", NARROW)
def test_to_narrow_is_the_nearest_code(name: str) -> None:
    e, m, bias, largest = NARROW[name]
    a, b = wild(), wild()[::-1].copy()
    (got,) = one_op(f"cvt.rn.satfinite.{name}.f32 %d0, %a0, %a1;", np.uint16, [a, b], target="sm_100a")
    codes = [minifloat(c, e, m, bias) for c in range(largest + 1)]
    sign_bit = 1 << (e + m)
    for values, have in ((a, got >> 8), (b, got & 0xFF)):
        for x, code in zip(values.tolist(), have.tolist(), strict=True):
            if math.isnan(x):
                assert name not in ("e4m3x2", "e5m2x2") or code == 0x7F
                continue
            magnitude = min(abs(x), codes[-1])
            best = min(range(largest + 1), key=lambda c: (abs(codes[c] - magnitude), c & 1))
            assert code == best | (sign_bit if math.copysign(1, x) < 0 else 0), (x, code)


def test_from_narrow_every_code() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    for name, dtype in (("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)):
        (got,) = one_op(f"cvt.rn.f16x2.{name} %d0, %a0;", np.uint32, [codes])
        want = torch.from_numpy(codes.view(np.uint8).copy()).view(dtype).to(torch.float16)
        have = torch.from_numpy(got.view(np.float16).copy())
        assert torch.equal(have.isnan(), want.isnan())
        assert torch.equal(have[~want.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))


def test_e4m3_and_e5m2_agree_with_torch() -> None:
    a = wild()
    a = a[np.isfinite(a)]
    for name, dtype, limit in (("e4m3x2", torch.float8_e4m3fn, 448.0), ("e5m2x2", torch.float8_e5m2, 57344.0)):
        (got,) = one_op(f"cvt.rn.satfinite.{name}.f32 %d0, %a0, %a0;", np.uint16, [a])
        want = torch.from_numpy(a).clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()
        assert np.array_equal(got & 0xFF, want)


def test_ue8m0() -> None:
    a = np.abs(wild())
    rz, rp = one_op(
        "cvt.rz.satfinite.ue8m0x2.f32 %d0, %a0, %a0; cvt.rp.satfinite.ue8m0x2.f32 %d1, %a0, %a0;",
        np.uint16,
        [a],
        outputs=2,
        target="sm_100a",
    )
    for x, z, p in zip(a.tolist(), (rz & 0xFF).tolist(), (rp & 0xFF).tolist(), strict=True):
        if math.isnan(x):
            assert (z, p) == (255, 255)
        elif math.isinf(x):
            assert (z, p) == (254, 254)
        elif x == 0:
            assert (z, p) == (0, 0)
        else:
            low = math.frexp(x)[1] - 1
            assert z == max(low + 127, 0)
            assert p == (low if 2.0**low == x else low + 1) + 127
    codes = np.arange(65536, dtype=np.uint16)
    (back,) = one_op("cvt.rn.bf16x2.ue8m0x2 %d0, %a0;", np.uint32, [codes], target="sm_100a")
    values = (back.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    bytes_ = codes.view(np.uint8)
    assert np.array_equal(values[bytes_ < 255], np.ldexp(np.float32(1), bytes_[bytes_ < 255].astype(np.int32) - 127))
    assert np.isnan(values[bytes_ == 255]).all()


def test_halves_from_single() -> None:
    a, b = wild(), wild()[::-1].copy()
    pair_bf, pair_f16 = one_op(
        "cvt.rn.bf16x2.f32 %d0, %a0, %a1; cvt.rn.f16x2.f32 %d1, %a0, %a1;", np.uint32, [a, b], outputs=2
    )
    for got, dtype in ((pair_bf, torch.bfloat16), (pair_f16, torch.float16)):
        for values, have in ((a, got >> 16), (b, got & 0xFFFF)):
            want = torch.from_numpy(values.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
            number = ~np.isnan(values)
            assert np.array_equal(have[number].astype(np.uint16), want[number])
            assert np.all((have[~number] & 0x7FFF) == 0x7FFF)


def test_halves_with_directed_rounding() -> None:
    a = wild()
    a = a[np.isfinite(a) & (np.abs(a) < 60000)]
    (rz,) = one_op("cvt.rz.bf16.f32 %d0, %a0;", np.uint16, [a])
    assert np.array_equal(rz, (a.view(np.uint32) >> 16).astype(np.uint16))
    (relu,) = one_op("cvt.rn.relu.bf16x2.f32 %d0, %a0, %a0;", np.uint32, [a])
    want = torch.from_numpy(a).to(torch.bfloat16).clamp(min=0).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal((relu & 0xFFFF).astype(np.uint16) & 0x7FFF, want & 0x7FFF)


def test_halves_to_single_every_code() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    from_f16, from_bf16 = one_op("cvt.f32.f16 %d0, %a0; cvt.f32.bf16 %d1, %a0;", np.float32, [codes], outputs=2)
    want = codes.view(np.float16).astype(np.float32)
    assert np.array_equal(from_f16[~np.isnan(want)].view(np.uint32), want[~np.isnan(want)].view(np.uint32))
    want = (codes.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(from_bf16[~np.isnan(want)].view(np.uint32), want[~np.isnan(want)].view(np.uint32))


def test_tf32() -> None:
    a = wild()
    a = a[np.isfinite(a)]
    (got,) = one_op("cvt.rna.tf32.f32 %d0, %a0;", np.uint32, [a])
    bits = a.view(np.uint32).astype(np.uint64)
    assert np.array_equal(got.astype(np.uint64), (bits + 0x1000) & 0xFFFFE000)


@pytest.mark.parametrize("to", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer(to: str, mode: str) -> None:
    a = np.concatenate(
        [wild(512), RNG.uniform(-300, 300, 512).astype(np.float32), np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32)]
    )
    bits, is_signed = int(to[1:]), to[0] == "s"
    out = np.uint64 if bits == 64 else np.uint32 if bits == 32 else np.uint16
    (got,) = one_op(f"cvt.{mode}.{to}.f32 %d0, %a0;", out, [a])
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    mask = (1 << (8 * np.dtype(out).itemsize)) - 1
    for x, g in zip(a, got.tolist(), strict=True):
        if np.isnan(x):
            continue
        value = high if x == np.inf else low if x == -np.inf else min(max(int(function(x)), low), high)
        assert g == value & mask, (x, g)


@pytest.mark.parametrize("source", ["u32", "s32", "u64", "s64"])
def test_integer_to_float(source: str) -> None:
    bits, is_signed = int(source[1:]), source[0] == "s"
    dtype = np.dtype(f"{'i' if is_signed else 'u'}{bits // 8}")
    a = np.frombuffer(RNG.bytes(8 * 1024), dtype=dtype).copy()
    a[:4] = [0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min]
    a >>= RNG.integers(0, bits - 1, len(a)).astype(dtype)
    (single,) = one_op(f"cvt.rn.f32.{source} %d0, %a0;", np.float32, [a])
    (double,) = one_op(f"cvt.rn.f64.{source} %d0, %a0;", np.float64, [a])
    (down,) = one_op(f"cvt.rz.f32.{source} %d0, %a0;", np.float32, [a])
    assert np.array_equal(single, a.astype(np.float32))
    assert np.array_equal(double, a.astype(np.float64))
    for x, y in zip(a.tolist(), down.tolist(), strict=True):
        away = float(np.nextafter(np.float32(y), np.float32(math.copysign(math.inf, x))))
        assert abs(float(y)) <= abs(x) < abs(away)


def test_integer_to_integer() -> None:
    a = np.frombuffer(RNG.bytes(4096), dtype=np.uint32).copy()
    (sign,) = one_op("cvt.s64.s32 %d0, %a0;", np.uint64, [a])
    (zero,) = one_op("cvt.u64.u32 %d0, %a0;", np.uint64, [a])
    (byte,) = one_op("cvt.s32.s8 %d0, %a0;", np.uint32, [a])
    (sat,) = one_op("cvt.sat.u8.s32 %d0, %a0;", np.uint32, [a])
    assert np.array_equal(sign.view(np.int64), a.view(np.int32).astype(np.int64))
    assert np.array_equal(zero, a.astype(np.uint64))
    assert np.array_equal(byte.view(np.int32), a.astype(np.uint8).view(np.int8).astype(np.int32))
    assert np.array_equal(sat, np.clip(a.view(np.int32), 0, 255).astype(np.uint32))


def test_cvt_pack() -> None:
    a, b, c = (np.frombuffer(RNG.bytes(2048), dtype=np.int32).copy() for _ in range(3))
    a[::2] %= 400
    b[::3] %= 70000
    bytes_, halves = one_op(
        "cvt.pack.sat.u8.s32.b32 %d0, %a0, %a1, %a2; cvt.pack.sat.s16.s32 %d1, %a0, %a1;",
        np.uint32,
        [a, b, c],
        outputs=2,
    )
    want = (c.view(np.uint32) << 16) | (np.clip(a, 0, 255) << 8 | np.clip(b, 0, 255)).astype(np.uint32)
    assert np.array_equal(bytes_, want)
    want = (np.clip(a, -32768, 32767) & 0xFFFF).astype(np.uint32) << 16 | (np.clip(b, -32768, 32767) & 0xFFFF).astype(
        np.uint32
    )
    assert np.array_equal(halves, want)


FOUR_BITS = (2, 1, 1, 7)


@pytest.mark.parametrize("name", ["e2m1x2", "e2m3x2", "e3m2x2"])
@pytest.mark.parametrize("relu", [False, True])
def test_from_less_than_eight_bits_every_code(name: str, relu: bool) -> None:
    e, m, bias, largest = FOUR_BITS if name == "e2m1x2" else NARROW[name]
    width = 4 if name == "e2m1x2" else 8
    each = np.arange(2 * (largest + 1))
    codes = (each[:, None] << width | each[::-1][None]).ravel().astype(np.uint16)
    source = "cvt.u8.u16 %low, %a0; " if width == 4 else ""
    text = f"{source}cvt.rn.{'relu.' if relu else ''}f16x2.{name} %d0, {'%low' if width == 4 else '%a0'};"
    (got,) = one_op(text, np.uint32, [codes], target="sm_100a", registers=".reg .b8 %low;")
    have = got.view(np.float16).reshape(-1, 2)
    values = np.array([minifloat(c, e, m, bias) for c in range(2 * (largest + 1))])
    if relu:
        values = np.maximum(values, 0)
    mask = (1 << width) - 1
    assert np.array_equal(have[:, 1], values[codes >> width]) and np.array_equal(have[:, 0], values[codes & mask])


def test_to_four_bits_is_the_nearest_code() -> None:
    a, b = wild(), wild()[::-1].copy()
    registers = ".reg .b8 %low;"
    for relu in ("", ".relu"):
        text = f"cvt.rn.satfinite{relu}.e2m1x2.f32 %low, %a0, %a1; cvt.u16.u8 %d0, %low;"
        (got,) = one_op(text, np.uint16, [a, b], target="sm_100a", registers=registers)
        codes = [minifloat(c, *FOUR_BITS[:3]) for c in range(8)]
        for values, have in ((a, got >> 4), (b, got & 15)):
            for x, code in zip(values.tolist(), have.tolist(), strict=True):
                if math.isnan(x):
                    continue  # the largest number; which sign is not said
                magnitude = 0.0 if relu and x < 0 else min(abs(x), 6.0)
                best = min(range(8), key=lambda c: (abs(codes[c] - magnitude), c & 1))
                assert code & 7 == best and (best == 0 or code >> 3 == (x < 0)), (x, code)


@pytest.mark.parametrize("name", ["e4m3x2", "e5m2x2"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_eight_bits_from_every_half(name: str, relu: str) -> None:
    dtype, limit = (torch.float8_e4m3fn, 448.0) if name == "e4m3x2" else (torch.float8_e5m2, 57344.0)
    codes = np.arange(65536, dtype=np.uint16)
    (got,) = one_op(f"cvt.rn.satfinite{relu}.{name}.f16x2 %d0, %a0;", np.uint16, [codes.view(np.uint32)])
    x = torch.from_numpy(codes.view(np.int16)).view(torch.float16).float()
    number = ~x.isnan()
    want = x.clamp(0 if relu else -limit, limit).to(dtype).view(torch.uint8)
    have = torch.from_numpy(got.view(np.uint8).copy())
    zero = number & (x <= 0) if relu else torch.zeros_like(number)
    assert torch.equal(have[number & ~zero], want[number & ~zero]) and not (have[zero] & 0x7F).any()
    assert torch.all(have[~number] & 0x7F == 0x7F)


@pytest.mark.parametrize(("round_", "up"), [("rz", False), ("rp", True)])
def test_exponents_from_every_half(round_: str, up: bool) -> None:
    codes = np.arange(32768, dtype=np.uint16)
    (got,) = one_op(
        f"cvt.{round_}.satfinite.ue8m0x2.bf16x2 %d0, %a0;", np.uint16, [codes.view(np.uint32)], target="sm_100a"
    )
    for x, code in zip(
        (codes.astype(np.uint32) << 16).view(np.float32).tolist(), got.view(np.uint8).tolist(), strict=True
    ):
        if math.isnan(x):
            assert code == 255
        elif x == 0 or math.isinf(x):
            assert code == (254 if x else 0)
        else:
            mantissa, exponent = math.frexp(x)
            assert code == min(254, max(0, exponent - 1 + 127 + (up and mantissa != 0.5))), x
