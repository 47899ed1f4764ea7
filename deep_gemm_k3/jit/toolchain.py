"""Where the run-time compiler and its headers are.

Three things are needed and may come from different places: NVRTC, the CUDA headers and CCCL. Each is looked for among the
pip packages of this environment first, then in CUDA_HOME or the usual system directories; ``cuda.pathfinder`` knows the
former. nvcc is optional. Nothing is searched at import; the answer is kept for the life of the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deep_gemm_k3 import envs

OLDEST_NVRTC = (12, 9)  # the first that knows the family target sm_100f
MENDING = 'pip install "deep_gemm_k3[gpu]"'


class ToolchainError(RuntimeError):
    """A part of the toolchain is missing; the message names what was looked for, where, and the mending command."""


@dataclass(frozen=True)
class Toolchain:
    nvrtc: Path
    nvrtc_version: tuple[int, int]
    cuda_include: Path
    cuda_version: int  # CUDA_VERSION of cuda.h
    cccl_include: Path
    cccl_version: int  # CCCL_VERSION of cuda/std/__cccl/version.h
    nvcc: Path | None

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        return (self.cuda_include, self.cccl_include)

    @property
    def headers_identity(self) -> str:
        return f"cuda {self.cuda_version} cccl {self.cccl_version}"

    @property
    def nvrtc_identity(self) -> str:
        major, minor = self.nvrtc_version
        return f"nvrtc {major}.{minor} {library_fingerprint(self.nvrtc)} {self.headers_identity}"

    def describe(self) -> dict[str, str]:
        """For people: doctor prints it."""
        return {
            "nvrtc": f"{self.nvrtc_version[0]}.{self.nvrtc_version[1]} {self.nvrtc}",
            "cuda headers": f"{self.cuda_version} {self.cuda_include}",
            "cccl": f"{self.cccl_version} {self.cccl_include}",
            "nvcc": str(self.nvcc) if self.nvcc else "none (optional)",
        }


@cache
def library_fingerprint(path: Path) -> str:
    """Tells builds of one version apart, wherever they are installed: size and first page (it holds the build id)."""
    with path.open("rb") as file:
        head = file.read(4096)
        size = file.seek(0, 2)
    return f"{size}-{hashlib.sha256(head).hexdigest()[:12]}"


def _system_roots() -> Iterator[Path]:
    for home in (envs.CUDA_HOME.get(), envs.CUDA_PATH.get()):
        if home:
            yield Path(home)
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")


def _pip_roots() -> Iterator[Path]:
    """``nvidia/cu13`` style directories of the pip packages, torch's own dependencies included."""
    spec = importlib.util.find_spec("nvidia")
    for location in spec.submodule_search_locations or () if spec else ():
        for pattern in ("cu1[3-9]", "cuda_runtime", "cuda_nvrtc", "cuda_cccl"):
            yield from sorted(Path(location).glob(pattern), reverse=True)


def _pathfinder_headers(component: str) -> Iterator[Path]:
    try:
        from cuda import pathfinder
    except ImportError:
        return
    find = getattr(pathfinder, "find_nvidia_header_directory", None)
    try:
        found = find(component) if find else None
    except Exception:
        found = None
    if found:
        yield Path(found)


def _first_with(name: str, what: str, candidates: Iterable[Path]) -> Path:
    tried = []
    for directory in candidates:
        if (directory / name).is_file():
            return directory
        if str(directory) not in tried:
            tried.append(str(directory))
    raise ToolchainError(
        f"{what}: wanted a directory with {name}, found none in {', '.join(tried) or 'no place'}. "
        f"Mend with: {MENDING}, or set CUDA_HOME to a CUDA 13 toolkit"
    )


def _cuda_candidates() -> Iterator[Path]:
    yield from _pathfinder_headers("cudart")
    yield from (root / "include" for root in (*_pip_roots(), *_system_roots()))


