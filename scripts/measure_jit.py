#!/usr/bin/env python3
"""Measures the JIT: compile time per target, cache hits from disk and from memory.

    python scripts/measure_jit.py [--kernel probe|mega] [--repeats 3] [--json FILE]

Every compile starts from an empty cache directory. A disk hit is measured twice: as the first thing a new process does
(it also finds the toolchain then) and in a process that has compiled before. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from jit_support import probe  # noqa: E402

from deep_gemm_k3.jit import ARCHITECTURES, Cache, KernelSource, KernelStore, default_compiler  # noqa: E402
from deep_gemm_k3.mega.plan import KERNELS  # noqa: E402

K3_DECODE = {
    "num_ranks": 8,
    "num_experts": 896,
    "num_topk": 16,
    "num_max_tokens_per_rank": 512,
    "num_max_shared_tokens": 4096,
    "hidden": 3584,
    "intermediate_hidden": 3072,
    "shared_hidden": 7168,
    "shared_intermediate_hidden": 768,
    "shared_output": "dense",
    "num_tokens": 8,
    "num_shared_tokens": 64,
}
FIRST_LOOKUP = """
import json, sys, time
sys.path[:0] = json.loads(sys.argv[1])
start = time.perf_counter()
from pathlib import Path
from deep_gemm_k3.jit import Cache, KernelSource, KernelStore
imported = time.perf_counter()
source = KernelSource(*json.loads(sys.argv[3]))
store = KernelStore(Cache(Path(sys.argv[2])))
store.compiler
ready = time.perf_counter()
assert store.disk.find(source, store.compiler) is not None
print(json.dumps([imported - start, ready - imported, time.perf_counter() - ready]))
"""


def source_of(kernel: str, arch: str) -> KernelSource:
    if kernel == "probe":
        return probe(arch)
    from deep_gemm_k3 import _extension

    target = arch.replace("100f", "100a")
    literal = _extension.ops().config_literal(json.dumps(K3_DECODE | {"target": target}))
    return KernelSource(KERNELS[target], arch, literal)


def has_kernel(kernel: str, arch: str) -> bool:
    """The fused kernel exists for some architectures only."""
    name = "probe" if kernel == "probe" else KERNELS[arch.replace("100f", "100a")]
    return (ROOT / "deep_gemm_k3/include/deep_gemm_k3/kernels" / f"{name}.cuh").is_file()


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def first_lookup(root: Path, source: KernelSource) -> list[float]:
    paths = json.dumps([str(ROOT)])
    job = json.dumps([source.name, source.arch, source.config])
    command = [sys.executable, "-c", FIRST_LOOKUP, paths, str(root), job]
    times: list[float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return [seconds * 1e3 for seconds in times]


def measure(kernel: str, arch: str, repeats: int) -> dict[str, Any]:
    compiler = default_compiler()
    source = source_of(kernel, arch)
    with tempfile.TemporaryDirectory() as scratch:
        compile_ms = []
        for index in range(repeats):
            store = KernelStore(Cache(Path(scratch) / str(index)), compiler)
            start = time.perf_counter()
            artefact = store.get(source)
            compile_ms.append((time.perf_counter() - start) * 1e3)
        root = Path(scratch) / "0"
        disk = Cache(root)
        disk_ms = median_ms(lambda: disk.find(source, compiler), 20)
        memory_ms = median_ms(lambda: store.get(source), 1000)
        import_ms, toolchain_ms, cold_ms = first_lookup(root, source)
    used = artefact.resources
    return {
        "kernel": kernel,
        "arch": arch,
        "compile_ms": round(statistics.median(compile_ms), 1),
        "disk_hit_ms": round(disk_ms, 3),
        "first_disk_hit_ms": round(cold_ms, 3),
        "import_ms": round(import_ms, 1),
        "toolchain_ms": round(toolchain_ms, 1),
        "memory_hit_ms": round(memory_ms, 5),
        "ptx_kib": round(len(artefact.ptx) / 1024),
        "cubin_kib": round(len(artefact.cubin) / 1024),
        "registers": used.registers,
        "spill_bytes": used.spill_stores + used.spill_loads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kernel", default="probe", choices=["probe", "mega"])
    parser.add_argument("--arch", action="append", choices=list(ARCHITECTURES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    archs = options.arch or [arch for arch in ARCHITECTURES if has_kernel(options.kernel, arch)]
    rows = [measure(options.kernel, arch, options.repeats) for arch in archs]
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
