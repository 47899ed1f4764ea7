"""Seeded random numbers that depend on their key alone: not on default dtype, default device or what was drawn before."""

from __future__ import annotations

import torch


class Draws:
    """A stream of random CPU tensors for a tuple of integers: same key, same stream."""

    def __init__(self, *key: int) -> None:
        state = 0x9E3779B97F4A7C15
        for part in key:
            state = ((state ^ (part + 0x632BE5AB)) * 0xD6E8FEB86659FD93) & ((1 << 63) - 1)
            state ^= state >> 29
        self._generator = torch.Generator(device="cpu").manual_seed(state)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def normal(self, *shape: int) -> torch.Tensor:
        """float32 of N(0, 1)."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype, device="cpu")

    def permutation(self, n: int) -> torch.Tensor:
        """int64 [n], 0 .. n - 1 in random order."""
        return torch.randperm(n, generator=self._generator, dtype=torch.int64, device="cpu")
