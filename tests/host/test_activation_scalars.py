"""The kernel's scalar functions (epilogue/activation.cuh, epilogue/quantise.cuh), compiled with g++ and compared with
float64 and with the package's own quantiser."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deep_gemm_k3.utils.quantize import ceil_to_ue8m0, ue8m0_to_float

INCLUDE = Path(__file__).resolve().parents[2] / "deep_gemm_k3" / "include"

SOURCE = r"""
#include "deep_gemm_k3/epilogue/quantise.cuh"
using namespace deep_gemm_k3::epilogue;
extern "C" {
void tanh_of(const float* x, float* y, int n, int fast) {
    for (int i = 0; i < n; ++i) {
        const Fraction quotient = tanh_fast(x[i]);
        y[i] = fast ? quotient.numerator / quotient.denominator : tanh_exact(x[i]);
    }
}
void quotient(const float* x, const float* d, float* y, int n, int fast) {
    for (int i = 0; i < n; ++i) y[i] = fast ? Divisor<true>(d[i]).divide(x[i]) : Divisor<false>(d[i]).divide(x[i]);
}
void situ(const float* gate, const float* up, float* y, int n, int fast, float beta, float linear_beta) {
    for (int i = 0; i < n; ++i)
        y[i] = fast ? SiTU<true>(beta, linear_beta)(gate[i], up[i]) : SiTU<false>(beta, linear_beta)(gate[i], up[i]);
}
void swiglu(const float* gate, const float* up, float* y, int n, int fast, float limit) {
    const float bound = nearest_bf16(limit);
    for (int i = 0; i < n; ++i) {
        const float g = clamp_gate(gate[i], bound), u = clamp_up(up[i], bound);
        y[i] = fast ? SwiGLU<true>(1.f, 1.f)(g, u) : SwiGLU<false>(1.f, 1.f)(g, u);
    }
}
void scale(const float* amax, int* code, float* inverse, float* operand, int n) {
    for (int i = 0; i < n; ++i) {
        code[i] = static_cast<int>(scale_code(amax[i]));
        inverse[i] = inverse_scale(code[i]);
        operand[i] = operand_scale(code[i]);
    }
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "a C++ compiler is part of the package's requirements"
    folder = tmp_path_factory.mktemp("scalars")
    source, target = folder / "scalars.cpp", folder / "scalars.so"
    source.write_text(SOURCE)
    command = [compiler, "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, f"-I{INCLUDE}", str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def call(function: Callable[..., object], *inputs: torch.Tensor, extra: tuple[object, ...] = ()) -> torch.Tensor:
    result = torch.empty_like(inputs[0])
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*inputs, result)]
    function(*pointers, inputs[0].numel(), *extra)
    return result


def every_bf16(largest: float = float("inf")) -> torch.Tensor:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return values[values.isfinite() & (values.abs() <= largest)].contiguous()


def relative_error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest relative error where the wanted value is a normal FP32 number, of values that must be finite."""
    assert bool(value.isfinite().all())
    normal = wanted.abs() >= 2.0**-126
    return float(((value.double() - wanted)[normal] / wanted[normal]).abs().max())


@pytest.mark.parametrize("fast", [False, True])
def test_tanh_is_accurate_near_zero_too(library: ctypes.CDLL, fast: bool) -> None:
    x = torch.cat([every_bf16(), torch.linspace(-12, 12, 200001), torch.linspace(-0.7, 0.7, 200001)])
    y = call(library.tanh_of, x, extra=(int(fast),))
    assert relative_error(y, torch.tanh(x.double())) < 2.0**-20


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("divisor", [1e-45, 1e-40, 2.0**-126, 1e-30, 0.25, 1.25, 4.0, 25.0, 4096.0, 3e38])
def test_division_by_any_positive_number(library: ctypes.CDLL, fast: bool, divisor: float) -> None:
    x = every_bf16()
    d = torch.full_like(x, divisor)
    y = call(library.quotient, x, d, extra=(int(fast),))
    wanted = x.double() / d.double()
    fits = wanted.abs() < 1.7e38  # an early overflow is harmless: the quotient goes through tanh
    assert relative_error(y[fits], wanted[fits]) < (2.0**-20 if fast else 2.0**-23)
    overflown = wanted.abs() > 6.9e38
    assert bool(y[overflown].isinf().all())
    assert bool((y[x == 0] == 0).all())
    if not fast:
        assert torch.equal(y, x / d)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("betas", [(4.0, 25.0), (4096.0, 4096.0), (0.25, 4096.0), (1e-40, 1e-40)])
def test_situ(library: ctypes.CDLL, fast: bool, betas: tuple[float, float]) -> None:
    gate = every_bf16(80.0)
    up = gate.flip(0).contiguous()
    beta, linear_beta = (float(torch.tensor(b, dtype=torch.float32)) for b in betas)
    arguments = (int(fast), ctypes.c_float(beta), ctypes.c_float(linear_beta))
    y = call(library.situ, gate, up, extra=arguments)
    g, u = gate.double(), up.double()
    wanted = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    if beta < 1e-38:  # the product underflows: finite zeros, never NaN
        assert bool((y == 0).all())
    else:
        # Tiny factors leave the normal range before their product does.
        safe = (g.abs() > 1e-30) & (u.abs() > 1e-30)
        assert relative_error(y[safe], wanted[safe]) < 2.0**-18
        assert bool(y.isfinite().all())


@pytest.mark.parametrize("fast", [False, True])
def test_swiglu_with_clamp(library: ctypes.CDLL, fast: bool) -> None:
    gate = every_bf16(80.0)
    up = gate.flip(0).contiguous()
    y = call(library.swiglu, gate, up, extra=(int(fast), ctypes.c_float(1.7)))
    limit = float(torch.tensor(1.7).bfloat16())
    g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    safe = (g.abs() > 1e-30) & (u.abs() > 1e-30)
    assert relative_error(y[safe], (g * torch.sigmoid(g) * u)[safe]) < 2.0**-18


def test_scales_match_the_quantiser(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(0, 0x7F800000, (200000,), generator=generator, dtype=torch.int32)
    powers = torch.cat([2.0 ** torch.arange(-126.0, 128.0), 448 * 2.0 ** torch.arange(-126.0, 119.0)])
    tiny = torch.arange(0, 70000, dtype=torch.int32).view(torch.float32)
    amax = torch.cat([patterns.view(torch.float32), powers, powers * (1 + 2.0**-23), tiny]).contiguous()
    code = torch.empty(amax.numel(), dtype=torch.int32)
    inverse, operand = torch.empty_like(amax), torch.empty_like(amax)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (amax, code, inverse, operand)]
    library.scale(*pointers, amax.numel())
    wanted = ceil_to_ue8m0(amax * torch.tensor(1 / 448.0))
    assert torch.equal(code, wanted.to(torch.int32))
    scales = ue8m0_to_float(wanted).double()
    assert torch.equal(inverse.double(), 1 / scales)
    held = wanted <= 246
    assert torch.equal(operand.double()[held], scales[held] * 256)
    assert bool(operand[~held].isinf().all())  # never a smaller number
    assert bool((code[amax == 0] == 0).all())
