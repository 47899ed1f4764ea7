"""Ranks in processes of their own, each with its emulator, over shared memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "dist"))
from processes import results, run_ranks

import deep_gemm_k3 as dg
from deep_gemm_k3 import envs
from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.world import RankInput

SHAPE = WorldShape(
    tokens=(5, 3), experts=4, topk=2, hidden=128, intermediate=128, shared_tokens=4, shared_hidden=128, shared_intermediate=128
)  # fmt: skip


def make(given: RankInput, timeout_s: float = 30.0) -> SymmBuffer:
    import torch.distributed as dist

    buffer = dg.get_symm_buffer_for_mega_moe(
        dist.group.WORLD, 4, 384, 2, 128, 128, bf16_shared_intermediate_hidden=128, num_sms=2, timeout_s=timeout_s
    )
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        getattr(buffer, name)[: given.routed.x.size(0)].copy_(getattr(given.routed, name))
    return buffer


def call(given: RankInput, buffer: SymmBuffer, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    y = torch.full((given.routed.x.size(0), 128), float("nan"), dtype=dtype)
    dg.fp8_fp4_mega_moe(y, given.l1, given.l2, buffer)
    return y


def one_rank(rank: int, size: int) -> list[torch.Tensor]:
    import torch.distributed as dist

    given = make_world(SHAPE, 1, target=envs.CPU_TARGET.get())[rank]
    outputs = []
    for route in ("emulator", "oracle"):
        envs.CPU_EXECUTOR.set(route)
        buffer = make(given)
        y = call(given, buffer)
        dist.barrier()
        buffer.destroy()
        outputs.append(y.float())
    return outputs


@pytest.mark.dist
def test_two_processes_agree_with_the_oracle() -> None:
    for emulated, oracle in results(one_rank, 2):
        assert metrics.relative_l2(emulated, oracle) < 2e-3


def late_then_refusing(rank: int, size: int) -> list[str]:
    """Calls that one rank or the other enters late, then some that rank 1's host refuses while rank 0 is on its way to the
    kernel, in it, or waits in it."""
    import torch.distributed as dist

    envs.CPU_EXECUTOR.set("emulator")
    given = make_world(SHAPE, 1, target=envs.CPU_TARGET.get())[rank]
    errors = []
    for delay in (0.0, 0.003, 0.03, 0.3):
        buffer = make(given)
        first = call(given, buffer)
        for turn in range(2):
            if turn % size == rank:
                time.sleep(0.1)
            metrics.assert_bitwise(call(given, buffer), first)
        dist.barrier()
        begin = time.monotonic()
        if rank == 1:
            time.sleep(delay)
        with pytest.raises(RuntimeError) as caught:
            call(given, buffer, torch.float32 if rank == 1 else torch.bfloat16)
        assert time.monotonic() - begin < 15.0
        errors.append(str(caught.value))
        dist.barrier()
        buffer.destroy()
    return errors


@pytest.mark.dist
def test_late_calls_and_a_refusing_host_of_another_process() -> None:
    for rank, errors in enumerate(results(late_then_refusing, 2)):
        for error in errors:
            assert "y: wanted dtype bfloat16, given float32" in error and (rank == 1 or "rank 1" in error), (
                rank,
                error,
            )


def killed(rank: int, size: int) -> str:
    envs.CPU_EXECUTOR.set("emulator")
    given = make_world(SHAPE, 1, target=envs.CPU_TARGET.get())[rank]
    buffer = make(given, timeout_s=2.0)
    first = call(given, buffer)
    metrics.assert_bitwise(call(given, buffer), first)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call(given, buffer)
    assert time.monotonic() - begin < 12.0
    return str(caught.value)


@pytest.mark.dist
def test_the_survivor_of_a_killed_process_names_what_it_missed() -> None:
    survivor, dead = run_ranks(killed, 2)
    assert dead.exit_code == -signal.SIGKILL
    assert not survivor.error, survivor.error
    assert "time-out" in survivor.value and "header of rank 1" in survivor.value, survivor.value
