"""What a cubin says about itself."""

from __future__ import annotations

import struct

_FLAGS_OFFSET = 48  # e_flags of a 64-bit ELF header
_NEW_ABI = 8  # from CUDA 13 on the architecture lies in the second byte of e_flags, before in the first


def cubin_architecture(cubin: bytes) -> int:
    """90 for sm_90a, 100 for sm_100a and sm_100f; 0 when the bytes are no cubin."""
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF":
        return 0
    (flags,) = struct.unpack_from("<I", cubin, _FLAGS_OFFSET)
    return (flags >> 8) & 0xFF if cubin[8] >= _NEW_ABI else flags & 0xFF
