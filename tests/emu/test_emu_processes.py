"""Ranks in processes of their own, each with its emulator, over shared memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "dist"))
from processes import results

import deep_gemm_k3 as dg
from deep_gemm_k3 import envs
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world

SHAPE = WorldShape(
    tokens=(5, 3), experts=4, topk=2, hidden=128, intermediate=128, shared_tokens=4, shared_hidden=128, shared_intermediate=128
)  # fmt: skip


def one_rank(rank: int, size: int) -> list[torch.Tensor]:
    import torch.distributed as dist

    given = make_world(SHAPE, 1, target=envs.CPU_TARGET.get())[rank]
    outputs = []
    for route in ("emulator", "oracle"):
        envs.CPU_EXECUTOR.set(route)
        buffer = dg.get_symm_buffer_for_mega_moe(
            dist.group.WORLD, 4, 384, 2, 128, 128, bf16_shared_intermediate_hidden=128, num_sms=2
        )
        count = given.routed.x.size(0)
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            getattr(buffer, name)[:count].copy_(getattr(given.routed, name))
        y = torch.full((count, 128), float("nan"), dtype=torch.bfloat16)
        dg.fp8_fp4_mega_moe(y, given.l1, given.l2, buffer)
        dist.barrier()
        buffer.destroy()
        outputs.append(y.float())
    return outputs


@pytest.mark.dist
def test_two_processes_agree_with_the_oracle() -> None:
    for emulated, oracle in results(one_rank, 2):
        assert metrics.relative_l2(emulated, oracle) < 2e-3
