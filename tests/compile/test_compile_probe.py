"""A real kernel goes the whole way for every architecture, without a GPU, and its layout numbers are the host's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from jit_support import SHAPE, config, probe

from deep_gemm_k3.jit import (
    ARCHITECTURES,
    Artefact,
    CompileError,
    KernelSource,
    NvccCompiler,
    NvrtcCompiler,
    find_toolchain,
    literal,
)
from deep_gemm_k3.jit.compiler import entries
from deep_gemm_k3.jit.elf import cubin_architecture
from deep_gemm_k3.jit.source import INCLUDE_DIR


@pytest.fixture(scope="module")
def compiled() -> dict[str, Artefact]:
    compiler = NvrtcCompiler()
    return {arch: compiler.compile(probe(arch)) for arch in ARCHITECTURES}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_probe_compiles(compiled: dict[str, Artefact], arch: str) -> None:
    artefact = compiled[arch]
    assert f".target {arch}" in artefact.ptx
    assert entries(artefact.ptx) == [artefact.entry]
    assert artefact.resources.registers > 0
    assert artefact.resources.spill_stores == artefact.resources.spill_loads == 0
    assert cubin_architecture(artefact.cubin) == int(arch[3:-1])


@pytest.fixture(scope="module")
def host_numbers(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The same constexpr functions, compiled by the host's compiler."""
    directory: Path = tmp_path_factory.mktemp("layout")
    (directory / "layout.cpp").write_text(
        "#include <cstdio>\n#include <deep_gemm_k3/plan/workspace.cuh>\n"
        "using namespace deep_gemm_k3;\n"
        f"constexpr BufferShape shape = {literal(SHAPE)};\n"
        "int main() {\n"
        '    std::printf("%llu\\n", (unsigned long long)plan::total_bytes(shape));\n'
        "    for (int i = 0; i < plan::kNumComponents; ++i)\n"
        '        std::printf("%llu\\n%llu\\n",\n'
        "            (unsigned long long)plan::component_offset(shape, static_cast<plan::Component>(i)),\n"
        "            (unsigned long long)plan::component_bytes(shape, static_cast<plan::Component>(i)));\n"
        "}\n"
    )
    program = directory / "layout"
    subprocess.run(
        ["g++", "-std=c++20", "-I", str(INCLUDE_DIR), str(directory / "layout.cpp"), "-o", str(program)], check=True
    )
    return [int(line) for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layout_numbers_equal_the_hosts(compiled: dict[str, Artefact], host_numbers: list[int], arch: str) -> None:
    """The table the device compiler put into the module; the GPU test reads what the kernel stored from it."""
    table = re.search(r"\.b8 \w*kProbeNumbers\w*\[\d+\] = \{([^}]*)\}", compiled[arch].ptx)
    assert table is not None
    data = bytes(int(byte) for byte in table.group(1).split(","))
    data += bytes(-len(data) % 8)
    found = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    assert found == host_numbers
    assert len(set(host_numbers)) > 20


def test_compilers_words_reach_the_user() -> None:
    broken = KernelSource("probe", "sm_90a", literal(config() | {"no_such_field": 1}))
    with pytest.raises(CompileError) as error:
        NvrtcCompiler().compile(broken)
    message = str(error.value)
    assert "no_such_field" in message and "error:" in message and "--- generated source" in message


def test_nvcc_gives_the_same_kernel() -> None:
    if find_toolchain().nvcc is None:
        with pytest.raises(RuntimeError, match="wanted nvcc, given none"):
            NvccCompiler()
        return
    artefact = NvccCompiler().compile(probe())
    assert artefact.entry == NvrtcCompiler().compile(probe()).entry
    assert cubin_architecture(artefact.cubin) == 90
