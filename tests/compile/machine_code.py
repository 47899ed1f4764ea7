"""Instructions of a cubin, as far as tests look at them: sm_90 and sm_100 encode each in 128 bits."""

from __future__ import annotations

import struct

LOAD_GLOBAL, LOAD_LOCAL, STORE_LOCAL, TO_UNIFORM_REGISTER = 0x981, 0x983, 0x387, 0x2CA
WGMMA = (0x9F0, 0xDF0)  # A from shared memory, from registers
MMA = 0x23C  # of one warp


def instructions(cubin: bytes) -> list[tuple[int, int]]:
    """Both halves of every instruction, in order; the low 12 bits of the first one name the operation."""
    section_offset = struct.unpack_from("<Q", cubin, 40)[0]
    size, count = struct.unpack_from("<HH", cubin, 58)
    found = []
    for i in range(count):
        _, kind, flags, _, begin, length = struct.unpack_from("<IIQQQQ", cubin, section_offset + i * size)
        if kind == 1 and flags & 4:  # PROGBITS that are executable
            found += [struct.unpack_from("<QQ", cubin, at) for at in range(begin, begin + length, 16)]
    return found


def strong_loads(cubin: bytes) -> list[int]:
    """Widths in bits of the loads at system scope: bits 9 to 11 of the second half hold the width (4, 5, 6: 32, 64, 128
    bits), bits 12 to 20 order and scope (0x1F5: strong, system)."""
    return [
        1 << (high >> 9 & 7) + 1
        for low, high in instructions(cubin)
        if low & 0xFFF == LOAD_GLOBAL and high >> 12 & 0x1FF == 0x1F5
    ]


def operations(cubin: bytes) -> list[int]:
    return [low & 0xFFF for low, _ in instructions(cubin)]
