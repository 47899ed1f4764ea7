"""A second call of one rank's buffer is refused, and neither the first nor its peers' calls notice."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from processes import PATIENCE_S, results

import deep_gemm_k3 as dg
from deep_gemm_k3._extension import ops
from deep_gemm_k3.testing.data import WorldShape, make_world

pytestmark = pytest.mark.dist


def second_calls(rank: int, size: int) -> None:
    shape = WorldShape(tokens=(3,) * size, experts=2 * size, topk=2, hidden=128, intermediate=128)
    given = make_world(shape, 1, target="sm_90a")[rank]
    buffer = dg.get_symm_buffer_for_mega_moe(
        dist.group.WORLD, shape.experts, 384, shape.topk, shape.hidden, shape.intermediate, device="cpu",
        timeout_s=PATIENCE_S,
    )  # fmt: skip
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        getattr(buffer, name)[:3].copy_(getattr(given.routed, name))
    y = torch.full((3, shape.hidden), float("nan"), dtype=torch.bfloat16)

    def call(out: torch.Tensor = y) -> None:
        dg.fp8_fp4_mega_moe(out, given.l1, given.l2, buffer)

    for _ in ("in its first call", "in the executor"):
        y.fill_(float("nan"))
        dist.barrier()
        if rank == 0:
            with ThreadPoolExecutor(1) as threads:
                first = threads.submit(call)
                while ops().buffer_calls(buffer.handle) == 0:
                    time.sleep(0.001)
                time.sleep(0.05)
                for out in (y, y.float()):  # what a call gives matters only once it is inside
                    with pytest.raises(RuntimeError, match="wanted no call inside it, given a second one"):
                        call(out)
                with pytest.raises(TypeError, match="fast_math: wanted True or False, given 'yes'"):
                    dg.fp8_fp4_mega_moe(y, given.l1, given.l2, buffer, fast_math="yes")
                with pytest.raises(ValueError, match="shared_output: wanted .*, given 'rs'"):
                    dg.warmup(buffer, shared_output="rs")
                dist.barrier()
                first.result(PATIENCE_S)
        else:
            dist.barrier()  # rank 0's second calls are over
            call()
        assert not y.isnan().any()
    buffer.check()
    call()


def test_peers_do_not_notice_a_second_call() -> None:
    results(second_calls, 2)
