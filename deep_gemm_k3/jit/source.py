"""The translation unit of one kernel: an include, one literal with named fields, one instantiation.

The literal is written by whoever plans (the host library, or :func:`literal` here); it is the log line, part of the cache
key and, broken over lines, what a reader of the generated file sees.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

INCLUDE_DIR = Path(__file__).resolve().parent.parent / "include"
PACKAGE = "deep_gemm_k3"

# Compilation targets and the compute capabilities that can run them. The first is exact, a family takes a major version.
ARCHITECTURES = {"sm_90a": "9.0", "sm_100a": "10.0", "sm_100f": "10.x"}

_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def literal(value: Any) -> str:
    """A designated initialiser in one line. Strings are C++ (an enumerator); mappings are structs, in declaration order."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f".{name} = {literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value.hex()}f"
    return str(value)


def _broken_over_lines(text: str) -> str:
    """One top-level field a line; a literal that has lines already stays as it is."""
    if "\n" in text:
        return text
    inner, depth, lines, start = text.strip()[1:-1], 0, [], 0
    for position, char in enumerate(inner):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            lines.append(inner[start:position].strip())
            start = position + 1
    lines.append(inner[start:].strip())
    return "{\n" + "".join(f"    {line},\n" for line in lines if line) + "}"


@dataclass(frozen=True)
class KernelSource:
    """One kernel of include/deep_gemm_k3/kernels/ for one architecture and one Config."""

    name: str
    arch: str
    config: str  # the Config literal
    ptx_only: bool = False  # for the emulator: no cubin, which takes the longer part of a compilation

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"arch: wanted one of {', '.join(ARCHITECTURES)}, given {self.arch!r}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"name: wanted a kernel of include/{PACKAGE}/kernels, given {self.name!r}")
        if not (INCLUDE_DIR / self.header).is_file():
            raise ValueError(
                f"name: wanted a kernel of include/{PACKAGE}/kernels, given {self.name!r} (no {self.header})"
            )
        if not re.fullmatch(r"(?:deep_gemm_k3::Config)?\{.*\}", self.config, re.DOTALL):
            raise ValueError(f"config: wanted a designated initialiser {{.field = ...}}, given {self.config[:60]!r}")

    @property
    def header(self) -> str:
        return f"{PACKAGE}/kernels/{self.name}.cuh"

    @property
    def key(self) -> str:
        """What plans and the registry of loaded kernels call it."""
        return f"{self.name} {self.arch} {self.config}"

    @property
    def slot(self) -> tuple[str, bool]:
        """What tells artefacts apart."""
        return self.key, self.ptx_only

    @property
    def log_line(self) -> str:
        return " ".join(self.key.split())

    @property
    def expression(self) -> str:
        """The name whose lowered form is the entry point."""
        return f"{PACKAGE}::kernels::{self.name}<{PACKAGE}::config>"

    @cached_property
    def text(self) -> str:
        return (
            f"// {PACKAGE}: kernel {self.name} for {self.arch}. Generated.\n"
            f"#include <{self.header}>\n\n"
            f"namespace {PACKAGE} {{\n"
            f"constexpr Config config = {_broken_over_lines(self.config)};\n"
            f"template __global__ decltype(kernels::{self.name}<config>) kernels::{self.name}<config>;\n"
            f"}}  // namespace {PACKAGE}\n"
        )

    def sources_digest(self) -> str:
        """Hash of every package header the kernel includes, by content and name relative to the include directory."""
        return headers_digest(self.header, INCLUDE_DIR)


@dataclass(frozen=True)
class _Header:
    stamp: tuple[int, int]
    digest: str
    includes: tuple[str, ...]


_headers: dict[Path, _Header] = {}


def _scan(path: Path) -> _Header:
    stat = path.stat()
    stamp = (stat.st_mtime_ns, stat.st_size)
    known = _headers.get(path)
    if known is not None and known.stamp == stamp:
        return known
    data = path.read_bytes()
    includes = tuple(quoted or angled for quoted, angled in _INCLUDE.findall(data.decode()))
    header = _Header(stamp, hashlib.sha256(data).hexdigest(), includes)
    _headers[path] = header
    return header


def package_headers(header: str, root: Path) -> dict[str, str]:
    """Name -> content hash of ``header`` and all headers under ``root`` it reaches, whatever conditionals say."""
    found: dict[str, str] = {}
    queue = [root / header]
    while queue:
        path = queue.pop()
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        scanned = _scan(path)
        found[name] = scanned.digest
        for include in scanned.includes:
            for candidate in (path.parent / include, root / include):
                resolved = Path(*_normalised(candidate))
                if resolved.is_file() and resolved.is_relative_to(root):
                    queue.append(resolved)
                    break
    return found


def _normalised(path: Path) -> list[str]:
    """Parts without ``..`` (symbolic links stay as they are: an install may be made of links)."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return parts


def headers_digest(header: str, root: Path) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(package_headers(header, root).items()):
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()
