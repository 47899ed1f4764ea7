"""Every header under include/ compiles alone, so that including one never needs another first."""

from __future__ import annotations

import pytest
from cuda.bindings import nvrtc

from deep_gemm_k3.jit import find_toolchain
from deep_gemm_k3.jit.source import INCLUDE_DIR

HEADERS = sorted(path.relative_to(INCLUDE_DIR).as_posix() for path in INCLUDE_DIR.rglob("*.cuh"))


def syntax_errors(text: str, arch: str) -> str:
    """The compiler's log when it refuses the text, else nothing."""
    directories = (INCLUDE_DIR, *find_toolchain().include_dirs)
    options = [f"--gpu-architecture={arch}", "--std=c++20", *(f"--include-path={path}" for path in directories)]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"alone.cu", 0, [], [])
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return "" if int(status) == 0 else log.decode(errors="replace")


@pytest.mark.parametrize("header", HEADERS)
def test_header_stands_alone(header: str) -> None:
    assert syntax_errors(f"#include <{header}>\n", "sm_90a") == ""


def test_a_header_that_leans_on_another_is_noticed() -> None:
    assert "deep_gemm_k3" in syntax_errors("constexpr deep_gemm_k3::BufferShape shape{};\n", "sm_90a")
