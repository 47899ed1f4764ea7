#!/usr/bin/env python3
"""What the compiler makes of every kernel that Kimi K3 can need, and whether the emulator has a model for all of it.

All configs of the K3 widths, over 1, 8 and 16 ranks, all entries and options, without duplicates, are compiled; their PTX
is decoded. With --cubin machine code is made as well, and registers, spills and compile time are kept.

    python scripts/check_emulator_coverage.py --target sm_100a --list             # how many kernels there are
    python scripts/check_emulator_coverage.py --target sm_100a --cubin OUT.json   # the full run, or more of it

A run may be stopped: the next one continues OUT.json, if headers and compiler are still the same. Kernels come in an order
without meaning, so whatever part is done is a fair sample. Exits 1 where an instruction has no model, a kernel spills or
asks for more memory than there is, or takes more than 10 s of one core to compile.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RANKS = (1, 8, 16)
OUTPUTS = ("none", "dense", "hidden_sharded", "token_owner")
SHARED_SLICE = {1: 6144, 8: 768, 16: 384}
SHARED_LIMIT, TENSOR_LIMIT, SECONDS_LIMIT = 227 * 1024, 512, 10.0
COLUMNS = ("registers", "spilled bytes", "stack bytes", "shared bytes", "tensor columns", "statements", "cpu seconds")


def problems(target: str) -> Iterator[dict[str, Any]]:
    """Every combination of what a call of the model can choose."""
    for ranks, output in itertools.product(RANKS, OUTPUTS):
        activations = [("situ", False)] + ([("swiglu", False), ("swiglu", True)] if output == "none" else [])
        for (activation, clamp), fast, invariant, statistics_wanted in itertools.product(
            activations, (False, True), (False, True), (False, True)
        ):
            yield {
                "num_ranks": ranks, "num_experts": 896, "num_topk": 16, "hidden": 3584, "intermediate_hidden": 3072,
                "num_max_tokens_per_rank": 8448, "num_max_shared_tokens": 8448 * (ranks if output == "token_owner" else 1),
                "shared_hidden": 0 if output == "none" else 7168,
                "shared_intermediate_hidden": SHARED_SLICE[ranks], "shared_output": output, "activation": activation,
                "has_clamp": clamp, "fast_math": fast, "batch_invariant": invariant, "has_statistics": statistics_wanted,
                "target": planned_target(target),
            }  # fmt: skip


def planned_target(target: str) -> str:
    return "sm_100a" if target == "sm_100f" else target


def name_of(literal: str) -> str:
    return hashlib.sha256(literal.encode()).hexdigest()[:12]


def configs(target: str) -> dict[str, dict[str, Any]]:
    """Configs without duplicates, by a name that says nothing, in the order of the names."""
    from deep_gemm_k3.mega.plan import all_configs

    found: dict[str, dict[str, Any]] = {}
    for problem in problems(target):
        for config in all_configs(problem):
            found.setdefault(name_of(config["literal"]), config)
    return dict(sorted(found.items()))


def cpu_seconds() -> float:
    """Of this process and of the compilers it has started."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def compile_one(target: str, config: dict[str, Any], compiler: str, ptx_only: bool) -> dict[str, Any]:
    """Compiles one kernel and decodes its PTX: what the emulator lacks, which opcodes it met, what the kernel takes."""
    from deep_gemm_k3.emulator import EmulatorError, Module
    from deep_gemm_k3.jit.compiler import NvccCompiler, NvrtcCompiler
    from deep_gemm_k3.jit.ptx import opcodes
    from deep_gemm_k3.jit.source import KernelSource
    from deep_gemm_k3.mega.plan import KERNELS

    chosen = NvccCompiler() if compiler == "nvcc" else NvrtcCompiler()
    source = KernelSource(KERNELS[planned_target(target)], target, config["literal"], ptx_only)
    start = cpu_seconds()
    made = chosen.compile(source)
    seconds = cpu_seconds() - start
    lacking = ""
    try:
        Module(made.ptx).check()
    except EmulatorError as error:
        lacking = str(error)
    found, used = opcodes(made.ptx), made.resources
    row = (
        used.registers,
        used.spill_stores + used.spill_loads,
        used.stack,
        config["launch"][9] + used.static_shared,
        config["tensor_memory"]["columns"] if planned_target(target) == "sm_100a" else 0,
        sum(found.values()),
        round(seconds, 2),
    )
    return {"name": name_of(config["literal"]), "lacking": lacking, "row": row, "opcodes": dict(found)}