def _cccl_candidates(cuda_include: Path) -> Iterator[Path]:
    yield from _pathfinder_headers("cccl")
    for include in (cuda_include, *(root / "include" for root in (*_pip_roots(), *_system_roots()))):
        yield include / "cccl"
        yield include


def _macro(path: Path, name: str) -> int:
    match = re.search(rf"^\s*#\s*define\s+{name}\s+(\d+)", path.read_text(errors="replace"), re.MULTILINE)
    return int(match.group(1)) if match else 0


def _find_nvrtc() -> Path:
    pattern = "libnvrtc.so.*[0-9]"
    try:
        from cuda import pathfinder

        return Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except ImportError as error:
        raise ToolchainError(
            f"cuda-pathfinder: wanted the Python package that finds NVRTC, given none ({error}). Mend with: {MENDING}"
        ) from error
    except Exception:
        for root in (*_pip_roots(), *_system_roots()):
            for directory in (root / "lib", root / "lib64", root / "targets/x86_64-linux/lib"):
                found = sorted(path for path in directory.glob(pattern) if "alt" not in path.name)
                if found:
                    # In the process already, it is what cuda-bindings gets, which would not look here.
                    ctypes.CDLL(str(found[-1]), mode=ctypes.RTLD_GLOBAL)
                    return found[-1]
    raise ToolchainError(
        f"NVRTC: wanted libnvrtc.so of CUDA 13, found none among the pip packages, CUDA_HOME or the system directories. "
        f"Mend with: {MENDING}"
    )


def _load_builtins(nvrtc: Path) -> None:
    """NVRTC opens its builtins by bare name and has no search path of its own: they must be in the process already."""
    found = sorted(p for p in nvrtc.resolve().parent.glob("libnvrtc-builtins.so.*") if "alt" not in p.name)
    for path in found[-1:]:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _nvrtc_version() -> tuple[int, int]:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(
            f"cuda-bindings: wanted the Python package that calls NVRTC, given none ({error}). Mend with: {MENDING}"
        ) from error
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        raise ToolchainError(f"NVRTC: cuda-bindings cannot load it ({error}). Mend with: {MENDING}") from error
    if int(result) != 0:
        raise ToolchainError(f"NVRTC: nvrtcVersion failed with {result}. Mend with: {MENDING}")
    return int(major), int(minor)


def _find_nvcc() -> Path | None:
    for root in (*_pip_roots(), *_system_roots()):
        path = root / "bin" / "nvcc"
        if path.is_file():
            return path
    return None


@cache
def find_toolchain() -> Toolchain:
    """Raises :class:`ToolchainError` with the mending command when a part is missing."""
    nvrtc = _find_nvrtc()
    _load_builtins(nvrtc)
    version = _nvrtc_version()
    if version < OLDEST_NVRTC:
        raise ToolchainError(
            f"NVRTC: wanted {OLDEST_NVRTC[0]}.{OLDEST_NVRTC[1]} or later, given {version[0]}.{version[1]} ({nvrtc}). "
            f"Mend with: {MENDING}"
        )
    cuda_include = _first_with("cuda_fp16.h", "CUDA headers", _cuda_candidates())
    cuda_version = _macro(cuda_include / "cuda.h", "CUDA_VERSION") if (cuda_include / "cuda.h").is_file() else 0
    if cuda_version and cuda_version // 1000 != version[0]:
        raise ToolchainError(
            f"CUDA headers: wanted CUDA {version[0]} as NVRTC ({nvrtc}), given {cuda_version // 1000} "
            f"({cuda_include}). Mend with: {MENDING}"
        )
    cccl_include = _first_with("cuda/std/cstdint", "CCCL", _cccl_candidates(cuda_include))
    version_header = cccl_include / "cuda/std/__cccl/version.h"
    cccl_version = _macro(version_header, "CCCL_VERSION") if version_header.is_file() else 0
    return Toolchain(nvrtc, version, cuda_include, cuda_version, cccl_include, cccl_version, _find_nvcc())
