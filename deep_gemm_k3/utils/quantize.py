"""Number formats of the routed experts: E4M3, E2M1 and UE8M0, exact conversions and the two quantisers.

========  =====  ==========================================  ==========================
format    bits   values                                      held in
========  =====  ==========================================  ==========================
E4M3      8      +-448 at most, no infinity, NaN = 0x7F      ``torch.float8_e4m3fn``
E2M1      4      +-{0, .5, 1, 1.5, 2, 3, 4, 6}               two per byte along K, even K in the low nibble
UE8M0     8      2^(code - 127); 255 = NaN                   ``uint8``, or four per ``int32`` along K, lowest K lowest
========  =====  ==========================================  ==========================

Everything here runs on any device and gives the same bits on each: only comparisons, integer arithmetic and
multiplications by powers of two are used, apart from one FP32 product (``amax * FP32(1/448)``).
"""

from __future__ import annotations

import torch

from ..arguments import check_bool, check_int, check_tensor
from .math import align

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE8M0_NAN = 255
UE8M0_BIAS = 127
AMAX_FLOOR = 1e-4
"""Smallest block maximum the input quantisers assume, so that a zero block gets an ordinary scale."""

_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_INVERSE_E4M3_MAX = float(torch.tensor(1.0 / 448.0, dtype=torch.float32, device="cpu"))


# ------------------------------------------------------------------------------------------------------------- UE8M0
def ue8m0_to_float(codes: torch.Tensor) -> torch.Tensor:
    """Powers of two of UE8M0 ``codes`` (uint8, any shape) as float32; code 255 gives NaN, code 0 the subnormal 2^-127."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 0x00400000), bits)
    bits = torch.where(codes == UE8M0_NAN, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def float_to_ue8m0(sf: torch.Tensor, name: str = "sf") -> torch.Tensor:
    """UE8M0 codes (uint8) of float32 powers of two; the exact inverse of :func:`ue8m0_to_float` on codes 0..254.

    Raises ``ValueError``, naming the first offender, for anything that is no power of two in [2^-127, 2^127]:
    zero, negative numbers, NaN and infinities included.
    """
    bits = sf.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    smallest = bits == 0x00400000
    valid = smallest | ((exponent >= 1) & (exponent <= 254) & (mantissa == 0))
    if not bool(valid.all()):
        where = (~valid).nonzero()[0].tolist()
        value = float(sf[tuple(where)])
        raise ValueError(f"{name}: wanted powers of two in [2^-127, 2^127], given {value!r} at {where}")
    return torch.where(smallest, torch.zeros_like(exponent), exponent).to(torch.uint8)


def ceil_to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """UE8M0 codes (uint8) of the smallest power of two >= ``x`` (float32, >= 0), kept in [2^-127, 2^127].

    Zero gives code 0. Infinity and NaN give code 254: E4M3 values under such a scale still show both, as NaN or as products
    that overflow. A format without NaN has to say it in the scale, as :func:`per_token_cast_to_fp4` does.
    """
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2^-126 the mantissa is the number itself in units of 2^-149: above 2^-127 the answer is 2^-126.
    subnormal = (mantissa > 0x400000).to(torch.int32)
    codes = torch.where(exponent == 0, subnormal, exponent + (mantissa != 0).to(torch.int32))
    return codes.clamp_(0, 254).to(torch.uint8)


def _flat(x: torch.Tensor) -> torch.Tensor:
    # A dimension of size 1 keeps any stride and still counts as contiguous; one view with stride 1 has none of that.
    return x.contiguous().as_strided((x.numel(),), (1,))


def pack_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """int32 [..., n / 4] from uint8 [..., n]: four codes per word, the lowest index in the lowest byte."""
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.size(-1) % 4:
        raise ValueError(
            f"codes: wanted uint8 with a last dimension divisible by 4, given {codes.dtype} {list(codes.shape)}"
        )
    return _flat(codes).view(torch.int32).view(*codes.shape[:-1], codes.size(-1) // 4)


def unpack_ue8m0(words: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4 * n] from int32 [..., n]; the inverse of :func:`pack_ue8m0`."""
    if words.dtype != torch.int32:
        raise ValueError(f"words: wanted int32, given {words.dtype}")
    return _flat(words).view(torch.uint8).view(*words.shape[:-1], 4 * words.size(-1))


