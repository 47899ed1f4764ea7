"""How programs set up a process for each of two GPUs: as upstream's do, and with the other device hidden."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from mega_support import DEVICE, SITU, Signature
from process_support import BACKEND, PROCESSES, ProcessFamily, Warm
from upstream_caller import SIGNATURES, call_all, shape

from deep_gemm_k3 import envs
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.processes import ProcessWorld
from deep_gemm_k3.utils.dist import init_dist

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(60)]

SMALL = ProcessFamily(
    WorldShape((384,) * PROCESSES, 4, 2, 384, 128, 384, 256, 128), Signature("rs", SITU, batch_invariant=True)
)
BACKGROUND = Warm()
FAMILIES = (ProcessFamily(shape(PROCESSES), *SIGNATURES), SMALL)


def as_upstream(rank: int, size: int, port: int) -> None:
    dist.destroy_process_group()
    envs.MASTER_PORT.set(port)
    envs.TIMEOUT_S.set(10.0)
    joined, world_size, group = init_dist(rank, size)
    assert (joined, world_size, group.size()) == (rank, size, size)
    assert torch.get_default_dtype() == torch.bfloat16
    call_all(group, DEVICE)


def test_a_caller_of_upstream() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessWorld(PROCESSES, BACKEND) as world:
        world.run(as_upstream, port, timeout_s=50.0)


def alone_with_a_device(rank: int, size: int) -> tuple[str, str]:
    if DEVICE.type == "cuda":
        assert torch.cuda.device_count() == 1
    (signature,) = SMALL.signatures
    SMALL.check_here(SMALL.world((7, 40), 8), signature, calls=2)
    return str(DEVICE), str(torch.cuda.get_device_properties(DEVICE).uuid) if DEVICE.type == "cuda" else str(rank)


def test_each_process_sees_its_own_device_only() -> None:
    """As launchers do that set CUDA_VISIBLE_DEVICES for every process: all devices are number 0."""
    with ProcessWorld(PROCESSES, BACKEND, hidden=True) as world:
        (name, first), (other_name, second) = world.run(alone_with_a_device, timeout_s=50.0)
    assert name == other_name and first != second
