"""What the compiler makes of the kernels that serve Kimi K3 over eight ranks: registers suffice, and no wgmma waits for
another because the compiler could not prove that the warps stay together."""

from __future__ import annotations

import json

import pytest

from deep_gemm_k3 import _extension
from deep_gemm_k3.jit import KernelSource, NvrtcCompiler
from deep_gemm_k3.mega.plan import KERNELS

K3 = {
    "num_ranks": 8,
    "num_experts": 896,
    "num_topk": 16,
    "num_max_tokens_per_rank": 8192,
    "hidden": 3584,
    "intermediate_hidden": 3072,
    "shared_hidden": 7168,
    "shared_intermediate_hidden": 768,
    "num_max_shared_tokens": 65536,
    "shared_output": "token_owner",
    "activation": "situ",
    "has_rms_norm": True,
    "fast_math": True,
    "target": "sm_90a",
}


@pytest.mark.parametrize("num_tokens", [8, 512])
def test_no_spill_and_no_serialised_wgmma(num_tokens: int) -> None:
    problem = K3 | {"num_tokens": num_tokens, "num_shared_tokens": 8 * num_tokens}
    literal = _extension.ops().config_literal(json.dumps(problem))
    made = NvrtcCompiler().compile(KernelSource(KERNELS["sm_90a"], "sm_90a", literal))
    assert made.resources.spill_stores == made.resources.spill_loads == 0
    # ptxas says "wgmma.mma_async instructions are serialized" and why.
    assert "serialized" not in made.log
