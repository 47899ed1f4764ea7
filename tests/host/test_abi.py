"""The host extension is one artefact: the rules of scripts/check_abi.py, each broken once, and the real file."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from deep_gemm_k3 import _extension

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_abi  # noqa: E402


def test_the_extension_has_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_abi.main([]) == 0, capsys.readouterr().out


def test_elf_file_is_read() -> None:
    library = check_abi.read_library(ROOT / "deep_gemm_k3" / "_C.so")
    assert "libtorch_cpu.so" in library.needed
    assert "aoti_torch_library_init_fragment" in library.undefined
    assert any(version.startswith("GLIBC_") for version in library.versions)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"undefined": ["PyObject_Call"]}, "of the Python API"),
        ({"undefined": ["_Py_Dealloc"]}, "of the Python API"),
        ({"undefined": ["_ZN3c105ErrorC1ENS_14SourceLocationE"]}, "a C++ symbol of torch"),
        ({"undefined": ["_ZNK2at10TensorBase4sizeEl"]}, "a C++ symbol of torch"),
        ({"undefined": ["torch_from_the_future"]}, "which this torch does not export"),
        ({"needed": ["libtorch_python.so"]}, "neither torch's nor the run time's"),
        ({"needed": ["libcuda.so.1"]}, "neither torch's nor the run time's"),
        ({"versions": ["GLIBC_2.39"]}, "wanted at most GLIBC_2.36"),
        ({"versions": ["GLIBCXX_3.4.99"]}, "wanted at most GLIBCXX_3.4.32"),
    ],
)
def test_each_rule_has_a_reason(changes: dict[str, list[str]], reason: str) -> None:
    (fault,) = check_abi.faults(check_abi.Library(**changes), {"aoti_torch_get_dim"})
    assert reason in fault and next(iter(changes.values()))[0] in fault


def test_what_is_allowed() -> None:
    library = check_abi.Library(
        needed=["libtorch_cpu.so", "libstdc++.so.6", "libc.so.6", "ld-linux-x86-64.so.2"],
        undefined=["aoti_torch_get_dim", "memcpy", "_ZNSt6vectorIiE"],
        versions=["GLIBC_2.34", "GLIBCXX_3.4.30", "CXXABI_1.3.13"],
    )
    assert check_abi.faults(library, {"aoti_torch_get_dim"}) == []


def test_library_is_built_from_these_headers() -> None:
    assert _extension.ops().layout_digest() == _extension.layout_digest()


@pytest.mark.parametrize("header", ["config.cuh", "params.cuh", "plan/workspace.cuh"])
def test_library_of_other_headers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    built = _extension.layout_digest()
    include = tmp_path / "include"
    shutil.copytree(_extension.INCLUDE_DIR, include)
    assert _extension.layout_digest(include) == built  # the place does not matter
    changed = include / "deep_gemm_k3" / header
    changed.write_text(changed.read_text() + "\n")
    other = _extension.layout_digest(include)
    monkeypatch.setattr(_extension, "layout_digest", lambda: other)
    with pytest.raises(_extension.ExtensionError, match=r"built from others .* Mend with: .*build_ext --inplace"):
        _extension.check_layout(built)
