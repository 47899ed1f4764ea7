"""Half-precision arithmetic on random bit patterns, against exact double arithmetic rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import one_op


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_arithmetic(kind: str) -> None:
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    a = torch.randint(-32768, 32768, (4096,), dtype=torch.int16)
    b = torch.randint(-32768, 32768, (4096,), dtype=torch.int16)
    c = torch.randint(-32768, 32768, (4096,), dtype=torch.int16)
    pairs = [x.numpy().view(np.uint32) for x in (a, b, c)]
    x, y, z = (t.view(dtype).double() for t in (a, b, c))
    add, mul, fma, low = one_op(
        f"add.rn.{kind}x2 %d0,%a0,%a1; mul.rn.{kind}x2 %d1,%a0,%a1; fma.rn.{kind}x2 %d2,%a0,%a1,%a2; min.{kind}x2 %d3,%a0,%a1;",
        np.uint32,
        pairs,
        outputs=4,
    )

    def check(got: np.ndarray, want: torch.Tensor) -> None:
        have = torch.from_numpy(got.view(np.int16)).view(dtype)
        wanted = round_once(want, dtype)
        nan = wanted.isnan()
        assert torch.equal(have.isnan(), nan)
        assert torch.equal(have.view(torch.int16)[~nan], wanted.view(torch.int16)[~nan])

    check(mul, x * y)
    exact = (x + y - x == y) & (x + y - y == x)  # where double holds the sum exactly
    same_or = torch.where(exact, x + y, torch.from_numpy(add.view(np.int16)).view(dtype).double())
    check(add, same_or)
    product = x * y
    exact = (product + z - product == z) & (product + z - z == product)
    check(fma, torch.where(exact, product + z, torch.from_numpy(fma.view(np.int16)).view(dtype).double()))
    ordered = ~(x.isnan() | y.isnan())
    assert torch.equal(torch.from_numpy(low.view(np.int16)).view(dtype)[ordered].double(), torch.minimum(x, y)[ordered])


def round_once(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Double to half, rounded once to nearest even: numpy does f16, bf16 is done on the bits."""
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return torch.from_numpy(value.numpy().astype(np.float16))
    exponent = torch.frexp(value.abs())[1].clamp(min=-125)
    step = torch.ldexp(torch.ones_like(value), exponent - 8)
    rounded = (value / step).round() * step
    out = torch.where(value.isfinite() & (value != 0), rounded, value)
    return torch.where(
        out.abs() > 3.3895313892515355e38, torch.copysign(torch.full_like(out, float("inf")), out), out
    ).to(dtype)
