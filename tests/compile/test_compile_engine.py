"""What the compiler makes of the kernels that serve Kimi K3 over eight ranks: registers suffice, and no wgmma waits for
another because the compiler could not prove that the warps stay together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from compile_support import compiled
from machine_code import LOAD_LOCAL, MMA, STORE_LOCAL, TO_UNIFORM_REGISTER, WGMMA, operations

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
    "changed",
    [
        pytest.param({"num_tokens": 8, "num_shared_tokens": 64}, id="8 ranks, 8 tokens"),
        pytest.param({"num_tokens": 512, "num_shared_tokens": 4096}, id="8 ranks, 512 tokens"),
        pytest.param(ONE_RANK | {"num_tokens": 64, "num_shared_tokens": 64}, id="64 tokens"),
        pytest.param(ONE_RANK | {"num_tokens": 128, "num_shared_tokens": 128}, id="128 tokens"),
        pytest.param({"num_ranks": 1, "num_tokens": 2048, "num_shared_tokens": 2048}, id="all experts on a rank"),
        pytest.param(ONE_RANK | {"num_tokens": 2048, "num_shared_tokens": 2048}, id="2048 tokens"),
    ],
)
def test_mainloops_are_not_held_up(changed: dict[str, int]) -> None:
    made = compiled(K3 | changed)
    # ptxas says "wgmma.mma_async instructions are serialized" and why.
    assert "serialized" not in made.log
    code = operations(made.cubin)
    inside = {code[at] for places in _mainloops(code) for at in places}
    # Spilled registers cost little once a task, much here.
    assert not inside & {LOAD_LOCAL, STORE_LOCAL}
    # Moves to uniform registers are there when the assembler cannot prove that a warp stays together, as after a branch on
    # a thread's index: then every wgmma waits for its descriptor.
    assert TO_UNIFORM_REGISTER not in inside


@pytest.mark.parametrize(
    ("num_tokens", "num_ctas", "by_warps", "by_warpgroups"),
    [(8, 2, True, False), (64, 2, True, True), (128, 2, False, True), (8, 1, False, True)],
)
def test_who_multiplies(num_tokens: int, num_ctas: int, by_warps: bool, by_warpgroups: bool) -> None:
    """Blocks of up to eight tokens are multiplied by single warps where two CTAs share an SM, others by warpgroups."""
    routed = K3 | ONE_RANK | {"shared_output": "none", "num_tokens": num_tokens, "num_shared_tokens": 0}
    code = operations(compiled(routed | {"overrides": {"num_ctas_per_sm": num_ctas}}).cubin)
    assert (MMA in code, bool({*WGMMA} & {*code})) == (by_warps, by_warpgroups)


def _mainloops(code: list[int]) -> list[range]:
    """From one product to the next, where that is near."""
    places = [at for at, operation in enumerate(code) if operation in (*WGMMA, MMA)]
    return [range(begin, end) for begin, end in pairwise(places) if end - begin < 100]
