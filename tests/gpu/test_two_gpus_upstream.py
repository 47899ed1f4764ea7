"""Upstream's way of calling with a process for each of two GPUs, set up as its programs do."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from mega_support import DEVICE
from process_support import BACKEND, PROCESSES, ProcessFamily
from upstream_caller import SIGNATURES, call_all, shape

from deep_gemm_k3 import envs
from deep_gemm_k3.testing.processes import ProcessWorld
from deep_gemm_k3.utils.dist import init_dist

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(60)]

FAMILIES = (ProcessFamily(shape(PROCESSES), *SIGNATURES),)


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
