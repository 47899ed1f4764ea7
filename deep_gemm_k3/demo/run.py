"""The job itself: what every rank of the demo does, and what it keeps for the checks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

import deep_gemm_k3
from deep_gemm_k3.demo.data import Bits, Layer, bits_of

MODES = ("dense", "rs", "sp_rs")
UNTOUCHED = 0x7FC1  # a BF16 NaN that no computation gives


@dataclass
class Call:
    """What one rank has after one call: bit patterns of y and of the shared output or of its whole workspace."""

    y: Bits
    shared: Bits
    seconds: float
    generation: int = 0


@dataclass
class RankResult:
    """Calls by (mode, part), and what the plan said about the first of each mode."""

    calls: dict[tuple[str, int], Call] = field(default_factory=dict)


class Progress:
    """Prints what has been done, with the time since the start."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.1f} s] {text}", flush=True)


class RankRun:
    """One rank: its buffer, its weights and its six calls."""

    def __init__(self, group: Any, layer: Layer, device: torch.device) -> None:
        problem = layer.problem
        self.layer, self.problem, self.rank, self.device = layer, problem, group.rank, device
        self.buffer = deep_gemm_k3.get_symm_buffer_for_mega_moe(
            group,
            problem.experts,
            max(problem.tokens),
            problem.topk,
            problem.hidden,
            problem.intermediate,
            activation="situ",
            bf16_shared_intermediate_hidden=problem.shared_slice,
            num_max_shared_tokens=problem.shared_tokens,
            device=device,
        )
        experts = layer.experts[self.rank].pairs()
        l1, l2 = ((weight.to(device), scales.to(device)) for weight, scales in experts)
        self.l1, self.l2 = deep_gemm_k3.transform_weights_for_mega_moe(l1, l2, "situ")
        self.gamma, self.shared_x = layer.gamma.to(device), layer.shared_x.to(device)
        self.workspaces = {mode: self._workspace(group, mode) for mode in MODES[1:]}

    def _workspace(self, group: Any, mode: str) -> Any:
        workspace = deep_gemm_k3.PublicationWorkspace(
            group,
            mode=mode,
            num_max_tokens=self.problem.shared_tokens,
            hidden=self.problem.shared_hidden,
            num_generations=3,
            device=self.device,
        )
        workspace.workspace.view(torch.int16).fill_(UNTOUCHED)
        return workspace

    def fill(self, routed: bool) -> int:
        """Puts this rank's tokens into its buffer; gives how many there are."""
        tokens = self.layer.tokens[self.rank]
        count = self.problem.tokens[self.rank] if routed else 0
        self.buffer.x[:count].copy_(tokens.x[:count])
        self.buffer.x_sf[:count].copy_(tokens.x_sf[:count])
        self.buffer.topk_idx[:count].copy_(tokens.topk_idx[:count])
        self.buffer.topk_weights[:count].copy_(tokens.topk_weights[:count])
        return count

    def call(self, mode: str, part: int) -> Call:
        problem = self.problem
        count = self.fill(routed=part == 0)
        y = torch.full((count, problem.hidden), float("nan"), dtype=torch.bfloat16, device=self.device)
        l1, l2 = (weight.to(self.device) for weight in self.layer.shared_slice(part, self.rank))
        shared = (self.shared_x, l1, l2, self.gamma, problem.epsilon)
        options: dict[str, Any] = {"situ_beta": problem.beta, "situ_linear_beta": problem.linear_beta}
        started = time.perf_counter()
        if mode == "dense":
            out = torch.full_like(self.shared_x, float("nan"))
            deep_gemm_k3.fp8_fp4_mega_moe_bf16_shared(y, out, self.l1, self.l2, *shared, self.buffer, **options)
            self.buffer.check()
            return Call(bits_of(y), bits_of(out), time.perf_counter() - started)
        publish = {
            "rs": deep_gemm_k3.fp8_fp4_mega_moe_bf16_shared_rs,
            "sp_rs": deep_gemm_k3.fp8_fp4_mega_moe_bf16_shared_sp_rs,
        }[mode]
        target = self.workspaces[mode]
        generation = target.generation
        arguments = (target.workspace, target.flags, target.peer_ptrs)
        publish(y, self.l1, self.l2, *shared, *arguments, self.buffer, **options)
        self.buffer.check()
        seconds = time.perf_counter() - started
        target.rotate()
        return Call(bits_of(y), bits_of(target.workspace), seconds, generation)


def describe(run: RankRun) -> str:
    """What the calls run and how large the parts of a buffer are, as the plan tells."""
    problem = run.problem
    plan = deep_gemm_k3.Plan.of(
        run.buffer,
        max(problem.tokens),
        num_shared_tokens=problem.shared_tokens,
        shared_hidden=problem.shared_hidden,
        shared_output="token_owner",
        activation="situ",
    )
    workspaces = ", ".join(f"{mode} {run.workspaces[mode].workspace.nbytes / 2**20:.2f} MiB" for mode in MODES[1:])
    return f"\n{plan.explain()}\nworkspace {workspaces} on each rank\n\n{plan.byte_table()}\n"


def run_rank(group: Any, layer: Layer, device: torch.device, progress: Progress) -> RankResult:
    run = RankRun(group, layer, device)
    result = RankResult()
    if run.rank == 0:
        progress("buffers, weights and workspaces are in place")
        print(describe(run), flush=True)
    for mode in MODES:
        for part in range(layer.problem.parts):
            result.calls[mode, part] = run.call(mode, part)
            group.barrier("demo")
        if run.rank == 0:
            seconds = sum(result.calls[mode, part].seconds for part in range(layer.problem.parts))
            progress(f"{mode}: {layer.problem.parts} calls on every rank, {seconds:.1f} s")
    run.buffer.destroy()
    return result


def run(layer: Layer, device: str | None, progress: Progress) -> list[RankResult]:
    """Runs the layer in every mode on all ranks."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with deep_gemm_k3.local_world(layer.problem.ranks) as world:
        return list(world.run(run_rank, layer, chosen, progress))
