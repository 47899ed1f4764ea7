"""A caller written for upstream's package, importing this one under its name: positional arguments, a process group, the
buffer zeroed between calls, a 64-token buffer with 72 shared tokens, either activation on one buffer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mega_support import CLAMPED, DEVICE, SITU, SWIGLU, Family, Signature

import deep_gemm_k3 as deep_gemm
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.oracle import Options, RoutedInput
from deep_gemm_k3.testing.world import RankInput, SharedInput, mega_moe_reference
from deep_gemm_k3.utils import per_token_cast_to_fp4, per_token_cast_to_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

EXPERTS, TOPK, TOKENS, HIDDEN, INTERMEDIATE = 8, 2, 64, 1024, 512
SHARED_TOKENS, SHARED_HIDDEN, SHARED_INTERMEDIATE = 72, 2048, 1024
# Named for its kernels alone, which are compiled with those of the other modules.
_SHAPE = WorldShape((TOKENS,), EXPERTS, TOPK, HIDDEN, INTERMEDIATE, 384, SHARED_HIDDEN, SHARED_INTERMEDIATE)
_KINDS = [Signature("routed", kind, fast_math=True) for kind in (SWIGLU, CLAMPED, SITU)]
FAMILIES = (Family(_SHAPE, *_KINDS, Signature("dense", SITU, fast_math=True)),)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    options = {"backend": "gloo"}
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
        options = {"backend": "nccl", "device_id": DEVICE}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60), **options)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def grouped_fp4(experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty((experts, n, k // 2), dtype=torch.int8, device=DEVICE)
    sf = torch.empty((experts, n, k // 32), dtype=torch.float, device=DEVICE)
    for i in range(experts):
        dense = (torch.randn((n, k), device=DEVICE) * 0.05).to(torch.bfloat16)
        weight[i], sf[i] = per_token_cast_to_fp4(dense, use_ue8m0=True, gran_k=32)
    return weight, deep_gemm.transform_sf_into_required_layout(sf, n, k, (1, 32), experts)


def test_a_caller_of_upstream(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGK3_TIMEOUT_S", "10")  # such a caller cannot name a limit
    torch.manual_seed(0)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        group, EXPERTS, TOKENS, TOPK, HIDDEN, INTERMEDIATE, 0, None, "fp8xfp4", "situ", SHARED_INTERMEDIATE
    )
    x = per_token_cast_to_fp8(
        torch.randn((TOKENS, HIDDEN), dtype=torch.bfloat16, device=DEVICE),
        use_ue8m0=True,
        gran_k=32,
        use_packed_ue8m0=True,
    )
    raw = grouped_fp4(EXPERTS, 2 * INTERMEDIATE, HIDDEN), grouped_fp4(EXPERTS, HIDDEN, INTERMEDIATE)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(*raw)
    scores = torch.randn((TOKENS, EXPERTS), device=DEVICE).softmax(dim=-1)
    weights, idx = torch.topk(scores, TOPK, dim=-1)
    given = RankInput(RoutedInput(*x, idx, weights), l1, l2)
    stats = torch.zeros(EXPERTS, dtype=torch.int, device=DEVICE)

    def fill() -> torch.Tensor:
        buffer.buffer.zero_()
        buffer.x[:TOKENS].copy_(x[0])
        buffer.x_sf[:TOKENS].copy_(x[1])
        buffer.topk_idx[:TOKENS].copy_(idx)
        buffer.topk_weights[:TOKENS].copy_(weights)
        return torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16, device=DEVICE)

    try:
        for options in (
            {"activation": "swiglu", "activation_clamp": None},
            {"activation": "swiglu", "activation_clamp": 1.0},
            {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0},
        ):
            y = fill()
            deep_gemm.fp8_fp4_mega_moe(
                y,
                l1,
                l2,
                buffer,
                cumulative_local_expert_recv_stats=stats,
                recipe=(1, 1, 32),
                fast_math=True,
                **options,
            )
            (want,) = mega_moe_reference([given], Options(**options))
            metrics.assert_close(y, want.y, str(options))
        assert torch.equal(stats, 3 * want.counts)

        bf16 = {"dtype": torch.bfloat16, "device": DEVICE}
        shared_x = torch.randn((SHARED_TOKENS, SHARED_HIDDEN), **bf16) * 0.25
        shared_l1 = torch.randn((2 * SHARED_INTERMEDIATE, SHARED_HIDDEN), **bf16) * 0.02
        shared_l2 = torch.randn((SHARED_HIDDEN, SHARED_INTERMEDIATE), **bf16) * 0.02
        gamma = torch.randn(HIDDEN, **bf16) * 0.1 + 1
        assert deep_gemm.supports_bf16_shared_independent_tokens()
        shared_l1, shared_l2 = deep_gemm.transform_weights_for_mega_moe(shared_l1, shared_l2)
        y, shared_y = fill(), torch.empty((SHARED_TOKENS, SHARED_HIDDEN), **bf16)
        deep_gemm.fp8_fp4_mega_moe_bf16_shared(
            y, shared_y, l1, l2, shared_x, shared_l1, shared_l2, gamma, 1e-6, buffer, stats, (1, 1, 32), "situ", True, 1.25, 1.5
        )  # fmt: skip
        shared = SharedInput(shared_x, shared_l1, shared_l2, gamma, 1e-6)
        (want,) = mega_moe_reference([RankInput(given.routed, l1, l2, shared)], Options("situ", None, 1.25, 1.5))
        metrics.assert_close(y, want.y, "y")
        assert want.shared_y is not None
        metrics.assert_close(shared_y, want.shared_y, "shared_y")
    finally:
        buffer.destroy()
