"""Mutation of the package's own kernel: weaken one kind of synchronisation in its PTX, and the emulator must object.

Each kind runs in a process of its own, as a script: a process keeps the kernels that it has loaded. A kind may be
narrowed to one site, ``python tests/emu/test_emu_mutation.py KIND SITE``; without a change, ``none``, all is well.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from typing import Any

import pytest

KINDS = {
    "none": (r"^", ""),
    "releasing reductions": (r"red\.release\.(gpu|sys)", r"red.relaxed.\1"),
    "acquiring loads": (r"ld\.acquire\.(gpu|sys)", r"ld.relaxed.\1"),
    "proxy fences": (r"fence\.proxy\.async[.:\w]*;", ""),
    "system scope": (r"(red\.release|ld\.acquire|st\.release|fence\.acq_rel)\.sys", r"\1.gpu"),
    "arrivals": (r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", ""),
    "expected bytes": (r"mbarrier\.expect_tx[.:\w]* \[%r\d+\], %r\d+;", ""),
    "named barriers": (r"bar(?:rier)?\.sync[.\w]*[^;]*;", ""),
}
# What the Blackwell kernel has besides.
BLACKWELL_KINDS = {
    "commits": (r"tcgen05\.commit[.:\w]* [^;]*;", ""),
    "loads from tensor memory": (r"tcgen05\.wait::ld[.\w]*;", ""),
    "barriers of the pair": (r"barrier\.cluster\.(?:arrive|wait)[.\w]*;", ""),
    "arrivals at the leader": (r"mbarrier\.arrive\.release\.cluster[.:\w]* _, \[%r\d+\];", ""),
    "copies of scales": (r"tcgen05\.cp[.:\w]* [^;]*;", ""),
    "claims told to the pair": (r"st\.relaxed\.cluster[.:\w]* [^;]*;", ""),
}
PATTERNS = KINDS | BLACKWELL_KINDS
CASES = [("sm_90a", kind) for kind in KINDS] + [("sm_100a", kind) for kind in PATTERNS]


def mutated(text: str, kind: str, site: int | None) -> str:
    pattern, replacement = PATTERNS[kind]
    sites = list(re.finditer(pattern, text))
    if site is None:
        return re.sub(pattern, replacement, text)
    match = sites[site % len(sites)]
    return text[: match.start()] + match.expand(replacement) + text[match.end() :]


def objections(kind: str, site: int | None, seed: int = 1) -> list[str]:
    """What the run of the mutated kernel by four ranks gives rise to; empty when nobody noticed."""
    import deep_gemm_k3.jit.kernel as kernels
    from deep_gemm_k3.demo import checks
    from deep_gemm_k3.demo.data import Problem, make_layer
    from deep_gemm_k3.demo.run import Progress, run
    from deep_gemm_k3.emulator import service

    original = kernels.register

    def register(artefact: Any, where: str, params_bytes: int = 0) -> int:
        changed = dataclasses.replace(artefact, ptx=mutated(artefact.ptx, kind, site))
        return original(changed, where, params_bytes)

    kernels.register = register
    service.configure(seed=seed, race_detection=True)
    layer = make_layer(
        Problem(
            hidden=256, intermediate=256, shared_hidden=512, shared_slice=128, experts_per_rank=2, tokens=(3, 0, 6, 4)
        )
    )
    found = []
    try:
        rows = checks.check(layer, run(layer, "cpu", Progress()), lambda _: None)
        found += [f"wrong: {row.check}" for row in rows if not row.passed]
    except RuntimeError as error:
        found.append(f"error: {error}")
    return found + [f"{f['kind']}: {f['text']}" for f in service.report()["findings"]]


@pytest.mark.emu_full
@pytest.mark.parametrize(("target", "kind"), CASES)
def test_every_kind_of_synchronisation_is_needed(target: str, kind: str) -> None:
    # A kernel that hangs ends by its own limit.
    environment = {**os.environ, "DGK3_TIMEOUT_S": "5", "DGK3_CPU_TARGET": target}
    command = [sys.executable, __file__, kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    except subprocess.TimeoutExpired:
        assert kind == "arrivals", "only a kernel whose pipeline stands still may need longer"
        return
    assert done.returncode == (0 if kind == "none" else 3), done.stdout[-2000:] + done.stderr[-2000:]


if __name__ == "__main__":
    noticed = objections(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
    for text in noticed[:10]:
        print(text[:1000])
    sys.exit(3 if noticed else 0)
