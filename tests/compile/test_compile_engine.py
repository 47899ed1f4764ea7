"""What the compiler makes of the kernels that serve Kimi K3 over eight ranks: registers suffice, and no wgmma waits for
another because the compiler could not prove that the warps stay together."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from machine_code import TO_UNIFORM_REGISTER, WGMMA, operations

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


ONE_RANK = {"num_ranks": 1, "num_experts": 112}


@pytest.mark.parametrize(
    ("changed", "max_spill_bytes"),
    [
        pytest.param({"num_tokens": 8, "num_shared_tokens": 64}, 0, id="8 ranks, 8 tokens"),
        pytest.param({"num_tokens": 512, "num_shared_tokens": 4096}, 0, id="8 ranks, 512 tokens"),
        pytest.param(ONE_RANK | {"num_tokens": 64, "num_shared_tokens": 64}, 0, id="64 tokens"),
        # Once a task, not in a mainloop.
        pytest.param(ONE_RANK | {"num_tokens": 128, "num_shared_tokens": 128}, 64, id="128 tokens"),
    ],
)
def test_no_spill_and_no_serialised_wgmma(changed: dict[str, int], max_spill_bytes: int) -> None:
    literal = _extension.ops().config_literal(json.dumps(K3 | changed))
    made = NvrtcCompiler().compile(KernelSource(KERNELS["sm_90a"], "sm_90a", literal))
    assert max(made.resources.spill_stores, made.resources.spill_loads) <= max_spill_bytes
    # ptxas says "wgmma.mma_async instructions are serialized" and why.
    assert "serialized" not in made.log
    assert not _moves_between_wgmmas(made.cubin)


def _moves_between_wgmmas(cubin: bytes) -> int:
    """Moves to uniform registers inside mainloops. There are some when the assembler cannot prove that a warp stays together,
    as after a branch on a thread's index; every wgmma then waits for its descriptor."""
    code, num_moves = operations(cubin), 0
    places = [at for at, operation in enumerate(code) if operation == WGMMA]
    for begin, end in pairwise(places):
        if end - begin < 100:
            num_moves += code[begin:end].count(TO_UNIFORM_REGISTER)
    return num_moves
