"""The roles around stand-in tiles: dispatch, combine, publication and aborts on one GPU, with exact integer checks.

The program in tests/gpu/protocol is compiled with nvcc and runs several local ranks on one
device: random routings, empty ranks, duplicates, holes, skew, faults.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deep_gemm_k3.jit import find_toolchain
from deep_gemm_k3.jit.source import INCLUDE_DIR
from deep_gemm_k3.mega.weights import default_target

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).parent / "protocol" / "main.cu"
# Ranks must neither share a hardware queue nor load code while another one spins.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}


class Build:
    """The compiler's run, which may go on while other things are compiled."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="deep_gemm_k3_protocol_")
        self.program = Path(self.folder.name) / "protocol_test"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        if self.process is None:
            nvcc = find_toolchain().nvcc
            wanted = "nvcc: wanted one to build the protocol test (pip install nvidia-cuda-nvcc), found none"
            assert nvcc is not None, wanted
            arch = default_target(torch.device("cuda"))
            gencode = f"arch={arch.replace('sm', 'compute')},code={arch}"
            flags = ["-std=c++20", "-O3", "-gencode", gencode, "-I", str(INCLUDE_DIR)]
            command = [nvcc, *flags, str(SOURCE), "-o", str(self.program)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return self.process

    def result(self) -> Path:
        output, _ = self.start().communicate(timeout=240)
        assert self.start().returncode == 0, output[-4000:]
        return self.program


# Started with the compilation of the fused kernels, where both are wanted.
BACKGROUND = Build()


@pytest.fixture(scope="module")
def program() -> Iterator[Path]:
    yield BACKGROUND.result()
    BACKGROUND.folder.cleanup()


@pytest.mark.parametrize("arguments", [("correct", "128"), ("abort",)], ids=["correct", "abort"])
def test_protocol(program: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [program, *arguments], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert done.stdout.rstrip().endswith("PASSED"), done.stdout[-8000:]
