"""Every environment variable the package reads, in one table; nothing else in the package touches the environment.

A variable is read when it is asked for, never at import, so a test or a launcher may set it late::

    from deep_gemm_k3 import envs
    envs.CACHE_DIR.get()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class EnvironmentValueError(ValueError):
    """A variable holds something it must not."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: how it is spelled, what it may hold and what it means."""

    name: str
    kind: str
    default: T
    meaning: str
    parse: Callable[[str], T]
    default_text: str = ""

    def get(self) -> T:
        """The value now: the default when the variable is unset or empty."""
        raw = os.environ.get(self.name, "")
        if raw == "":
            return self.default
        try:
            return self.parse(raw)
        except ValueError as error:
            raise EnvironmentValueError(f"{self.name}: wanted {self.kind}, given {raw!r}") from error

    def is_set(self) -> bool:
        return os.environ.get(self.name, "") != ""

    def set(self, value: T) -> None:
        """Sets it for this process and its children."""
        os.environ[self.name] = str(value)


_table: list[Variable[object]] = []


def _define(variable: Variable[T]) -> Variable[T]:
    _table.append(variable)  # type: ignore[arg-type]
    return variable


def _text(name: str, meaning: str, default: str = "", default_text: str = "", kind: str = "text") -> Variable[str]:
    return _define(Variable(name, kind, default, meaning, str, default_text))


def _path(name: str, meaning: str, default_text: str) -> Variable[str]:
    return _define(Variable(name, "a path", "", meaning, os.path.expanduser, default_text))


def _choice(name: str, choices: tuple[str, ...], meaning: str) -> Variable[str]:
    def parse(raw: str) -> str:
        if raw not in choices:
            raise ValueError(raw)
        return raw

    return _define(Variable(name, f"one of {', '.join(choices)}", choices[0], meaning, parse))


def _flag(name: str, meaning: str) -> Variable[bool]:
    def parse(raw: str) -> bool:
        lowered = raw.lower()
        if lowered not in _TRUE + _FALSE:
            raise ValueError(raw)
        return lowered in _TRUE

    return _define(Variable(name, "0 or 1", False, meaning, parse))


def _count(
    name: str, default: int, meaning: str, default_text: str = "", low: int = 0, high: int | None = None
) -> Variable[int]:
    def parse(raw: str) -> int:
        value = int(raw)
        if value < low or (high is not None and value > high):
            raise ValueError(raw)
        return value

    kind = f"a whole number, {low} or more" if high is None else f"a whole number in {low}..{high}"
    return _define(Variable(name, kind, default, meaning, parse, default_text))


def _seconds(name: str, default: float, meaning: str) -> Variable[float]:
    def parse(raw: str) -> float:
        value = float(raw)
        if not 0 < value < 1e9:
            raise ValueError(raw)
        return value

    return _define(Variable(name, "seconds above 0 and below 1e9", default, meaning, parse))


CACHE_DIR = _path("DGK3_CACHE_DIR", "Where compiled kernels are kept.", "the user's cache directory")
CPU_TARGET = _choice("DGK3_CPU_TARGET", ("sm_100a", "sm_90a"), "The architecture that stands behind CPU tensors.")
CPU_EXECUTOR = _choice(
    "DGK3_CPU_EXECUTOR",
    ("emulator", "oracle"),
    "What computes calls on CPU tensors: the emulator, or the oracle for tests of all that is not the kernel.",
)
EMULATOR_SEED = _count("DGK3_EMULATOR_SEED", 0, "Schedule of the emulator behind CPU tensors.")
EMULATOR_ADVERSARY = _choice(
    "DGK3_EMULATOR_ADVERSARY", ("random", "earliest", "latest"), "When asynchronous work completes in the emulator."
)
EMULATOR_RACES = _flag("DGK3_EMULATOR_RACES", "Looks for data races in the emulator behind CPU tensors.")
EMULATOR_TRACE = _path("DGK3_EMULATOR_TRACE", "Where the emulator writes a trace for Perfetto at exit.", "none")
COMPILER = _choice("DGK3_COMPILER", ("nvrtc", "nvcc"), "What compiles kernels at run time.")
COMPILE_WORKERS = _count("DGK3_COMPILE_WORKERS", 0, "Processes that compile in a warm-up.", "0: one per core")
KEEP_SOURCES = _flag("DGK3_KEEP_SOURCES", "Keeps generated sources and compiler logs beside the cached kernels.")
TIMEOUT_S = _seconds("DGK3_TIMEOUT_S", 120.0, "How long a rank waits for its peers when the caller names no limit.")
LOG_LEVEL = _choice("DGK3_LOG_LEVEL", ("warning", "info", "debug", "error"), "What the package's logger prints.")
CUDA_HOME = _path("CUDA_HOME", "A CUDA toolkit, searched after the pip packages.", "unset")
CUDA_PATH = _path("CUDA_PATH", "Like CUDA_HOME, asked when that is unset.", "unset")
MASTER_ADDR = _text("MASTER_ADDR", "Address of rank 0's store in `utils.dist.init_dist`.", "127.0.0.1")
MASTER_PORT = _count("MASTER_PORT", 8361, "Port of that store.", low=1, high=2**16 - 1)
WORLD_SIZE = _count("WORLD_SIZE", 1, "Number of nodes in `utils.dist.init_dist`.", low=1, high=2**16)
RANK = _count("RANK", 0, "This node's number in `utils.dist.init_dist`, below WORLD_SIZE.")


def table() -> tuple[Variable[object], ...]:
    """All variables in the order of the documentation."""
    return tuple(_table)


# Nothing in the package uses NVLink multicast, and where machines share a switch its set-up can disturb others.
_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


def prepare_cuda_rank(only_device: int | None = None) -> None:
    """For a process that is one rank of several, before CUDA starts: no multicast, and kernels loaded when they are used.

    With ``only_device`` the process sees no other device; its ordinal is then 0.
    """
    os.environ.update(_NO_MULTICAST, CUDA_MODULE_LOADING="LAZY")
    if only_device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[only_device] if visible else str(only_device)


@contextmanager
def equal_ordinals_allowed() -> Iterator[None]:
    """While torch maps the memory of peers: devices of one ordinal are different ones, each hidden from the others' ranks."""
    name = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def child_environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment for a child process; a value of None removes the variable."""
    environment = dict(os.environ)
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def markdown() -> str:
    """The README's section about environment variables."""
    lines = ["| variable | value | default | meaning |", "|---|---|---|---|"]
    for variable in table():
        default: object = variable.default_text or variable.default
        if isinstance(default, bool):
            default = int(default)
        lines.append(f"| `{variable.name}` | {variable.kind} | {default} | {variable.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
