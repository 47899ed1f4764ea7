"""The fused kernel goes through the run-time compiler, and host and device agree about its argument."""

from __future__ import annotations

import json
import re
import struct

import pytest

from deep_gemm_k3 import _extension
from deep_gemm_k3.jit import Artefact, KernelSource, NvrtcCompiler
from deep_gemm_k3.jit.ptx import argument_bytes, families, opcodes
from deep_gemm_k3.mega.plan import KERNELS

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
    literal = _extension.ops().config_literal(json.dumps(SMALL | {"target": "sm_90a"}))
    return NvrtcCompiler().compile(KernelSource(KERNELS["sm_90a"], "sm_90a", literal))


def test_argument_has_one_size(mega: Artefact) -> None:
    assert argument_bytes(mega.ptx, mega.entry) == _extension.ops().params_bytes()


def test_kernel_fits_its_registers_and_multiplies_with_wgmma(mega: Artefact) -> None:
    used = mega.resources
    assert 0 < used.registers <= 255
    assert families(mega.ptx)["wgmma"] > 0


def test_no_trap_is_compiled_in(mega: Artefact) -> None:
    """An abort ends the kernel in an orderly way; a trap would destroy the context of every rank on the device."""
    assert "trap" not in families(mega.ptx)


def _strong_loads(cubin: bytes) -> list[int]:
    """Widths in bits of the loads at system scope in an sm_90 cubin. An instruction is 128 bits: the low 12 bits of the
    first half say LDG (0x981); of the second half, bits 9 to 11 hold the width (4, 5, 6: 32, 64, 128 bits) and bits 12
    to 20 the order and scope (0x1F5: strong, system)."""
    section_offset = struct.unpack_from("<Q", cubin, 40)[0]
    size, count = struct.unpack_from("<HH", cubin, 58)
    widths = []
    for i in range(count):
        _, kind, flags, _, begin, length = struct.unpack_from("<IIQQQQ", cubin, section_offset + i * size)
        if kind != 1 or not flags & 4:  # PROGBITS that are executable
            continue
        for at in range(begin, begin + length, 16):
            low, high = struct.unpack_from("<QQ", cubin, at)
            if low & 0xFFF == 0x981 and high >> 12 & 0x1FF == 0x1F5:
                widths.append(1 << (high >> 9 & 7) + 1)
    return widths


def test_words_that_carry_their_epoch_are_read_whole(mega: Artefact) -> None:
    """The assembler narrows relaxed 16-byte loads to the parts that are used, volatile ones it leaves whole."""
    loads = [opcode for opcode in opcodes(mega.ptx) if opcode.startswith("ld.") and opcode.endswith("b128")]
    assert loads == ["ld.volatile.global.b128"]


def test_such_words_are_whole_in_the_machine_code_too(mega: Artefact) -> None:
    vectors = len(re.findall(r"ld\.(?:volatile|relaxed\.sys)\.global\.(?:v4\.u32|b128)", mega.ptx))
    assert vectors >= 8
    assert _strong_loads(mega.cubin).count(128) >= vectors
