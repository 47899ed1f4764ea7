"""Modules, devices and launches of the emulator."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_gemm_k3.arguments import check_bool, check_choice, check_int, check_text, is_int, shown
from deep_gemm_k3.emulator._library import ArgumentError, EmulatorError, error_text, library, refuse
from deep_gemm_k3.emulator.host_memory import ADDRESSES, Memory, is_mapped, memory_of
from deep_gemm_k3.emulator.parameters import pack

ADVERSARIES = ("random", "earliest", "latest")
_OLDEST_ARCH = 75  # of the compilers that make the PTX this emulator reads


@dataclass(frozen=True)
class Finding:
    """Something the program did that the hardware does not promise to bear."""

    kind: str
    text: str
    count: int


class Module:
    """PTX text, parsed. Kernels are decoded when they are first launched, or all at once by ``check``."""

    def __init__(self, ptx: str | bytes) -> None:
        self._handle: int | None = None
        if not isinstance(ptx, str | bytes):
            raise refuse("ptx", "text or bytes", ptx)
        text = ptx.encode() if isinstance(ptx, str) else ptx
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
        if check_text("kernel", kernel) and kernel not in self.kernels:
            raise refuse("kernel", f"one of {', '.join(self.kernels)}", kernel)
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
    values: Sequence[int] = [value] if is_int(value) else value  # type: ignore[list-item,assignment]
    if (
        not isinstance(values, Sequence)
        or not 1 <= len(values) <= 3
        or any(not is_int(size) or not 1 <= size <= limit for size, limit in zip(values, _LIMITS, strict=False))
    ):
        text = shown(values)
        raise ArgumentError(f"{name}: wanted x[, y[, z]] in 1..{_LIMITS[0]}, 1..{_LIMITS[1]} each, given {text}")
    return [*map(int, values), *[1] * (3 - len(values))]


def _check_arch(given: Any) -> str:
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", given) if isinstance(given, str) else None
    if found is None or int(found[1]) < _OLDEST_ARCH:
        raise refuse("arch", f"sm_90a, sm_100a or another from sm_{_OLDEST_ARCH} on", given)
    return str(given)


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
        check_choice("adversary", adversary, ADVERSARIES)
        check_choice("on_deadlock", on_deadlock, ("report", "time"))
        flags = {"race_detection": race_detection, "lanes_apart": lanes_apart, "coverage": coverage, "trace": trace}
        for name, flag in flags.items():
            check_bool(name, flag)
        self.num_sms, self.arch = check_int("num_sms", num_sms, 1, 2**16), _check_arch(arch)
        check_text("roles", roles)
        self._instances: dict[tuple[int, int], int] = {}
        self._modules: list[Module] = []
        self._machine = library().emulator_machine(
            check_int("seed", seed, 0, 2**64 - 1),
            ADVERSARIES.index(adversary),
            race_detection | (on_deadlock == "time") << 1 | lanes_apart << 2 | coverage << 3,
            check_int("quantum", quantum, 0, 2**32 - 1),
            check_int("max_instructions", max_instructions, 0, 2**64 - 1),
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
        """Makes host memory reachable by kernels: what a launch does by itself for the tensors among its parameters. Raises
        ``ValueError`` unless this process may read it, and write it where it is ``writable``."""
        check_int("address", address, 1, ADDRESSES - 1)
        check_int("size", size, 0, ADDRESSES - address)
        if size and not is_mapped(address, size, check_bool("writable", writable)):
            rights = "read and write" if writable else "read"
            raise refuse(
                "address", f"memory that this process may {rights}", f"{size} bytes at {address:#x}", is_text=True
            )
        self._reach(check_text("name", name), Memory(address, size, address, writable))

    def _reach(self, name: str, memory: Memory) -> None:
        library().emulator_memory_add(self._machine, memory.base, memory.num_bytes, name.encode(), int(memory.writable))

    def unregister(self, address: int) -> None:
        """Later accesses to the allocation are reported as uses after it was freed."""
        library().emulator_memory_remove(self._machine, check_int("address", address, 0, ADDRESSES - 1))

    def own(self, tensor: Any, rank: int) -> None:
        """Says whose memory a tensor is: bytes that other ranks read or write there count as a peer's."""
        memory = memory_of("tensor", tensor)
        check_int("rank", rank, 0, 2**32 - 1)
        library().emulator_own(self._machine, memory.address, int(tensor.nbytes), rank)

    def trace(self) -> str:
        """What the launches since the last call did, as JSON for Chrome's or Perfetto's viewer: one track per warp, by role,
        with every wait named by the functions around it. Empty without ``trace=True``."""
        return bytes(library().emulator_trace(self._machine)).decode()

    def reached_lines(self) -> set[int]:
        """The lines of PTX that some warp has executed, counted from 1. Empty without ``coverage=True``."""
        return {int(line) for line in library().emulator_reached(self._machine).split()}

    def register_tensor(self, tensor: Any, name: str) -> None:
        """Makes all memory behind a tensor or an array reachable by kernels; what is read-only stays so."""
        self._reach(check_text("name", name), memory_of(name, tensor))

    def symbol(self, module: Module, name: str, rank: int = 0) -> tuple[int, int]:
        """Address and size of a module variable, as a rank sees it."""
        if name not in module.variables:
            raise refuse("name", f"one of {', '.join(module.variables)}", name)
        offset, size = module.variables[name]
        return library().emulator_instance_base(self._instance(module, rank)) + offset, size

    def launch(
        self, module: Module, kernel: str, grid: int | Sequence[int], block: int | Sequence[int], **options: Any
    ) -> None:
        """Runs one kernel to its end; ``options`` are the other fields of ``Launch``."""
        self.run([Launch(module, kernel, grid, block, **options)])

    def run(self, launches: Iterable[Launch]) -> None:
        """Runs launches until all have ended: ranks side by side, launches of one rank in their order, as in a stream."""
        if not isinstance(launches, Iterable):
            raise refuse("launches", "a list of Launch", launches)
        prepared = [(launch, *self._checked(launch)) for launch in launches]  # all, before the machine has one
        for launch, shape, packed in prepared:
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

    def _checked(self, launch: Launch) -> tuple[list[int], bytes]:
        """Shape and parameters of a launch."""
        if not isinstance(launch, Launch):
            raise refuse("launches", "a list of Launch", launch)
        if not isinstance(launch.module, Module):
            raise refuse("module", "a Module", launch.module)
        if launch.module.target != self.arch:
            raise EmulatorError(f"arch: wanted PTX for {self.arch}, given PTX for {launch.module.target}")
        shape = [
            *_triple("grid", launch.grid),
            *_triple("block", launch.block),
            *_triple("cluster", launch.cluster),
            check_int("shared_bytes", launch.shared_bytes, 0, 2**31 - 1),
            self.num_sms,
            check_int("rank", launch.rank, 0, 2**32 - 1),
        ]
        return shape, self._pack(launch)

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
        known = launch.module.kernels.get(check_text("kernel", launch.kernel))
        if known is None:
            raise EmulatorError(f"kernel: wanted one of {', '.join(launch.module.kernels)}, given {launch.kernel}")
        return pack(launch.kernel, known["params"], launch.params, self._reach)
