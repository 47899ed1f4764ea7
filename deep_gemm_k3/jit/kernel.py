"""Kernels of this process: a memory cache in front of the disk, and loading into a target."""

from __future__ import annotations

import threading
from functools import cache

from deep_gemm_k3.jit.cache import Cache
from deep_gemm_k3.jit.compiler import Artefact, Compiler, default_compiler
from deep_gemm_k3.jit.source import KernelSource


class KernelStore:
    """Thread-safe. A kernel asked for by several threads at once is looked up once."""

    def __init__(self, disk: Cache | None = None, compiler: Compiler | None = None) -> None:
        self.disk = disk or Cache()
        self._compiler = compiler
        self._artefacts: dict[tuple[str, bool], Artefact] = {}
        self._handles: dict[tuple[str, str], int] = {}
        self._mutex = threading.Lock()
        self._busy: dict[tuple[str, bool], threading.Lock] = {}

    @property
    def compiler(self) -> Compiler:
        if self._compiler is None:
            self._compiler = default_compiler()
        return self._compiler

    def get(self, source: KernelSource) -> Artefact:
        """From memory, disk or the compiler."""
        found = self._artefacts.get(source.slot)
        if found is not None:
            return found
        with self._mutex:
            busy = self._busy.setdefault(source.slot, threading.Lock())
        with busy:
            found = self._artefacts.get(source.slot)
            if found is None:
                found = self._artefacts[source.slot] = self.disk.get(source, self.compiler)
        return found

    def peek(self, source: KernelSource) -> Artefact | None:
        """From memory or disk, without compiling."""
        found = self._artefacts.get(source.slot) or self.disk.find(source, self.compiler)
        return found and self.put(found)

    def put(self, artefact: Artefact) -> Artefact:
        """Keeps an artefact that somebody else compiled."""
        return self._artefacts.setdefault((artefact.key, artefact.ptx_only), artefact)

    def loaded(self) -> list[Artefact]:
        """What the process has asked for so far."""
        return list(self._artefacts.values())

    def load(self, source: KernelSource, where: str, params_bytes: int = 0) -> int:
        """Compiles if need be, loads into ``cuda:INDEX``, ``emulator`` or ``null``; the handle that launches take."""
        slot = (source.key, where)
        handle = self._handles.get(slot)
        if handle is None:
            handle = self._handles[slot] = register(self.get(source), where, params_bytes)
        return handle


def register(artefact: Artefact, where: str, params_bytes: int = 0) -> int:
    """Hands an artefact to the launch layer: a cubin to the driver of a CUDA device, PTX to the emulator.

    ``params_bytes`` is the size of the kernel's argument as the host knows it; a kernel that disagrees is refused.
    """
    import torch

    from deep_gemm_k3 import _extension

    image = artefact.cubin if where.startswith("cuda") else artefact.ptx.encode() + b"\0"
    data = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    return int(_extension.ops().register_kernel(where, artefact.key, artefact.entry, artefact.arch, data, params_bytes))


@cache
def default_store() -> KernelStore:
    """The store of the process: default cache directory, default compiler."""
    return KernelStore()
