"""The demo's second opinion: the same layer from the packed bytes, in float64, with numpy and nothing of this package.

It knows no ranks, no buffers and no tiles. It decodes the bytes with tables of its own, sums in float64, and rounds
where the format of a stored value says so: gate and up projections, expert partials, sums and outputs are BF16; the
activation entering the second routed GEMM is E4M3 with a power-of-two scale per 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Reals = NDArray[np.float64]


# ------------------------------------------------------------------------------------------------------------- decoding
def e4m3_values() -> Reals:
    """Value of every E4M3 code: sign, four exponent bits with bias 7, three mantissa bits; S.1111.111 is NaN."""
    values = np.empty(256)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        values[code] = np.nan if code & 127 == 127 else (-value if sign else value)
    return values


def e2m1_values() -> Reals:
    """Value of every E2M1 code: sign, two exponent bits with bias 1, one mantissa bit."""
    values = np.empty(16)
    for code in range(16):
        sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
        value = mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
        values[code] = -value if sign else value
    return values


def decode_fp8(codes: Bytes, scales: Bytes) -> Reals:
    """[rows, K] from E4M3 codes [rows, K] and UE8M0 scales [rows, K / 32]."""
    return e4m3_values()[codes] * np.repeat(np.ldexp(1.0, scales.astype(np.int32) - 127), 32, axis=1)


def decode_fp4(packed: Bytes, scales: Bytes) -> Reals:
    """[rows, K] from E2M1 pairs [rows, K / 2], the even column in the low half, and UE8M0 scales [rows, K / 32]."""
    table = e2m1_values()
    values = np.empty((packed.shape[0], packed.shape[1] * 2))
    values[:, 0::2] = table[packed & 15]
    values[:, 1::2] = table[packed >> 4]
    blocks = values.reshape(packed.shape[0], -1, 32)
    blocks *= np.ldexp(1.0, scales.astype(np.int32) - 127)[:, :, None]
    return values


def decode_bf16(bits: NDArray[np.uint16]) -> Reals:
    """Values of BF16 bit patterns: the upper halves of FP32 patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# ------------------------------------------------------------------------------------------------------------- rounding
def _round_to(values: Reals, significant: int, least: int) -> Reals:
    """Nearest multiple, ties to even, of the unit that leaves ``significant`` bits; units below 2^least do not exist."""
    _, exponent = np.frexp(values)
    unit = np.maximum(exponent - significant, least)
    return np.ldexp(np.rint(np.ldexp(values, -unit)), unit)


def to_bf16(values: Reals) -> Reals:
    return _round_to(values, 8, -133)


def to_e4m3(values: Reals) -> Reals:
    return np.clip(_round_to(values, 4, -9), -448.0, 448.0)


def to_scaled_e4m3(values: Reals) -> Reals:
    """Rows quantised in blocks of 32 columns: scale 2^n, the smallest with amax / 448 <= 2^n; a zero block stays zero."""
    blocks = values.reshape(values.shape[0], -1, 32)
    mantissa, exponent = np.frexp(np.abs(blocks).max(axis=2, initial=0.0) / 448.0)
    exponent = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent), -127, 127)[:, :, None]
    return np.ldexp(to_e4m3(np.ldexp(blocks, -exponent)), exponent).reshape(values.shape)


# ------------------------------------------------------------------------------------------------------------- the layer
@dataclass(frozen=True)
class Situ:
    """The gated unit: both sides bounded by a tangent, the gate side weighted by a sigmoid."""

    beta: float
    linear_beta: float

    def __call__(self, gate: Reals, up: Reals) -> Reals:
        bounded = self.beta * np.tanh(gate / self.beta) / (1.0 + np.exp(-gate))
        return bounded * self.linear_beta * np.tanh(up / self.linear_beta)


@dataclass(frozen=True)
class Expert:
    """One routed expert as a checkpoint stores it."""

    l1: Bytes
    l1_scales: Bytes
    l2: Bytes
    l2_scales: Bytes

    def partials(self, x: Reals, weights: Reals, situ: Situ) -> Reals:
        """BF16-rounded outputs of rows ``x``, each weighted before its second quantisation."""
        gate, up = np.split(to_bf16(x @ decode_fp4(self.l1, self.l1_scales).T), 2, axis=1)
        inner = to_scaled_e4m3(situ(gate, up) * weights[:, None])
        return to_bf16(inner @ decode_fp4(self.l2, self.l2_scales).T)


def routed(x: Reals, choice: NDArray[np.int64], weights: Reals, experts: list[Expert], situ: Situ) -> Reals:
    """BF16-rounded sums over each token's experts; slots with expert -1 add nothing."""
    total = np.zeros((x.shape[0], experts[0].l2.shape[0]))
    for index, expert in enumerate(experts):
        tokens, slots = np.nonzero(choice == index)
        if tokens.size:
            np.add.at(total, tokens, expert.partials(x[tokens], weights[tokens, slots], situ))
    return to_bf16(total)


def rms_norm(values: Reals, gamma: Reals, epsilon: float) -> Reals:
    return to_bf16(values * gamma / np.sqrt((values**2).mean(axis=1, keepdims=True) + epsilon))


def shared(x: Reals, gate: NDArray[np.uint16], up: NDArray[np.uint16], down: NDArray[np.uint16], situ: Situ) -> Reals:
    """The unsharded shared expert from BF16 bit patterns; its output is not rounded. In pieces, to bound the memory."""
    step = 1024
    inner = np.empty((x.shape[0], gate.shape[0]))
    for at in range(0, gate.shape[0], step):
        piece = slice(at, at + step)
        g, u = to_bf16(x @ decode_bf16(gate[piece]).T), to_bf16(x @ decode_bf16(up[piece]).T)
        inner[:, piece] = to_bf16(situ(g, u))
    return np.concatenate([inner @ decode_bf16(down[at : at + step]).T for at in range(0, down.shape[0], step)], axis=1)
