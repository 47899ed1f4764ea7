#!/usr/bin/env python3
"""What the compilers make of every kernel that Kimi K3 can need, and whether the emulator has a model for all of it.

All configs of the K3 widths, over 1, 8 and 16 ranks, all entries and options, without duplicates, are compiled and their
PTX is decoded; for the Blackwell targets machine code is made, by NVRTC and by nvcc, and what it takes is kept.

    python scripts/check_emulator_coverage.py --list           # how many kernels there are
    python scripts/check_emulator_coverage.py docs/runs        # all records, or what is still missing in them
    python scripts/check_emulator_coverage.py OUT --targets sm_100a --compilers nvrtc --limit 4

sm_100f takes the PTX of sm_100a with the target changed and assembles that. On one kernel of sixteen the compiler is run
for sm_100f as well, and its text compared; everywhere the machine code is. The record of sm_100f says what differed. Its
seconds are those of sm_100a and of assembling once more, which is more than a kernel needs.

A run may be stopped: the next one continues its records, those whose headers and compiler are still the same. Kernels come
in an order without meaning, so whatever part is done is a fair sample. Exits 1 where an instruction has no model, a kernel
spills or asks for more memory than there is, takes more than 10 s of one core to compile, or sm_100f's text is another.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from k3_kernels import configs, name_of, planned, problems  # noqa: E402

SHARED_LIMIT, TENSOR_LIMIT, SECONDS_LIMIT = 227 * 1024, 512, 10.0
COLUMNS = ("registers", "spilled bytes", "stack bytes", "shared bytes", "tensor columns", "statements", "cpu seconds")
TARGETS, COMPILERS = ("sm_90a", "sm_100a", "sm_100f"), ("nvrtc", "nvcc")
# Names that a compiler makes of the file's name and its own process.
INTERNAL = re.compile(r"_INTERNAL_[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}_\d+")


def cpu_seconds() -> float:
    """Of this process and of the compilers it has started."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


# ------------------------------------------------------------------------------------------------------- one kernel
@dataclass(frozen=True)
class Made:
    """What one kernel became: its line in the record ``(target, compiler)``."""

    record: tuple[str, str]
    name: str
    row: tuple[float, ...]
    opcodes: dict[str, int]
    lacking: str = ""
    compared: tuple[str, ...] = ()  # with sm_100a
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A kernel to compile, or, for sm_100f, to assemble from the PTX that ``scratch`` keeps."""

    target: str
    compiler: str
    config: dict[str, Any]
    scratch: Path
    with_family: bool = False  # for sm_100f too, at once

    @property
    def name(self) -> str:
        return name_of(self.config["literal"])

    @property
    def kept(self) -> Path:
        return self.scratch / f"{self.name}.{self.compiler}"


def is_sampled(name: str) -> bool:
    return name.startswith("0")


def same_text(ptx: str) -> str:
    """PTX without what two runs of one compiler write differently."""
    return INTERNAL.sub("_INTERNAL", re.sub(r"//[^\n]*", "", ptx))


def for_family(ptx: str) -> str:
    """PTX of sm_100a as that of sm_100f."""
    found, count = re.subn(r"^\.target sm_100a$", ".target sm_100f", ptx, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"PTX: wanted one line '.target sm_100a', given {count}")
    return found


def machine_code(cubin: bytes) -> str:
    """Digest of the instructions of a cubin: the sections that can be executed."""
    (sections,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    digest, length = hashlib.sha256(), 0
    for i in range(count):
        _, kind, flags, _, begin, size_of = struct.unpack_from("<IIQQQQ", cubin, sections + i * size)
        if kind == 1 and flags & 4:
            digest.update(cubin[begin : begin + size_of])
            length += size_of
    if length == 0:
        raise ValueError("cubin: wanted instructions, given none")
    return digest.hexdigest()


def compiler_of(name: str) -> Any:
    from deep_gemm_k3.jit.compiler import NvccCompiler, NvrtcCompiler

    return NvccCompiler() if name == "nvcc" else NvrtcCompiler()


def without_model(ptx: str) -> str:
    from deep_gemm_k3.emulator import EmulatorError, Module

    try:
        Module(ptx).check()
    except EmulatorError as error:
        return str(error)
    return ""


def row_of(config: dict[str, Any], used: Any, ptx: str, seconds: float) -> tuple[tuple[float, ...], dict[str, int]]:
    from deep_gemm_k3.jit.ptx import opcodes

    found = opcodes(ptx)
    row = (
        used.registers,
        used.spill_stores + used.spill_loads,
        used.stack,
        config["launch"][9] + used.static_shared,
        config["tensor_memory"]["columns"] if "kSM100" in config["literal"] else 0,
        sum(found.values()),
        round(seconds, 2),
    )
    return row, dict(found)


def compile_one(step: Step) -> Made:
    """Compiles a kernel and decodes its PTX: what the emulator lacks, which opcodes it met, what the kernel takes."""
    from deep_gemm_k3.jit.source import KernelSource
    from deep_gemm_k3.mega.plan import KERNELS

    start = cpu_seconds()
    # sm_90a's machine code is looked at where it runs.
    source = KernelSource(KERNELS[step.target], step.target, step.config["literal"], step.target == "sm_90a")
    made = compiler_of(step.compiler).compile(source)
    seconds = cpu_seconds() - start
    if step.target == "sm_100a":
        step.kept.write_bytes(zlib.compress(json.dumps([seconds, machine_code(made.cubin), made.ptx]).encode(), 1))
    row, found = row_of(step.config, made.resources, made.ptx, seconds)
    return Made((step.target, step.compiler), step.name, row, found, without_model(made.ptx))


def assemble_one(step: Step) -> Made:
    """The kernel for sm_100f, from the text for sm_100a."""
    from deep_gemm_k3.jit.compiler import Resources
    from deep_gemm_k3.jit.source import KernelSource
    from deep_gemm_k3.jit.toolchain import find_toolchain
    from deep_gemm_k3.mega.plan import KERNELS

    if not step.kept.is_file():
        compile_one(replace(step, target="sm_100a"))
    before, code, ptx = json.loads(zlib.decompress(step.kept.read_bytes()))
    step.kept.unlink()
    ptx = for_family(ptx)
    compared, differs = ["machine code"], []
    if is_sampled(step.name):
        compared.append("text")
        source = KernelSource(KERNELS["sm_100a"], "sm_100f", step.config["literal"])
        if same_text(compiler_of(step.compiler).compile(source).ptx) != same_text(ptx):
            differs.append("text")
    nvcc = find_toolchain().nvcc
    if nvcc is None:
        raise RuntimeError("sm_100f: wanted ptxas beside nvcc, given no nvcc among the pip packages, CUDA_HOME or PATH")
    start = cpu_seconds()
    with tempfile.TemporaryDirectory() as directory:
        text, cubin = Path(directory) / "kernel.ptx", Path(directory) / "kernel.cubin"
        text.write_text(ptx)
        command = [str(nvcc.with_name("ptxas")), "-v", "-arch=sm_100f", str(text), "-o", str(cubin)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{step.name}: ptxas refused it for sm_100f: {result.stdout}{result.stderr}")
        seconds = before + cpu_seconds() - start
        if machine_code(cubin.read_bytes()) != code:
            differs.append("machine code")
    row, found = row_of(step.config, Resources.parse(result.stdout + result.stderr), ptx, seconds)
    return Made(("sm_100f", step.compiler), step.name, row, found, without_model(ptx), tuple(compared), tuple(differs))


def take(step: Step) -> list[Made]:
    """One kernel's lines; one that does not compile has no row but a text that says why."""
    made: list[Made] = []
    for target in (step.target, "sm_100f") if step.with_family else (step.target,):
        try:
            one = replace(step, target=target)
            made.append(assemble_one(one) if target == "sm_100f" else compile_one(one))
        except Exception as error:
            made.append(Made((target, step.compiler), step.name, (), {}, f"{type(error).__name__}: {error}"))
    return made


