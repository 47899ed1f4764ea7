"""One rank of a measured call: buffer, outputs and the call itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._extension import ops
from ..arguments import check_choice, check_int, refuse_value
from ..mega import api
from ..mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from ..mega.plan import KERNELS, Plan, problem_of
from ..mega.publication import PublicationWorkspace
from ..testing.oracle import Options, RoutedInput
from .data import RankData
from .work import Shape

MODES = ("routed", "dense", "rs", "sp_rs")
OUTPUTS = {"routed": "none", "dense": "dense", "rs": "hidden_sharded", "sp_rs": "token_owner"}
OPTIONS = Options("situ", None, 4.0, 25.0)
_LEAST_OF_A_POINT = {"tokens": 0, "shared_tokens": 0, "experts": 1, "topk": 1}


def check_point(given: Mapping[str, Any], name: str) -> None:
    """Raise ``ValueError`` where a point of ``bench tune`` has a name or a value that cannot be."""
    known = [*_LEAST_OF_A_POINT, "mode", "overrides"]
    for key, value in given.items():
        check_choice(f"{name}: name", key, known)
        if key == "mode":
            check_choice(f"{name}.mode", value, MODES)
        elif key == "overrides" and not isinstance(value, dict):
            raise refuse_value(f"{name}.overrides", "choices by name", value)
        elif key in _LEAST_OF_A_POINT:
            check_int(f"{name}.{key}", value, _LEAST_OF_A_POINT[key], 2**20)


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
        "shared_rows": c["shared_tile"]["num_rows"],
        "num_ctas_per_sm": c["num_ctas_per_sm"],
        "num_stages": c["num_stages"],
        "splits": dict(c["splits"]),
        "narrow_widths": dict(c["narrow_widths"]),
    }


def compile_plans(plans: Sequence[Plan], traced: Sequence[Plan] = ()) -> str:
    """Compile the kernels of many plans in parallel, of the ``traced`` ones those with a timeline; what was done, in words.
    Plans that cannot be launched are left to whoever calls them."""
    from ..jit.kernel import default_store
    from ..jit.source import KernelSource
    from ..jit.warmup import warm_up

    wanted = [(p, "") for p in plans] + [(p, "_traced") for p in traced]
    sources = {
        (p.literal, k): KernelSource(KERNELS[p.target] + k, p.target, p.literal)
        for p, k in wanted
        if not p.data["fault"]
    }
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
        self.publications: dict[str, PublicationWorkspace] = {}
        self.input: RoutedInput | None = None
        self.mode = "routed"
        self.plan: Plan | None = None

    def use(self, mode: str, timeline: torch.Tensor | None = None) -> Plan:
        """Choose the entry; the next call is its first. ``timeline``: memory for a traced kernel's events."""
        self.mode = mode
        how = self.how
        fixed = {k: v for k, v in problem_of(self.buffer).items() if k in ("target", "num_sms", "whole_device")}
        self.plan = plan_of(self.shape, mode, how, **fixed)
        if fault := self.plan.data["fault"]:
            raise RuntimeError(f"plan: wanted one that can be launched, given overrides {dict(how.overrides)}: {fault}")
        ops().set_overrides(self.buffer.handle, json.dumps(pinned(self.plan)))
        ops().set_debug(self.buffer.handle, 0, 0 if timeline is None else timeline.data_ptr())
        if mode in ("rs", "sp_rs") and mode not in self.publications:
            made = PublicationWorkspace(self.buffer, mode, self.shape.shared_tokens, self.shape.shared_hidden)
            self.publications[mode] = made
        return self.plan

    @property
    def published(self) -> PublicationWorkspace | None:
        """The workspaces of a mode live as long as the case: graphs that were captured with them may be replayed."""
        return self.publications.get(self.mode)

    def fill(self, routed: RoutedInput) -> None:
        self.input = routed
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            value = getattr(routed, name)
            getattr(self.buffer, name)[: value.size(0)].copy_(value)

    def renew_inputs(self, routed: RoutedInput) -> None:
        """`fill` and `clear`."""
        self.fill(routed)
        self.clear()

    def clear(self) -> None:
        """Overwrite the outputs, so that a call that wrote nothing cannot pass a check; done when this returns, since
        peers write there too."""
        self.y.fill_(float("nan"))
        if self.shared_y is not None and self.mode == "dense":
            self.shared_y.fill_(float("nan"))
        if self.published is not None:
            self.published.workspace.fill_(float("nan"))
        self.settle()

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

    def destroy(self) -> None:
        for workspace in self.publications.values():
            workspace.destroy()
        self.buffer.destroy()
