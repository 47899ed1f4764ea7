#!/usr/bin/env python3
"""What the host costs in one validated call with a warm plan: the public functions up to, and without, the launch.

python scripts/measure_host_overhead.py [--calls N] [--device cpu|cuda]

Prints the best of five rounds for each entry, in microseconds a call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import deep_gemm_k3 as dg
from deep_gemm_k3.testing.data import WorldShape, make_world

ROUNDS = 5
SHAPE = WorldShape((8,), 4, 2, 256, 128, shared_tokens=16, shared_hidden=256, shared_intermediate=128)


def best_of(call: Callable[[], None], calls: int) -> float:
    """Microseconds a call in the fastest round."""
    call()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(time.perf_counter() - start)
    return min(times) / calls * 1e6


def entries(device: str) -> dict[str, Callable[[], None]]:
    """All public calls over one buffer whose launches go nowhere."""
    given = make_world(SHAPE, 0, target=None if device == "cuda" else "sm_90a", device=device)[0]
    l1, l2 = (given.l1, given.l2) if device == "cpu" else dg.transform_weights_for_mega_moe(given.l1, given.l2)
    buffer = dg.get_symm_buffer_for_mega_moe(
        None, SHAPE.experts, 384, SHAPE.topk, SHAPE.hidden, SHAPE.intermediate,
        bf16_shared_intermediate_hidden=SHAPE.shared_intermediate, device=device,
        target=None if device == "cuda" else "sm_90a",
    )  # fmt: skip
    torch.ops.deep_gemm_k3.set_route(buffer.handle, "none")
    buffer.topk_idx.fill_(-1)
    y = torch.empty(8, SHAPE.hidden, dtype=torch.bfloat16, device=device)
    stats = torch.zeros(SHAPE.experts, dtype=torch.int32, device=device)
    shared: Any = given.shared
    inputs = (shared.x, shared.l1, shared.l2, shared.rms_weight, 1e-5)
    shared_y = torch.empty_like(shared.x)
    betas = {"situ_beta": 4.0, "situ_linear_beta": 25.0}

    def published(mode: str, function: Callable[..., None]) -> Callable[[], None]:
        space = dg.PublicationWorkspace(buffer, mode, 16, SHAPE.shared_hidden, num_generations=3)
        target = (space.workspace, space.flags, space.peer_ptrs)
        return lambda: function(y, l1, l2, *inputs, *target, buffer, stats, **betas)

    return {
        "fp8_fp4_mega_moe": lambda: dg.fp8_fp4_mega_moe(y, l1, l2, buffer, None, None, stats),
        "fp8_fp4_mega_moe_bf16_shared": lambda: dg.fp8_fp4_mega_moe_bf16_shared(
            y, shared_y, l1, l2, *inputs, buffer, stats, **betas
        ),
        "fp8_fp4_mega_moe_bf16_shared_rs": published("rs", dg.fp8_fp4_mega_moe_bf16_shared_rs),
        "fp8_fp4_mega_moe_bf16_shared_sp_rs": published("sp_rs", dg.fp8_fp4_mega_moe_bf16_shared_sp_rs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20000, help="calls in a round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    for name, call in entries(options.device).items():
        print(f"{name:<36} {best_of(call, options.calls):8.2f} us")


if __name__ == "__main__":
    main()
