"""Quantisers, weight layouts and oracle on a GPU: the CPU's bits, in seconds, with little scratch."""

from __future__ import annotations

import time

import pytest
import torch

from deep_gemm_k3.mega.weights import (
    default_target,
    identify_target,
    restore_weights_from_mega_moe,
    transform_weights_for_mega_moe,
)
from deep_gemm_k3.testing import data, metrics, oracle, world
from deep_gemm_k3.utils import per_token_cast_to_fp4, per_token_cast_to_fp8, transform_sf_into_required_layout

pytestmark = pytest.mark.gpu

H, I = 3584, 3072


def random_pairs(experts: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return [
        (
            torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda", generator=g),
            torch.randint(3, 137, (experts, n, k // 32), dtype=torch.uint8, device="cuda", generator=g),
        )
        for n, k in ((2 * I, H), (H, I))
    ]


@pytest.mark.parametrize("log_scale", [-30, 0, 40])
def test_quantisers_give_the_cpu_bits(log_scale: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = (torch.randn(129, 1024) * 2.0**log_scale).to(dtype)
        for cast, options in ((per_token_cast_to_fp8, (True, 32, True)), (per_token_cast_to_fp4, (True, 32))):
            for ours, theirs in zip(cast(x.cuda(), *options), cast(x, *options), strict=True):
                metrics.assert_bitwise(ours.cpu(), theirs, cast.__name__)
    _, sf = per_token_cast_to_fp4(torch.randn(250, 640), True, 32)
    laid = transform_sf_into_required_layout(sf.cuda(), 250, 640, (1, 32))
    host = transform_sf_into_required_layout(sf, 250, 640, (1, 32))
    assert laid.stride() == host.stride()
    metrics.assert_bitwise(laid.cpu(), host)


def test_e2m1_says_no_number_in_the_cpu_bits() -> None:
    x = torch.randn(129, 1024)
    x[5, 7], x[6, 8], x[7, 9] = float("nan"), float("inf"), -float("inf")
    for options in ((True, 32), (True, 32, True), (False, 32)):
        for ours, theirs in zip(
            per_token_cast_to_fp4(x.cuda(), *options), per_token_cast_to_fp4(x, *options), strict=True
        ):
            metrics.assert_bitwise(ours.cpu(), theirs)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_layouts_give_the_cpu_bits(target: str) -> None:
    pairs = random_pairs(2, 1)
    ours = transform_weights_for_mega_moe(*pairs, target=target)
    theirs = transform_weights_for_mega_moe(*[(w.cpu(), s.cpu()) for w, s in pairs], target=target)
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            metrics.assert_bitwise(x.cpu(), y)
    for back, given in zip(restore_weights_from_mega_moe(*ours), pairs, strict=True):
        assert torch.equal(back[0], given[0])
        assert torch.equal(back[1], given[1])


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_rank_of_the_model_takes_seconds_and_little_scratch(target: str) -> None:
    """All 112 experts of a rank at EP8; scratch stays below one expert's weights."""
    experts = 112
    l1, l2 = random_pairs(experts, 2)
    transform_weights_for_mega_moe((l1[0][:1], l1[1][:1]), (l2[0][:1], l2[1][:1]), target=target)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    result = transform_weights_for_mega_moe(l1, l2, target=target)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    held = torch.cuda.memory_allocated() - before
    scratch = torch.cuda.max_memory_allocated() - before - held
    one = sum(t[0].numel() for t in (*l1, *l2))
    print(f"{target}: {experts} experts in {seconds:.2f} s, {held / 2**20:.0f} MiB, scratch {scratch / 2**20:.1f} MiB")
    assert identify_target(*result[0]) == target
    assert scratch < one
    assert seconds < 20


def test_default_target_is_the_gpus() -> None:
    major, _ = torch.cuda.get_device_capability()
    l1, l2 = data.expert_range_weights(data.WorldShape((1,), 1, 1, 256, 128), 1, range(1))
    moved = [(w.cuda(), s.cuda()) for w, s in (l1, l2)]
    assert identify_target(*transform_weights_for_mega_moe(*moved)[0]) == {9: "sm_90a", 10: "sm_100a"}[major]


@pytest.mark.parametrize("kind", ["random", "exact"])
def test_oracle_agrees_with_itself_on_the_cpu(kind: str) -> None:
    shape = data.WorldShape((33, 0, 70), 6, 4, 1024, 512, 40, 1024, 256)
    options = oracle.Options("situ", None, 4.0, 25.0)
    inputs = data.make_world(shape, 3, "holes", kind, default_target(torch.device("cuda")))
    on_gpu = world.mega_moe_reference([rank.to("cuda") for rank in inputs], options)
    for ours, theirs in zip(on_gpu, world.mega_moe_reference(inputs, options), strict=True):
        metrics.assert_close(ours.y.cpu(), theirs.y, "y")
        assert ours.shared_y is not None
        assert theirs.shared_y is not None
        if kind == "exact":
            metrics.assert_bitwise(ours.shared_y.cpu(), theirs.shared_y, "shared")
        metrics.assert_close(ours.shared_y.cpu(), theirs.shared_y, "shared")
