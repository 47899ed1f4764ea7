"""The kernels' scalar epilogue functions, compiled by the host compiler, against the oracle and float64."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from deep_gemm_k3.testing import oracle
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.utils import quantize

SHIM = """
#include "deep_gemm_k3/epilogue/activation.cuh"
#include "deep_gemm_k3/epilogue/quantise.cuh"
using namespace deep_gemm_k3::epilogue;
template <bool kFast> static void situ(const float* g, const float* u, float* out, int n, float beta, float linear) {
    const SiTU<kFast> f(beta, linear);
    for (int i = 0; i < n; ++i) out[i] = f(g[i], u[i]);
}
template <bool kFast> static void swiglu(const float* g, const float* u, float* out, int n) {
    for (int i = 0; i < n; ++i) out[i] = SwiGLU<kFast>(0, 0)(g[i], u[i]);
}
extern "C" {
void run_situ(const float* g, const float* u, float* out, int n, float beta, float linear, int fast) {
    fast ? situ<true>(g, u, out, n, beta, linear) : situ<false>(g, u, out, n, beta, linear);
}
void run_swiglu(const float* g, const float* u, float* out, int n, float limit, int fast) {
    for (int i = 0; i < n && limit > 0; ++i) {
        const float gate = clamp_gate(g[i], limit), up = clamp_up(u[i], limit);
        fast ? swiglu<true>(&gate, &up, out + i, 1) : swiglu<false>(&gate, &up, out + i, 1);
    }
    if (!(limit > 0)) fast ? swiglu<true>(g, u, out, n) : swiglu<false>(g, u, out, n);
}
void run_codes(const float* amax, unsigned* out, int n) { for (int i = 0; i < n; ++i) out[i] = scale_code(amax[i]); }
void run_inverse(const unsigned* code, float* out, int n) { for (int i = 0; i < n; ++i) out[i] = inverse_scale(code[i]); }
}
"""

FLOATS = ctypes.POINTER(ctypes.c_float)
FAST_ERROR = 2.0**-20
EXACT_ERROR = 2.0**-21  # a few roundings of FP32 and of the mathematical library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, source_root: str) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed"
    folder = tmp_path_factory.mktemp("epilogue")
    (folder / "shim.cpp").write_text(SHIM)
    include = Path(source_root) / "deep_gemm_k3" / "include"
    target = folder / "shim.so"
    command = [compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", f"-I{include}"]
    subprocess.run([*command, str(folder / "shim.cpp"), "-o", str(target)], check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.run_situ.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int, ctypes.c_float, ctypes.c_float, ctypes.c_int]
    loaded.run_swiglu.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int, ctypes.c_float, ctypes.c_int]
    for name in ("run_codes", "run_inverse"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return loaded


def all_bf16() -> torch.Tensor:
    """Every finite BF16 number of magnitude below 2^64, in random order, as float32."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    values = values[values.abs() < 2.0**64]
    return values[torch.randperm(values.numel())].contiguous()


def call(function, gate: torch.Tensor, up: torch.Tensor, *scalars) -> torch.Tensor:
    out = torch.empty_like(gate)
    function(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), *scalars)
    return out


def in_float64(gate: torch.Tensor, up: torch.Tensor, options: Options) -> np.ndarray:
    g, u = gate.double().numpy(), up.double().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        sigmoid = 1 / (1 + np.exp(-g))
        if options.activation == "swiglu":
            return g * sigmoid * u
        beta, linear = float(np.float32(options.situ_beta)), float(np.float32(options.situ_linear_beta))
        return beta * np.tanh(g / beta) * sigmoid * (linear * np.tanh(u / linear))


