"""Planned kernels as the run-time compiler makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deep_gemm_k3.jit import Artefact, KernelSource, NvrtcCompiler
from deep_gemm_k3.mega.plan import KERNELS, Plan


def compiled(problem: Mapping[str, Any], suffix: str = "") -> Artefact:
    """The kernel that the planner takes for a problem; ``suffix`` "_traced": the one with a timeline."""
    plan = Plan.make(**problem)
    return NvrtcCompiler().compile(KernelSource(KERNELS[plan.target] + suffix, plan.target, plan.literal))
