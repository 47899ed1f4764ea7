"""Calls on CUDA tensors: what the host checks there, what the kernel checks, captures, and the results' form."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mega_support import SITU as SITU_OPTIONS
from mega_support import SWIGLU, Signature, WithoutStatistics
from small_ranks import BF16, SITU, Rank, small

import deep_gemm_k3 as dg
from deep_gemm_k3.mega.weights import default_target
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.world import RankInput, mega_moe_reference

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOKENS, SHARED_TOKENS = 5, 6
# Not of the exact dense call below: its first call compiles everything that it can choose, as a program's does.
FAMILIES = (
    WithoutStatistics(
        small(tokens=(384,), shared_tokens=384),
        Signature("rs", SITU_OPTIONS, fast_math=True),
        Signature("routed", SWIGLU, fast_math=True),
        counts=[(TOKENS, SHARED_TOKENS)],
    ),
)


def inputs(shape: WorldShape) -> RankInput:
    return make_world(shape, 1, target=default_target(torch.device(DEVICE)))[0]


def rank(**options: Any) -> Rank:
    shape = small(tokens=(TOKENS,), shared_tokens=SHARED_TOKENS)
    return Rank(None, inputs(shape), shape, DEVICE, **{"timeout_s": 3.0, **options})


def publish(rank: Rank, space: dg.PublicationWorkspace, **changes: Any) -> None:
    shared = rank.given.shared
    assert shared is not None
    arguments = {
        "y": rank.y, "l1_weights": rank.given.l1, "l2_weights": rank.given.l2, "shared_x": shared.x,
        "shared_l1_weights": shared.l1, "shared_l2_weights": shared.l2, "rms_weight": shared.rms_weight,
        "rms_epsilon": 1e-5, "shared_rs_workspace": space.workspace, "shared_rs_flags": space.flags,
        "shared_rs_peer_ptrs": space.peer_ptrs, "sym_buffer": rank.buffer, **SITU,
    }  # fmt: skip
    dg.fp8_fp4_mega_moe_bf16_shared_rs(**{**arguments, **changes})


def close(actual: torch.Tensor, expected: torch.Tensor, limit: float) -> bool:
    difference = (actual.double().cpu() - expected.double()).norm()
    return bool(difference <= limit * expected.double().norm())


def test_a_call_equals_the_oracle() -> None:
    shape = small(tokens=(TOKENS,), shared_tokens=SHARED_TOKENS)
    given = inputs(shape)
    one = Rank(None, given, shape, DEVICE)
    one.dense(fast_math=False)
    torch.cuda.synchronize()
    options = Options(activation="situ", situ_beta=4.0, situ_linear_beta=25.0)
    expected = mega_moe_reference([given], options)[0]
    assert expected.shared_y is not None
    assert close(one.y, expected.y, 2e-3) and close(one.shared_y, expected.shared_y, 2e-3)


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (lambda rank, space: rank.buffer.topk_idx.__setitem__((1, 0), 2), "topk_idx.values"),
        (lambda rank, space: rank.buffer.topk_idx.__setitem__((4, 1), -2), "topk_idx.values"),
        (lambda rank, space: space.flags.__setitem__(0, 3), "shared_rs_flags.generation"),
        (lambda rank, space: space.flags.__setitem__(2, 64), "shared_rs_flags.stride"),
        (lambda rank, space: space.peer_ptrs.__setitem__(0, 0), "shared_rs_peer_ptrs.values"),
    ],
)
def test_device_values_are_checked_on_request(spoil: Callable[..., None], check: str) -> None:
    one = rank()
    space = dg.PublicationWorkspace(one.buffer, "rs", 8, one.shape.shared_hidden)
    publish(one, space, validate="device")
    one.y.fill_(float("nan"))
    space.workspace.zero_()
    spoil(one, space)
    with pytest.raises(RuntimeError) as caught:
        publish(one, space, validate="device")
    assert str(caught.value).endswith(f"[{check}]")
    assert one.y.isnan().all() and not space.workspace.any()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rank, space: rank.buffer.topk_idx.__setitem__((1, 0), 2), "expert id out of range"),
        (lambda rank, space: space.flags.__setitem__(0, 3), "publication generation out of range"),
        (lambda rank, space: space.flags.__setitem__(2, 64), "publication stride mismatch"),
    ],
)
def test_the_kernel_checks_them_too_and_the_next_call_says_so(spoil: Callable[..., None], words: str) -> None:
    one = rank(timeout_s=2.0)
    space = dg.PublicationWorkspace(one.buffer, "rs", 8, one.shape.shared_hidden)
    spoil(one, space)
    publish(one, space)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=words):
        one.buffer.check()
    with pytest.raises(RuntimeError, match=f"wanted one without an abort.*{words}"):
        publish(one, space)


def test_tensors_of_another_device_are_refused() -> None:
    one = rank()
    with pytest.raises(RuntimeError, match=r"y: wanted device cuda:\d as the buffer, given cpu \[y.device\]"):
        one.routed(y=torch.empty(5, 128, dtype=BF16))
    with pytest.raises(RuntimeError, match="l1_weights: wanted device cuda"):
        one.routed(l1_weights=tuple(t.cpu() for t in one.given.l1))


def test_a_first_call_inside_a_capture_is_refused_with_advice() -> None:
    one = rank()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match=r"deep_gemm_k3\.warmup\(sym_buffer, \.\.\.\)"):
        one.routed()
    one.routed()
    torch.cuda.synchronize()
    assert not one.y.isnan().any()


def test_a_warm_call_is_captured_and_replayed_with_other_inputs() -> None:
    one = rank()
    dg.warmup(one.buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.routed()
    one.buffer.topk_idx[3:5] = -1  # fewer live tokens
    for _ in range(3):  # an odd number
        one.y.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    replayed = one.y.clone()
    assert not replayed[3:5].view(torch.int16).any()
    one.routed()
    torch.cuda.synchronize()
    assert torch.equal(one.y, replayed)
    one.buffer.check()


def test_an_eager_call_is_cheap() -> None:
    """A loose bound; the figure comes from the script."""
    one = rank()
    one.routed()
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            one.routed()
        times.append((time.perf_counter() - start) / 20)
        torch.cuda.synchronize()
    assert min(times) < 100e-6
