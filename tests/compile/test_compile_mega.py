"""The fused kernel goes through the run-time compiler, and host and device agree about its argument."""

from __future__ import annotations

import re

import pytest
from compile_support import compiled
from machine_code import strong_loads

from deep_gemm_k3 import _extension
from deep_gemm_k3.jit import Artefact
from deep_gemm_k3.jit.ptx import argument_bytes, families, opcodes

SMALL = {
    "num_ranks": 2,
    "num_experts": 8,
    "num_topk": 2,
    "num_max_tokens_per_rank": 384,
    "hidden": 1024,
    "intermediate_hidden": 512,
    "num_tokens": 64,
    "shared_hidden": 2048,
    "shared_intermediate_hidden": 1024,
    "num_max_shared_tokens": 384,
    "shared_output": "token_owner",
}


@pytest.fixture(scope="module")
def mega() -> Artefact:
    return compiled(SMALL | {"target": "sm_90a"})


def test_argument_has_one_size(mega: Artefact) -> None:
    assert argument_bytes(mega.ptx, mega.entry) == _extension.ops().params_bytes()


def test_kernel_fits_its_registers_and_multiplies_with_wgmma(mega: Artefact) -> None:
    used = mega.resources
    assert 0 < used.registers <= 255
    assert families(mega.ptx)["wgmma"] > 0


def test_no_trap_is_compiled_in(mega: Artefact) -> None:
    """An abort ends the kernel in an orderly way; a trap would destroy the context of every rank on the device."""
    assert "trap" not in families(mega.ptx)


def test_words_that_carry_their_epoch_are_read_whole(mega: Artefact) -> None:
    """The assembler narrows relaxed 16-byte loads to the parts that are used, volatile ones it leaves whole."""
    loads = [opcode for opcode in opcodes(mega.ptx) if opcode.startswith("ld.") and opcode.endswith("b128")]
    assert loads == ["ld.volatile.global.b128"]


def test_such_words_are_whole_in_the_machine_code_too(mega: Artefact) -> None:
    vectors = len(re.findall(r"ld\.(?:volatile|relaxed\.sys)\.global\.(?:v4\.u32|b128)", mega.ptx))
    assert vectors >= 8
    assert strong_loads(mega.cubin).count(128) >= vectors
