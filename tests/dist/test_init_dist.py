"""`utils.dist.init_dist` without CUDA: gloo, upstream's environment variables, and a group of all ranks."""

from __future__ import annotations

import re
import socket

import pytest
import torch
import torch.distributed as dist
from processes import results

from deep_gemm_k3 import envs
from deep_gemm_k3.mega.buffer import get_symm_buffer_for_mega_moe
from deep_gemm_k3.utils.dist import init_dist

pytestmark = pytest.mark.dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def two_nodes(rank: int, size: int, port: int) -> None:
    dist.destroy_process_group()
    torch.cuda.is_available = lambda: False  # the CPU's part of the function, wherever this runs
    node, local_rank = divmod(rank, 2)
    envs.MASTER_ADDR.set("127.0.0.1")
    envs.MASTER_PORT.set(port)
    envs.WORLD_SIZE.set(2)
    envs.RANK.set(node)
    joined_rank, world_size, group = init_dist(local_rank, 2)
    assert (joined_rank, world_size) == (rank, 4)
    assert (group.rank(), group.size()) == (rank, 4)
    assert torch.get_default_dtype() == torch.bfloat16
    buffer = get_symm_buffer_for_mega_moe(group, 8, 64, 2, 256, 128, device="cpu")
    assert buffer.group is group and buffer.num_ranks == 4
    assert buffer.topk_weights.dtype == torch.float32


def test_ranks_are_numbered_over_the_nodes() -> None:
    results(two_nodes, 4, free_port())


@pytest.mark.parametrize(("local_rank", "ranks"), [(-1, 2), (2, 2)])
def test_local_ranks_are_checked(local_rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"local_rank: wanted an integer in 0\.\.{ranks - 1}, given {local_rank}"):
        init_dist(local_rank, ranks)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("RANK", "2", "a node's number below WORLD_SIZE, which is 2, given 2"),
        ("RANK", "-1", "a whole number, 0 or more, given '-1'"),
        ("WORLD_SIZE", "0", "a whole number in 1..65536, given '0'"),
        ("WORLD_SIZE", "65536", "at most 65536 ranks on all nodes, given 65536 nodes of 4"),
        ("WORLD_SIZE", "two", "a whole number in 1..65536, given 'two'"),
        ("MASTER_PORT", "99999999", "a whole number in 1..65535, given '99999999'"),
        ("MASTER_PORT", "0", "a whole number in 1..65535, given '0'"),
    ],
)
def test_variables_are_named_before_anything_is_waited_for(
    name: str, given: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"WORLD_SIZE": "2", "RANK": "1", name: given}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it was waited"))
    before = torch.get_default_dtype()
    with pytest.raises(ValueError, match=re.escape(f"{name}: wanted {wanted}")):
        init_dist(1, 4)
    assert torch.get_default_dtype() == before


def test_a_process_group_of_one_serves_a_call() -> None:
    """The buffer that the caller fills is the memory that the call reads."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with get_symm_buffer_for_mega_moe(dist.group.WORLD, 2, 64, 1, 128, 128, device="cpu") as buffer:
            assert buffer.base_ptrs == (buffer.buffer.data_ptr(),)
    finally:
        dist.destroy_process_group()
