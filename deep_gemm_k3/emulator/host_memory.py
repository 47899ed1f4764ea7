"""Host memory that kernels are to reach: where a tensor or an array lies, or a refusal by name of what lies nowhere here."""

from __future__ import annotations

from typing import Any, NamedTuple

from deep_gemm_k3.arguments import is_int, shown
from deep_gemm_k3.emulator._library import refuse

ADDRESSES = 2**64
WANTED = "a dense CPU tensor or an array"


class Memory(NamedTuple):
    """An allocation, and the address of a tensor's or an array's first element in it."""

    base: int
    num_bytes: int
    address: int
    writable: bool


def is_array(value: Any) -> bool:
    """Torch tensors of any kind, and numpy arrays."""
    return hasattr(value, "untyped_storage") or (hasattr(value, "ctypes") and hasattr(value, "flags"))


def memory_of(name: str, value: Any) -> Memory:
    """The whole allocation behind ``value``. Raises ``ArgumentError`` where it is not memory of this process: tensors of other
    devices, sparse ones and those without data."""
    if not is_array(value):
        raise refuse(name, WANTED, value)
    if hasattr(value, "untyped_storage"):
        return _of_tensor(name, value)
    root = value  # views keep what owns the memory: an array, or a tensor
    while is_array(getattr(root, "base", None)):
        root = root.base
    if hasattr(root, "untyped_storage"):
        return _of_tensor(name, root)._replace(address=int(value.ctypes.data))
    return Memory(int(root.ctypes.data), int(root.nbytes), int(value.ctypes.data), bool(root.flags.writeable))


def _of_tensor(name: str, tensor: Any) -> Memory:
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.device.type != "cpu" or layout != "strided":
        raise refuse(name, WANTED, f"{shown(tensor)}, {layout} on {tensor.device}", is_text=True)
    try:
        storage = tensor.untyped_storage()
        base, num_bytes = storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # of tracing and the like: a shape and no data
        base, num_bytes = 0, 1
    if base == 0 and num_bytes:
        raise refuse(name, WANTED, f"{shown(tensor)} without data", is_text=True)
    return Memory(base, num_bytes, int(tensor.data_ptr()), True)


def address_of(name: str, value: Any) -> int:
    """The address of a tensor's or an array's first element; integers are addresses already."""
    if is_int(value) and 0 <= value < ADDRESSES:
        return int(value)
    if is_array(value):
        return memory_of(name, value).address
    raise refuse(name, f"{WANTED}, or an address", value)


def is_mapped(low: int, num_bytes: int, writable: bool) -> bool:
    """Whether this process may read, or write too, all of the range."""
    reached, high = low, low + num_bytes
    with open("/proc/self/maps") as maps:  # in the order of addresses
        for line in maps:
            limits, rights, _ = line.split(None, 2)
            begin, end = (int(text, 16) for text in limits.split("-"))
            if begin <= reached < end and rights[0] == "r" and (rights[1] == "w" or not writable):
                reached = end
            if reached >= high:
                return True
    return False
