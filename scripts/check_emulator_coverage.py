#!/usr/bin/env python3
"""Does the emulator have a model for every instruction of every kernel that Kimi K3 can need?

All configs of the K3 widths, over 1, 8 and 16 ranks, all entries and options that compile, are compiled to PTX and decoded.
    python scripts/check_emulator_coverage.py --list             # how many kernels there are
    python scripts/check_emulator_coverage.py OUT.json           # the full run
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

RANKS = (1, 8, 16)
OUTPUTS = ("none", "dense", "hidden_sharded", "token_owner")
SHARED_SLICE = {1: 6144, 8: 768, 16: 384}


def problems(target: str) -> Iterator[dict[str, Any]]:
    """Every combination of what a call of the model can choose."""
    for ranks, output in itertools.product(RANKS, OUTPUTS):
        activations = [("situ", False)] + ([("swiglu", False), ("swiglu", True)] if output == "none" else [])
        for (activation, clamp), fast, invariant, statistics in itertools.product(
            activations, (False, True), (False, True), (False, True)
        ):
            yield {
                "num_ranks": ranks, "num_experts": 896, "num_topk": 16, "hidden": 3584, "intermediate_hidden": 3072,
                "num_max_tokens_per_rank": 8448, "num_max_shared_tokens": 8448 * (ranks if output == "token_owner" else 1),
                "shared_hidden": 0 if output == "none" else 7168,
                "shared_intermediate_hidden": SHARED_SLICE[ranks], "shared_output": output, "activation": activation,
                "has_clamp": clamp, "fast_math": fast, "batch_invariant": invariant, "has_statistics": statistics,
                "target": target,
            }  # fmt: skip


def literals(target: str) -> dict[str, str]:
    """Config literals without duplicates, each with the problem it was first found for."""
    from deep_gemm_k3.mega.plan import all_configs

    found: dict[str, str] = {}
    for problem in problems(target):
        for config in all_configs(problem):
            found.setdefault(config["literal"], f"{problem['num_ranks']} ranks, {problem['shared_output']}")
    return found


def decode(target: str, literal: str) -> dict[str, Any]:
    """Compiles one kernel to PTX and decodes it: what the emulator lacks, and which opcodes it met."""
    from deep_gemm_k3.emulator import EmulatorError, Module
    from deep_gemm_k3.jit.compiler import NvrtcCompiler
    from deep_gemm_k3.jit.ptx import opcodes
    from deep_gemm_k3.jit.source import KernelSource
    from deep_gemm_k3.mega.plan import KERNELS

    ptx = NvrtcCompiler().compile(KernelSource(KERNELS[target], target, literal, ptx_only=True)).ptx
    lacking = ""
    try:
        Module(ptx).check()
    except EmulatorError as error:
        lacking = str(error)
    found = opcodes(ptx)
    return {"literal": literal, "lacking": lacking, "statements": sum(found.values()), "opcodes": dict(found)}


def summary(target: str, done: dict[str, Any], total: int, seconds: float) -> dict[str, Any]:
    from deep_gemm_k3.jit.source import INCLUDE_DIR, headers_digest
    from deep_gemm_k3.mega.plan import KERNELS

    used: Counter[str] = Counter()
    for entry in done.values():
        used.update(entry["opcodes"])
    statements = [entry["statements"] for entry in done.values()]
    return {
        "target": target,
        "headers": headers_digest(f"deep_gemm_k3/kernels/{KERNELS[target]}.cuh", INCLUDE_DIR),
        "kernels": total,
        "decoded": len(done),
        "lacking": {literal: entry["lacking"] for literal, entry in done.items() if entry["lacking"]},
        "statements": [min(statements, default=0), max(statements, default=0)],
        "opcodes": len({name.split(".")[0] for name in used}),
        "opcodes_with_modifiers": dict(sorted(used.items())),
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--list", action="store_true", help="only count")
    parser.add_argument("--limit", type=int, default=0, help="decode at most so many")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    wanted = list(literals(arguments.target))
    print(
        f"{arguments.target}: {len(wanted)} kernels, {sum(1 for _ in problems(arguments.target))} problems", flush=True
    )
    if arguments.list:
        return
    total = len(wanted)
    wanted.sort(key=lambda literal: hashlib.sha256(literal.encode()).digest())  # whatever part is done is a fair sample
    wanted = wanted[: arguments.limit or total]
    started, done = time.monotonic(), {}
    with ProcessPoolExecutor(arguments.workers) as pool:
        futures = [pool.submit(decode, arguments.target, literal) for literal in wanted]
        for number, future in enumerate(as_completed(futures), 1):
            entry = future.result()
            done[entry["literal"]] = entry
            if number % 50 == 0 or number == len(wanted):
                text = json.dumps(summary(arguments.target, done, total, time.monotonic() - started), indent=1)
                if arguments.out:
                    arguments.out.write_text(text + "\n")
                print(f"{number} of {len(wanted)}, {time.monotonic() - started:.0f} s", flush=True)
    lacking = [entry for entry in done.values() if entry["lacking"]]
    for entry in lacking:
        print(f"{entry['lacking']}: {entry['literal']}")
    raise SystemExit(1 if lacking else 0)


if __name__ == "__main__":
    main()
