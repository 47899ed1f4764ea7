"""The kernels that need the most registers of their share spill none; scripts/kernel_table.py says so where they do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deep_gemm_k3.jit.compiler import Artefact

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kernel_table.py"
SPILLS = """ptxas info    : Function properties for kernel
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 80 registers, used 16 barriers"""
SERIALISED = """ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 80 registers, used 16 barriers"""


@pytest.fixture
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["kernel_table"] = importlib.util.module_from_spec(spec)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def test_kernels_nearest_to_their_limit_keep_it(table: ModuleType) -> None:
    assert table.main(["--nearest"]) == 0


@pytest.mark.parametrize(("log", "said"), [(SPILLS, "8 bytes spilled, 8 of stack"), (SERIALISED, "(C7512)")])
def test_a_kernel_beyond_its_limit_is_named(
    table: ModuleType, log: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Store:
        def get(self, source: Any) -> Artefact:
            return Artefact(source.name, source.arch, source.config, "entry", "", b"", "", log)

    monkeypatch.setattr(table, "default_store", Store)
    entries = table.nearest()[:1]
    monkeypatch.setattr(table, "nearest", lambda: entries)
    monkeypatch.setattr(table, "warm_up", lambda *_: "")
    monkeypatch.setattr(table, "markdown", lambda *_: "")
    assert table.main(["--nearest"]) == 1
    assert said in capsys.readouterr().out
