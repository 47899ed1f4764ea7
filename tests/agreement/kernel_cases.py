"""Calls of the fused kernel whose results are compared between a GPU and the emulator.

Inputs come from seeds, drawn on the CPU. Both sides run the very same kernel: the plan's choices that depend on the device
are fixed. Inputs of kind "exact" have one right sum in any order; those of kind "random" show how sums are accumulated.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RankResult, RunOptions, Session, run_world

NUM_SMS = 4
OVERRIDES = {"num_ctas_per_sm": 1, "routed_tokens": 16, "shared_tokens": 64}
ONE = WorldShape((24,), 4, 2, 512, 256, 24, 512, 256)
TWO = WorldShape((13, 8), 4, 2, 512, 256, 16, 512, 256)
SITU = Options("situ", None, 4.0, 25.0)
SWIGLU = Options("swiglu")
CLAMPED = Options("swiglu", activation_clamp=2048.0)


@dataclass(frozen=True)
class Case:
    """One call: its shape, entry, activation and how inputs are drawn."""

    shape: WorldShape
    mode: str
    options: Options
    kind: str
    fast_math: bool = False

    @property
    def name(self) -> str:
        clamp = "-clamp" if self.options.activation_clamp is not None else ""
        fast = "-fast" if self.fast_math else ""
        return f"{self.shape.ranks}-{self.mode}-{self.options.activation}{clamp}-{self.kind}{fast}"


CASES = [
    *(Case(ONE, "routed", options, kind) for kind in ("exact", "random") for options in (SWIGLU, CLAMPED, SITU)),
    *(Case(shape, mode, SITU, kind) for kind in ("exact", "random") for shape in (ONE, TWO) for mode in ("dense", "rs", "sp_rs") if shape is TWO or mode != "sp_rs"),
    Case(TWO, "routed", SITU, "exact"),
    Case(TWO, "routed", SITU, "random"),
    Case(ONE, "routed", SITU, "random", True),
    Case(ONE, "dense", SITU, "random", True),
]  # fmt: skip


def kernel_digest() -> str:
    """What tells one version of the kernel from another: the contents of its headers."""
    from deep_gemm_k3.jit.source import INCLUDE_DIR, headers_digest

    return headers_digest("deep_gemm_k3/kernels/mega_sm90.cuh", INCLUDE_DIR)


def compile_all(cases: list[Case]) -> str:
    """Compiles what the cases run on a GPU, all kernels at once."""
    from deep_gemm_k3.jit.kernel import default_store
    from deep_gemm_k3.jit.source import KernelSource
    from deep_gemm_k3.jit.warmup import warm_up
    from deep_gemm_k3.mega.plan import all_configs

    outputs = {"routed": "none", "dense": "dense", "rs": "hidden_sharded", "sp_rs": "token_owner"}
    sources = []
    for case in cases:
        s = case.shape
        problem = {
            "num_ranks": s.ranks, "num_experts": s.experts, "num_topk": s.topk, "hidden": s.hidden,
            "intermediate_hidden": s.intermediate, "num_max_tokens_per_rank": 384, "target": "sm_90a", "num_sms": NUM_SMS,
            "has_statistics": True, "whole_device": False, "num_max_shared_tokens": s.shared_tokens,
            "shared_intermediate_hidden": s.shared_intermediate, "shared_output": outputs[case.mode],
            "activation": case.options.activation, "has_clamp": case.options.activation_clamp is not None,
            "fast_math": case.fast_math, "shared_hidden": 0 if case.mode == "routed" else s.shared_hidden,
            "overrides": OVERRIDES,
        }  # fmt: skip
        sources += [KernelSource("mega_sm90", "sm_90a", config["literal"]) for config in all_configs(problem)]
    return str(warm_up(sources, default_store()))


def run_case(case: Case, device: str) -> list[RankResult]:
    """All ranks' results of one call, on the CPU."""
    session = Session(case.shape, device=device, overrides=OVERRIDES, num_sms=NUM_SMS, target="sm_90a")
    try:
        world = make_world(case.shape, 7, "uniform", case.kind, "sm_90a", device)
        how = RunOptions(fast_math=case.fast_math)
        results = run_world(world, case.options, case.mode, how, session)
        return [
            RankResult(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in vars(result).values()))
            for result in results
        ]
    finally:
        session.close()


def outputs(results: list[RankResult]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything that a call wrote."""
    for rank, result in enumerate(results):
        for name in ("y", "stats", "shared_y", "workspace"):
            tensor = getattr(result, name)
            if tensor is not None:
                yield f"{name}{rank}", tensor


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def pack_rows(tensor: torch.Tensor, rows: int = 1) -> str:
    """The first rows, for measuring how far results differ."""
    return base64.b85encode(zlib.compress(tensor[:rows].contiguous().view(torch.uint8).numpy().tobytes(), 9)).decode()


def unpack_rows(text: str, like: torch.Tensor, rows: int = 1) -> torch.Tensor:
    raw = bytearray(zlib.decompress(base64.b85decode(text)))
    return torch.frombuffer(raw, dtype=torch.uint8).view(like.dtype).view(like[:rows].shape)


def record_case(case: Case, device: str) -> dict[str, dict[str, str]]:
    """Digests of every output of a case; of random inputs also a few rows of y and of the dense shared output."""
    found: dict[str, dict[str, str]] = {}
    for name, tensor in outputs(run_case(case, device)):
        found[name] = {"sha256": digest(tensor)}
        if case.kind == "random" and name in ("y0", "shared_y0"):
            found[name]["rows"] = pack_rows(tensor)
    return found
