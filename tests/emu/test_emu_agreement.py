"""The emulator against a GPU, bit for bit: what an H200 computed from the same seeds lies in ``docs/runs/h200-agreement.json``.

``python tests/agreement/record.py OUT.json`` writes that file on a machine with a GPU.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import kernel_cases
import numpy as np
import product_probe
import pytest
import record
import torch

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "docs" / "runs" / "h200-agreement.json").read_text())
IN_CI = ("1-routed-situ-exact", "2-rs-situ-exact", "1-dense-situ-random")


@pytest.mark.parametrize("probe", product_probe.PROBES)
def test_tensor_core_sums(probe: str) -> None:
    """Every bit of single products, whatever the exponents, infinities and NaN included."""
    for family in product_probe.FAMILIES:
        known = RECORD["products"][probe][family]
        bits = product_probe.run("emulator", probe, product_probe.make_case(probe, family, record.TILES))
        rows = np.frombuffer(base64.b85decode(known["rows"]), np.uint32).reshape(-1, 8)
        differ = np.argwhere(bits[0, : len(rows)] != rows)
        assert not len(differ), f"{family}: {len(differ)} differ, first at {differ[0]}"
        assert product_probe.digest(bits) == known["sha256"], family


def test_probes_would_show_another_rule() -> None:
    """The recorded bits are not those of sums rounded once to nearest, nor of one bit more or less of alignment."""
    case = product_probe.make_case("wgmma_bf16", "far", record.TILES)
    a, b = (product_probe.bf16_values(words[0, 0]).astype(np.float64) for words in (case.a, case.b))
    rounded = (a @ b.T + case.c[0]).astype(np.float32).view(np.uint32)
    rows = np.frombuffer(base64.b85decode(RECORD["products"]["wgmma_bf16"]["far"]["rows"]), np.uint32).reshape(-1, 8)
    assert (rounded[: len(rows)] != rows).sum() > 40
    apart = np.abs(rounded[: len(rows)].astype(np.int64) - rows.astype(np.int64))
    assert apart.max() < 8


def chosen(case: kernel_cases.Case) -> Any:
    return pytest.param(case, id=case.name, marks=() if case.name in IN_CI else pytest.mark.emu_full)


@pytest.mark.parametrize("case", [chosen(case) for case in kernel_cases.CASES])
def test_calls_of_the_fused_kernel(case: kernel_cases.Case) -> None:
    """Every output of the SM90 kernel. With ``fast_math`` approximate instructions take part, whose tables are not known;
    and when the kernel has changed since the record was made, random inputs may be summed in another order."""
    known = RECORD["calls"][case.name]
    same_kernel = RECORD["kernel"] == kernel_cases.kernel_digest()
    same_bits = case.kind == "exact" or (same_kernel and not case.fast_math)
    if case.kind == "exact" and case.mode != "routed" and not same_kernel:
        same_bits = False  # the norm's sum of squares has an order
    for name, tensor in kernel_cases.outputs(kernel_cases.run_case(case, "cpu")):
        if same_bits or name.startswith("stats") or (case.kind == "exact" and not name.startswith("y")):
            assert kernel_cases.digest(tensor) == known[name]["sha256"], name
        elif "rows" in known[name]:
            rows = kernel_cases.unpack_rows(known[name]["rows"], tensor)
            error = (tensor[: len(rows)].double() - rows.double()).norm() / rows.double().norm()
            assert error < (1e-4 if same_kernel else 2e-3), f"{name}: {float(error)}"
            assert torch.equal(tensor[: len(rows)].isnan(), rows.isnan())
