"""What an installation promises before anything is computed."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import deep_gemm_k3
from deep_gemm_k3 import _extension

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_version_is_the_projects() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert deep_gemm_k3.__version__ == declared
    assert _extension.ops().version() == declared


def test_import_needs_no_cuda_library() -> None:
    code = """
import builtins, ctypes, sys
import torch
opened = []
real = ctypes.CDLL.__init__
def spy(self, name, *args, **kw):
    opened.append(str(name))
    return real(self, name, *args, **kw)
ctypes.CDLL.__init__ = spy
import deep_gemm_k3
from deep_gemm_k3 import _extension
_extension.load()
print([n for n in opened if 'cuda' in n or 'nvrtc' in n], torch.cuda.is_initialized())
"""
    assert run_python(code) == "[] False"


def test_extension_is_bound_to_no_python_and_no_machine() -> None:
    blob = _extension.LIBRARY.read_bytes()
    needed = subprocess.run(["readelf", "-d", str(_extension.LIBRARY)], capture_output=True, text=True).stdout
    assert "libpython" not in needed
    assert "libcuda" not in needed
    assert "RPATH" not in needed and "RUNPATH" not in needed
    assert b"PyObject" not in blob and b"Py_Initialize" not in blob
    assert str(ROOT).encode() not in blob


def test_missing_extension_names_the_mending_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_extension, "_loaded", False)
    monkeypatch.setattr(_extension, "LIBRARY", tmp_path / "_C.so")
    with pytest.raises(_extension.ExtensionError, match=r"has not been built\. Mend with: .*build_ext --inplace"):
        _extension.load()


def test_broken_extension_names_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(_extension, "_loaded", False)
    monkeypatch.setattr(_extension, "LIBRARY", broken)
    with pytest.raises(_extension.ExtensionError, match=r"cannot be loaded with torch .*Mend with"):
        _extension.load()


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(_extension, "_loaded", False)
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    with pytest.raises(_extension.ExtensionError, match=r"wanted torch >= 2\.11 .*given torch 2\.10\.1"):
        _extension.load()


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = deep_gemm_k3.nonsense


def test_every_public_name_is_there() -> None:
    for name in deep_gemm_k3._PUBLIC:
        assert getattr(deep_gemm_k3, name) is not None
        assert name in dir(deep_gemm_k3)


def test_type_checkers_see_the_public_names() -> None:
    assert set(deep_gemm_k3.__all__) == {*deep_gemm_k3._PUBLIC, "__version__"}
    tree = ast.parse(Path(deep_gemm_k3.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: f".{node.module}" for node in imports for alias in node.names}
    assert seen == deep_gemm_k3._PUBLIC


def test_import_costs_little_beyond_torch() -> None:
    code = """
import time
import torch
began = time.process_time()
import deep_gemm_k3
for name in deep_gemm_k3._PUBLIC:
    getattr(deep_gemm_k3, name)
from deep_gemm_k3 import _extension
_extension.load()
print(time.process_time() - began)
"""
    assert min(float(run_python(code)) for _ in range(2)) < 0.5


def test_wheel_serves_every_python_and_holds_what_runs(tmp_path: Path) -> None:
    build = ["build", "--build-base", str(tmp_path / "build")]
    wheel_command = ["bdist_wheel", "--dist-dir", str(tmp_path / "dist"), "--bdist-dir", str(tmp_path / "tree")]
    command = [sys.executable, "setup.py", "-q", *build, *wheel_command]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=280)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.startswith(f"deep_gemm_k3-{deep_gemm_k3.__version__}-py3-none-linux")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {p.relative_to(ROOT).as_posix() for p in (ROOT / "deep_gemm_k3").rglob("*.py")}
    headers = {p.relative_to(ROOT).as_posix() for p in (ROOT / "deep_gemm_k3").rglob("*.cuh")}
    assert package | headers | {"deep_gemm_k3/_C.so", "deep_gemm_k3/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "csrc/", "build/"))]
