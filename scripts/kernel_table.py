#!/usr/bin/env python3
"""Registers, spills, shared memory and CTAs per SM of the fused kernel's variants at Kimi K3's widths; needs no GPU.

    python scripts/kernel_table.py [--target sm_100a] [--json FILE] [--write docs/kernels.md]
    python scripts/kernel_table.py --nearest    # only the few sm_90a kernels that need the most registers of their share
    python scripts/kernel_table.py --all        # every kernel of the model over 1, 8 and 16 ranks, all options: no table

Compiles one kernel for every pair of tiles that the plan can choose (through the cache) and reads what the assembler
reports. CTAs per SM follow from the limits of an SM, equal for compute capabilities 9.0 and 10.0. Exits 1 where a kernel
spills, waits for every wgmma, or fewer CTAs fit than its launch relies on.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from k3_kernels import configs, planned

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

ONE_RANK = K3 | SHARED | {"num_ranks": 1}
ONE_EXPERT = K3 | SHARED | {"num_ranks": 2, "num_experts": 2, "num_topk": 1, "max_tokens": 16, "max_shared_tokens": 64}
# Problem, tokens of the routed and of the shared tile, K splits: whichever spills first when the kernel grows.
NEAREST: tuple[tuple[str, dict[str, Any], tuple[int, int], tuple[int, int, int, int]], ...] = (
    ("routed", K3, (8, 0), (1, 1, 1, 1)),
    ("routed", K3, (32, 0), (1, 1, 1, 1)),
    ("token owner, exact math", PROBLEMS["token owner, exact math"], (8, 16), (7, 8, 8, 1)),
    ("token owner", K3 | SHARED, (16, 64), (1, 1, 4, 1)),
    ("token owner, an expert each", ONE_EXPERT, (16, 64), (7, 8, 8, 1)),
    ("token owner, exact math", K3 | SHARED | {"fast_math": False}, (104, 128), (1, 1, 1, 1)),
    ("token owner, one rank", ONE_RANK | {"shared_intermediate_hidden": 6144}, (8, 16), (2, 2, 2, 4)),
    ("token owner, one rank", ONE_RANK, (88, 64), (1, 1, 4, 1)),
)

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
    notes: str  # of the assembler, on wgmmas that wait for each other

    @property
    def is_bad(self) -> bool:
        return bool(self.spill_bytes or self.stack_bytes or self.notes or self.ctas < self.wanted_ctas)


def ctas_per_sm(registers: int, shared_bytes: int, threads: int) -> int:
    warps = threads // 32
    per_warp = -(-registers * 32 // REGISTER_GRAIN) * REGISTER_GRAIN
    warps_that_fit = REGISTERS // PARTS // per_warp * PARTS
    return min(warps_that_fit // warps, SHARED_BYTES // (shared_bytes + SHARED_RESERVED), WARPS // warps)


def tiles_of(config: dict[str, Any]) -> tuple[int, int]:
    shared = config["shared_tile"]["num_tokens"] if config["shared_output"] != "none" else 0
    return config["routed_tile"]["num_tokens"], shared


def nearest() -> list[tuple[str, dict[str, Any]]]:
    """The kernels that ``NEAREST`` names. Raises LookupError where the plan no longer chooses one of them."""
    found = []
    for name, problem, tiles, splits in NEAREST:
        entries = all_configs(problem | {"target": "sm_90a"})
        matching = [
            entry
            for entry in entries
            if tiles_of(entry["config"]) == tiles and tuple(entry["config"]["splits"].values()) == splits
        ]
        if not matching:
            raise LookupError(
                f"{name}: no plan has tiles of {tiles} tokens and splits {splits}: choose another for NEAREST"
            )
        found.append((name, matching[0]))
    return found


def chosen(target: str) -> list[tuple[str, dict[str, Any]]]:
    """The first config of every pair of tiles, and of split and unsplit work."""
    found = []
    for name, problem in PROBLEMS.items():
        seen = set()
        for entry in all_configs(problem | {"target": planned(target)}):
            config = entry["config"]
            key = (*tiles_of(config), max(config["splits"].values()) > 1)
            if key not in seen:
                seen.add(key)
                found.append((name, entry))
    return found


def source_of(target: str, entry: dict[str, Any]) -> KernelSource:
    return KernelSource(KERNELS[planned(target)], target, entry["literal"])


def row_of(name: str, entry: dict[str, Any], target: str) -> Row:
    config = entry["config"]
    artefact = default_store().get(source_of(target, entry))
    used, shared_bytes = artefact.resources, entry["launch"][9]
    return Row(
        name,
        *tiles_of(config),
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
        " ".join(line.strip() for line in artefact.log.splitlines() if "(C75" in line),
    )


HEAD = """# The fused kernel's variants{title}

What one thread and one CTA of the {engine} kernel take at Kimi K3's widths (routed 3584/3072, shared 7168/768 per rank, 896
experts over 8 ranks, top-16). One row for every pair of tiles that the plan can choose, in a split and an unsplit form where
both exist. {registers} Made by

    python scripts/kernel_table.py {options}

which needs no GPU and fails when a kernel spills, its wgmmas wait for each other, or fewer CTAs fit on an SM than the
launch relies on. With `--all` it compiles every kernel of the model instead, over 1, 8 and 16 ranks, and names those that
fail. Compiler: {compiler}.

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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=["sm_90a", "sm_100a", "sm_100f"], default="sm_90a")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--nearest", action="store_true", help="only the kernels that are nearest to their limit")
    only.add_argument("--all", action="store_true", help="every kernel of the model; their names instead of a table")
    options = parser.parse_args(arguments)
    if options.write and (options.nearest or options.all):
        parser.error("--write: wanted the kernels of the table, given others")
    if options.nearest and options.target != "sm_90a":
        parser.error("--nearest: wanted sm_90a")
    if options.all:
        entries = list(configs(planned(options.target)).items())
    else:
        entries = nearest() if options.nearest else chosen(options.target)
    print(warm_up([source_of(options.target, entry) for _, entry in entries], default_store()))
    rows = [row_of(name, entry, options.target) for name, entry in entries]
    table = "" if options.all else markdown(rows, options.target)
    print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.write:
        options.write.write_text(table)
    bad = [row for row in rows if row.is_bad]
    for row in bad:
        print(
            f"{row.calls}, tiles {row.routed_tile} and {row.shared_tile}, splits {row.splits}: {row.spill_bytes} bytes "
            f"spilled, {row.stack_bytes} of stack, {row.ctas} CTAs {row.notes}"
        )
    print(f"{len(rows)} kernels, {len(bad)} of them beyond a limit")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
