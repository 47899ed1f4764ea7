"""Builds the host extension ``deep_gemm_k3/_C.so`` with ninja.

The library uses nothing but torch's stable ABI and no CPython API, so one file serves every Python version and every
torch release from 2.11 on. It names libtorch_cpu.so by soname only: by the time it is loaded torch is in the process,
so no path of the building machine is stored in it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def torch_root() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "deep_gemm_k3: building needs torch >= 2.11: pip install torch, then pip install --no-build-isolation ."
        )
    return Path(spec.submodule_search_locations[0])


def ninja_program() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            sys.exit("deep_gemm_k3: building needs ninja: pip install ninja")
        return found


def layout_digest() -> str:
    """What ``deep_gemm_k3._extension`` compares when it loads the library."""
    return str(runpy.run_path(str(ROOT / "deep_gemm_k3" / "_extension.py"))["layout_digest"]())


def host_sources() -> list[Path]:
    return sorted((ROOT / "csrc").rglob("*.cpp"))


def emulator_flags() -> str:
    """The emulator runs 32 lanes per instruction: its files are compiled for vectors, and round exactly as written."""
    flags = "-O3 -ffp-contract=off -fno-math-errno -fno-trapping-math"
    if platform.machine() in ("x86_64", "AMD64"):
        flags += " -mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpopcnt"
    return flags


def quote(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_text(build_dir: Path, target: Path) -> str:
    torch = torch_root()
    compiler = os.environ.get("CXX", "g++")
    includes = [ROOT / "csrc", ROOT / "deep_gemm_k3" / "include"]
    flags = [
        "-std=c++20 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter -pthread",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        f'-DDEEP_GEMM_K3_VERSION=\\"{VERSION}\\"',
        f"-ffile-prefix-map='{ROOT}'=.",
        *(f"-I'{path}'" for path in includes),
        f"-isystem '{torch / 'include'}'",
        os.environ.get("CXXFLAGS", ""),
    ]
    lines = [
        f"builddir = {quote(build_dir)}",
        f"cxx = {compiler}",
        f"cflags = {' '.join(flags).strip()}",
        f"ldflags = -shared -pthread -Wl,--no-as-needed -L'{torch / 'lib'}' -ltorch_cpu -Wl,--as-needed -ldl -lrt",
        "rule compile",
        "  command = $cxx $cflags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        "  command = $cxx $in $ldflags -o $out",
        "  description = link $out",
    ]
    objects = []
    for source in host_sources():
        obj = build_dir / "obj" / source.relative_to(ROOT).with_suffix(".o")
        objects.append(obj)
        lines.append(f"build {quote(obj)}: compile {quote(source)}")
        if source.parent.name == "emulator":
            lines.append(f"  cflags = $cflags {emulator_flags()}")
        if source == ROOT / "csrc" / "jit" / "layout_digest.cpp":
            lines.append(f'  cflags = $cflags -DDEEP_GEMM_K3_LAYOUT_DIGEST=\\"{layout_digest()}\\"')
    lines.append(f"build {quote(target)}: link {' '.join(quote(obj) for obj in objects)}")
    lines.append(f"default {quote(target)}")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        build_dir = ROOT / "build" / "host"
        build_dir.mkdir(parents=True, exist_ok=True)
        linked = build_dir / target.name
        script = build_dir / "build.ninja"
        text = ninja_text(build_dir, linked)
        if not script.exists() or script.read_text() != text:
            script.write_text(text)
        jobs = os.environ.get("MAX_JOBS", str(min(os.cpu_count() or 1, 8)))
        built = subprocess.run([ninja_program(), "-f", str(script), "-j", jobs, "--quiet"], cwd=ROOT)
        if built.returncode != 0:
            sys.exit("deep_gemm_k3: the host extension did not compile; the compiler's words are above")
        # Published by rename: a process that has the old file mapped keeps it.
        if not target.exists() or target.read_bytes() != linked.read_bytes():
            scratch = target.with_suffix(f".{os.getpid()}.tmp")
            shutil.copyfile(linked, scratch)
            scratch.replace(target)


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("deep_gemm_k3._C", sources=[str(p.relative_to(ROOT)) for p in host_sources()])],
    cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPythonWheel},
)