class Record:
    """The file of a run: totals over all kernels done, and a row for each."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self.lacking: dict[str, str] = {}
        self.opcodes: Counter[str] = Counter()
        self.rows: dict[str, tuple[float, ...]] = {}

    def resume(self, path: Path) -> None:
        if not path.is_file():
            return
        old = json.loads(path.read_text())
        if any(old.get(name) != value for name, value in self.head.items()):
            return
        self.lacking = old["lacking"]
        self.opcodes.update(old["opcodes_with_modifiers"])
        self.rows = {name: tuple(float(number) for number in row.split()) for name, row in old["rows"].items()}

    def add(self, result: dict[str, Any]) -> None:
        self.rows[result["name"]] = result["row"]
        self.opcodes.update(result["opcodes"])
        if result["lacking"]:
            self.lacking[result["name"]] = result["lacking"]

    def faults(self) -> list[str]:
        found = [f"{name}: {text}" for name, text in self.lacking.items()]
        for name, (_, spilled, stack, shared, columns, _, seconds) in self.rows.items():
            if spilled or stack or shared > SHARED_LIMIT or columns > TENSOR_LIMIT or seconds > SECONDS_LIMIT:
                found.append(
                    f"{name}: {spilled:g} bytes spilled, {stack:g} of stack, {shared:g} of shared memory, "
                    f"{columns:g} columns of tensor memory, {seconds} s"
                )
        return found

    def text(self) -> str:
        columns = list(zip(*self.rows.values(), strict=True))
        ranges = {
            name: [min(column), statistics.median(column), max(column)]
            for name, column in zip(COLUMNS, columns, strict=False)
        }
        record = self.head | {
            "decoded": len(self.rows),
            "faults": self.faults(),
            "lacking": self.lacking,
            "lowest, median, highest": {
                name: " ".join(f"{number:g}" for number in found) for name, found in ranges.items()
            },
            "opcodes": len({name.split(".")[0] for name in self.opcodes}),
            "opcodes_with_modifiers": dict(sorted(self.opcodes.items())),
            "columns of rows": ", ".join(COLUMNS),
            "rows": {name: " ".join(f"{number:g}" for number in row) for name, row in sorted(self.rows.items())},
        }
        return json.dumps(record, indent=1) + "\n"


def run(arguments: argparse.Namespace, wanted: dict[str, dict[str, Any]], record: Record) -> None:
    left = [config for name, config in wanted.items() if name not in record.rows]
    left = left[: arguments.limit or len(left)]
    started = written = time.monotonic()
    with ProcessPoolExecutor(arguments.workers) as pool:
        ahead = iter(left)
        running = {submit(pool, arguments, config) for config in itertools.islice(ahead, 2 * arguments.workers)}
        while running:
            done = next(as_completed(running))
            running.discard(done)
            record.add(done.result())
            now = time.monotonic()
            if not arguments.minutes or now - started < arguments.minutes * 60:
                running |= {submit(pool, arguments, config) for config in itertools.islice(ahead, 1)}
            if now - written > 10 or not running:
                written = now
                if arguments.out:
                    arguments.out.write_text(record.text())
                print(f"{len(record.rows)} of {len(wanted)}, {now - started:.0f} s", flush=True)


def submit(pool: ProcessPoolExecutor, arguments: argparse.Namespace, config: dict[str, Any]) -> Any:
    return pool.submit(compile_one, arguments.target, config, arguments.compiler, not arguments.cubin)


def head(arguments: argparse.Namespace, num_kernels: int) -> dict[str, Any]:
    from deep_gemm_k3.jit.compiler import NvccCompiler, NvrtcCompiler
    from deep_gemm_k3.jit.source import INCLUDE_DIR, headers_digest
    from deep_gemm_k3.mega.plan import KERNELS

    kernel = KERNELS[planned_target(arguments.target)]
    return {
        "target": arguments.target,
        "compiler": (NvccCompiler() if arguments.compiler == "nvcc" else NvrtcCompiler()).identity,
        "machine code": arguments.cubin,
        "headers": headers_digest(f"deep_gemm_k3/kernels/{kernel}.cuh", INCLUDE_DIR),
        "kernels": num_kernels,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--target", choices=["sm_90a", "sm_100a", "sm_100f"], default="sm_90a")
    parser.add_argument("--compiler", choices=["nvrtc", "nvcc"], default="nvrtc")
    parser.add_argument("--cubin", action="store_true", help="machine code as well, and what it takes")
    parser.add_argument("--list", action="store_true", help="only count")
    parser.add_argument("--limit", type=int, default=0, help="compile at most so many")
    parser.add_argument("--minutes", type=float, default=0, help="begin nothing after so long")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    wanted = configs(arguments.target)
    print(
        f"{arguments.target}: {len(wanted)} kernels, {sum(1 for _ in problems(arguments.target))} problems", flush=True
    )
    if arguments.list:
        return 0
    record = Record(head(arguments, len(wanted)))
    if arguments.out:
        record.resume(arguments.out)
    run(arguments, wanted, record)
    for fault in record.faults():
        print(fault)
    return 1 if record.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
