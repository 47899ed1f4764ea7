"""Shared by the JIT's tests: a Config literal and compilers that count."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from deep_gemm_k3.jit import Artefact, KernelSource, literal

SHAPE = {
    "num_ranks": 4,
    "num_experts": 16,
    "num_topk": 4,
    "num_max_tokens": 384,
    "num_max_shared_tokens": 768,
    "hidden": 1024,
    "intermediate": 512,
    "shared_intermediate": 256,
}
ENUMERATORS = {"sm_90a": "Architecture::kSM90", "sm_100a": "Architecture::kSM100", "sm_100f": "Architecture::kSM100"}


def config(arch: str = "sm_90a", **changes: Any) -> dict[str, Any]:
    """A complete Config as nested dictionaries, in declaration order."""
    fields: dict[str, Any] = {
        "arch": ENUMERATORS[arch],
        "shape": SHAPE,
        "shared_hidden": 2048,
        "activation": "Activation::kSiTU",
        "shared_output": "SharedOutput::kDense",
        "has_clamp": False,
        "fast_math": True,
        "has_rms_norm": True,
        "has_statistics": False,
        "routed_tile": {"num_rows": 256, "num_tokens": 16, "num_k": 128},
        "shared_tile": {"num_rows": 128, "num_tokens": 16, "num_k": 64},
        "splits": {"routed_l1": 1, "routed_l2": 1, "shared_l1": 1, "shared_l2": 1},
        "num_stages": 4,
        "num_math_warpgroups": 2,
        "num_threads": 128,
        "num_ctas_per_sm": 1,
    }
    unknown = set(changes) - set(fields)
    assert not unknown, unknown
    return fields | changes


def probe(arch: str = "sm_90a", **changes: Any) -> KernelSource:
    return KernelSource("probe", arch, literal(config(arch, **changes)))


class CountingCompiler:
    """Makes plausible artefacts out of nothing and notes each compilation in a file that all processes append to."""

    def __init__(self, journal: Path, seconds: float = 0.0, identity: str = "counting 1.0") -> None:
        self.journal = journal
        self.seconds = seconds
        self.identity = identity

    def compile(self, source: KernelSource) -> Artefact:
        descriptor = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        os.close(descriptor)
        time.sleep(self.seconds)
        cubin = b"\x7fELF" + source.key.encode() * 100
        ptx = ".version 9.0\n.visible .entry the_entry(\n)\n{\n}\n"
        return Artefact(
            source.name, source.arch, source.config, "the_entry", ptx, cubin, source.text, "log", self.identity
        )

    @property
    def count(self) -> int:
        return len(self.journal.read_text().split()) if self.journal.exists() else 0