# -------------------------------------------------------------------------------------------------------------- E4M3
def float_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """E4M3 of ``x`` (any float dtype): round to nearest even, saturating at +-448; NaN stays NaN."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_e4m3_blocks(
    x: torch.Tensor, gran_k: int = 32, amax_floor: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` float32 [rows, K] per row and ``gran_k`` columns with power-of-two scales.

    Returns E4M3 [rows, K] and UE8M0 codes uint8 [rows, K / gran_k]. The scale is the smallest power of two that is at
    least ``amax * FP32(1 / 448)``; the conversion saturates. K must be a multiple of ``gran_k``.
    """
    rows, k = x.shape
    if k % gran_k:
        raise ValueError(f"x: wanted a width divisible by {gran_k}, given {k}")
    blocks = x.float().view(rows, k // gran_k, gran_k)
    amax = blocks.abs().amax(dim=2) if blocks.numel() else blocks.new_zeros(blocks.shape[:2])
    if amax_floor:
        amax = amax.clamp_min(amax_floor)
    codes = ceil_to_ue8m0(amax * _INVERSE_E4M3_MAX)
    # 2^-e is representable for every e in [-127, 127], so this product is exact up to underflow to zero.
    inverse = ue8m0_to_float((254 - codes.to(torch.int32)).to(torch.uint8))
    values = float_to_e4m3(blocks * inverse.unsqueeze(2))
    return values.view(rows, k), codes


def dequantize_e4m3(x: torch.Tensor, sf: torch.Tensor, gran_k: int = 32) -> torch.Tensor:
    """float32 [rows, K] of E4M3 ``x`` [rows, K] and scales ``sf``, either int32 [rows, K / (4 * gran_k)] holding packed
    UE8M0 or uint8 [rows, K / gran_k]. Every product is exact (or underflows below 2^-149).
    """
    rows, k = x.shape
    codes = unpack_ue8m0(sf) if sf.dtype == torch.int32 else sf
    if codes.shape != (rows, k // gran_k):
        raise ValueError(f"sf: wanted {[rows, k // gran_k]} UE8M0 scales, given {list(codes.shape)}")
    blocks = x.float().view(rows, k // gran_k, gran_k)
    return (blocks * ue8m0_to_float(codes).unsqueeze(2)).view(rows, k)


# -------------------------------------------------------------------------------------------------------------- E2M1
def float_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes (uint8, 0..15) of ``x``: the nearest value, ties towards zero, saturating at +-6, never a negative zero.

    Ties towards zero is upstream's rule for weights, kept so that both packages make the same bytes.
    """
    x = x.float()
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for boundary in _E2M1_BOUNDARIES:  # comparisons are several times as fast as a search
        code += magnitude > boundary
    return code + ((x < 0) & (code != 0)).to(torch.uint8) * 8


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] from codes uint8 [..., K] (0..15): even K in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., K] (0..15) from uint8 or int8 [..., K / 2]; the inverse of :func:`pack_e2m1`."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e2m1_to_float(packed: torch.Tensor) -> torch.Tensor:
    """float32 [..., K] of packed E2M1 uint8 or int8 [..., K / 2]; code 8 gives -0.0."""
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    values = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    flat = packed.contiguous().view(torch.uint8).flatten().to(torch.int32)
    return pairs.index_select(0, flat).view(*packed.shape[:-1], packed.shape[-1] * 2)


def dequantize_e2m1(packed: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] of packed E2M1 [N, K / 2] and UE8M0 ``codes`` uint8 [N, K / 32]; exact."""
    n, half = packed.shape
    if codes.shape != (n, half // 16):
        raise ValueError(f"codes: wanted {[n, half // 16]} UE8M0 scales, given {list(codes.shape)}")
    values = e2m1_to_float(packed).view(n, half // 16, 32)
    return values.mul_(ue8m0_to_float(codes).unsqueeze(2)).view(n, half * 2)


# -------------------------------------------------------------------------------------------------------- quantisers
def _check_options(use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool) -> int:
    """The width of a group of columns, once all options are known to be of their kinds and to go together."""
    if check_bool("use_packed_ue8m0", use_packed_ue8m0) and not check_bool("use_ue8m0", use_ue8m0):
        raise ValueError("use_packed_ue8m0: wanted use_ue8m0=True with it, given False")
    check_bool("use_ue8m0", use_ue8m0)
    return check_int("gran_k", gran_k, 1, 2**20)


def _check_packing(groups: int, gran_k: int, n: int) -> None:
    if groups % 4:
        wanted = f"a width of {n} columns in groups whose number is divisible by 4, for use_packed_ue8m0"
        raise ValueError(f"gran_k: wanted {wanted}, given {gran_k}: {groups} groups")


def _quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """``x / divisor``, correctly rounded everywhere: by a number, CUDA multiplies with its rounded reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def _blocks_of(x: torch.Tensor, gran_k: int) -> torch.Tensor:
    """``x`` [m, n] as float32 [m, ceil(n / gran_k), gran_k], the last block padded with zeros."""
    if check_tensor("x", x).dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x: wanted a floating-point matrix, given {x.dtype} {list(x.shape)}")
    m, n = x.shape
    padded = align(n, gran_k)
    values = x.float()
    if padded != n:
        values = torch.nn.functional.pad(values, (0, padded - n))
    return values.reshape(m, padded // gran_k, gran_k)


def _block_amax(blocks: torch.Tensor) -> torch.Tensor:
    amax = blocks.abs().amax(dim=2) if blocks.numel() else blocks.new_zeros(blocks.shape[:2])
    return amax.clamp_min(AMAX_FLOOR)


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every row of ``x`` [m, n] to E4M3 in groups of ``gran_k`` columns; block maxima are floored at 1e-4.

    Returns ``(values, sf)``: E4M3 [m, n] and one scale per group, float32 [m, ceil(n / gran_k)]. The scale is
    ``amax / 448``, or with ``use_ue8m0`` the smallest power of two that is at least that. ``use_packed_ue8m0`` (with
    ``use_ue8m0``) returns int32 [m, groups / 4] instead, four UE8M0 bytes each along K. Raises ``ValueError`` for an
    argument of the wrong kind, and where packing finds a group count that is no multiple of 4.

    A NaN among the columns of a group stays NaN; an infinity becomes NaN, or with ``use_ue8m0`` +-448 * 2^127, which
    overflows FP32. Finite columns beside them do not keep their values.
    """
    gran_k = _check_options(use_ue8m0, gran_k, use_packed_ue8m0)
    blocks = _blocks_of(x, gran_k)
    n = x.size(1)
    if use_packed_ue8m0:
        _check_packing(blocks.size(1), gran_k, n)
    if not use_ue8m0:
        sf = _quotient(_block_amax(blocks), E4M3_MAX)
        values = float_to_e4m3(blocks * (1.0 / sf).unsqueeze(2))
        return values.flatten(1)[:, :n].contiguous(), sf
    values, codes = quantize_e4m3_blocks(blocks.flatten(1), gran_k, AMAX_FLOOR)
    return values[:, :n].contiguous(), pack_ue8m0(codes) if use_packed_ue8m0 else ue8m0_to_float(codes)


def per_token_cast_to_fp4(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every row of ``x`` [m, n], n even, to E2M1 in groups of ``gran_k`` columns; maxima are floored at 1e-4.

    Returns ``(packed, sf)``: int8 [m, n / 2] with even columns in the low nibble, and scales float32
    [m, ceil(n / gran_k)]: ``amax / 6``, or with ``use_ue8m0`` the smallest power of two that is at least that; packed
    to int32 as in :func:`per_token_cast_to_fp8` when asked. Ties between two codes go towards zero.

    E2M1 has no NaN, so a group with a NaN or an infinity has a scale that is NaN (UE8M0 code 255) and codes of zero;
    :func:`transform_sf_into_required_layout` and :func:`transform_weights_for_mega_moe` refuse it.
    """
    gran_k = _check_options(use_ue8m0, gran_k, use_packed_ue8m0)
    if check_tensor("x", x).dim() == 2 and x.size(1) % 2:
        raise ValueError(f"x: wanted an even width, given {x.size(1)}")
    blocks = _blocks_of(x, gran_k)
    if use_packed_ue8m0:
        _check_packing(blocks.size(1), gran_k, x.size(1))
    sf = _quotient(_block_amax(blocks), E2M1_MAX)
    no_number = ~torch.isfinite(sf)
    sf = sf.masked_fill(no_number, float("nan"))
    codes = ceil_to_ue8m0(sf).masked_fill_(no_number, UE8M0_NAN) if use_ue8m0 else None
    if codes is not None:
        sf = ue8m0_to_float(codes)
    packed = pack_e2m1(float_to_e2m1(blocks * (1.0 / sf).unsqueeze(2)).flatten(1))
    packed = packed[:, : x.size(1) // 2].contiguous().view(torch.int8)
    return packed, pack_ue8m0(codes) if codes is not None and use_packed_ue8m0 else sf
