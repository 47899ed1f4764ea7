"""Matrix products that the CuTe DSL compiled, on numpy inputs: PTX in another compiler's style."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_emu_tensor_scaled import decode, packed4, small_codes

from deep_gemm_k3.emulator import Device, Module, TensorMap

RNG = np.random.default_rng(8)
M, N, K = 256, 128, 256
SCHEDULES = [("earliest", 0), ("latest", 1), ("random", 2), ("random", 3)]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the PTX of every kernel. No driver and no GPU is visible to the compiler."""
    out = tmp_path_factory.mktemp("cute_dsl")
    script = Path(__file__).with_name("cute_dsl_gemms.py")
    for arch in ("sm_90a", "sm_100a"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(script), arch, str(out)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    return out


def run(
    path: Path, arch: str, grid: int | tuple[int, ...], block: int, params: list, adversary: str, seed: int, **options
) -> None:
    """One launch; parameters that only carry the DSL's settings (no pointer, no map) are zero."""
    module = Module.load(path)
    (name,) = module.kernels
    device = Device(arch=arch, seed=seed, adversary=adversary, race_detection=True)
    given = iter(params)
    values = [next(given) if size in (8, 128) else bytes(size) for _, _, _, size in module.kernels[name]["params"]]
    device.launch(module, name, grid, block, params=values, shared_bytes=200 * 1024, **options)
    assert not device.findings, device.findings


def integers(rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(-4, 5, (rows, columns))).to(torch.bfloat16)


@pytest.mark.parametrize(("adversary", "seed"), SCHEDULES)
def test_dense_product_by_pairs_of_ctas(compiled: Path, adversary: str, seed: int) -> None:
    a, b, c = integers(M, K), integers(N, K), torch.zeros(M, N)
    maps = [
        TensorMap(x, "bfloat16", [K, x.shape[0]], [2 * K], [64, box], swizzle="128B") for x, box in ((a, 128), (b, 64))
    ]
    run(compiled / "dense.ptx", "sm_100a", 2, 128, [*maps, c], adversary, seed, cluster=2)
    assert torch.equal(c, a.float() @ b.float().T)


def scale_blocks(scales: np.ndarray) -> torch.Tensor:
    """Blocks of 128 rows by 4 scales, k blocks innermost; in a block row r % 32 has 16 bytes, 4 for each r // 32."""
    rows, k = scales.shape
    blocks = scales.reshape(rows // 128, 4, 32, k // 4, 4).transpose(0, 3, 2, 1, 4)
    return torch.from_numpy(blocks.astype(np.uint8).copy())


@pytest.mark.parametrize(("adversary", "seed"), SCHEDULES)
@pytest.mark.parametrize("count", [1, 2])
def test_block_scaled_product_of_eight_and_four_bits(compiled: Path, count: int, adversary: str, seed: int) -> None:
    a, b = small_codes(M, K, "e4m3"), small_codes(N, K, "e2m1")
    scales = [RNG.integers(124, 130, (rows, K // 32)) for rows in (M, N)]
    c, tensor_a = torch.zeros(M, N), torch.from_numpy(a.astype(np.uint8)).clone()
    tensor_b = torch.from_numpy(packed4(b).reshape(N, K // 2)).clone()
    scale_a, scale_b = (scale_blocks(s) for s in scales)
    blocks = K // 128
    maps = [
        TensorMap(tensor_a, "uint8", [K, M], [K], [128, 128], swizzle="128B"),
        TensorMap(tensor_b, "16u4_align16b", [K, N], [K // 2], [128, 128 // count], swizzle="128B"),
        TensorMap(scale_a, "uint16", [256, M // 128, blocks], [512 * blocks, 512], [256, 1, 1]),
        TensorMap(scale_b, "uint16", [256, blocks], [512], [256, 1]),
    ]
    run(compiled / f"scaled{count}.ptx", "sm_100a", 2, 128, [*maps, c], adversary, seed, cluster=count)
    fa, fb = (np.repeat(2.0 ** (s - 127), 32, 1) for s in scales)
    want = (decode(a, "e4m3") * fa) @ (decode(b, "e2m1") * fb).T
    assert np.array_equal(c.numpy(), want.astype(np.float32))


@pytest.mark.parametrize(("adversary", "seed"), SCHEDULES)
def test_product_of_two_warpgroups(compiled: Path, adversary: str, seed: int) -> None:
    a, b, c = integers(M, K), integers(2 * N, K), torch.zeros(M, 2 * N)
    maps = [TensorMap(x, "bfloat16", [K, x.shape[0]], [2 * K], [64, 128], swizzle="128B") for x in (a, b)]
    run(compiled / "warpgroups.ptx", "sm_90a", (2, 2), 288, [*maps, c], adversary, seed)
    assert torch.equal(c, a.float() @ b.float().T)
