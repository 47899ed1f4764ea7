#!/usr/bin/env python3
"""What it costs that the fused kernel is cut into role functions; needs no GPU.

    python scripts/role_cost.py [--write docs/role_cost.md]

Compiles kernels as they are and once more with the functions of every role (``FLATTENED``) written into the kernel's own
body, from a copy of the headers, and compares registers, spills, instructions and functions in the machine code. Exits 1
where they differ by a register or by more than one instruction in a thousand.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deep_gemm_k3.jit import compiler
from deep_gemm_k3.jit.source import INCLUDE_DIR, KernelSource
from deep_gemm_k3.mega.plan import KERNELS, Plan

TARGET = "sm_90a"
K3 = {
    "num_ranks": 8, "num_experts": 896, "num_topk": 16, "num_max_tokens_per_rank": 8064, "hidden": 3584,
    "intermediate_hidden": 3072, "activation": "situ", "num_max_shared_tokens": 8192, "shared_hidden": 7168,
    "shared_intermediate_hidden": 768, "shared_output": "token_owner", "target": TARGET,
}  # fmt: skip
CALLS = {"8 tokens": 8, "64 tokens": 64, "512 tokens": 512, "2048 tokens": 2048}
KERNEL = "kernels/mega_sm90.cuh"
# Function, its header and how it is called; later ones are called by earlier ones. Functions that return early or give
# a value stay functions.
FLATTENED = (
    ("run", "kernels/mega.cuh", "run<C, engine::EngineSM90<C>>"),
    ("start", "kernels/mega.cuh", "start<C, Engine>"),
    ("run_math", "kernels/mega.cuh", "run_math<C, Engine>"),
    ("consume", "engine/sm90/consume.cuh", "Engine::consume"),
    ("produce", "engine/sm90/produce.cuh", "Engine::produce"),
    ("dispatch", "roles/dispatch.cuh", "roles::dispatch<C>"),
    ("combine", "roles/combine.cuh", "roles::combine<C>"),
    ("combine_token", "roles/combine.cuh", "combine_token<C>"),
)


@dataclass(frozen=True)
class Cost:
    registers: int
    spill_bytes: int
    instructions: int
    functions: int  # of the machine code; 1: nothing is called
    calls: int  # of the PTX


def executable_sections(cubin: bytes) -> list[int]:
    """Bytes of every section of machine code; one per function."""
    table = struct.unpack_from("<Q", cubin, 40)[0]
    size, count = struct.unpack_from("<HH", cubin, 58)
    found = []
    for i in range(count):
        _, kind, flags, _, _, length = struct.unpack_from("<IIQQQQ", cubin, table + i * size)
        if kind == 1 and flags & 4:
            found.append(length)
    return found


def cost_of(literal: str, include_dir: Path) -> Cost:
    with mock.patch.object(compiler, "INCLUDE_DIR", include_dir):
        made = compiler.NvrtcCompiler().compile(KernelSource(KERNELS[TARGET], TARGET, literal))
    sections, used = executable_sections(made.cubin), made.resources
    spilled = used.spill_stores + used.spill_loads
    calls = len(re.findall(r"^\s*call", made.ptx, re.MULTILINE))
    return Cost(used.registers, spilled, sum(sections) // 16, len(sections), calls)


def function_of(text: str, name: str) -> tuple[list[str], str]:
    """Parameters and body of the only definition of ``name``."""
    found = re.search(rf"__forceinline__ void {name}\(([^)]*)\) \{{\n(.*?)\n\}}\n", text, re.DOTALL)
    assert found, name
    parameters = [part.strip() for part in found.group(1).split(",")]
    return parameters, found.group(2)


def arguments_of(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "(<[{") - (char in ")>]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def written_out(text: str, call: str, name: str, header: Path) -> str:
    """``text`` with the statement that calls the function replaced by the function's body."""
    parameters, body = function_of(header.read_text(), name)
    at = text.index(call + "(")
    end = text.index(";\n", at)
    arguments = arguments_of(text[at + len(call) + 1 : end - 1])
    bound = [
        f"{parameter} = {argument};"
        for parameter, argument in zip(parameters, arguments, strict=True)
        if parameter.split()[-1].lstrip("&") != argument
    ]
    return text[:at] + "{\n" + "\n".join([*bound, body]) + "\n}" + text[end + 1 :]


def flatten(include_dir: Path) -> None:
    """Rewrites the kernel's header in ``include_dir``."""
    root = include_dir / "deep_gemm_k3"
    kernel = root / KERNEL
    text = kernel.read_text()
    for name, header, call in FLATTENED:
        text = written_out(text, call, name, root / header)
    opening = "namespace deep_gemm_k3::kernels {\n"
    text = text.replace(opening, opening + "using namespace engine;\nusing namespace roles;\n", 1)
    entry = "Params params) {\n"
    assert entry in text
    kernel.write_text(text.replace(entry, entry + "using Engine = engine::EngineSM90<C>;\n", 1))


def differ(shipped: Cost, flattened: Cost) -> bool:
    """Beyond what the assembler's schedule makes of another order of blocks: no register, 1 instruction in 1000."""
    if (shipped.registers, shipped.spill_bytes) != (flattened.registers, flattened.spill_bytes):
        return True
    return abs(shipped.instructions - flattened.instructions) * 1000 > flattened.instructions


HEAD = """# What the roles cost

The fused kernel is cut into functions, one per role and smaller ones below them. Here are kernels as they are (K3's widths,
eight ranks, token owner), and with the roles' functions ({names}) written into the kernel's own body. Made by

    python scripts/role_cost.py --write docs/role_cost.md

which needs no GPU and fails when they differ by a register or by more than one instruction in a thousand. The machine code
is one function that calls nothing either way. Compiler: {compiler}.

| calls | kernel | registers | spilled bytes | instructions | functions in the machine code | calls in the PTX |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines, bad = [], []
    with tempfile.TemporaryDirectory() as folder:
        flat = Path(folder) / "include"
        shutil.copytree(INCLUDE_DIR, flat)
        flatten(flat)
        for calls, tokens in CALLS.items():
            literal = Plan.make(**K3, num_tokens=tokens, num_shared_tokens=tokens).literal
            shipped, flattened = cost_of(literal, INCLUDE_DIR), cost_of(literal, flat)
            for kind, cost in (("in functions", shipped), ("flattened", flattened)):
                row = f"| {calls} | {kind} | {cost.registers} | {cost.spill_bytes} | {cost.instructions} | {cost.functions} | {cost.calls} |"
                print(row, flush=True)
                lines.append(row)
            if differ(shipped, flattened):
                bad.append(calls)
    names = ", ".join(f"`{name}`" for name, _, _ in FLATTENED)
    if options.write:
        identity = compiler.NvrtcCompiler().identity
        options.write.write_text(HEAD.format(names=names, compiler=identity) + "\n".join(lines) + "\n")
    for calls in bad:
        print(f"{calls}: the flattened kernel differs")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
