"""Memory that every rank of a group can address: the ground a symmetric buffer stands on.

    CPU, ranks in this process   anonymous mappings, shared by reference
    CPU, one process per rank    memory files (memfd), mapped by all; they have no name in any directory and vanish with
                                 their last mapping, so a killed process leaves nothing behind
    CUDA, ranks in this process  plain tensors on one device
    CUDA, process group          torch symmetric memory

All of it starts as zeros. Whoever holds a `RankMemory` keeps the memory of all its ranks alive, so a rank may let go, or
end, while its peers still write to it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .. import envs
from ..emulator.service import Ownership
from .group import Group, GroupError
from .process_group import ProcessGroupAdapter
from .processes import machine

T = TypeVar("T")


@dataclass
class RankMemory:
    """This rank's bytes, and the addresses at which this process (CPU) or device (CUDA) sees every rank's."""

    own: torch.Tensor
    bases: list[int]
    keep: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Claim:
    """What one allocation asks for, and whom it tells when that fails."""

    group: Group
    device: torch.device
    num_bytes: int
    tag: str
    sizes: str

    def get(self, action: Callable[[], T]) -> T:
        """`action()`, which gets the memory; peers are told when it raises."""
        return refusing(self.group, lambda: self._named(action), self.tag)

    def _named(self, action: Callable[[], T]) -> T:
        """What the system says of too little memory names neither bytes nor arguments."""
        wanted = f"buffer: wanted {self.num_bytes} bytes of {self.device.type} memory for {self.sizes}, given"
        try:
            return action()
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{wanted} less: {error}") from error
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC):
                raise
            raise MemoryError(f"{wanted} less: {error.strerror}") from error


def allocate(group: Group, device: torch.device, num_bytes: int, tag: str, sizes: str) -> RankMemory:
    """Collective: `num_bytes` zeros on every rank, addressable from all of them. What fails on one rank raises on all.

    `sizes` names the arguments that decide the bytes. Where there is too little memory, MemoryError (on the CPU) or
    `torch.OutOfMemoryError` (CUDA) tells both.
    """
    claim = _Claim(group, device, num_bytes, tag, sizes)
    if device.type == "cuda":
        if isinstance(group, ProcessGroupAdapter):
            return _symmetric_memory(group, claim)
        return _local(claim, lambda: _cuda_zeros(device, num_bytes))
    memory = _local(claim, lambda: _mapped(_private(num_bytes))) if group.is_local else _memory_files(claim)
    if group.size > 1:
        memory.keep.append(Ownership(memory.bases, num_bytes))
    return memory


def refusing(group: Group, action: Callable[[], T], tag: str) -> T:
    """`action()`; when it raises, peers that wait for this rank in the next exchange raise too."""
    try:
        return action()
    except Exception as error:
        group.refuse(f"{tag}: {type(error).__name__}: {error}")
        raise


def settle(device: torch.device) -> None:
    """Wait until nothing queued on `device` can touch memory that is about to be freed; not while a graph is recorded."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


def _private(num_bytes: int) -> mmap.mmap:
    """Zeros for this process alone: what a forked one writes stays there."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _mapped(mapping: mmap.mmap) -> torch.Tensor:
    # The tensor's storage holds the mapping; it goes away with the last view.
    return torch.frombuffer(mapping, dtype=torch.int8)


def _cuda_zeros(device: torch.device, num_bytes: int) -> torch.Tensor:
    memory = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    torch.cuda.current_stream(device).synchronize()
    return memory


def _local(claim: _Claim, create: Callable[[], torch.Tensor]) -> RankMemory:
    group, device, tag = claim.group, claim.device, claim.tag
    own = claim.get(create)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    tensors: list[torch.Tensor] = group.all_gather(own, tag)
    if stream is not None:
        for tensor in tensors:
            tensor.record_stream(stream)  # freed memory is reused only after what this rank has queued
    group.barrier(f"{tag}: mapped")
    return RankMemory(own, [tensor.data_ptr() for tensor in tensors], tensors)


def _memory_files(claim: _Claim) -> RankMemory:
    group, num_bytes, tag = claim.group, claim.num_bytes, claim.tag
    descriptor = claim.get(lambda: _new_memory_file(num_bytes))
    try:
        status = os.fstat(descriptor)
        own = (machine(), os.getpid(), descriptor, status.st_ino, num_bytes)
        gathered = group.all_gather(own, tag)
        # Every rank, this one included, is mapped through the same kind of mapping.
        tensors = claim.get(lambda: [_map_peer(rank, *peer) for rank, peer in enumerate(gathered)])
        group.barrier(f"{tag}: mapped")
    finally:
        os.close(descriptor)
    return RankMemory(tensors[group.rank], [tensor.data_ptr() for tensor in tensors], tensors)


def _new_memory_file(num_bytes: int) -> int:
    descriptor = os.memfd_create("deep_gemm_k3", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map_peer(rank: int, where: str, pid: int, descriptor: int, inode: int, num_bytes: int) -> torch.Tensor:
    if where != machine():
        raise GroupError(
            f"group: wanted all ranks on one machine and in one process namespace, given rank {rank} elsewhere "
            f"({where}, here {machine()})",
            (rank,),
        )
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        if (status.st_ino, status.st_size) != (inode, num_bytes):
            raise GroupError(f"group: rank {rank} (process {pid}) ended while its memory was being mapped", (rank,))
        return _mapped(mmap.mmap(opened, num_bytes))
    finally:
        os.close(opened)


def _symmetric_memory(group: ProcessGroupAdapter, claim: _Claim) -> RankMemory:
    from torch.distributed import _symmetric_memory as symmetric

    device, num_bytes, tag = claim.device, claim.num_bytes, claim.tag

    def create() -> torch.Tensor:
        memory = symmetric.empty(num_bytes, dtype=torch.int8, device=device)
        memory.zero_()
        torch.cuda.current_stream(device).synchronize()
        return memory

    own = claim.get(create)
    # torch's rendezvous has a limit of its own, but does not tell who is missing: come to it together.
    places = refusing(group, lambda: _place(device), tag)
    gathered: list[_Place] = group.all_gather(places, f"{tag}: allocated")
    _check_devices(gathered)
    handle = refusing(group, lambda: _rendezvous(own, group, gathered), tag)
    group.barrier(f"{tag}: mapped")
    return RankMemory(own, [int(pointer) for pointer in handle.buffer_ptrs], [handle])


@dataclass(frozen=True)
class _Place:
    """Where a rank's memory is: which device, and by which ordinal its process knows it."""

    machine: str
    device: str
    ordinal: int


def _place(device: torch.device) -> _Place:
    return _Place(machine(), str(torch.cuda.get_device_properties(device).uuid), device.index or 0)


def _check_devices(places: list[_Place]) -> None:
    """Raise, on every rank alike, when two processes share a device: their kernels would not run at the same time."""
    seen: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        first = seen.setdefault((place.machine, place.device), rank)
        if first != rank:
            raise GroupError(
                f"device: wanted one for each process, given ranks {first} and {rank} on device {place.device}; several "
                "ranks on one device are a local world",
                (first, rank),
            )


def _rendezvous(own: torch.Tensor, group: ProcessGroupAdapter, places: list[_Place]) -> Any:
    from torch.distributed import _symmetric_memory as symmetric

    # torch tells devices of one machine apart by their ordinals, which are all 0 where each process sees its own alone.
    is_hidden = len({(place.machine, place.ordinal) for place in places}) < len(places)
    with envs.equal_ordinals_allowed() if is_hidden else nullcontext():
        return symmetric.rendezvous(own, group.process_group)
