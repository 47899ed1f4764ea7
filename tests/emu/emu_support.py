"""Shared by the emulator's tests: kernels around single instructions, and CUDA C++ through NVRTC."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from deep_gemm_k3 import envs
from deep_gemm_k3.emulator import Device, Module, service

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def fresh_emulator(target: str = "", *, autouse: bool = False, may_find: bool = False) -> Any:
    """A fixture, to be given a name in a test's module: the emulator behind CPU tensors has seen nothing when a test begins,
    and its schedule is the usual one when the test is over, whatever the test chose.

    CPU tensors stand for a GPU of `target`; empty: for what the environment says. A finding in a test's calls fails the test
    unless it `may_find` some.
    """

    @pytest.fixture(autouse=autouse)
    def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        if target:
            monkeypatch.setenv(envs.CPU_TARGET.name, target)
        service.clear()
        yield
        found = service.report()["findings"]
        service.configure()
        assert may_find or not found, found

    return emulator


def one_op(
    text: str,
    out: np.dtype | type,
    inputs: Sequence[np.ndarray],
    *,
    registers: str = "",
    outputs: int = 1,
    target: str = "sm_90a",
) -> list[np.ndarray]:
    """Runs `text` for every element; %d0.. are results, %a0.. the inputs, all registers of their types' width."""
    kinds = [np.asarray(x).dtype.itemsize for x in inputs]
    size = np.dtype(out).itemsize
    count = len(inputs[0])
    lines = [
        HEADER.replace("sm_90a", target),
        ".visible .entry k(",
        ",".join(f".param .u64 p{i}" for i in range(len(inputs) + outputs)),
        ", .param .u32 n) {",
    ]
    lines.append(".reg .pred %out; .reg .b32 %i, %n, %t; .reg .b64 %ptr, %off;" + registers)
    for i, width in enumerate(kinds):
        lines.append(f".reg .{REGISTER[width]} %a{i};")
    for i in range(outputs):
        lines.append(f".reg .{REGISTER[size]} %d{i};")
    lines += [
        "mov.u32 %i, %ctaid.x; mov.u32 %t, %ntid.x; mul.lo.u32 %i, %i, %t; mov.u32 %t, %tid.x; add.u32 %i, %i, %t;"
    ]
    lines += ["ld.param.u32 %n, [n]; setp.ge.u32 %out, %i, %n; @%out ret;"]
    for i, width in enumerate(kinds):
        lines.append(
            f"ld.param.u64 %ptr, [p{i}]; mul.wide.u32 %off, %i, {width}; add.u64 %ptr, %ptr, %off; ld.global.b{8 * width} %a{i}, [%ptr];"
        )
    lines.append(text)
    for i in range(outputs):
        lines.append(
            f"ld.param.u64 %ptr, [p{len(inputs) + i}]; mul.wide.u32 %off, %i, {size}; add.u64 %ptr, %ptr, %off; st.global.b{8 * size} [%ptr], %d{i};"
        )
    lines.append("ret; }")
    results = [np.zeros(count, dtype=out) for _ in range(outputs)]
    device = Device(arch=target)
    device.launch(
        Module("\n".join(lines)),
        "k",
        (count + 127) // 128,
        128,
        params=[*[np.ascontiguousarray(x) for x in inputs], *results, count],
    )
    return results


def run_ptx(
    body: str,
    params: str,
    values: Sequence[object],
    *,
    block: int = 32,
    grid: int = 1,
    device: Device | None = None,
    module: str = "",
    target: str = "sm_90a",
    **options: object,
) -> Device:
    """Runs one kernel `k` whose body and parameter list are given."""
    text = HEADER.replace("sm_90a", target) + module + f".visible .entry k({params}) {{\n{body}\nret; }}"
    device = device or Device(arch=target)
    device.launch(Module(text), "k", grid, block, params=list(values), **options)
    return device


@functools.cache
def compile_cuda(source: str, arch: str = "sm_90a", *options: str) -> str:
    """PTX of CUDA C++ from NVRTC."""
    from cuda.bindings import nvrtc

    from deep_gemm_k3.jit.toolchain import find_toolchain

    toolchain = find_toolchain()
    flags = [
        f"--gpu-architecture={arch}",
        "--std=c++20",
        *options,
        *(f"--include-path={path}" for path in toolchain.include_dirs),
    ]
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    assert int(status) == 0
    encoded = [flag.encode() for flag in flags]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(status):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.rstrip(b"\0").decode()


def cuda_module(source: str, arch: str = "sm_90a") -> Module:
    return Module(compile_cuda(source, arch))
