"""Modules, devices and launches of the emulator."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_gemm_k3.arguments import check_int, is_int
from deep_gemm_k3.emulator._library import EmulatorError, error_text, library
from deep_gemm_k3.emulator.tensor_map import TensorMap, address_of

ADVERSARIES = ("random", "earliest", "latest")
_FORMATS = {"f32": "<f", "f64": "<d"}


@dataclass(frozen=True)
class Finding:
    """Something the program did that the hardware does not promise to bear."""

    kind: str
    text: str
    count: int


class Module:
    """PTX text, parsed. Kernels are decoded when they are first launched, or all at once by ``check``."""

    def __init__(self, ptx: str | bytes) -> None:
        text = ptx.encode() if isinstance(ptx, str) else ptx
        self._handle: int | None = None
        self._handle = library().emulator_module(text, len(text))
        if not self._handle:
            raise EmulatorError(error_text())
        described = json.loads(library().emulator_module_describe(self._handle))
        self.target: str = described["target"]
        self.kernels: dict[str, dict[str, Any]] = described["kernels"]
        self.variables: dict[str, list[int]] = described["variables"]

    @classmethod
    def load(cls, path: str | Path) -> Module:
        return cls(Path(path).read_bytes().rstrip(b"\0"))

    def check(self, kernel: str = "") -> None:
        """Decodes the kernel, or every one: an opcode or modifier without a model is an error with its line."""
        if not library().emulator_module_check(self._handle, kernel.encode()):
            raise EmulatorError(error_text())

    def __del__(self) -> None:
        if self._handle:
            library().emulator_module_free(self._handle)


@dataclass
class Launch:
    """One kernel to run. ``params`` are tensors, arrays, numbers, bytes or tensor maps, in the kernel's order."""

    module: Module
    kernel: str
    grid: int | Sequence[int]
    block: int | Sequence[int]
    params: Sequence[Any] = ()
    cluster: int | Sequence[int] = 1
    shared_bytes: int = 0
    rank: int = 0


_LIMITS = (2**31 - 1, 65535, 65535)  # of a grid; blocks and clusters have narrower ones, which a launch checks


def _triple(name: str, value: int | Sequence[int]) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    if not 1 <= len(values) <= 3 or any(
        not is_int(size) or not 1 <= size <= limit for size, limit in zip(values, _LIMITS, strict=False)
    ):
        raise EmulatorError(f"{name}: wanted x[, y[, z]] in 1..{_LIMITS[0]}, 1..{_LIMITS[1]} each, given {values}")
    return [*values, *[1] * (3 - len(values))]


