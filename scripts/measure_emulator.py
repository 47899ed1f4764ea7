#!/usr/bin/env python3
"""How fast the emulator is on this machine; prints the rows of docs/emulator.md's table of speeds.

python scripts/measure_emulator.py [--only NAME ...]
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("sm_90a", "sm_100a")
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "emu")]

LOOP = """
extern "C" __global__ void k(int* out, int rounds) {
    int x = threadIdx.x, y = 1; float f = x;
    #pragma unroll 1
    for (int i = 0; i < rounds; ++i) { x = x * 5 + i; y ^= x >> 3; f = f * 0.5f + 1.0f; y += x; x ^= y; }
    out[blockIdx.x * blockDim.x + threadIdx.x] = x + y + int(f);
}
"""
PRODUCTS = r"""
typedef unsigned int u32; typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(128) k(u32* out, int rounds) {
    extern __shared__ __align__(1024) u32 s[];
    for (int i = threadIdx.x; i < 16384; i += 128) s[i] = 0x3f803f80u + (i * 2654435761u & 0x807f807fu);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    u32 at = (u32)__cvta_generic_to_shared(s);
    u64 a = at >> 4 | 1ull << 16 | (u64)(64 | 1 << 30) << 32, b = (at + 16384) >> 4 | 1ull << 16 | (u64)(64 | 1 << 30) << 32;
    float v[NV] = {};
    for (int i = 0; i < rounds; ++i) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int j = 0; j < 4; ++j) PRODUCT
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    float sum = 0;
    for (int i = 0; i < NV; ++i) sum += v[i];
    out[threadIdx.x] = __float_as_uint(sum);
}
"""


def instructions() -> Iterator[str]:
    import numpy as np
    from emu_support import cuda_module

    from deep_gemm_k3.emulator import Device

    device, out = Device(), np.zeros(64 * 32, np.int32)
    module = cuda_module(LOOP)
    started = time.process_time()
    device.launch(module, "k", 16, 128, params=[out, 20000])
    rate = device.counters["instructions"] / (time.process_time() - started)
    yield f"| warp instructions, integer and float, 64 warps | {rate / 1e6:.0f} M/s on one core |"


def products() -> Iterator[str]:
    import numpy as np
    from emu_support import cuda_module

    from deep_gemm_k3.emulator import Device

    for n, rounds in ((8, 1500), (16, 1500), (64, 600), (128, 400), (256, 200)):
        half = n // 2
        registers = ", ".join(f"%{i}" for i in range(half))
        outputs = ", ".join(f'"+f"(v[{i}])' for i in range(half))
        product = (
            f'asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{registers}}}, %{half}, %{half + 1}, '
            f'1, 1, 1, 0, 0;" : {outputs} : "l"(a), "l"(b) : "memory");'
        )
        module = cuda_module(PRODUCTS.replace("NV", str(half)).replace("PRODUCT", product))
        device, out = Device(), np.zeros(128, np.uint32)
        started = time.process_time()
        device.launch(module, "k", 1, 128, params=[out, rounds], shared_bytes=65536)
        rate = device.counters["macs"] / (time.process_time() - started)
        yield f"| wgmma m64n{n}k16 BF16, both operands in shared memory | {rate / 1e9:.2f} G MAC/s on one core |"


def call_seconds(shape: Any, mode: str, target: str) -> str:
    """Wall and CPU seconds of the second of two calls, and its counters."""
    from deep_gemm_k3.emulator import service
    from deep_gemm_k3.testing.data import make_world
    from deep_gemm_k3.testing.oracle import Options
    from deep_gemm_k3.testing.runner import RunOptions, Session, run_world

    world = make_world(shape, 1, "uniform", "random", target)
    session = Session(shape, device="cpu", target=target)
    try:
        options = Options("situ", None, 4.0, 25.0)
        run_world(world, options, mode, RunOptions(), session)
        service.clear()
        wall, cpu = time.perf_counter(), time.process_time()
        run_world(world, options, mode, RunOptions(), session)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        counters = service.report()["counters"]
    finally:
        session.close()
    return (
        f"{wall:.1f} s, {cpu:.1f} s of CPU; {counters['instructions'] / 1e6:.1f} M warp instructions, "
        f"{counters['macs'] / 1e9:.2f} G MAC"
    )


def calls() -> Iterator[str]:
    from deep_gemm_k3.testing.data import WorldShape

    for target, ranks in itertools.product(TARGETS, (1, 2)):
        shape = WorldShape((64,) * ranks, 4 * ranks, 1, 1024, 512, 72, 2048, 1024)
        said = call_seconds(shape, "dense", target)
        yield f"| one call of {ranks} rank(s) at the SiTU regression's shapes, {target}, compiled | {said} |"


def column() -> Iterator[str]:
    from deep_gemm_k3.testing.data import WorldShape

    for target in TARGETS:
        said = call_seconds(WorldShape((16,), 1, 1, 3584, 3072), "routed", target)
        yield f"| one expert of Kimi K3 (3584 / 3072), 16 tokens, {target}, compiled | {said} |"


def regression() -> Iterator[str]:
    script = [sys.executable, str(ROOT / "tests" / "test_mega_moe_situ.py")]
    for target in TARGETS:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DGK3_CPU_TARGET": target}
        for _ in range(2):  # the first run compiles
            wall, cpu = time.perf_counter(), child_seconds()
            subprocess.run(script, check=True, env=environment, stdout=subprocess.DEVNULL)
            wall, cpu = time.perf_counter() - wall, child_seconds() - cpu
        yield f"| `tests/test_mega_moe_situ.py`, {target}, compiled | {wall:.1f} s, {cpu:.1f} s of CPU |"


def child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "instructions": instructions, "products": products, "calls": calls, "regression": regression, "column": column,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    print("| what | speed |\n|---|---|")
    for name in parser.parse_args().only:
        for row in PARTS[name]():
            print(row, flush=True)


if __name__ == "__main__":
    main()
