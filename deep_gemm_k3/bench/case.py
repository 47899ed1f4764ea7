"""One rank of a measured call: buffer, outputs, the call itself, and the comparison of its results with the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._extension import ops
from ..mega import api
from ..mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from ..mega.plan import KERNELS, Plan, problem_of
from ..mega.publication import PublicationWorkspace
from ..testing import metrics, oracle
from ..testing.oracle import Options, RoutedInput
from ..testing.world import RankInput, SharedInput, mega_moe_reference
from .data import RankData
from .work import Shape

MODES = ("routed", "dense", "rs", "sp_rs")
OUTPUTS = {"routed": "none", "dense": "dense", "rs": "hidden_sharded", "sp_rs": "token_owner"}
OPTIONS = Options("situ", None, 4.0, 25.0)


class CheckFailed(RuntimeError):
    """A result that no time may be printed for."""


@dataclass(frozen=True)
class Settings:
    """How a call is planned and made. ``overrides`` of the planner's choices, by the names that ``Plan.make`` takes."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    fast_math: bool = True
    batch_invariant: bool = False
    num_sms: int | None = None
    timeout_s: float = 20.0
    sample: int = 64
    """Tokens of a rank that are compared with the oracle; more are only compared with earlier results."""


def make_buffer(group: Any, shape: Shape, device: torch.device, how: Settings) -> SymmBuffer:
    """Room for the call's tokens, no more: a buffer's size is part of what is compiled."""
    options: dict[str, Any] = {"device": device, "num_sms": how.num_sms, "timeout_s": how.timeout_s}
    if shape.shared_tokens:
        options["bf16_shared_intermediate_hidden"] = shape.shared_intermediate
        options["num_max_shared_tokens"] = shape.shared_tokens
    experts = shape.experts * shape.ranks
    tokens = max(shape.tokens, 1)
    return get_symm_buffer_for_mega_moe(group, experts, tokens, shape.topk, shape.hidden, shape.intermediate, **options)


def plan_of(shape: Shape, mode: str, how: Settings, **of_device: Any) -> Plan:
    """The plan of a call of ``shape``."""
    problem: dict[str, Any] = {
        "num_ranks": shape.ranks,
        "num_experts": shape.experts * shape.ranks,
        "num_topk": shape.topk,
        "num_tokens": shape.tokens,
        "num_max_tokens_per_rank": max(shape.tokens, 1),
        "hidden": shape.hidden,
        "intermediate_hidden": shape.intermediate,
        **of_device,
    }
    if shape.shared_tokens:
        problem |= {"shared_intermediate_hidden": shape.shared_intermediate}
        problem |= {"num_max_shared_tokens": shape.shared_tokens}
    return Plan.make(**{**problem, **_call_options(shape, mode, how)})


