"""A caller written for upstream's package, importing this one under its name: positional arguments, a process group, the
buffer zeroed between calls, a 64-token buffer with 72 shared tokens, either activation on one buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from mega_support import CLAMPED, SITU, SWIGLU, Signature

import deep_gemm_k3 as deep_gemm
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.oracle import Options, RoutedInput
from deep_gemm_k3.testing.world import RankInput, SharedInput, mega_moe_reference
from deep_gemm_k3.utils import per_token_cast_to_fp4, per_token_cast_to_fp8

LOCAL_EXPERTS, TOPK, TOKENS, HIDDEN, INTERMEDIATE = 8, 2, 64, 1024, 512
SHARED_TOKENS, SHARED_HIDDEN, SHARED_INTERMEDIATE = 72, 2048, 1024
# Named for the kernels alone, which are compiled with those of the other modules.
SIGNATURES = [Signature("routed", kind, fast_math=True) for kind in (SWIGLU, CLAMPED, SITU)]
SIGNATURES += [Signature("dense", SITU, fast_math=True)]


def shape(ranks: int) -> WorldShape:
    widths = (HIDDEN, INTERMEDIATE, 384, SHARED_HIDDEN, SHARED_INTERMEDIATE)
    return WorldShape((TOKENS,) * ranks, LOCAL_EXPERTS * ranks, TOPK, *widths)


def _grouped_fp4(experts: int, n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty((experts, n, k // 2), dtype=torch.int8, device=device)
    sf = torch.empty((experts, n, k // 32), dtype=torch.float, device=device)
    for i in range(experts):
        dense = (torch.randn((n, k), device=device) * 0.05).to(torch.bfloat16)
        weight[i], sf[i] = per_token_cast_to_fp4(dense, use_ue8m0=True, gran_k=32)
    return weight, deep_gemm.transform_sf_into_required_layout(sf, n, k, (1, 32), experts)


def _inputs(rank: int, ranks: int, device: torch.device) -> RankInput:
    """What a rank of such a caller makes; every rank can make all."""
    torch.manual_seed(rank)
    bf16 = {"dtype": torch.bfloat16, "device": device}
    x, x_sf = per_token_cast_to_fp8(
        torch.randn((TOKENS, HIDDEN), **bf16), use_ue8m0=True, gran_k=32, use_packed_ue8m0=True
    )
    raw = (
        _grouped_fp4(LOCAL_EXPERTS, 2 * INTERMEDIATE, HIDDEN, device),
        _grouped_fp4(LOCAL_EXPERTS, HIDDEN, INTERMEDIATE, device),
    )
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(*raw)
    scores = torch.randn((TOKENS, LOCAL_EXPERTS * ranks), dtype=torch.float, device=device).softmax(dim=-1)
    weights, idx = torch.topk(scores, TOPK, dim=-1)
    shared_x = torch.randn((SHARED_TOKENS, SHARED_HIDDEN), **bf16) * 0.25
    shared_l1 = torch.randn((2 * SHARED_INTERMEDIATE, SHARED_HIDDEN), **bf16) * 0.02
    shared_l2 = torch.randn((SHARED_HIDDEN, SHARED_INTERMEDIATE), **bf16) * 0.02
    gamma = torch.randn(HIDDEN, **bf16) * 0.1 + 1
    shared_l1, shared_l2 = deep_gemm.transform_weights_for_mega_moe(shared_l1, shared_l2)
    return RankInput(
        RoutedInput(x, x_sf, idx, weights), l1, l2, SharedInput(shared_x, shared_l1, shared_l2, gamma, 1e-6)
    )


@dataclass
class Caller:
    """One rank's buffer and inputs, all ranks' inputs for the reference."""

    group: dist.ProcessGroup
    device: torch.device

    def __post_init__(self) -> None:
        self.rank, ranks = self.group.rank(), self.group.size()
        self.ranks = [_inputs(rank, ranks, self.device) for rank in range(ranks)]
        self.buffer = deep_gemm.get_symm_buffer_for_mega_moe(
            self.group, LOCAL_EXPERTS * ranks, TOKENS, TOPK, HIDDEN, INTERMEDIATE, 0, None, "fp8xfp4", "situ", SHARED_INTERMEDIATE
        )  # fmt: skip
        self.stats = torch.zeros(LOCAL_EXPERTS, dtype=torch.int, device=self.device)

    def fill(self) -> torch.Tensor:
        """Zero the buffer while all ranks are idle, write the inputs, and give an output."""
        torch.cuda.synchronize() if self.device.type == "cuda" else None
        dist.barrier(self.group)
        self.buffer.buffer.zero_()
        torch.cuda.synchronize() if self.device.type == "cuda" else None
        dist.barrier(self.group)
        routed = self.ranks[self.rank].routed
        self.buffer.x[:TOKENS].copy_(routed.x)
        self.buffer.x_sf[:TOKENS].copy_(routed.x_sf)
        self.buffer.topk_idx[:TOKENS].copy_(routed.topk_idx)
        self.buffer.topk_weights[:TOKENS].copy_(routed.topk_weights)
        return torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16, device=self.device)

    def routed_calls(self) -> None:
        mine = self.ranks[self.rank]
        alone = [RankInput(one.routed, one.l1, one.l2) for one in self.ranks]
        kinds: tuple[dict[str, object], ...] = (
            {"activation": "swiglu", "activation_clamp": None},
            {"activation": "swiglu", "activation_clamp": 1.0},
            {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0},
        )
        for options in kinds:
            y = self.fill()
            deep_gemm.fp8_fp4_mega_moe(
                y, mine.l1, mine.l2, self.buffer, cumulative_local_expert_recv_stats=self.stats, recipe=(1, 1, 32),
                fast_math=True, **options,
            )  # fmt: skip
            want = mega_moe_reference(alone, Options(**options))[self.rank]  # type: ignore[arg-type]
            metrics.assert_close(y, want.y, str(options))
        assert torch.equal(self.stats, len(kinds) * want.counts)

    def shared_call(self) -> None:
        mine = self.ranks[self.rank]
        s = mine.shared
        assert s is not None
        assert deep_gemm.supports_bf16_shared_independent_tokens()
        y, shared_y = self.fill(), torch.empty((SHARED_TOKENS, SHARED_HIDDEN), dtype=torch.bfloat16, device=self.device)
        deep_gemm.fp8_fp4_mega_moe_bf16_shared(
            y, shared_y, mine.l1, mine.l2, s.x, s.l1, s.l2, s.rms_weight, 1e-6, self.buffer, self.stats, (1, 1, 32), "situ",
            True, 1.25, 1.5,
        )  # fmt: skip
        want = mega_moe_reference(self.ranks, Options("situ", None, 1.25, 1.5))[self.rank]
        metrics.assert_close(y, want.y, "y")
        assert want.shared_y is not None
        metrics.assert_close(shared_y, want.shared_y, "shared_y")


def call_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Every kind of call, compared with the oracle."""
    caller = Caller(group, device)
    try:
        caller.routed_calls()
        caller.shared_call()
    finally:
        caller.buffer.destroy()
