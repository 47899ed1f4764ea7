"""Finding the compiler and its headers, wherever the parts are; and saying what mends it when they are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deep_gemm_k3.jit import NvccCompiler, NvrtcCompiler, ToolchainError, default_compiler, find_toolchain, toolchain


@pytest.fixture(autouse=True)
def fresh_search():
    find_toolchain.cache_clear()
    yield
    find_toolchain.cache_clear()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pip packages and no system directories."""
    monkeypatch.setattr(toolchain, "_pip_roots", lambda: iter(()))
    monkeypatch.setattr(toolchain, "_system_roots", lambda: iter(()))
    monkeypatch.setattr(toolchain, "_pathfinder_headers", lambda component: iter(()))


def test_everything_is_found() -> None:
    found = find_toolchain()
    assert found.nvrtc_version >= toolchain.OLDEST_NVRTC
    assert (found.cuda_include / "cuda_fp16.h").is_file()
    assert (found.cccl_include / "cuda/std/cstdint").is_file()
    assert found.cuda_version // 1000 == found.nvrtc_version[0]
    assert set(found.describe()) == {"nvrtc", "cuda headers", "cccl", "nvcc"}


def test_identity_holds_versions_and_no_path() -> None:
    found = find_toolchain()
    assert "/" not in found.nvrtc_identity
    assert f"nvrtc {found.nvrtc_version[0]}.{found.nvrtc_version[1]}" in found.nvrtc_identity
    assert "/" not in NvrtcCompiler(found).identity


def make_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_sources_are_combined(tmp_path: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA headers among the pip packages, CCCL only in a toolkit."""
    pip = make_tree(tmp_path / "pip", {"include/cuda_fp16.h": "", "include/cuda.h": "#define CUDA_VERSION 13000\n"})
    version = "#define CCCL_VERSION 3000005\n"
    home = make_tree(
        tmp_path / "home",
        {
            "include/cuda_fp16.h": "",
            "include/cccl/cuda/std/cstdint": "",
            "include/cccl/cuda/std/__cccl/version.h": version,
        },
    )
    monkeypatch.setattr(toolchain, "_pip_roots", lambda: iter((pip,)))
    monkeypatch.setattr(toolchain, "_system_roots", lambda: iter((home,)))
    monkeypatch.setattr(toolchain, "_nvrtc_version", lambda: (13, 0))
    found = find_toolchain()
    assert found.include_dirs == (pip / "include", home / "include" / "cccl")
    assert found.cccl_version == 3000005


def test_cuda_home_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert next(toolchain._system_roots()) == tmp_path


@pytest.mark.parametrize("missing", ["CUDA headers", "CCCL"])
def test_missing_headers_name_the_mending_command(
    tmp_path: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    files = {"include/cuda_fp16.h": ""} if missing == "CCCL" else {}
    root = make_tree(tmp_path, files)
    monkeypatch.setattr(toolchain, "_system_roots", lambda: iter((root,)))
    with pytest.raises(ToolchainError) as error:
        find_toolchain()
    message = str(error.value)
    assert message.startswith(f"{missing}: wanted") and 'pip install "deep_gemm_k3[gpu]"' in message
    assert str(root / "include") in message


@pytest.mark.parametrize("module", ["cuda.bindings", "cuda.pathfinder"])
def test_missing_packages_name_the_mending_command(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    import cuda

    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(cuda, module.split(".")[1], raising=False)
    with pytest.raises(ToolchainError, match=r"Mend with: pip install \"deep_gemm_k3\[gpu\]\""):
        find_toolchain()


def test_packages_on_the_path_alone_are_used() -> None:
    """As with --target and PYTHONPATH: the finder of cuda-bindings looks into the interpreter's own site-packages only."""
    program = "from deep_gemm_k3.jit.toolchain import find_toolchain; print(find_toolchain().nvrtc_version)"
    start = f"import sys; sys.path = {sys.path!r}; {program}"
    ended = subprocess.run([sys.executable, "-S", "-c", start], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("(13, ")


def test_old_nvrtc_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_nvrtc_version", lambda: (12, 4))
    with pytest.raises(ToolchainError, match=r"wanted 12\.9 or later, given 12\.4"):
        find_toolchain()


def test_headers_of_another_release_are_refused(tmp_path: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_tree(tmp_path, {"include/cuda_fp16.h": "", "include/cuda.h": "#define CUDA_VERSION 12060\n"})
    monkeypatch.setattr(toolchain, "_system_roots", lambda: iter((root,)))
    monkeypatch.setattr(toolchain, "_nvrtc_version", lambda: (13, 0))
    with pytest.raises(ToolchainError, match="wanted CUDA 13 as NVRTC"):
        find_toolchain()


def test_nvcc_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGK3_COMPILER", "nvcc")
    if find_toolchain().nvcc is not None:
        assert isinstance(default_compiler(), NvccCompiler)
    monkeypatch.setattr(toolchain, "_find_nvcc", lambda: None)
    find_toolchain.cache_clear()
    with pytest.raises(ToolchainError, match="wanted nvcc, given none"):
        default_compiler()
    monkeypatch.setenv("DGK3_COMPILER", "nvrtc")
    assert isinstance(default_compiler(), NvrtcCompiler)
