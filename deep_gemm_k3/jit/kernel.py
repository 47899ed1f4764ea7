"""Kernels of this process: a memory cache in front of the disk, and loading into a target."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from deep_gemm_k3.jit.cache import Cache
from deep_gemm_k3.jit.compiler import Artefact, Compiler, default_compiler
from deep_gemm_k3.jit.source import KernelSource

NO_DEVICE = -1
TARGETS = ("cuda", "emulator", "null")


class KernelStore:
    """Thread-safe. A kernel asked for by several threads at once is looked up once."""

    def __init__(self, disk: Cache | None = None, compiler: Compiler | None = None) -> None:
        self.disk = disk or Cache()
        self._compiler = compiler
        self._artefacts: dict[str, Artefact] = {}
        self._handles: dict[tuple[str, str, int], int] = {}
        self._mutex = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}

    @property
    def compiler(self) -> Compiler:
        if self._compiler is None:
            self._compiler = default_compiler()
        return self._compiler

    def get(self, source: KernelSource) -> Artefact:
        """From memory, disk or the compiler."""
        found = self._artefacts.get(source.key)
        if found is not None:
            return found
        with self._mutex:
            busy = self._busy.setdefault(source.key, threading.Lock())
        with busy:
            found = self._artefacts.get(source.key)
            if found is None:
                found = self._artefacts[source.key] = self.disk.get(source, self.compiler)
        return found

    def peek(self, source: KernelSource) -> Artefact | None:
        """From memory or disk, without compiling."""
        found = self._artefacts.get(source.key) or self.disk.find(source, self.compiler)
        return found and self.put(found)

    def put(self, artefact: Artefact) -> Artefact:
        """Keeps an artefact that somebody else compiled."""
        return self._artefacts.setdefault(artefact.key, artefact)

    def load(self, source: KernelSource, target: str, device: int = NO_DEVICE, params_bytes: int = 0) -> int:
        """Compiles if need be, loads into the target and returns the handle that launches take."""
        slot = (source.key, target, device)
        handle = self._handles.get(slot)
        if handle is None:
            handle = self._handles[slot] = register(self.get(source), target, device, params_bytes)
        return handle


def register(artefact: Artefact, target: str, device: int = NO_DEVICE, params_bytes: int = 0) -> int:
    """Hands an artefact to the launch layer: a cubin to the driver of a CUDA device, PTX to the emulator."""
    if target not in TARGETS:
        raise ValueError(f"target: wanted one of {', '.join(TARGETS)}, given {target!r}")
    import torch

    image = artefact.cubin if target == "cuda" else artefact.ptx.encode() + b"\0"
    data = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    return int(
        _ops().register_kernel(target, [artefact.key, artefact.entry, artefact.arch], data, device, params_bytes)
    )


def _ops() -> Any:
    from deep_gemm_k3 import _extension

    return _extension.ops()


@cache
def default_store() -> KernelStore:
    """The store of the process: default cache directory, default compiler."""
    return KernelStore()
