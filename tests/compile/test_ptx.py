"""Reading PTX: opcodes, families, arguments."""

from __future__ import annotations

import pytest
from jit_support import probe

from deep_gemm_k3.jit import ARCHITECTURES, NvrtcCompiler
from deep_gemm_k3.jit.ptx import argument_bytes, families, opcodes

TEXT = """
.version 9.0
.target sm_90a
.visible .entry one(
\t.param .align 8 .b8 one_param_0[32]
)
{
\t.reg .pred \t%p<3>;
\t.reg .b32 \t%r<9>;
\tld.param.u64 \t%rd1, [one_param_0+8]; // a comment; mul.lo.s32 %r1
$L__BB0_1:
\t{
\t.reg .pred p;
\tmbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;
\t}
\t@%p1 bra \t$L__BB0_1;
\t@!%p2 add.s32 \t%r1, %r2, 1;
$L__BB0_2: add.s32 %r1, %r1, %r2; ret;
}
"""


def test_opcodes_are_counted_with_their_modifiers() -> None:
    assert opcodes(TEXT) == {
        "ld.param.u64": 1,
        "mbarrier.try_wait.parity.shared::cta.b64": 1,
        "bra": 1,
        "add.s32": 2,
        "ret": 1,
    }
    assert families(TEXT) == {"ld": 1, "mbarrier": 1, "bra": 1, "add": 2, "ret": 1}


def test_argument_is_measured() -> None:
    assert argument_bytes(TEXT, "one") == 32


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_probe_uses_what_it_says(arch: str) -> None:
    artefact = NvrtcCompiler().compile(probe(arch))
    found = families(artefact.ptx)
    assert {"cp", "mbarrier", "fence", "st", "ld", "bra", "ret"} <= set(found)
    assert not {"wgmma", "tcgen05", "call", "trap"} & set(found)
    assert argument_bytes(artefact.ptx, artefact.entry) == 32
