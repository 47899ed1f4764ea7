"""The package's own kernel through the public calls, on the emulator: four local ranks, every mode, every check."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from emu_support import fresh_emulator

import deep_gemm_k3 as dg
from deep_gemm_k3 import envs
from deep_gemm_k3.demo import checks
from deep_gemm_k3.demo.data import Problem, make_layer
from deep_gemm_k3.demo.run import Progress, run
from deep_gemm_k3.emulator import service
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.world import RankInput

emulated = fresh_emulator()
SMALL = Problem(
    hidden=256, intermediate=256, shared_hidden=512, shared_slice=128, experts_per_rank=2, tokens=(3, 0, 6, 4)
)


def one_rank_call(given: RankInput, **options: Any) -> tuple[torch.Tensor, str]:
    """y of one routed call, and what the plan says about it."""
    buffer = dg.get_symm_buffer_for_mega_moe(
        None, 2, 384, 2, 128, 128, bf16_shared_intermediate_hidden=128, num_sms=2, **options
    )
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        getattr(buffer, name)[:5].copy_(getattr(given.routed, name))
    y = torch.full((5, 128), float("nan"), dtype=torch.bfloat16)
    dg.fp8_fp4_mega_moe(y, given.l1, given.l2, buffer)
    said = dg.Plan.of(buffer, 5).explain()
    buffer.destroy()
    return y, said


def test_calls_run_the_kernel_unless_the_oracle_is_asked_for(
    emulated: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = WorldShape(
        tokens=(5,),
        experts=2,
        topk=2,
        hidden=128,
        intermediate=128,
        shared_tokens=4,
        shared_hidden=128,
        shared_intermediate=128,
    )
    given = make_world(shape, 1, target="sm_100a")[0]
    caplog.set_level(logging.INFO, "deep_gemm_k3")
    emulated_y, said = one_rank_call(given)
    assert "runs on   the emulator, which executes the kernel's PTX for sm_100a" in said
    assert "by the emulator executing PTX for sm_100a" in caplog.text
    report = service.report()
    assert report["counters"]["tensor_products"] > 0
    monkeypatch.setenv(envs.CPU_EXECUTOR.name, "oracle")
    oracle_y, said = one_rank_call(given)
    assert "runs on   the oracle" in said
    assert service.report()["counters"] == report["counters"]
    assert metrics.relative_l2(emulated_y, oracle_y) < 2e-3


def test_the_emulated_architecture_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(**options: Any) -> str:
        with dg.get_symm_buffer_for_mega_moe(None, 2, 384, 2, 128, 128, device="cpu", **options) as buffer:
            return buffer.target

    assert target() == "sm_100a"
    assert target(target="sm_90a") == "sm_90a"
    monkeypatch.setenv(envs.CPU_TARGET.name, "sm_90a")
    assert target() == "sm_90a"
    assert target(target="sm_100a") == "sm_100a"
    with pytest.raises(ValueError, match="target: wanted 'sm_90a' or 'sm_100a' for tensors on cpu, given 'sm_80'"):
        target(target="sm_80")


@pytest.mark.emu_full
@pytest.mark.parametrize("adversary", ["random", "earliest", "latest"])
def test_four_ranks_in_every_mode(emulated: None, adversary: str) -> None:
    service.configure(seed=4, adversary=adversary)
    layer = make_layer(SMALL)
    rows = checks.check(layer, run(layer, "cpu", Progress()), lambda _: None)
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]
    assert service.report()["counters"]["tensor_products"] > 0
