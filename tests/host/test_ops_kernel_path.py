"""Calls on the way that kernels take, up to a launch that goes nowhere: compile, load, params, tensor maps."""

from __future__ import annotations

import json

import pytest
import torch
from small_ranks import SITU, Rank, alone

import deep_gemm_k3 as dg
from deep_gemm_k3._extension import ops
from deep_gemm_k3.mega.plan import load_kernel


def route(rank: Rank, name: str) -> None:
    ops().set_route(rank.buffer.handle, name)


def published(rank: Rank, mode: str, rows: int = 4) -> None:
    shared = rank.given.shared
    assert shared is not None
    space = dg.PublicationWorkspace(rank.buffer, mode, 8, shared.x.size(1), num_generations=3)
    function = dg.fp8_fp4_mega_moe_bf16_shared_rs if mode == "rs" else dg.fp8_fp4_mega_moe_bf16_shared_sp_rs
    function(
        rank.y, rank.given.l1, rank.given.l2, shared.x[:rows], shared.l1, shared.l2, shared.rms_weight, 1e-5,
        space.workspace, space.flags, space.peer_ptrs, rank.buffer, **SITU,
    )  # fmt: skip


def test_a_call_reaches_the_launch_layer() -> None:
    """The kernel is compiled and registered under the key that the plan looks for; nothing is written."""
    rank = alone()
    route(rank, "null")
    published(rank, "rs")
    published(rank, "rs")
    assert rank.y.isnan().all()
    published(rank, "rs", rows=0)  # no shared tokens: the maps are still valid ones
    assert not torch.cuda.is_initialized()


def test_kernel_and_host_agree_about_the_argument() -> None:
    """A launch is refused when the kernel's argument has another size than the host's struct."""
    rank = alone()
    plan = dg.Plan.of(rank.buffer, 3)
    load_kernel("null", "sm_90a", plan.literal)
    key = f"mega_sm90 sm_90a {plan.literal}"
    handle = ops().find_kernel(key, -1)
    assert handle > 0
    assert json.loads(ops().kernel_info(handle))["params_bytes"] == ops().params_bytes()


def test_routes_are_part_of_what_ranks_compare_and_refused_by_name() -> None:
    rank = alone()
    with pytest.raises(RuntimeError, match="route: wanted oracle, cuda, emulator, null or none, given gpu"):
        route(rank, "gpu")
    route(rank, "none")
    rank.routed()
    assert rank.y.isnan().all()
    route(rank, "oracle")
    rank.routed()
    assert not rank.y.isnan().any()


def test_a_compilers_refusal_arrives_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_gemm_k3.jit.compiler import CompileError
    from deep_gemm_k3.mega import plan

    def refuse(**wanted: str) -> None:
        raise CompileError(f"refused for {wanted['place']}: {wanted['literal']}")

    monkeypatch.setattr(plan, "load_kernel", refuse)
    rank = alone()
    route(rank, "emulator")
    with pytest.raises(CompileError, match=r"refused for emulator: \{\.arch = "):
        rank.routed()


def test_everything_a_signature_can_choose_is_loaded_and_fits() -> None:
    """What a first call does on a device, with kernels that go nowhere."""
    from deep_gemm_k3.mega.plan import all_configs, load_kernels, problem_of

    rank = alone(num_sms=2)
    problem = {**problem_of(rank.buffer), "max_tokens": 8}
    configs = all_configs(problem)
    report = load_kernels(problem, "null")
    assert report.requested == len(configs)
    for entry in configs:
        assert ops().find_kernel(f"mega_sm90 sm_90a {entry['literal']}", -1) > 0
        assert entry["launch"][0] == 2 * entry["config"]["num_ctas_per_sm"]
        assert entry["launch"][3] == entry["config"]["num_threads"]