def assert_relative(actual: torch.Tensor, expected: np.ndarray, limit: float) -> None:
    """Relative errors below ``limit`` wherever FP32 has its full precision, absolute ones of its grid below that."""
    value = actual.double().numpy()
    tiny = np.abs(expected) < 2.0**-100
    assert (np.abs(value[tiny]) < 2.0**-99).all()
    big = np.abs(expected) > 2.0**120
    rest = ~tiny & ~big
    error = np.abs(value[rest] - expected[rest]) / np.abs(expected[rest])
    worst = int(error.argmax())
    assert error[worst] < limit, f"{value[rest][worst]!r}, wanted {expected[rest][worst]!r}: {error[worst]:.2e}"


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("betas", [(4.0, 25.0), (4096.0, 4096.0), (0.25, 0.5), (1.25, 1.5), (1e-3, 1e3)])
def test_situ(library: ctypes.CDLL, fast: bool, betas: tuple[float, float]) -> None:
    gate, up = all_bf16(), all_bf16()
    options = Options("situ", None, *betas)
    out = call(library.run_situ, gate, up, *betas, int(fast))
    assert bool(torch.isfinite(out).all())
    moderate = (gate > -80) & (gate.abs() > 2.0**-40) & (up.abs() > 2.0**-40)  # exp stays a normal FP32 number
    assert_relative(out[moderate], in_float64(gate, up, options)[moderate.numpy()], FAST_ERROR if fast else EXACT_ERROR)
    theirs = oracle.activate(gate.to(torch.bfloat16), up.to(torch.bfloat16), options)
    assert_relative(out[moderate], theirs[moderate].double().numpy(), FAST_ERROR)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("betas", [(1e-40, 1e-40), (1e-45, 25.0), (2.0**-126, 1.0), (3e38, 3e38)])
def test_situ_at_the_ends_of_the_betas(library: ctypes.CDLL, fast: bool, betas: tuple[float, float]) -> None:
    """Nothing is flushed, nothing becomes NaN: 0 / beta is 0 and everything else saturates (or nothing does)."""
    gate, up = all_bf16(), all_bf16()
    out = call(library.run_situ, gate, up, *betas, int(fast))
    assert not bool(out.isnan().any())
    assert not bool(out[(gate == 0) | (up == 0)].any())
    if betas[1] in (1.0, 25.0):
        one = torch.full((1,), 30.0)
        value = float(call(library.run_situ, one, torch.full((1,), 1e3), *betas, int(fast)))
        assert value == pytest.approx(float(np.float32(betas[0])) * betas[1], rel=1e-5, abs=2e-45)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("limit", [0.0, 10.0])
def test_swiglu(library: ctypes.CDLL, fast: bool, limit: float) -> None:
    gate, up = all_bf16(), all_bf16()
    out = call(library.run_swiglu, gate, up, limit, int(fast))
    options = Options("swiglu", limit or None)
    clamped = (gate.clamp(max=limit), up.clamp(-limit, limit)) if limit else (gate, up)
    moderate = (gate > -80) & (gate.abs() > 2.0**-40) & (up.abs() > 2.0**-40)
    expected = in_float64(*clamped, Options("swiglu"))[moderate.numpy()]
    assert_relative(out[moderate], expected, FAST_ERROR if fast else EXACT_ERROR)
    theirs = oracle.activate(gate.to(torch.bfloat16), up.to(torch.bfloat16), options)
    assert_relative(out[moderate], theirs[moderate].double().numpy(), FAST_ERROR)


def test_scale_codes_are_the_quantisers(library: ctypes.CDLL) -> None:
    """At every exponent: the power of two, its neighbours, and random maxima; and the inverse of all 255 codes."""
    powers = torch.exp2(torch.arange(-149, 128).double()).float() * torch.tensor([[1.0], [448.0], [1.75], [0.999]])
    powers = powers.flatten()
    infinity = torch.tensor(float("inf"))
    points = torch.cat(
        (powers, torch.nextafter(powers, infinity), torch.nextafter(powers, -infinity), torch.rand(4096))
    )
    points = torch.cat((points.clamp_min(0.0), torch.zeros(1), infinity.view(1))).contiguous()
    codes = torch.empty(points.numel(), dtype=torch.int32)
    library.run_codes(points.data_ptr(), codes.data_ptr(), points.numel())
    inverse_of_448 = float(torch.tensor(1 / 448, dtype=torch.float32))
    assert torch.equal(codes.to(torch.uint8), quantize.ceil_to_ue8m0(points * inverse_of_448))
    every = torch.arange(255, dtype=torch.int32)
    inverse = torch.empty(255)
    library.run_inverse(every.data_ptr(), inverse.data_ptr(), 255)
    assert torch.equal(inverse, quantize.ue8m0_to_float((254 - every).to(torch.uint8)))
