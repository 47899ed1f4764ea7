"""A traced kernel runs wherever the kernel runs that it stands for: it takes no more of a CTA's shared memory, and its
registers are bounded alike."""

from __future__ import annotations

import struct

import pytest
from compile_support import compiled
from test_compile_engine import K3, ONE_RANK

SHT_NOBITS = 8


def static_shared_bytes(cubin: bytes) -> int:
    """Shared memory that a kernel declares beside what its launch gives it: sections .nv.shared.KERNEL."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    strings = sections[names][4]

    def name(section: tuple[int, ...]) -> bytes:
        begin = strings + section[0]
        return cubin[begin : cubin.index(b"\0", begin)]

    return sum(s[5] for s in sections if s[1] == SHT_NOBITS and name(s).startswith(b".nv.shared."))


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("tokens", [8, 128])
def test_a_traced_kernel_takes_no_more_shared_memory(target: str, tokens: int) -> None:
    problem = K3 | ONE_RANK | {"target": target, "num_tokens": tokens, "num_shared_tokens": tokens}
    plain, traced = (compiled(problem, suffix).cubin for suffix in ("", "_traced"))
    assert static_shared_bytes(traced) == static_shared_bytes(plain)
    assert traced != plain
