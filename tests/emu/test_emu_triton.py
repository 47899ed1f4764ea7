"""Triton's matmul, compiled by Triton for a GPU that is not there: wgmma on sm_90a, tcgen05 on sm_100a.

Needs ``pip install "deep_gemm_k3[triton]"``; run with ``-m triton``.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from deep_gemm_k3.emulator import Device, Module

pytestmark = pytest.mark.triton

BLOCK = {"BM": 128, "BN": 64, "BK": 64}
SHAPE = (200, 136, 160)  # no multiple of the blocks


# `tl` is Triton's language, which `compiled` puts there: without Triton this module can still be collected.
# ruff: noqa: F821
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, scm, scn, BM, BN, BK):  # type: ignore[no-untyped-def]
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a = a_ptr + rm[:, None] * sam + rk[None, :] * sak
    b = b_ptr + rk[:, None] * sbk + rn[None, :] * sbn
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a, mask=(rm[:, None] < M) & (rk[None, :] + k < K), other=0.0)
        y = tl.load(b, mask=(rk[:, None] + k < K) & (rn[None, :] < N), other=0.0)
        total = tl.dot(x, y, total)
        a += BK * sak
        b += BK * sbk
    c = c_ptr + rm[:, None] * scm + rn[None, :] * scn
    tl.store(c, total.to(tl.float16), mask=(rm[:, None] < M) & (rn[None, :] < N))


def compiled(capability: int) -> Any:
    import triton
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    matmul.__globals__["tl"] = tl
    names = list(matmul.__code__.co_varnames[: matmul.__code__.co_argcount])
    constants = {"sak": 1, "sbn": 1, "scn": 1, **BLOCK}
    signature = {
        name: "constexpr" if name in constants else "*fp16" if name.endswith("_ptr") else "i32" for name in names
    }
    aligned = [i for i, name in enumerate(names) if name in ("a_ptr", "b_ptr", "c_ptr", "sam", "sbk", "scm")]
    source = ASTSource(
        triton.jit(matmul), signature, constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 3})


@pytest.mark.parametrize(("capability", "instruction"), [(90, "wgmma"), (100, "tcgen05")])
@pytest.mark.parametrize("adversary", ["random", "latest"])
def test_matmul(capability: int, instruction: str, adversary: str) -> None:
    kernel = compiled(capability)
    module = Module(kernel.asm["ptx"])
    assert re.search(rf"\b{instruction}\.", kernel.asm["ptx"])
    m, n, k = SHAPE
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-4, 5, size).astype(np.float16) for size in ((m, k), (k, n)))
    c = np.full((m, n), np.nan, np.float16)
    values: list[Any] = [a, b, c, m, n, k, k, n, n]
    values += [0] * (len(module.kernels["matmul"]["params"]) - len(values))  # scratch that this kernel does not use
    device = Device(arch=module.target, seed=1, adversary=adversary)
    grid = (-(-m // BLOCK["BM"]), -(-n // BLOCK["BN"]))
    device.launch(module, "matmul", grid, 128, params=values, shared_bytes=kernel.metadata.shared)
    np.testing.assert_array_equal(c, (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16))
    # Triton 3.9.0 converts what tcgen05.ld has loaded ahead of its tcgen05.wait::ld, which PTX does not allow.
    assert {finding.kind for finding in device.findings} == ({"load-in-flight"} if instruction == "tcgen05" else set())
