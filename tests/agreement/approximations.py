"""How far the approximate instructions of the device lie from the exact functions, in units of the last place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from product_probe import Bits, Kernel, compile_ptx

FUNCTIONS = {
    "ex2": ("ex2.approx.ftz.f32", -20, 4, np.exp2),
    "rcp": ("rcp.approx.ftz.f32", -20, 20, lambda x: 1.0 / x),
    "rsqrt": ("rsqrt.approx.ftz.f32", -20, 20, lambda x: 1.0 / np.sqrt(np.abs(x))),
    "lg2": ("lg2.approx.ftz.f32", -20, 20, lambda x: np.log2(np.abs(x))),
    "tanh": ("tanh.approx.f32", -10, 4, np.tanh),
    "sqrt": ("sqrt.approx.ftz.f32", -20, 20, lambda x: np.sqrt(np.abs(x))),
}
COUNT = 4096

SOURCE = "".join(
    f"""extern "C" __global__ void approx_{name}(const float* x, float* y) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = x[i], r;
    {"v = fabsf(v);" if name in ("rsqrt", "lg2", "sqrt") else ""}
    asm("{op} %0, %1;" : "=f"(r) : "f"(v));
    y[i] = r;
}}
"""
    for name, (op, *_) in FUNCTIONS.items()
)


def inputs(name: str) -> NDArray[np.float32]:
    g = Bits(30, list(FUNCTIONS).index(name))
    _, low, high, _ = FUNCTIONS[name]
    code = (g.integers(0, 1, (COUNT,)) << 31) | (g.integers(127 + low, 127 + high, (COUNT,)) << 23)
    return (code | g.integers(0, (1 << 23) - 1, (COUNT,))).astype(np.uint32).view(np.float32)


def errors(name: str, given: NDArray[np.float32]) -> NDArray[np.float64]:
    """Distance from the exact value, in units of its last place."""
    exact = FUNCTIONS[name][3](inputs(name).astype(np.float64))
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 23)
    return (given.astype(np.float64) - exact) / unit


def run(where: str, name: str) -> NDArray[np.float32]:
    """The instruction's results for ``inputs(name)``, from "cuda" or "emulator"."""
    out = np.zeros(COUNT, np.float32)
    Kernel(compile_ptx(SOURCE), f"approx_{name}", COUNT // 128).run(where, (inputs(name),), out)
    return out
