"""Packed singles, three-operand extremes, sign and class tests, and approximations against their documented errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import one_op

RNG = np.random.default_rng(29)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.0, -3.5, 3.4e38], np.float32)


def singles(count: int = 512) -> np.ndarray:
    values = RNG.standard_normal(count).astype(np.float32) * np.exp2(RNG.integers(-20, 20, count)).astype(np.float32)
    values[: len(SPECIAL)] = SPECIAL
    return values


def same(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan) and np.array_equal(got[~nan], want[~nan])
    assert np.array_equal(np.signbit(got[~nan]), np.signbit(want[~nan]))


def pairs() -> tuple[np.ndarray, np.ndarray]:
    values = np.roll(singles(), int(RNG.integers(512)))
    return values, values.view(np.uint64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_packed_singles() -> None:
    (a, pa), (b, pb), (c, pc) = pairs(), pairs(), pairs()
    text = "add.rn.f32x2 %d0,%a0,%a1; sub.rn.f32x2 %d1,%a0,%a1; mul.f32x2 %d2,%a0,%a1; fma.rn.f32x2 %d3,%a0,%a1,%a2;"
    add, sub, mul, fma = (
        x.view(np.float32) for x in one_op(text, np.uint64, [pa, pb, pc], outputs=4, target="sm_100a")
    )
    same(add, a + b), same(sub, a - b), same(mul, a * b)
    exact = (a.astype(np.float64) * b).astype(np.float64)
    total = exact + c
    certain = (total - exact == c) & (total - c == exact)  # double holds the sum
    same(fma[certain], total[certain].astype(np.float32))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("mode", ["", ".NaN", ".xorsign.abs", ".abs"])
def test_extremes(op: str, mode: str) -> None:
    if mode == ".abs":  # of three only
        a, b, c = singles(), np.roll(singles(), 7), np.roll(singles(), 19)
        (got,) = one_op(f"{op}.abs.f32 %d0,%a0,%a1,%a2;", np.float32, [a, b, c], target="sm_100a")
        pick = np.fmin if op == "min" else np.fmax
        return same(got, pick(pick(abs(a), abs(b)), abs(c)))
    a, b = singles(), np.roll(singles(), 7)
    (got,) = one_op(f"{op}{mode}.f32 %d0,%a0,%a1;", np.float32, [a, b])
    if mode == ".NaN":
        pick = np.minimum if op == "min" else np.maximum
    else:
        pick = np.fmin if op == "min" else np.fmax
    want = pick(abs(a), abs(b)) if "abs" in mode else pick(a, b)
    if "abs" in mode:
        want = np.where(np.isnan(want), want, np.copysign(want, np.where(np.signbit(a) != np.signbit(b), -1, 1)))
        zero_or_nan = np.isnan(a) | np.isnan(b)
        return same(got[~zero_or_nan], want[~zero_or_nan].astype(np.float32))
    different = ~((a == 0) & (b == 0))
    same(got[different], want[different])


def test_signs_and_classes() -> None:
    a, b = singles(), np.roll(singles(), 3)
    (got,) = one_op("copysign.f32 %d0,%a0,%a1;", np.float32, [a, b])
    same(got, np.copysign(b, a))
    tests = {
        "finite": np.isfinite(a), "infinite": np.isinf(a), "number": ~np.isnan(a), "notanumber": np.isnan(a),
        "normal": np.isfinite(a) & (abs(a) >= 2.0**-126), "subnormal": (a != 0) & (abs(a) < 2.0**-126),
    }  # fmt: skip
    for name, want in tests.items():
        (got,) = one_op(
            f"testp.{name}.f32 %p, %a0; selp.u32 %d0, 1, 0, %p;", np.uint32, [a], registers=".reg .pred %p;"
        )
        assert np.array_equal(got, want), name


APPROXIMATIONS = {  # text: (function, lowest, highest, relative error, absolute error)
    "rcp.approx.f32 %d0,%a0;": (lambda x: 1 / x, 1e-3, 1e3, 2**-23, 0),
    "sqrt.approx.f32 %d0,%a0;": (np.sqrt, 1e-3, 1e3, 2**-23, 0),
    "rsqrt.approx.f32 %d0,%a0;": (lambda x: x**-0.5, 1e-3, 1e3, 2**-22.9, 0),
    "rsqrt.approx.ftz.f32 %d0,%a0;": (lambda x: x**-0.5, 1e-3, 1e3, 2**-22.9, 0),
    "ex2.approx.f32 %d0,%a0;": (np.exp2, -20, 20, 2**-22.5, 0),
    "ex2.approx.ftz.f32 %d0,%a0;": (np.exp2, -20, 20, 2**-22.5, 0),
    "lg2.approx.f32 %d0,%a0;": (np.log2, 0.5, 2, 0, 2**-22),
    "lg2.approx.ftz.f32 %d0,%a0; ": (np.log2, 2, 1e4, 2**-22, 0),
    "sin.approx.f32 %d0,%a0;": (np.sin, -np.pi, np.pi, 0, 2**-20.5),
    "cos.approx.f32 %d0,%a0;": (np.cos, -np.pi, np.pi, 0, 2**-20.5),
    "tanh.approx.f32 %d0,%a0;": (np.tanh, -4, 4, 2**-11, 0),
    "div.approx.f32 %d0,%a0,%a1;": (lambda x, y: x / y, 1e-3, 1e3, 2 * 2**-23, 0),
    "div.full.f32 %d0,%a0,%a1;": (lambda x, y: x / y, 1e-3, 1e3, 2 * 2**-23, 0),
}


@pytest.mark.parametrize("text", APPROXIMATIONS)
def test_approximations_of_singles(text: str) -> None:
    function, low, high, relative, absolute = APPROXIMATIONS[text]
    inputs = [RNG.uniform(low, high, 4096).astype(np.float32) for _ in range(2 if "%a1" in text else 1)]
    (got,) = one_op(text, np.float32, inputs)
    want = function(*(x.astype(np.float64) for x in inputs))
    assert np.all(np.abs(got - want) <= relative * np.abs(want) + absolute)


SPECIAL_RESULTS = {
    "rcp.approx.f32": ([0.0, -0.0, np.inf, -np.inf], [np.inf, -np.inf, 0.0, -0.0]),
    "sqrt.approx.f32": ([0.0, -0.0, np.inf, -1.0], [0.0, -0.0, np.inf, np.nan]),
    "rsqrt.approx.f32": ([0.0, -0.0, np.inf, -1.0], [np.inf, -np.inf, 0.0, np.nan]),
    "ex2.approx.f32": ([0.0, -np.inf, np.inf, 128.0], [1.0, 0.0, np.inf, np.inf]),
    "lg2.approx.f32": ([1.0, 0.0, np.inf, -1.0], [0.0, -np.inf, np.inf, np.nan]),
    "tanh.approx.f32": ([0.0, -0.0, np.inf, -np.inf], [0.0, -0.0, 1.0, -1.0]),
    "sin.approx.f32": ([0.0, -0.0, np.inf, np.nan], [0.0, -0.0, np.nan, np.nan]),
    "cos.approx.f32": ([0.0, -0.0, np.inf, np.nan], [1.0, 1.0, np.nan, np.nan]),
}


@pytest.mark.parametrize("op", SPECIAL_RESULTS)
def test_approximations_at_their_ends(op: str) -> None:
    inputs, wanted = SPECIAL_RESULTS[op]
    (got,) = one_op(f"{op} %d0,%a0;", np.float32, [np.array(inputs, np.float32)])
    same(got, np.array(wanted, np.float32))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("op", "low", "high", "bits"), [("tanh.approx", -4, 4, None), ("ex2.approx", -8, 8, None)])
def test_approximations_of_halves(op: str, low: float, high: float, bits: None, kind: str) -> None:
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    x = torch.from_numpy(RNG.uniform(low, high, 2048)).to(dtype)
    ftz = ".ftz" if (op, kind) == ("ex2.approx", "bf16") else ""
    packed = x.view(torch.int16).numpy().view(np.uint32)
    (got,) = one_op(f"{op}{ftz}.{kind}x2 %d0,%a0;", np.uint32, [packed])
    want = (torch.tanh if "tanh" in op else torch.exp2)(x.double())
    have = torch.from_numpy(got.view(np.int16)).view(dtype).double()
    relative = 2**-10 if kind == "f16" else 2**-7  # tanh: 2^-10.987 and 2^-8, ex2: 2^-9.9 and 2^-7
    assert torch.all((have - want).abs() <= relative * want.abs() + 2.0**-24)
