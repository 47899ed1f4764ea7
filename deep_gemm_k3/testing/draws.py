"""Seeded random numbers that depend on their key alone: not on default dtype, default device or what was drawn before."""

from __future__ import annotations

import torch


class Draws:
    """A stream of random tensors for a tuple of integers: same key, same stream.

    ``device`` is where they are drawn. Every kind of device has streams of its own; those of the CPU are the ones that
    every machine can repeat.
    """

    def __init__(self, *key: int, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        state = 0x9E3779B97F4A7C15
        for part in key:
            state = ((state ^ (part + 0x632BE5AB)) * 0xD6E8FEB86659FD93) & ((1 << 63) - 1)
            state ^= state >> 29
        self._generator = torch.Generator(device=self.device).manual_seed(state)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float32, device=self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        """float32 of N(0, 1)."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device=self.device)

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype, device=self.device)

    def permutation(self, n: int) -> torch.Tensor:
        """int64 [n], 0 .. n - 1 in random order."""
        return torch.randperm(n, generator=self._generator, dtype=torch.int64, device=self.device)
