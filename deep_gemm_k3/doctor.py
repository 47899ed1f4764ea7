"""``python -m deep_gemm_k3 doctor``: what this machine has, what is missing, and the command that mends it.

Nothing here creates a CUDA context. Libraries are opened by name, devices are asked through the driver after ``cuInit``
alone, and torch is never asked about CUDA. The exit code is 0 when everything that this machine needs is there: a
machine with a GPU needs the run-time compiler too, one without needs only the package itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import typer

from deep_gemm_k3 import _extension

OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``note`` says that something optional is absent; ``missing`` fails the doctor."""

    subject: str
    status: str
    found: str
    mend: str = ""


@dataclass(frozen=True)
class Device:
    ordinal: int
    name: str
    capability: tuple[int, int]
    multicast: bool
    peers: tuple[int, ...]


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


class Driver:
    """libcuda, opened by name and asked through functions that need no context."""

    _NOTHING_HERE = (34, 100)  # CUDA_ERROR_STUB_LIBRARY, CUDA_ERROR_NO_DEVICE
    _MULTICAST_SUPPORTED = 132
    _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76

    fault = 0
    """Why it refuses to start, where that is not for want of a GPU; `devices` finds out."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")

    def version(self) -> str:
        value = ctypes.c_int()
        if self.lib.cuDriverGetVersion(ctypes.byref(value)) != 0:
            return "unknown"
        return f"{value.value // 1000}.{value.value % 1000 // 10}"

    def _attribute(self, attribute: int, device: int) -> int:
        value = ctypes.c_int()
        error = self.lib.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return value.value if error == 0 else 0

    def devices(self) -> list[Device]:
        count = ctypes.c_int()
        error = self.lib.cuInit(0) or self.lib.cuDeviceGetCount(ctypes.byref(count))
        if error:
            self.fault = 0 if error in self._NOTHING_HERE else error
            return []
        found = []
        for ordinal in range(count.value):
            name = ctypes.create_string_buffer(128)
            self.lib.cuDeviceGetName(name, 128, ordinal)
            peers = []
            for other in range(count.value):
                can = ctypes.c_int()
                if (
                    other != ordinal
                    and self.lib.cuDeviceCanAccessPeer(ctypes.byref(can), ordinal, other) == 0
                    and can.value
                ):
                    peers.append(other)
            capability = (
                self._attribute(self._CAPABILITY_MAJOR, ordinal),
                self._attribute(self._CAPABILITY_MINOR, ordinal),
            )
            multicast = bool(self._attribute(self._MULTICAST_SUPPORTED, ordinal))
            found.append(Device(ordinal, name.value.decode(), capability, multicast, tuple(peers)))
        return found


def open_driver() -> Driver | None:
    try:
        return Driver()
    except OSError:
        return None


def check_versions() -> Iterator[Finding]:
    import deep_gemm_k3

    yield Finding("package", OK, f"deep_gemm_k3 {deep_gemm_k3.__version__} in {_extension.PACKAGE_DIR}")
    libc = " ".join(platform.libc_ver())
    yield Finding("python", OK, f"{platform.python_version()} on {platform.machine()}, {libc}, {os.cpu_count()} cores")
    version = _version_of("torch")
    if version is None:
        yield Finding("torch", MISSING, "not installed", "pip install 'torch>=2.11'")
    elif _extension.torch_release(version) < _extension.OLDEST_TORCH:
        yield Finding("torch", MISSING, f"{version}; 2.11 or later is needed", "pip install 'torch>=2.11'")
    else:
        yield Finding("torch", OK, version)


def check_extension() -> Iterator[Finding]:
    try:
        built = _extension.ops().version()
    except ImportError as error:
        yield Finding("extension", MISSING, str(error).split(" Mend with:")[0], _extension.mending_command())
        return
    import deep_gemm_k3

    if built != deep_gemm_k3.__version__:
        found = f"built for {built}, the package is {deep_gemm_k3.__version__}"
        yield Finding("extension", MISSING, found, _extension.mending_command())
    else:
        yield Finding("extension", OK, f"{_extension.LIBRARY.name}, torch stable ABI 2.11")


def check_headers() -> Iterator[Finding]:
    headers = sorted(_extension.INCLUDE_DIR.rglob("*.cuh"))
    if headers:
        yield Finding("kernel sources", OK, f"{len(headers)} headers")
    else:
        yield Finding("kernel sources", MISSING, f"none in {_extension.INCLUDE_DIR}", _extension.mending_command())


def check_cache() -> Iterator[Finding]:
    from deep_gemm_k3.jit import Cache

    cache = Cache()
    try:
        cache.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache.root):
            entries = list(cache.entries())
    except OSError as error:
        found = f"{cache.root}: {error.strerror}; every process compiles for itself"
        yield Finding("cache", NOTE, found, "export DGK3_CACHE_DIR=a directory you may write")
        return
    damaged = [entry for entry in entries if entry.damage]
    size = sum(entry.size for entry in entries) / 1e6
    others = sum(bool(entry.other_format) for entry in entries)
    apart = f", {others} of another format" if others else ""
    yield Finding("cache", OK, f"{cache.root}: {len(entries) - others} kernels{apart}, {size:.1f} MB")
    if damaged:
        found = f"{len(damaged)} damaged kernels, rebuilt when they are needed"
        yield Finding("cache contents", NOTE, found, "python -m deep_gemm_k3 cache clear")


def check_compiler(needed: bool) -> Iterator[Finding]:
    """The run-time compiler, as the JIT itself finds it."""
    from deep_gemm_k3.jit import ToolchainError, find_toolchain

    try:
        toolchain = find_toolchain()
    except ToolchainError as error:
        what, _, mend = str(error).partition(" Mend with: ")
        yield Finding("compiler", MISSING if needed else NOTE, f"kernels cannot be compiled. {what}", mend)
        return
    for subject, found in toolchain.describe().items():
        yield Finding(subject, OK, found)


def torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def check_devices(driver: Driver | None, devices: list[Device]) -> Iterator[Finding]:
    if driver is None:
        yield Finding("driver", NOTE, "no libcuda: CPU tensors only")
        return
    if driver.fault:
        found = f"CUDA {driver.version()} refuses to start, CUresult {driver.fault}"
        yield Finding("driver", MISSING, found, "nvidia-smi, which tells more; then the driver and its services")
        return
    yield Finding("driver", OK, f"CUDA {driver.version()}")
    if not devices:
        yield Finding("gpu", NOTE, "none: CPU tensors only")
    elif not torch_has_cuda():
        yield Finding(
            "torch for CUDA", MISSING, "this torch was built without CUDA", "pip install torch (a CUDA build)"
        )
    for device in devices:
        major, minor = device.capability
        supported = major in (9, 10)
        found = f"{device.name}, sm_{major}{minor}"
        yield Finding(
            f"gpu {device.ordinal}", OK if supported else NOTE, found if supported else f"{found}: no kernel for it"
        )
    if len(devices) > 1:
        alone = [d.ordinal for d in devices if len(d.peers) < len(devices) - 1]
        if alone:
            found = f"GPUs {alone} do not reach all others: groups over them are refused"
            yield Finding("peer access", NOTE, found, "nvidia-smi topo -p2p r")
        else:
            yield Finding("peer access", OK, "every GPU reaches every other")


def check_symmetric_memory(devices: list[Device]) -> Iterator[Finding]:
    import importlib.util

    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        status = MISSING if devices else NOTE
        yield Finding(
            "symmetric memory", status, "this torch has none: no process groups on GPUs", "pip install -U torch"
        )
    elif not devices:
        yield Finding("symmetric memory", OK, "POSIX shared memory for groups of processes on the CPU")
    else:
        multicast = all(device.multicast for device in devices)
        yield Finding("symmetric memory", OK, f"torch; multicast {'present' if multicast else 'absent'} and not used")


def examine() -> list[Finding]:
    """All findings, in the order of the report. A check that itself fails becomes a finding."""
    driver = open_driver()
    devices = driver.devices() if driver else []
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_versions,
        check_extension,
        check_headers,
        check_cache,
        lambda: check_compiler(bool(devices)),
        lambda: check_devices(driver, devices),
        lambda: check_symmetric_memory(devices),
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:
            findings.append(Finding("doctor", MISSING, f"{type(error).__name__}: {error}"))
    return findings


app = typer.Typer(add_completion=False)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Look at this machine: what works, what is missing, how to mend it. Exit code 1 when something needed is missing."""
    findings = examine()
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print(f"{finding.status:<8}{finding.subject:<{width + 2}}{finding.found}")
            if finding.mend:
                print(f"{'':<8}{'':<{width + 2}}mend with: {finding.mend}")
    missing = [finding.subject for finding in findings if finding.status == MISSING]
    if missing:
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
        raise typer.Exit(1)
