"""Records what a GPU computes: ``python tests/agreement/record.py OUT.json``; without a GPU, what the emulator computes."""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent))
import approximations
import kernel_cases
import numpy as np
import product_probe

TILES = 2
ROWS = {"wgmma_bf16": 16, "mma_e4m3": 16}


def record_products(where: str) -> dict[str, Any]:
    """Digests of whole results and the first rows' bits, per probe and family."""
    found: dict[str, Any] = {}
    for probe in product_probe.PROBES:
        for family in product_probe.FAMILIES:
            bits = product_probe.run(where, probe, product_probe.make_case(probe, family, TILES))
            rows = base64.b85encode(bits[0, : ROWS.get(probe, 8)].tobytes()).decode()
            found.setdefault(probe, {})[family] = {"sha256": product_probe.digest(bits), "rows": rows}
    return found


def record_approximations(where: str) -> dict[str, Any]:
    """Of every approximate instruction: digest, largest error in units of the last place, and how many are exact."""
    found: dict[str, Any] = {}
    for name in approximations.FUNCTIONS:
        given = approximations.run(where, name)
        error = np.abs(approximations.errors(name, given))
        found[name] = {
            "sha256": product_probe.digest(given.view(np.uint32)),
            "largest": float(error.max()),
            "nearest": float((error <= 0.5).mean()),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=("products", "calls"))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no call after this time")
    arguments = parser.parse_args()
    started = time.monotonic()
    where = "cuda" if torch.cuda.is_available() else "emulator"
    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if where == "cuda" else "emulator"}
    if where == "emulator":
        from deep_gemm_k3 import _extension

        _extension.ops().set_cpu_route("emulator")
    if arguments.only != "calls":
        record["products"] = record_products(where)
        record["approximations"] = record_approximations(where)
        arguments.out.write_text(json.dumps(record, indent=1))
    if arguments.only != "products":
        record["calls"], record["kernel"] = {}, kernel_cases.kernel_digest()
        if where == "cuda":
            print(kernel_cases.compile_all(kernel_cases.CASES))
        for case in kernel_cases.CASES:
            if time.monotonic() - started > arguments.seconds:
                print(f"{case.name}: no time left")
                continue
            device = "cuda:0" if where == "cuda" else "cpu"
            record["calls"][case.name] = kernel_cases.record_case(case, device)
            print(f"{case.name}: {time.monotonic() - started:.1f} s", flush=True)
            arguments.out.write_text(json.dumps(record, indent=1))
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
