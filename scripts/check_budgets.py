#!/usr/bin/env python3
"""Checks the size and place rules of the code base; prints ``path:line: rule: what`` and exits 1 when one is broken.

    python scripts/check_budgets.py [--no-compile] [ROOT]

| rule | limit |
|---|---|
| file-length | 400 lines; one flat table may be longer when its first lines say ``budget: flat table`` |
| function-length | 80 lines |
| template-parameters | 3 |
| arguments | 6 positional ones in host code; signatures given by others are listed in FIXED_SIGNATURES |
| inline-asm | only in include/deep_gemm_k3/ptx/ |
| spin | waiting on memory only in include/deep_gemm_k3/sync/ and csrc/runtime/ |
| environment | read only in deep_gemm_k3/envs.py |
| self-contained | every header of plan/ compiles alone with g++ |
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cxx_scan

MAX_FILE = 400
MAX_FUNCTION = 80
MAX_TEMPLATE = 3
MAX_ARGUMENTS = 6
FLAT_TABLE = "budget: flat table"

ROOTS = ("deep_gemm_k3", "csrc", "scripts", "tests", "setup.py")
PYTHON = {".py"}
CXX = {".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh"}
PTX_DIR = "deep_gemm_k3/include/deep_gemm_k3/ptx/"
DEVICE_DIR = "deep_gemm_k3/include/"
SPIN_DIRS = ("deep_gemm_k3/include/deep_gemm_k3/sync/", "csrc/runtime/")
ENVIRONMENT_FILE = "deep_gemm_k3/envs.py"

# Signatures that callers know by position, from the interface this package keeps, and the operators under them, whose
# arguments are those of the schema.
FIXED_SIGNATURES = {
    "get_symm_buffer_for_mega_moe",
    "transform_weights_for_mega_moe",
    "fp8_fp4_mega_moe",
    "fp8_fp4_mega_moe_bf16_shared",
    "fp8_fp4_mega_moe_bf16_shared_rs",
    "fp8_fp4_mega_moe_bf16_shared_sp_rs",
    "mega_moe",
}

# What reads memory that another thread changes.
_POLL = re.compile(
    r"\b(?:ld_(?:acquire|relaxed|volatile|mmio)\w*|\w*(?:try|test)_wait\w*|atomicLoad\w*|__atomic_load\w*"
    r"|volatile_load\w*)\s*[<(]|\.\s*load\s*\(|\bvolatile\b"
)


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.what}"


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """(relative path, text) of every file the rules are about."""
    for name in ROOTS:
        top = root / name
        files = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in files:
            if path.suffix in PYTHON | CXX and path.is_file():
                yield path.relative_to(root).as_posix(), path.read_text()


def check_file_length(path: str, text: str) -> Iterator[Finding]:
    lines = text.count("\n")
    if lines > MAX_FILE and not any(FLAT_TABLE in line for line in text.splitlines()[:5]):
        yield Finding(path, lines, "file-length", f"{lines} lines, at most {MAX_FILE}")


def _positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    return len(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def check_python(path: str, text: str) -> Iterator[Finding]:
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                yield Finding(
                    path, node.lineno, "function-length", f"{node.name}: {lines} lines, at most {MAX_FUNCTION}"
                )
            count = _positional(node)
            if count > MAX_ARGUMENTS and node.name not in FIXED_SIGNATURES and path.startswith("deep_gemm_k3/"):
                what = f"{node.name}: {count} positional arguments, at most {MAX_ARGUMENTS}"
                yield Finding(path, node.lineno, "arguments", what)


def check_python_environment(path: str, text: str) -> Iterator[Finding]:
    if not path.startswith("deep_gemm_k3/") or path == ENVIRONMENT_FILE:
        return
    names = ("environ", "getenv", "putenv", "environb", "unsetenv")
    for node in ast.walk(ast.parse(text, path)):
        hit = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        hit = hit or (
            isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
        )
        if hit:
            yield Finding(path, getattr(node, "lineno", 1), "environment", f"only {ENVIRONMENT_FILE} reads it")


def check_cxx(path: str, text: str) -> Iterator[Finding]:
    stripped = cxx_scan.strip(text)
    for function in cxx_scan.functions(stripped):
        if function.lines > MAX_FUNCTION:
            what = f"{function.name}: {function.lines} lines, at most {MAX_FUNCTION}"
            yield Finding(path, function.first_line, "function-length", what)
        host = path.startswith("csrc/") and function.name not in FIXED_SIGNATURES
        if host and function.parameters > MAX_ARGUMENTS:
            what = f"{function.name}: {function.parameters} arguments, at most {MAX_ARGUMENTS}"
            yield Finding(path, function.first_line, "arguments", what)
    for line, count in cxx_scan.template_heads(stripped):
        if count > MAX_TEMPLATE:
            yield Finding(path, line, "template-parameters", f"{count}, at most {MAX_TEMPLATE}")


def check_assembly(path: str, text: str) -> Iterator[Finding]:
    if not path.startswith(PTX_DIR):
        for line in cxx_scan.inline_assembly(cxx_scan.strip(text)):
            yield Finding(path, line, "inline-asm", f"only in {PTX_DIR}")


def check_spins(path: str, text: str) -> Iterator[Finding]:
    if path.startswith(SPIN_DIRS) or not path.startswith((DEVICE_DIR, "csrc/")):
        return
    for loop in cxx_scan.loops(cxx_scan.strip(text)):
        if _POLL.search(loop.header) or (loop.endless and _POLL.search(loop.body)):
            yield Finding(path, loop.line, "spin", f"a loop that waits on memory belongs in {' or '.join(SPIN_DIRS)}")


def check_cxx_environment(path: str, text: str) -> Iterator[Finding]:
    stripped = cxx_scan.strip(text)
    for match in re.finditer(r"\b(?:secure_)?getenv\s*\(|\bsetenv\s*\(|\benviron\b", stripped):
        line = cxx_scan.line_of(stripped, match.start())
        yield Finding(path, line, "environment", f"only {ENVIRONMENT_FILE} reads it; pass the value in")


def check_self_contained(root: Path) -> list[Finding]:
    compiler = shutil.which("g++") or shutil.which("c++")
    include = root / DEVICE_DIR
    headers = sorted((include / "deep_gemm_k3" / "plan").glob("*.cuh"))
    if not headers:
        return []
    if compiler is None:
        return [Finding(DEVICE_DIR, 1, "self-contained", "no C++ compiler to check the headers with")]

    def compile_alone(header: Path) -> Finding | None:
        command = [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-I", str(include), str(header)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return None
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        return Finding(header.relative_to(root).as_posix(), 1, "self-contained", (errors or ["does not compile"])[0])

    with ThreadPoolExecutor(2) as pool:
        return [finding for finding in pool.map(compile_alone, headers) if finding]


RULES: dict[str, tuple[set[str], Callable[[str, str], Iterator[Finding]]]] = {
    "file-length": (PYTHON | CXX, check_file_length),
    "python": (PYTHON, check_python),
    "python-environment": (PYTHON, check_python_environment),
    "cxx": (CXX, check_cxx),
    "assembly": (CXX, check_assembly),
    "spins": (CXX, check_spins),
    "cxx-environment": (CXX, check_cxx_environment),
}


def check_text(path: str, text: str) -> list[Finding]:
    """All findings of the rules that need no compiler."""
    suffix = Path(path).suffix
    return sorted(finding for suffixes, rule in RULES.values() if suffix in suffixes for finding in rule(path, text))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--no-compile", action="store_true", help="leave out the self-contained headers")
    options = parser.parse_args(arguments)
    findings: list[Finding] = []
    count = 0
    for path, text in sources(options.root):
        findings += check_text(path, text)
        count += 1
    if not options.no_compile:
        findings += check_self_contained(options.root)
    for finding in sorted(findings):
        print(finding)
    print(f"budgets: {count} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