def _call_options(shape: Shape, mode: str, how: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {"shared_output": OUTPUTS[mode], "activation": OPTIONS.activation}
    options |= {"fast_math": how.fast_math, "batch_invariant": how.batch_invariant, "overrides": dict(how.overrides)}
    if mode != "routed":
        options |= {"num_shared_tokens": shape.shared_tokens, "shared_hidden": shape.shared_hidden}
    return options


def pinned(plan: Plan) -> dict[str, Any]:
    """Overrides that repeat a plan: with them a buffer's first call prepares this one kernel and no other."""
    c = plan.config
    return {
        "routed_tokens": c["routed_tile"]["num_tokens"],
        "shared_tokens": c["shared_tile"]["num_tokens"],
        "num_ctas_per_sm": c["num_ctas_per_sm"],
        "num_stages": c["num_stages"],
        "splits": dict(c["splits"]),
    }


def compile_plans(plans: Sequence[Plan], traced: bool = False) -> str:
    """Compile the kernels of many plans in parallel (``traced``: those with a timeline too); what was done, in words."""
    from ..jit.kernel import default_store
    from ..jit.source import KernelSource
    from ..jit.warmup import warm_up

    kinds = ("", "_traced") if traced else ("",)
    sources = {(p.literal, k): KernelSource(KERNELS[p.target] + k, p.target, p.literal) for p in plans for k in kinds}
    return str(warm_up(list(sources.values()), default_store()))


class Case:
    """One rank's side of a measured call. Made on every rank of the group at once; ``use`` before anything else."""

    def __init__(self, group: Any, shape: Shape, data: RankData, device: torch.device, how: Settings) -> None:
        self.shape, self.data, self.device, self.how = shape, data, device, how
        self.buffer = make_buffer(group, shape, device, how)
        self.rank = self.buffer.rank
        self.y = torch.zeros(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        self.shared_y: torch.Tensor | None = None
        if shape.shared_tokens:
            self.shared_y = torch.zeros(shape.shared_tokens, shape.shared_hidden, dtype=torch.bfloat16, device=device)
        self.published: PublicationWorkspace | None = None
        self.input: RoutedInput | None = None
        self.mode = "routed"
        self.plan: Plan | None = None

    def use(self, mode: str, timeline: torch.Tensor | None = None) -> Plan:
        """Choose the entry; the next call is its first. ``timeline``: memory for a traced kernel's events."""
        self.mode = mode
        how = self.how
        fixed = {k: v for k, v in problem_of(self.buffer).items() if k in ("target", "num_sms", "whole_device")}
        self.plan = plan_of(self.shape, mode, how, **fixed)
        ops().set_overrides(self.buffer.handle, json.dumps(pinned(self.plan)))
        ops().set_debug(self.buffer.handle, 0, 0 if timeline is None else timeline.data_ptr())
        if self.published is not None:
            self.published.destroy()
            self.published = None
        if mode in ("rs", "sp_rs"):
            self.published = PublicationWorkspace(self.buffer, mode, self.shape.shared_tokens, self.shape.shared_hidden)
        return self.plan

    def fill(self, routed: RoutedInput) -> None:
        self.input = routed
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            value = getattr(routed, name)
            getattr(self.buffer, name)[: value.size(0)].copy_(value)

    def clear(self) -> None:
        """Overwrite the outputs, so that a call that wrote nothing cannot pass a check."""
        self.y.fill_(float("nan"))
        if self.shared_y is not None and self.mode == "dense":
            self.shared_y.fill_(float("nan"))
        if self.published is not None:
            self.published.workspace.fill_(float("nan"))

    def call(self, number: int) -> None:
        l1, l2 = self.data.routed_set(number)
        options: dict[str, Any] = {"activation": "situ", "fast_math": self.how.fast_math}
        options |= {"situ_beta": OPTIONS.situ_beta, "situ_linear_beta": OPTIONS.situ_linear_beta}
        options["batch_invariant"] = self.how.batch_invariant
        if self.mode == "routed":
            api.fp8_fp4_mega_moe(self.y, l1, l2, self.buffer, **options)
            return
        s = self.data.shared_set(number)
        shared = (s.x, s.l1, s.l2, s.rms_weight, s.rms_epsilon)
        if self.mode == "dense":
            assert self.shared_y is not None
            api.fp8_fp4_mega_moe_bf16_shared(self.y, self.shared_y, l1, l2, *shared, self.buffer, **options)
            return
        p = self.published
        assert p is not None
        entry = api.fp8_fp4_mega_moe_bf16_shared_rs if self.mode == "rs" else api.fp8_fp4_mega_moe_bf16_shared_sp_rs
        entry(self.y, l1, l2, *shared, p.workspace, p.flags, p.peer_ptrs, self.buffer, **options)

    def call_and_settle(self) -> None:
        self.call(0)
        self.settle()

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.buffer.check()

    def outputs(self) -> list[torch.Tensor]:
        """What the last call wrote."""
        results = [self.y]
        if self.mode == "dense" and self.shared_y is not None:
            results.append(self.shared_y)
        if self.published is not None:
            results.append(self.published.workspace[0])
        return results

    def expert_rows(self, inputs: Sequence[RoutedInput]) -> tuple[int, int]:
        """Experts of this rank that get a row from any rank, and the rows."""
        local = torch.cat([i.topk_idx.flatten() for i in inputs]) - self.rank * self.shape.experts
        local = local[(local >= 0) & (local < self.shape.experts)]
        return int(local.unique().numel()), int(local.numel())

    def destroy(self) -> None:
        if self.published is not None:
            self.published.destroy()
        self.buffer.destroy()


# ---------------------------------------------------------------------------------------------------------- comparison
def sample_rows(count: int, limit: int) -> list[int]:
    """At most ``limit`` of ``count`` rows: the first, the last and evenly between."""
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)}) if limit > 1 else [0]


