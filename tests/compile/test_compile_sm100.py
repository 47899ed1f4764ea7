"""What the compiler makes of the Blackwell kernels that serve Kimi K3: registers, shared and tensor memory, opcodes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from compile_support import compiled
from machine_code import strong_loads

from deep_gemm_k3 import _extension
from deep_gemm_k3.emulator import Module
from deep_gemm_k3.jit import KernelSource, NvrtcCompiler
from deep_gemm_k3.jit.ptx import argument_bytes, families, opcodes
from deep_gemm_k3.mega.plan import KERNELS, Plan

K3 = {
    "num_ranks": 8, "num_experts": 896, "num_topk": 16, "num_max_tokens_per_rank": 8192, "hidden": 3584,
    "intermediate_hidden": 3072, "activation": "situ", "has_statistics": True, "target": "sm_100a",
}  # fmt: skip
SHARED = {"shared_hidden": 7168, "shared_intermediate_hidden": 768, "num_max_shared_tokens": 65536}
SPLITS = {
    "splits": {"routed_l1": 2, "routed_l2": 4, "shared_l1": 16, "shared_l2": 2},
    "routed_tokens": 16,
    "shared_tokens": 32,
}
CASES = {
    "decode, published": ("sm_100a", SHARED | {"num_tokens": 8, "num_shared_tokens": 64, "shared_output": "token_owner"}),
    "decode, split": (
        "sm_100a",
        SHARED | {"num_tokens": 1, "num_shared_tokens": 32, "shared_output": "token_owner", "overrides": SPLITS},
    ),
    "family target": ("sm_100f", SHARED | {"num_tokens": 8, "num_shared_tokens": 64, "shared_output": "hidden_sharded"}),
    "large prefill, routed": ("sm_100a", {"num_tokens": 4096, "shared_output": "none"}),
    "alone, exact": ("sm_100a", {"num_tokens": 64, "shared_output": "none", "num_sms": 1, "fast_math": False}),
}  # fmt: skip
LARGEST_REGISTERS = 128  # thirteen warps; the kernel does not trade registers


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_fits(name: str) -> None:
    arch, changed = CASES[name]
    problem: dict[str, Any] = K3 | changed
    plan = Plan.make(**problem)
    made = NvrtcCompiler().compile(KernelSource(KERNELS["sm_100a"], arch, plan.literal))
    used = made.resources
    assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)
    assert 0 < used.registers <= LARGEST_REGISTERS
    memory, tensor = plan.data["shared_memory"], plan.data["tensor_memory"]
    assert memory["bytes_per_cta"] + used.static_shared <= memory["limit"] == 227 * 1024
    assert 32 <= tensor["columns"] <= tensor["limit"] == 512
    assert argument_bytes(made.ptx, made.entry) == _extension.ops().params_bytes()
    # Every opcode has a model, so what is compiled can be executed without a chip.
    Module(made.ptx).check(made.entry)
    assert "trap" not in families(made.ptx)
    # Words that carry their epoch are read whole.
    vectors = len(re.findall(r"ld\.(?:volatile|relaxed\.sys)\.global\.(?:v4\.u32|b128)", made.ptx))
    assert strong_loads(made.cubin).count(128) >= vectors >= 8


def test_pairs_multiply_as_pairs() -> None:
    """Half the CTAs of an even grid issue for two; a single CTA issues for itself."""

    def groups(num_sms: int) -> set[str]:
        made = compiled(K3 | {"num_tokens": 8, "shared_output": "none", "num_sms": num_sms})
        tensor = [opcode for opcode in opcodes(made.ptx) if opcode.startswith("tcgen05.mma")]
        assert tensor
        assert not any(opcode.startswith("wgmma") for opcode in opcodes(made.ptx))
        return {part for opcode in tensor for part in opcode.split(".") if part.startswith("cta_group")}

    assert groups(148) == {"cta_group::2"}
    assert groups(147) == {"cta_group::1"}