# ---------------------------------------------------------------------------------------------------------- records
class Record:
    """The file of one target and compiler: totals over all kernels done, and a row for each."""

    def __init__(self, head: dict[str, Any], wanted: set[str]) -> None:
        self.head = head
        self.wanted = wanted
        self.lacking: dict[str, str] = {}
        self.opcodes: Counter[str] = Counter()
        self.rows: dict[str, tuple[float, ...]] = {}
        self.compared: Counter[str] = Counter()
        self.differs: dict[str, list[str]] = {}

    def resume(self, path: Path) -> bool:
        """Takes up what the file holds, if it is of the same sources and compiler and of kernels that are still wanted."""
        old = json.loads(path.read_text()) if path.is_file() else {}
        if any(old.get(name) != value for name, value in self.head.items()) or not old["rows"].keys() <= self.wanted:
            return False
        self.lacking = {name: text for name, text in old["lacking"].items() if name in old["rows"]}
        self.opcodes.update(old["opcodes_with_modifiers"])
        self.rows = {name: tuple(float(number) for number in row.split()) for name, row in old["rows"].items()}
        self.compared.update(old.get("compared with sm_100a", {}))
        self.differs = old.get("differs from sm_100a", {})
        return True

    def add(self, made: Made) -> None:
        if made.row:
            self.rows[made.name] = made.row
        self.opcodes.update(made.opcodes)
        self.compared.update(made.compared)
        for what in made.differs:
            self.differs.setdefault(what, []).append(made.name)
        if made.lacking:
            self.lacking[made.name] = made.lacking

    def faults(self) -> list[str]:
        found = [f"{name}: {text}" for name, text in self.lacking.items()]
        found += [f"{name}: another text for sm_100f than for sm_100a" for name in self.differs.get("text", [])]
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
        record = self.head | {"kernels": len(self.wanted), "decoded": len(self.rows)}
        record |= {"faults": self.faults(), "lacking": self.lacking}
        if self.head["target"] == "sm_100f":
            record |= {"compared with sm_100a": dict(self.compared), "differs from sm_100a": self.differs}
        middle = {name: " ".join(f"{number:g}" for number in found) for name, found in ranges.items()}
        record |= {
            "lowest, median, highest": middle,
            "opcodes": len({name.split(".")[0] for name in self.opcodes}),
            "opcodes_with_modifiers": dict(sorted(self.opcodes.items())),
            "columns of rows": ", ".join(COLUMNS),
            "rows": {name: " ".join(f"{number:g}" for number in row) for name, row in sorted(self.rows.items())},
        }
        return json.dumps(record, indent=1) + "\n"