def expected(cases: Sequence[Case]) -> list[tuple[list[int], list[int], torch.Tensor, torch.Tensor | None]]:
    """Per rank: sampled routed rows, sampled shared rows, and what the oracle computes for them."""
    ranks, places = [], []
    for case in cases:
        assert case.input is not None
        tokens = sample_rows(case.shape.tokens, case.how.sample)
        rows = sample_rows(case.shape.shared_tokens, case.how.sample)
        i = case.input
        routed = RoutedInput(i.x[tokens], i.x_sf[tokens], i.topk_idx[tokens], i.topk_weights[tokens])
        shared = None
        if case.mode != "routed":
            s = case.data.shared_set(0)
            shared = SharedInput(s.x[rows], s.l1, s.l2, s.rms_weight, s.rms_epsilon)
        ranks.append(RankInput(routed, *case.data.routed_set(0), shared))
        places.append((tokens, rows))
    results = mega_moe_reference(ranks, OPTIONS)
    return [(*place, r.y, r.shared_y) for place, r in zip(places, results, strict=True)]


def published_rows(cases: Sequence[Case], rank: int) -> torch.Tensor:
    """The shared output of ``rank`` put together again from what it published: BF16 [S, Hs]."""
    first = cases[0]
    views = [c.published.workspace[0] for c in cases if c.published is not None]
    out = torch.empty(first.shape.shared_tokens, first.shape.shared_hidden, dtype=torch.bfloat16, device=first.device)
    for dest, view in enumerate(views):
        if first.mode == "rs":
            shard = out.size(1) // len(views)
            out[:, dest * shard : (dest + 1) * shard] = view[: out.size(0), rank, :shard]
        else:
            owned = out.size(0) // len(views)
            out[dest * owned : (dest + 1) * owned] = view[:owned, rank]
    return out


def check_against_oracle(cases: Sequence[Case]) -> float:
    """Compare what the last call of all ranks wrote; the largest relative error over the tensors."""
    worst = 0.0
    for case, (tokens, rows, y, shared_y) in zip(cases, expected(cases), strict=True):
        pairs = [("y", case.y[tokens], y)]
        if not bool(torch.isfinite(case.y).all()):
            raise CheckFailed(f"{case.mode}, rank {case.rank}: y: wanted finite numbers everywhere")
        if shared_y is not None:
            got = case.shared_y if case.mode == "dense" else published_rows(cases, case.rank)
            assert got is not None
            pairs.append(("shared_y", got[rows], shared_y))
        for name, got, want in pairs:
            result = metrics.compare(got, want)
            if not result.within():
                raise CheckFailed(f"{case.mode}, rank {case.rank}: {name}: {result}")
            worst = max(worst, result.tensor)
    return worst


def check_same(case: Case, wanted: Sequence[torch.Tensor]) -> None:
    """The last call's outputs must be bit for bit those of the call that was compared with the oracle."""
    for got, want in zip(case.outputs(), wanted, strict=True):
        report = metrics.bitwise_report(got, want)
        if report is not None:
            raise CheckFailed(f"{case.mode}, rank {case.rank}: a timed call differs from the checked one: {report}")


__all__ = [
    "Case",
    "CheckFailed",
    "Settings",
    "check_against_oracle",
    "check_same",
    "oracle",
    "plan_of",
    "published_rows",
]
