"""A float64 computation of a call in numpy, from the packed bytes, sharing no code with the package.

Number formats are tables written out from their definitions; sums are float64; values are rounded where the contract of
the numbers says so. There are no ranks: experts and tokens are global.
"""

from __future__ import annotations

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e4m3_value(code: int) -> float:
    sign, exponent, mantissa = (-1.0 if code & 128 else 1.0), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([_e4m3_value(code) for code in range(256)])


def bytes_of(t: torch.Tensor) -> np.ndarray:
    """Raw bytes of a tensor, the last dimension multiplied by the element size."""
    return t.contiguous().flatten().view(torch.uint8).numpy().reshape(*t.shape[:-1], t.shape[-1] * t.element_size())


def bf16(x: np.ndarray) -> np.ndarray:
    """float64 rounded to BF16, nearest even, with BF16's subnormals; as float64."""
    _, exponent = np.frexp(x)
    quantum = np.exp2(np.maximum(exponent - 8, -133).astype(np.float64))
    return np.where(x == 0, x, np.rint(x / quantum) * quantum)


def e4m3_round(x: np.ndarray) -> np.ndarray:
    """float64 rounded to E4M3, nearest even, saturating; as float64."""
    table = E4M3[:127]
    a = np.minimum(np.abs(x), 448.0)
    upper = np.clip(np.searchsorted(table, a, side="left"), 1, 126)
    low, high = table[upper - 1], table[upper]
    middle = (low + high) / 2
    take_high = (a > middle) | ((a == middle) & (upper % 2 == 0))
    return np.copysign(np.where(take_high, high, low), x)


def quantise(x: np.ndarray) -> np.ndarray:
    """Per row and 32 columns: E4M3 times the smallest power of two that is at least amax / 448."""
    blocks = x.reshape(x.shape[0], -1, 32)
    amax = np.abs(blocks).max(axis=2)
    mantissa, exponent = np.frexp(amax / 448.0)  # mantissa in [0.5, 1)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    scale = np.exp2(np.where(amax == 0, -127, np.clip(exponent, -127, 127)).astype(np.float64))[:, :, None]
    return (e4m3_round(blocks / scale) * scale).reshape(x.shape)


def activation(gate: np.ndarray, up: np.ndarray, options: dict) -> np.ndarray:
    with np.errstate(over="ignore"):
        sigmoid = 1.0 / (1.0 + np.exp(-gate))
    if options["activation"] == "situ":
        beta, linear = np.float64(options["situ_beta"]), np.float64(options["situ_linear_beta"])
        return beta * np.tanh(gate / beta) * sigmoid * linear * np.tanh(up / linear)
    clamp = options.get("activation_clamp")
    if clamp is not None:
        gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
        with np.errstate(over="ignore"):
            sigmoid = 1.0 / (1.0 + np.exp(-gate))
    return gate * sigmoid * up


def tokens_of(x: torch.Tensor, x_sf: torch.Tensor) -> np.ndarray:
    return E4M3[bytes_of(x)] * np.exp2(bytes_of(x_sf).astype(np.float64) - 127).repeat(32, axis=1)


def expert_matrix(weight: torch.Tensor, sf: torch.Tensor) -> np.ndarray:
    """float64 [N, K] of one expert in checkpoint layout: codes [N, K / 2], scales uint8 [N, K / 32] or packed words."""
    raw = bytes_of(weight)
    values = np.stack((E2M1[raw & 15], E2M1[raw >> 4]), axis=-1).reshape(raw.shape[0], 2 * raw.shape[1])
    return values * np.exp2(bytes_of(sf).astype(np.float64) - 127).repeat(32, axis=1)


def routed(tokens, topk_idx, topk_weights, experts, options) -> np.ndarray:
    """float64 [T, H] before the norm. ``experts[e]`` = (L1 float64 [2I, H], L2 float64 [H, I]) or a callable giving it."""
    idx, weights = topk_idx.numpy(), topk_weights.numpy().astype(np.float64)
    total = np.zeros_like(tokens)
    partial = np.zeros((*idx.shape, tokens.shape[1]))
    for expert in np.unique(idx[idx >= 0]):
        l1, l2 = experts[expert]
        t, j = np.nonzero(idx == expert)
        both = bf16(tokens[t] @ l1.T)
        inter = both.shape[1] // 2
        hidden = activation(both[:, :inter], both[:, inter:], options) * weights[t, j][:, None]
        partial[t, j] = bf16(quantise(hidden) @ l2.T)
    for slot in range(idx.shape[1]):
        total += np.where(idx[:, slot, None] >= 0, partial[:, slot], 0.0)
    return bf16(total)


def norm(y: np.ndarray, gamma: torch.Tensor, epsilon: float) -> np.ndarray:
    g = gamma.float().numpy().astype(np.float64)
    return bf16(y * g / np.sqrt((y * y).mean(axis=1, keepdims=True) + epsilon))


def shared(x: torch.Tensor, l1: torch.Tensor, l2: torch.Tensor, options: dict) -> np.ndarray:
    xd, w1, w2 = (t.float().numpy().astype(np.float64) for t in (x, l1, l2))
    both = bf16(xd @ w1.T)
    inter = both.shape[1] // 2
    return bf16(bf16(activation(both[:, :inter], both[:, inter:], options)) @ w2.T)


def relative(actual: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Relative L2 over the whole and in the worst row; infinite where something is not finite."""
    difference = np.linalg.norm(actual - reference, axis=1)
    scale = np.linalg.norm(reference, axis=1)
    rows = np.where(difference == 0, 0.0, difference / np.where(scale == 0, 1e-300, scale))
    whole = np.linalg.norm(difference) / max(np.linalg.norm(scale), 1e-300) if difference.any() else 0.0
    if not np.isfinite(actual).all():
        return float("inf"), float("inf")
    return float(whole), float(rows.max(initial=0.0))
