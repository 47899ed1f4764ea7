"""The roles around stand-in tiles: dispatch, combine, publication and aborts on one GPU, with exact integer checks.

The program in tests/gpu/protocol is compiled with nvcc and runs several local ranks on one
device: random routings, empty ranks, duplicates, holes, skew, faults.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deep_gemm_k3.jit import find_toolchain
from deep_gemm_k3.jit.source import INCLUDE_DIR

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).parent / "protocol" / "main.cu"
# Ranks must neither share a hardware queue nor load code while another one spins.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvcc = find_toolchain().nvcc
    assert nvcc is not None, "nvcc: wanted one to build the protocol test (pip install nvidia-cuda-nvcc), found none"
    path = tmp_path_factory.mktemp("protocol") / "protocol_test"
    flags = ["-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-I", str(INCLUDE_DIR)]
    done = subprocess.run([nvcc, *flags, SOURCE, "-o", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return path


@pytest.mark.parametrize("arguments", [("correct", "128"), ("abort",)], ids=["correct", "abort"])
def test_protocol(program: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [program, *arguments], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert done.stdout.rstrip().endswith("PASSED"), done.stdout[-8000:]
