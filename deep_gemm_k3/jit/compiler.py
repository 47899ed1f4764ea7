"""A translation unit in, PTX and cubin out. NVRTC by default; nvcc (DGK3_COMPILER=nvcc) for those who have it."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deep_gemm_k3 import envs
from deep_gemm_k3.jit.source import INCLUDE_DIR, KernelSource
from deep_gemm_k3.jit.toolchain import MENDING, Toolchain, ToolchainError, find_toolchain, library_fingerprint

# What decides the result, paths excepted. ptxas' -v puts registers, spills and stack into the log.
NVRTC_FLAGS = ("--std=c++20", "--ptxas-options=-v", "--no-cache")
PTX_ONLY_FLAGS = ("--generate-line-info",)  # source lines and functions for the emulator's reports; no other effect
NVCC_FLAGS = ("-std=c++20", "-Xptxas=-v", "--expt-relaxed-constexpr")

_ENTRY = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$.]+)", re.MULTILINE)


class CompileError(RuntimeError):
    """The compiler refused; the message carries its own text."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel; the largest number where functions of its own were compiled beside it."""

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    static_shared: int = 0

    @classmethod
    def parse(cls, log: str) -> Resources:
        def number(pattern: str) -> int:
            return max((int(found) for found in re.findall(pattern, log)), default=0)

        return cls(
            registers=number(r"Used (\d+) registers"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
            stack=number(r"(\d+) bytes stack frame"),
            static_shared=number(r"(\d+) bytes smem"),
        )


@dataclass(frozen=True)
class Artefact:
    """One compiled kernel."""

    name: str
    arch: str
    config: str
    entry: str
    ptx: str
    cubin: bytes = field(repr=False)
    source: str = field(repr=False)
    log: str = field(repr=False, default="")
    compiler: str = ""
    seconds: float = 0.0
    ptx_only: bool = False

    @property
    def key(self) -> str:
        return f"{self.name} {self.arch} {self.config}"

    @property
    def resources(self) -> Resources:
        return Resources.parse(self.log)

    def check(self) -> None:
        """Raises :class:`CompileError` when something is missing: an empty artefact is never accepted."""
        if self.cubin == b"" and self.ptx_only:
            pass
        elif not self.cubin.startswith(b"\x7fELF"):
            raise CompileError(
                f"{self.name} for {self.arch}: wanted a cubin, given {len(self.cubin)} bytes that are none"
            )
        if self.entry not in entries(self.ptx):
            raise CompileError(f"{self.name} for {self.arch}: wanted PTX with the entry {self.entry!r}, given none")


class Compiler(Protocol):
    @property
    def identity(self) -> str:
        """Everything about the compiler that decides its result and is no path: part of the cache key."""

    def compile(self, source: KernelSource) -> Artefact: ...


def entries(ptx: str) -> list[str]:
    return _ENTRY.findall(ptx)


def _only_entry(source: KernelSource, ptx: str) -> str:
    found = entries(ptx)
    if len(found) != 1:
        raise CompileError(f"{source.name} for {source.arch}: wanted one entry in the PTX, given {len(found)}: {found}")
    return found[0]


def _refused(source: KernelSource, compiler: str, log: str) -> CompileError:
    numbered = "\n".join(f"{number:4d}  {line}" for number, line in enumerate(source.text.splitlines(), 1))
    return CompileError(
        f"{source.name} for {source.arch}: {compiler} refused the kernel.\n{log.strip()}\n--- generated source\n{numbered}"
    )


class NvrtcCompiler:
    """NVRTC through cuda-bindings: no toolkit, no GPU, no file."""

    def __init__(self, toolchain: Toolchain | None = None) -> None:
        self.toolchain = toolchain or find_toolchain()

    @property
    def identity(self) -> str:
        return f"{self.toolchain.nvrtc_identity} {' '.join(NVRTC_FLAGS + PTX_ONLY_FLAGS)}"

    def compile(self, source: KernelSource) -> Artefact:
        from cuda.bindings import nvrtc

        includes = [f"--include-path={path}" for path in (INCLUDE_DIR, *self.toolchain.include_dirs)]
        arch = source.arch.replace("sm_", "compute_") if source.ptx_only else source.arch
        lines = PTX_ONLY_FLAGS if source.ptx_only else ()
        options = [f"--gpu-architecture={arch}", *NVRTC_FLAGS, *lines, *includes]
        start = time.perf_counter()
        name = f"{source.name}_{source.arch}.cu".encode()
        program = _ok(nvrtc.nvrtcCreateProgram(source.text.encode(), name, 0, [], []))
        try:
            _ok(nvrtc.nvrtcAddNameExpression(program, source.expression.encode()))
            encoded = [option.encode() for option in options]
            status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
            log = _blob(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if int(status) != 0:
                raise _refused(source, f"NVRTC ({status.name})", log)
            entry = _ok(nvrtc.nvrtcGetLoweredName(program, source.expression.encode())).decode()
            ptx = _blob(nvrtc, "PTX", program).rstrip(b"\0").decode()
            cubin = b"" if source.ptx_only else _blob(nvrtc, "CUBIN", program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        seconds = time.perf_counter() - start
        return _finished(source, entry, (ptx, cubin, log), self.identity, seconds)


def _finished(
    source: KernelSource, entry: str, results: tuple[str, bytes, str], compiler: str, seconds: float
) -> Artefact:
    """The artefact of PTX, cubin and log, checked."""
    ptx, cubin, log = results
    artefact = Artefact(
        source.name, source.arch, source.config, entry, ptx, cubin, source.text, log, compiler, seconds, source.ptx_only
    )
    artefact.check()
    return artefact


def _ok(result: Sequence[Any]) -> Any:
    if int(result[0]) != 0:
        raise CompileError(f"NVRTC: {result[0].name}")
    return result[1] if len(result) > 1 else None


def _blob(nvrtc: Any, what: str, program: Any) -> bytes:
    size = _ok(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = b"\0" * size
    _ok(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer


class NvccCompiler:
    """nvcc of a toolkit: one run for PTX, one that assembles it."""

    def __init__(self, toolchain: Toolchain | None = None) -> None:
        self.toolchain = toolchain or find_toolchain()
        if self.toolchain.nvcc is None:
            raise ToolchainError(
                "DGK3_COMPILER: wanted nvcc, given none among the pip packages, CUDA_HOME or PATH. "
                f"Mend with: unset DGK3_COMPILER (NVRTC needs {MENDING}), or set CUDA_HOME"
            )
        self.nvcc = self.toolchain.nvcc
        result = subprocess.run([str(self.nvcc), "--version"], capture_output=True, text=True)
        match = re.search(r"Build (\S+)", result.stdout)
        if result.returncode != 0 or match is None:
            raise ToolchainError(
                f"nvcc: {self.nvcc} --version failed: {result.stderr.strip() or result.stdout.strip()}"
            )
        self._version = f"{match.group(1)} {library_fingerprint(self.nvcc)}"

    @property
    def identity(self) -> str:
        return f"nvcc {self._version} {self.toolchain.headers_identity} {' '.join(NVCC_FLAGS + PTX_ONLY_FLAGS)}"

    def _run(self, source: KernelSource, options: Sequence[str], output: Path) -> str:
        includes = [f"-I{path}" for path in (INCLUDE_DIR, *self.toolchain.include_dirs)]
        path = output.with_name("kernel.ptx" if output.suffix == ".cubin" else "kernel.cu")
        command = [
            str(self.nvcc),
            f"-arch={source.arch}",
            *NVCC_FLAGS,
            *includes,
            *options,
            "-o",
            str(output),
            str(path),
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        log = result.stdout + result.stderr
        if result.returncode != 0:
            raise _refused(source, "nvcc", log)
        return log

    def compile(self, source: KernelSource) -> Artefact:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="deep_gemm_k3_") as scratch:
            directory = Path(scratch)
            (directory / "kernel.cu").write_text(source.text)
            lines = PTX_ONLY_FLAGS if source.ptx_only else ()
            log = self._run(source, ["--ptx", *lines], directory / "kernel.ptx")
            log += "" if source.ptx_only else self._run(source, ["--cubin"], directory / "kernel.cubin")
            ptx = (directory / "kernel.ptx").read_text()
            cubin = b"" if source.ptx_only else (directory / "kernel.cubin").read_bytes()
        seconds = time.perf_counter() - start
        return _finished(source, _only_entry(source, ptx), (ptx, cubin, log), self.identity, seconds)


def default_compiler() -> Compiler:
    """The one the environment names."""
    return NvccCompiler() if envs.COMPILER.get() == "nvcc" else NvrtcCompiler()
