"""Every instruction that the compiler makes of this package's kernels has a model in the emulator.

A fixed sample of Kimi K3's kernels; ``scripts/check_emulator_coverage.py`` takes all of them, and its record of the last
full run lies in ``docs/runs``.
"""

from __future__ import annotations

from typing import Any

import pytest

from deep_gemm_k3.emulator import EmulatorError, Module
from deep_gemm_k3.jit import KernelSource, NvrtcCompiler
from deep_gemm_k3.mega.plan import KERNELS, Plan

K3: dict[str, Any] = {
    "num_experts": 896, "num_topk": 16, "hidden": 3584, "intermediate_hidden": 3072, "num_max_tokens_per_rank": 8448,
}  # fmt: skip
SHARED = {"shared_hidden": 7168, "num_max_shared_tokens": 8448, "activation": "situ"}
SAMPLE: dict[str, dict[str, Any]] = {
    "one-rank-routed": {"num_ranks": 1, "num_tokens": 64, "activation": "swiglu", "has_clamp": True},
    "ep8-decode-rs": {
        **SHARED, "num_ranks": 8, "num_tokens": 8, "num_shared_tokens": 64, "shared_intermediate_hidden": 768,
        "shared_output": "hidden_sharded", "has_statistics": True,
    },
    "ep8-prefill-sp-rs": {
        **SHARED, "num_ranks": 8, "num_tokens": 4096, "num_shared_tokens": 8192, "shared_intermediate_hidden": 768,
        "shared_output": "token_owner", "fast_math": False,
    },
    "ep16-dense-invariant": {
        **SHARED, "num_ranks": 16, "num_tokens": 256, "num_shared_tokens": 256, "shared_intermediate_hidden": 384,
        "shared_output": "dense", "batch_invariant": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_kernels_of_the_model_decode(name: str, target: str) -> None:
    literal = Plan.make(**K3, **SAMPLE[name], target=target).literal
    kernel = NvrtcCompiler().compile(KernelSource(KERNELS[target], target, literal, ptx_only=True))
    Module(kernel.ptx).check()


def test_probe_and_traced_kernels_decode() -> None:
    literal = Plan.make(**K3, **SAMPLE["ep8-decode-rs"], target="sm_90a").literal
    Module(NvrtcCompiler().compile(KernelSource("mega_sm90_traced", "sm_90a", literal, ptx_only=True)).ptx).check()


@pytest.mark.parametrize("statement", ["frobnicate.b32 %r1, %r2;", "add.frob.s32 %r1, %r2, %r2;"])
def test_an_instruction_without_a_model_is_an_error_with_its_line(statement: str) -> None:
    text = f".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k() {{\n.reg .b32 %r<3>;\n{statement}\nret;\n}}\n"
    with pytest.raises(EmulatorError, match="PTX line 6"):
        Module(text).check()
