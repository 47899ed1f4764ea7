"""What this installation and machine can do, with the reason when they cannot.

A probe never starts a collective and never initialises CUDA: it may be called in any process, at any time, on any subset of
ranks.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from .arguments import is_int, shown


@dataclass(frozen=True)
class Capability:
    """True or false, and why."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return f"{'yes' if self.available else 'no'}: {self.reason}"


def supports_bf16_shared_independent_tokens() -> bool:
    """Shared tokens may be more or fewer than routed tokens in every call with a BF16 shared expert."""
    return True


@functools.cache
def extension() -> Capability:
    """The host extension can be loaded."""
    from ._extension import ExtensionError, load

    try:
        load()
    except ExtensionError as error:
        return Capability(False, str(error))
    return Capability(True, "the host extension is loaded")


@functools.cache
def cuda_driver() -> Capability:
    """A CUDA driver and at least one device are present. Asks the driver library, creates no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Capability(False, "libcuda.so.1 was not found: no NVIDIA driver is installed")
    if (code := driver.cuInit(0)) != 0:
        return Capability(False, f"the CUDA driver refused to start (error {code})")
    count = ctypes.c_int()
    if (code := driver.cuDeviceGetCount(ctypes.byref(count))) != 0 or count.value == 0:
        return Capability(False, f"the CUDA driver has no device (error {code}, {count.value} devices)")
    return Capability(True, f"{count.value} CUDA device{'s' if count.value > 1 else ''}")


def _device_attribute(driver: ctypes.CDLL, attribute: int, device: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value


@functools.cache
def device_target(index: int = 0) -> Capability:
    """The target that kernels for one device are compiled for, as the reason; false when there is none."""
    driver = cuda_driver()
    if not driver:
        return driver
    library = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_int()
    if library.cuDeviceGet(ctypes.byref(handle), index) != 0:
        return Capability(False, f"there is no CUDA device {index}")
    major, minor = (_device_attribute(library, attribute, handle.value) for attribute in (75, 76))
    if (major, minor) == (9, 0):
        return Capability(True, "sm_90a")
    if major == 10:
        return Capability(True, "sm_100a")
    return Capability(False, f"cuda:{index} has compute capability {major}.{minor}; 9.0 and 10.x are served")


def mega_moe(device: str = "cuda", index: int = 0) -> Capability:
    """The fused call can run on tensors of this device type."""
    if not (loaded := extension()):
        return loaded
    if isinstance(device, str) and device == "cpu":
        return Capability(True, "CPU tensors: the emulator executes the kernel's PTX")
    if not isinstance(device, str) or device != "cuda":
        return Capability(False, f"device: wanted 'cpu' or 'cuda', given {shown(device)}")
    if not is_int(index) or not 0 <= index < 2**31:
        return Capability(False, f"index: wanted the number of a CUDA device, given {shown(index)}")
    target = device_target(index)
    if not target:
        return target
    from . import _extension
    from .mega.plan import KERNELS

    kernel = _extension.INCLUDE_DIR / "deep_gemm_k3" / "kernels" / f"{KERNELS[target.reason]}.cuh"
    if not kernel.exists():
        return Capability(False, f"there is no kernel for {target.reason}")
    return Capability(True, f"one kernel for {target.reason}, compiled on first use")


def publication(num_ranks: int, shared_hidden: int, mode: str = "rs") -> Capability:
    """A publication mode ('rs' by columns, 'sp_rs' by tokens) fits these widths."""
    if not isinstance(mode, str) or mode not in ("rs", "sp_rs"):
        return Capability(False, f"mode: wanted 'rs' or 'sp_rs', given {shown(mode)}")
    if not is_int(num_ranks) or num_ranks < 1:
        return Capability(False, f"num_ranks: wanted an integer of at least 1, given {shown(num_ranks)}")
    if not is_int(shared_hidden) or shared_hidden < 1 or shared_hidden % 128 != 0:
        return Capability(False, f"shared_hidden: wanted a multiple of 128, given {shown(shared_hidden)}")
    if mode == "rs" and (shared_hidden % num_ranks != 0 or shared_hidden // num_ranks % 8 != 0):
        return Capability(
            False, f"shared hidden {shared_hidden} does not give {num_ranks} ranks a multiple of 8 columns"
        )
    return Capability(True, "published with 16-byte stores to the peers' workspaces")