def file_of(target: str, compiler: str) -> str:
    return "emulator-coverage-sm90a.json" if target == "sm_90a" else f"compiled-{target}-{compiler}.json"


def head(target: str, compiler: str) -> dict[str, Any]:
    from deep_gemm_k3.jit.source import INCLUDE_DIR, headers_digest
    from deep_gemm_k3.mega.plan import KERNELS

    kernel = KERNELS[planned(target)]
    return {
        "target": target,
        "compiler": compiler_of(compiler).identity,
        "machine code": target != "sm_90a",
        "headers": headers_digest(f"deep_gemm_k3/kernels/{kernel}.cuh", INCLUDE_DIR),
    }


# -------------------------------------------------------------------------------------------------------------- run
def chosen(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Records in the order of their making: sm_100f needs what sm_100a leaves behind."""
    return [
        (target, compiler)
        for target in ("sm_100a", "sm_90a", "sm_100f")
        for compiler in COMPILERS
        if target in arguments.targets and compiler in arguments.compilers and (target, compiler) != ("sm_90a", "nvcc")
    ]


def steps(
    records: dict[tuple[str, str], Record], wanted: dict[str, dict[str, Any]], limit: int, scratch: Path
) -> Iterator[Step]:
    """What is missing: records of sm_100a and sm_90a side by side, sampled kernels for sm_100f as well; then its others."""
    missing = {
        (target, compiler): dict.fromkeys(
            [name for name in wanted[planned(target)] if name not in record.rows][: limit or None]
        )
        for (target, compiler), record in records.items()
    }
    first = [[(key, name) for name in names] for key, names in missing.items() if key[0] != "sm_100f"]
    for (target, compiler), name in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*first))):
        family = missing.get(("sm_100f", compiler), {}) if target == "sm_100a" and is_sampled(name) else {}
        with_family = name in family
        family.pop(name, None)
        yield Step(target, compiler, wanted[planned(target)][name], scratch, with_family)
    left = [(name, key[1]) for key, names in missing.items() if key[0] == "sm_100f" for name in names]
    for name, compiler in sorted(left):
        yield Step("sm_100f", compiler, wanted["sm_100a"][name], scratch)


def run(arguments: argparse.Namespace, todo: Iterator[Step], records: dict[tuple[str, str], Record]) -> None:
    started = written = time.monotonic()
    with ProcessPoolExecutor(arguments.workers) as pool:
        ahead = itertools.islice(todo, arguments.workers + 2)
        running: set[Future[list[Made]]] = {pool.submit(take, step) for step in ahead}
        while running:
            done = next(as_completed(running))
            running.discard(done)
            for made in done.result():
                records[made.record].add(made)
            now = time.monotonic()
            if not arguments.seconds or now - started < arguments.seconds:
                running |= {pool.submit(take, step) for step in itertools.islice(todo, 1)}
            if now - written > 10 or not running:
                written = now
                save(arguments.out, records)
                counts = ", ".join(f"{file_of(*key)} {len(record.rows)}" for key, record in records.items())
                print(f"{now - started:.0f} s: {counts}", flush=True)


def save(out: Path, records: dict[tuple[str, str], Record]) -> None:
    for key, record in records.items():
        if record.rows:
            partial = out / f".{file_of(*key)}"
            partial.write_text(record.text())
            partial.rename(out / file_of(*key))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="folder of the records")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--compilers", nargs="+", choices=COMPILERS, default=COMPILERS)
    parser.add_argument("--list", action="store_true", help="only count")
    parser.add_argument("--limit", type=int, default=0, help="at most so many kernels for each record")
    parser.add_argument("--seconds", type=float, default=0, help="begin nothing after so long")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scratch", type=Path, help="where PTX waits for sm_100f (default: a folder that goes away)")
    arguments = parser.parse_args()
    wanted = {target: configs(target) for target in ("sm_90a", "sm_100a")}
    for target, found in wanted.items():
        print(f"{target}: {len(found)} kernels, {sum(1 for _ in problems(target))} problems", flush=True)
    if arguments.list:
        return 0
    if arguments.out is None:
        parser.error("out: wanted a folder for the records, given none")
    arguments.out.mkdir(parents=True, exist_ok=True)
    records = {key: Record(head(*key), set(wanted[planned(key[0])])) for key in chosen(arguments)}
    for key, record in records.items():
        record.resume(arguments.out / file_of(*key))
        print(f"{file_of(*key)}: {len(record.rows)} done", flush=True)
    with tempfile.TemporaryDirectory(prefix="deep_gemm_k3_") as temporary:
        scratch = arguments.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        run(arguments, steps(records, wanted, arguments.limit, scratch), records)
    faults = [f"{file_of(*key)}: {fault}" for key, record in records.items() for fault in record.faults()]
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
