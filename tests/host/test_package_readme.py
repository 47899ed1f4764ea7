"""The README's ten lines of use run as they stand, at a smaller shape."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import deep_gemm_k3
from deep_gemm_k3.utils import per_token_cast_to_fp4, per_token_cast_to_fp8, transform_sf_into_required_layout

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "896, 128, 16, 3584, 3072"


def weights(rows: int, columns: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed, scales = per_token_cast_to_fp4(torch.randn(experts * rows, columns), True, 32)
    scales = transform_sf_into_required_layout(scales.view(experts, rows, -1), rows, columns, (1, 32), experts)
    return packed.view(experts, rows, columns // 2), scales


def test_use_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert SHAPE in block and "bf16_shared_intermediate_hidden=768" in block
    code = block.replace(SHAPE, "4, 64, 2, 256, 256").replace("hidden=768", "hidden=128")
    w13, w13_scales = weights(512, 256, 4)
    w2, w2_scales = weights(256, 256, 4)
    x, x_sf = per_token_cast_to_fp8(torch.randn(5, 256), True, 32, True)
    names = {
        "group": deep_gemm_k3.local_world(1)[0],
        "w13": w13,
        "w13_scales": w13_scales,
        "w2": w2,
        "w2_scales": w2_scales,
        "x": x,
        "x_sf": x_sf,
        "ids": torch.tensor([[0, 1], [2, 3], [3, -1], [1, 2], [0, 3]]),
        "weights": torch.full((5, 2), 0.5),
        "y": torch.full((5, 256), float("nan"), dtype=torch.bfloat16),
        "shared_x": torch.randn(7, 512).bfloat16(),
        "shared_y": torch.full((7, 512), float("nan"), dtype=torch.bfloat16),
        "shared_w13": torch.randn(256, 512).bfloat16() * 0.05,
        "shared_w2": torch.randn(512, 128).bfloat16() * 0.05,
        "rms_weight": torch.ones(256, dtype=torch.bfloat16),
    }
    exec(compile(code, "README.md", "exec"), names)
    y, shared_y = names["y"], names["shared_y"]
    assert isinstance(y, torch.Tensor) and isinstance(shared_y, torch.Tensor)
    assert bool(y.isfinite().all()) and bool(shared_y.isfinite().all())
    torch.testing.assert_close(y.float().square().mean(dim=1), torch.ones(5), rtol=2e-2, atol=0)
    names["buffer"].destroy()


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
