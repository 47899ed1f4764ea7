"""As many ranks as the model's largest group, and as many as there may be; shards of the published width of one vector."""

from __future__ import annotations

import pytest
from emu_support import fresh_emulator

from deep_gemm_k3 import envs
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RunOptions, check_world

SITU = Options("situ", None, 4.0, 25.0)
emulated = fresh_emulator(autouse=True)


@pytest.mark.parametrize(
    ("ranks", "target", "mode"),
    [(16, "sm_90a", "rs"), (16, "sm_100a", "rs"), (64, "sm_90a", "sp_rs")],
)
def test_many_ranks(ranks: int, target: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with no tokens among them; three calls: all generations, both parities."""
    monkeypatch.setenv(envs.CPU_TARGET.name, target)
    tokens = tuple(7 * rank % 5 for rank in range(ranks))
    shared_tokens, shared_hidden = (5, 8 * ranks) if mode == "rs" else (ranks, 128)
    shape = WorldShape(tokens, 2 * ranks, 4, 256, 128, shared_tokens, shared_hidden, 128)
    world = make_world(shape, 1, "k3_router", "exact", target)
    # One kernel for all token counts.
    check_world(world, SITU, mode, RunOptions(fast_math=False, batch_invariant=True, calls=3), bitwise=True)