class Device:
    """An emulated GPU. One device per rank is not needed: launches of several ranks run on it side by side."""

    def __init__(
        self,
        num_sms: int = 4,
        arch: str = "sm_90a",
        seed: int = 0,
        *,
        adversary: str = "random",
        race_detection: bool = False,
        on_deadlock: str = "report",
        quantum: int = 0,
        max_instructions: int = 0,
        lanes_apart: bool = False,
        coverage: bool = False,
        roles: str = "",
        trace: bool = False,
    ) -> None:
        """``roles`` names the warps of a CTA in the order of their numbers, "math*8,producer,dispatch*3": counters are then
        also kept per role, and a ``trace`` has their names. ``lanes_apart`` lets lanes of a warp run apart wherever no
        instruction needs them together, as independent thread scheduling allows. ``coverage`` is for ``reached_lines``."""
        if adversary not in ADVERSARIES:
            raise ValueError(f"adversary: wanted one of {', '.join(ADVERSARIES)}, given {adversary!r}")
        if on_deadlock not in ("report", "time"):
            raise ValueError(f"on_deadlock: wanted 'report' or 'time', given {on_deadlock!r}")
        self.num_sms, self.arch = check_int("num_sms", num_sms, 1, 2**16), arch
        self._instances: dict[tuple[int, int], int] = {}
        self._modules: list[Module] = []
        self._machine = library().emulator_machine(
            check_int("seed", seed, 0, 2**64 - 1),
            ADVERSARIES.index(adversary),
            race_detection | (on_deadlock == "time") << 1 | lanes_apart << 2 | coverage << 3,
            quantum,
            max_instructions,
        )
        if not library().emulator_observe(self._machine, roles.encode(), int(trace)):
            raise ValueError(error_text())
        self.counters: dict[str, int] = {}
        self.role_counters: dict[str, dict[str, int]] = {}
        self.findings: list[Finding] = []
        self.printed = ""
        self.schedule = 0
        """A digest of which warp ran how far when and what completed when: equal for equal runs."""

    def __del__(self) -> None:
        if getattr(self, "_machine", None):
            for instance in self._instances.values():
                library().emulator_instance_free(instance)
            library().emulator_machine_free(self._machine)

    def register(self, address: int, size: int, name: str, writable: bool = True) -> None:
        """Makes host memory reachable by kernels: what a launch does by itself for the tensors among its parameters."""
        library().emulator_memory_add(self._machine, address, size, name.encode(), int(writable))

    def unregister(self, address: int) -> None:
        """Later accesses to the allocation are reported as uses after it was freed."""
        library().emulator_memory_remove(self._machine, address)

    def own(self, tensor: Any, rank: int) -> None:
        """Says whose memory a tensor is: bytes that other ranks read or write there count as a peer's."""
        library().emulator_own(self._machine, address_of(tensor), int(tensor.nbytes), rank)

    def trace(self) -> str:
        """What the launches since the last call did, as JSON for Chrome's or Perfetto's viewer: one track per warp, by role,
        with every wait named by the functions around it. Empty without ``trace=True``."""
        return bytes(library().emulator_trace(self._machine)).decode()

    def reached_lines(self) -> set[int]:
        """The lines of PTX that some warp has executed, counted from 1. Empty without ``coverage=True``."""
        return {int(line) for line in library().emulator_reached(self._machine).split()}

    def register_tensor(self, tensor: Any, name: str) -> None:
        if hasattr(tensor, "untyped_storage"):
            storage = tensor.untyped_storage()
            self.register(storage.data_ptr(), storage.nbytes(), name)
        else:
            base = tensor
            while getattr(base, "base", None) is not None and hasattr(base.base, "ctypes"):
                base = base.base
            self.register(int(base.ctypes.data), int(base.nbytes), name)

    def symbol(self, module: Module, name: str, rank: int = 0) -> tuple[int, int]:
        """Address and size of a module variable, as a rank sees it."""
        offset, size = module.variables[name]
        return library().emulator_instance_base(self._instance(module, rank)) + offset, size

    def launch(
        self, module: Module, kernel: str, grid: int | Sequence[int], block: int | Sequence[int], **options: Any
    ) -> None:
        """Runs one kernel to its end; ``options`` are the other fields of ``Launch``."""
        self.run([Launch(module, kernel, grid, block, **options)])

    def run(self, launches: Iterable[Launch]) -> None:
        """Runs launches until all have ended: ranks side by side, launches of one rank in their order, as in a stream."""
        launches = list(launches)
        for launch in launches:
            if launch.module.target != self.arch:
                raise EmulatorError(f"arch: wanted PTX for {self.arch}, given PTX for {launch.module.target}")
            packed = self._pack(launch)
            shape = [
                *_triple("grid", launch.grid),
                *_triple("block", launch.block),
                *_triple("cluster", launch.cluster),
                check_int("shared_bytes", launch.shared_bytes, 0, 2**31 - 1),
                self.num_sms,
                launch.rank,
            ]
            instance = self._instance(launch.module, launch.rank)
            if not library().emulator_launch(
                self._machine, instance, launch.kernel.encode(), (ctypes.c_uint32 * 12)(*shape), packed, len(packed)
            ):
                raise EmulatorError(error_text())
        done = library().emulator_run(self._machine)
        failure = "" if done else error_text()
        report = json.loads(library().emulator_report(self._machine))
        self.counters, self.role_counters = report["counters"], report["roles"]
        self.findings = [Finding(**entry) for entry in report["findings"]]
        self.printed = report["printed"]
        self.schedule = report["schedule"]
        if not done:
            raise EmulatorError(failure)

    def _instance(self, module: Module, rank: int) -> int:
        key = (id(module), rank)
        if key not in self._instances:
            made = library().emulator_instance(module._handle)
            if not made:
                raise EmulatorError(error_text())
            self._instances[key] = made
            self._modules.append(module)  # an instance needs its module, and the key its identity
        return self._instances[key]

    def _pack(self, launch: Launch) -> bytes:
        known = launch.module.kernels.get(launch.kernel)
        if known is None:
            raise EmulatorError(f"kernel: wanted one of {', '.join(launch.module.kernels)}, given {launch.kernel}")
        wanted = known["params"]
        if len(wanted) != len(launch.params):
            raise EmulatorError(f"params: {launch.kernel} wants {len(wanted)}, given {len(launch.params)}")
        out = bytearray()
        for number, ((name, kind, offset, size), value) in enumerate(zip(wanted, launch.params, strict=True)):
            out += bytes(offset - len(out))
            data = self._pack_one(f"params[{number}] of {launch.kernel}", kind, size, value)
            if len(data) != size:
                raise EmulatorError(f"params[{number}] ({name}): wanted {size} bytes, given {len(data)}")
            out += data
        return bytes(out)

    def _pack_one(self, name: str, kind: str, size: int, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, TensorMap):
            if not isinstance(value.tensor, int):
                self.register_tensor(value.tensor, f"tensor map {name}")
            return value.encoded
        if hasattr(value, "data_ptr") or (hasattr(value, "ctypes") and getattr(value, "ndim", 0) > 0):
            self.register_tensor(value, name)
            return struct.pack("<Q", address_of(value))
        if isinstance(value, float) or kind in _FORMATS:
            return struct.pack(_FORMATS.get(kind, "<f" if size == 4 else "<d"), value)
        number = int(value)
        if not -(1 << (8 * size - 1)) <= number < 1 << (8 * size):
            raise EmulatorError(f"{name}: wanted a number of {size} bytes, given {number}")
        return (number & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
