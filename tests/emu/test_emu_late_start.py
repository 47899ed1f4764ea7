"""A kernel that starts when a peer has already failed: it computes nothing, reports what the peer found, and ends."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.replay import Play, Schedule, record

ABORT_OFFSET, EPOCH_OFFSET = 384, 0  # of the control block
# code (1 + expert out of range), rank, where, index, wanted, seen, epoch, claimed
CELL = (2, 1, 0x1000D, 9, 16, 17, 1, 1)


@pytest.mark.parametrize(
    ("target", "num_sms", "mode"), [("sm_90a", 2, "sp_rs"), ("sm_100a", 1, "routed"), ("sm_100a", 2, "sp_rs")]
)
def test_a_rank_that_starts_after_the_abort_ends_at_once(target: str, num_sms: int, mode: str) -> None:
    shared = {} if mode == "routed" else {"shared_tokens": 4, "shared_hidden": 256, "shared_intermediate": 128}
    options = Options("situ", None, 4.0, 25.0) if shared else Options("swiglu")
    shape = WorldShape((), 4, 2, 256, 256, **shared)
    (scene,) = record(Play("late", shape, options, mode, ((3, 4),), calls=1, num_sms=num_sms, target=target))
    cell = torch.frombuffer(bytearray(struct.pack("<8I", *CELL)), dtype=torch.uint8)
    for part in scene.memory:
        if part.name.startswith("buffer") and part.initial is not None:
            part.initial[ABORT_OFFSET : ABORT_OFFSET + 32] = cell
    alone = replace(scene, launches=[given for given in scene.launches if given["rank"] == 0])
    memory = {part.name: part.bytes for part in scene.memory}
    outputs = [name for name in memory if name.startswith("y ")]
    for seed, adversary in enumerate(("random", "earliest", "latest")):
        outcome = alone.replay(schedule=Schedule(seed, adversary))
        assert not outcome.fault and not outcome.findings, outcome
        assert torch.equal(memory["error record of rank 0"], cell)
        initial = {part.name: part.initial for part in scene.memory}
        assert memory["buffer of rank 0"][EPOCH_OFFSET] == initial["buffer of rank 0"][EPOCH_OFFSET]
        assert all(torch.equal(memory[name], initial[name]) for name in outputs)
