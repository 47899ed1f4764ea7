#!/usr/bin/env python3
"""Registers, spills, shared memory and CTAs per SM of the fused kernel's variants at Kimi K3's widths; needs no GPU.

    python scripts/kernel_table.py [--target sm_100a] [--json FILE] [--write docs/kernels.md]

Compiles one kernel for every pair of tiles that the plan can choose (through the cache) and reads what the assembler
reports. CTAs per SM follow from the limits of an SM, equal for compute capabilities 9.0 and 10.0. Exits 1 where a kernel spills, or fewer CTAs
fit than its launch relies on.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deep_gemm_k3.jit.kernel import default_store
from deep_gemm_k3.jit.source import KernelSource
from deep_gemm_k3.jit.warmup import warm_up
from deep_gemm_k3.mega.plan import KERNELS, all_configs

K3: dict[str, Any] = {
    "num_ranks": 8, "num_experts": 896, "num_topk": 16, "num_max_tokens_per_rank": 8064, "hidden": 3584,
    "intermediate_hidden": 3072, "activation": "situ", "has_statistics": True,
}  # fmt: skip
SHARED: dict[str, Any] = {
    "num_max_shared_tokens": 8192, "shared_hidden": 7168, "shared_intermediate_hidden": 768,
    "shared_output": "token_owner",
}  # fmt: skip
PROBLEMS = {
    "routed": K3,
    "token owner": K3 | SHARED,
    "token owner, batch invariant": K3 | SHARED | {"batch_invariant": True},
    "token owner, exact math": K3 | SHARED | {"fast_math": False, "max_tokens": 1, "max_shared_tokens": 1},
    "token owner, part of a device": K3
    | SHARED
    | {"whole_device": False, "num_sms": 16, "max_tokens": 1, "max_shared_tokens": 1},
}

# An SM. Warps are dealt to four parts of it, registers likewise.
PARTS = 4
REGISTERS, REGISTER_GRAIN = 65536, 256
SHARED_BYTES, SHARED_RESERVED = 233472, 1024
WARPS = 64


@dataclass(frozen=True)
class Row:
    calls: str
    routed_tile: int
    shared_tile: int
    splits: str
    stages: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    ctas: int
    wanted_ctas: int
    cubin_kib: int
    tensor_columns: int
    seconds: float


def ctas_per_sm(registers: int, shared_bytes: int, threads: int) -> int:
    warps = threads // 32
    per_warp = -(-registers * 32 // REGISTER_GRAIN) * REGISTER_GRAIN
    warps_that_fit = REGISTERS // PARTS // per_warp * PARTS
    return min(warps_that_fit // warps, SHARED_BYTES // (shared_bytes + SHARED_RESERVED), WARPS // warps)


def chosen(target: str) -> list[tuple[str, dict[str, Any]]]:
    """The first config of every pair of tiles, and of split and unsplit work."""
    found = []
    for name, problem in PROBLEMS.items():
        seen = set()
        for entry in all_configs(problem | {"target": "sm_100a" if target == "sm_100f" else target}):
            config = entry["config"]
            tiles = config["routed_tile"]["num_tokens"], config["shared_tile"]["num_tokens"]
            key = (*tiles, max(config["splits"].values()) > 1)
            if key not in seen:
                seen.add(key)
                found.append((name, entry))
    return found


def source_of(target: str, entry: dict[str, Any]) -> KernelSource:
    return KernelSource(KERNELS["sm_100a" if target == "sm_100f" else target], target, entry["literal"])


def row_of(name: str, entry: dict[str, Any], target: str) -> Row:
    config = entry["config"]
    artefact = default_store().get(source_of(target, entry))
    used, shared_bytes = artefact.resources, entry["launch"][9]
    return Row(
        name,
        config["routed_tile"]["num_tokens"],
        config["shared_tile"]["num_tokens"] if config["shared_output"] != "none" else 0,
        " ".join(str(config["splits"][phase]) for phase in ("routed_l1", "routed_l2", "shared_l1", "shared_l2")),
        config["num_stages"],
        used.registers,
        used.spill_stores + used.spill_loads,
        used.stack,
        shared_bytes + used.static_shared,
        ctas_per_sm(used.registers, shared_bytes + used.static_shared, config["num_threads"]),
        config["num_ctas_per_sm"],
        len(artefact.cubin) // 1024,
        entry["tensor_memory"]["columns"],
        artefact.seconds,
    )


HEAD = """# The fused kernel's variants{title}

What one thread and one CTA of the {engine} kernel take at Kimi K3's widths (routed 3584/3072, shared 7168/768 per rank, 896
experts over 8 ranks, top-16). One row for every pair of tiles that the plan can choose, in a split and an unsplit form where
both exist. {registers} Made by

    python scripts/kernel_table.py {options}

which needs no GPU and fails when a kernel spills or fewer CTAs fit on an SM than the launch relies on. Compiler: {compiler}.

| calls | routed tile (tokens) | shared tile (tokens) | K splits (routed L1, L2, shared L1, L2) | stages | registers | spilled bytes | stack bytes | shared memory (bytes) | {tensor}CTAs per SM | cubin (KiB) |
|---|---|---|---|---|---|---|---|---|{rule}---|---|
"""
SM90_REGISTERS = "Registers are those of the launch bounds; the warpgroups then trade them (`kernels/mega.cuh`)."


def markdown(rows: list[Row], target: str) -> str:
    is_sm90 = target == "sm_90a"
    lines = [
        f"| {r.calls} | {r.routed_tile} | {r.shared_tile or '-'} | {r.splits} | {r.stages} | {r.registers} | {r.spill_bytes} | "
        f"{r.stack_bytes} | {r.shared_bytes} | {'' if is_sm90 else f'{r.tensor_columns} | '}{r.ctas} (relies on {r.wanted_ctas}) | "
        f"{r.cubin_kib} |"
        for r in rows
    ]
    head = HEAD.format(
        title="" if is_sm90 else f" for {target}",
        engine="SM90" if is_sm90 else "SM100",
        registers=SM90_REGISTERS if is_sm90 else "Tensor memory is in columns of 512 a CTA may have.",
        options="--write docs/kernels.md" if is_sm90 else f"--target {target} --write docs/kernels_{target}.md",
        compiler=default_store().compiler.identity,
        tensor="" if is_sm90 else "tensor memory (columns) | ",
        rule="" if is_sm90 else "---|",
    )
    return head + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=["sm_90a", "sm_100a", "sm_100f"], default="sm_90a")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    entries = chosen(options.target)
    print(warm_up([source_of(options.target, entry) for _, entry in entries], default_store()))
    rows = [row_of(name, entry, options.target) for name, entry in entries]
    table = markdown(rows, options.target)
    print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.write:
        options.write.write_text(table)
    bad = [row for row in rows if row.spill_bytes or row.ctas < row.wanted_ctas]
    for row in bad:
        print(
            f"{row.calls}, tiles {row.routed_tile} and {row.shared_tile}: {row.spill_bytes} bytes spilled, {row.ctas} CTAs"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
