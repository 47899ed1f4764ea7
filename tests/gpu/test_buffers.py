"""Symmetric buffers and publication workspaces in device memory: one rank, a local world, symmetric memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_gemm_k3.mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from deep_gemm_k3.mega.first_call import first_call
from deep_gemm_k3.mega.group import GroupError
from deep_gemm_k3.mega.local_world import LocalRank, local_world
from deep_gemm_k3.mega.publication import PublicationWorkspace
from deep_gemm_k3.testing.processes import ProcessWorld

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "num_experts": 8,
    "num_max_tokens_per_rank": 96,
    "num_topk": 2,
    "hidden": 256,
    "intermediate_hidden": 128,
}


def make(group: Any = None, **changes: Any) -> SymmBuffer:
    return get_symm_buffer_for_mega_moe(group, **{**SMALL, **changes})


def device_bytes(address: int, size: int) -> torch.Tensor:
    """`size` bytes of device memory at `address`, which torch need not know."""

    class Memory:
        __cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }

    return torch.as_tensor(Memory(), device="cuda")


@pytest.fixture
def group_of_one() -> Iterator[dist.ProcessGroup]:
    torch.cuda.set_device(0)
    store = dist.HashStore()
    dist.init_process_group(
        "nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60), device_id=torch.device("cuda", 0)
    )
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def check_form(buffer: SymmBuffer, num_sms: int) -> None:
    assert buffer.device == torch.device("cuda", torch.cuda.current_device())
    assert all(view.is_cuda for view in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, buffer.buffer))
    assert buffer.base_ptrs[buffer.rank] == buffer.buffer.data_ptr()
    assert all(base % 1024 == 0 for base in (buffer.base_ptrs if buffer.num_ranks == 1 else ()))
    assert buffer.num_sms == num_sms
    assert int(buffer.buffer.count_nonzero()) == 0
    buffer.check()


def all_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def test_one_rank() -> None:
    with make() as buffer:
        check_form(buffer, all_sms())
        assert buffer.target in ("sm_90a", "sm_100a")
    with make(num_sms=10) as buffer:
        assert buffer.num_sms == 10
    with pytest.raises(ValueError, match="num_sms: wanted an integer in 1"):
        make(num_sms=all_sms() + 1)


def test_cpu_buffers_can_be_asked_for() -> None:
    assert make(device="cpu").device.type == "cpu"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_local_world(size: int) -> None:
    def body(group: LocalRank) -> int:
        buffer = make(group)
        check_form(buffer, all_sms() // size)
        group.barrier("checked")
        offset, _ = buffer.layout.components["topk_idx"]
        for peer, base in enumerate(buffer.base_ptrs):
            device_bytes(base + offset + 16 * group.rank, 8).view(torch.int64).fill_(10 * group.rank + peer)
        torch.cuda.current_stream().synchronize()
        group.barrier("written")
        assert buffer.topk_idx[:size, 0].tolist() == [10 * source + group.rank for source in range(size)]
        group.barrier("read")
        stream = torch.cuda.current_stream().cuda_stream
        buffer.destroy()
        with pytest.raises(RuntimeError, match="given one that was destroyed"):
            buffer.x.data_ptr()
        return stream

    with local_world(size) as world:
        streams = world.run(body)
    assert len(set(streams)) == size and 0 not in streams


def test_a_group_of_one_over_symmetric_memory(group_of_one: dist.ProcessGroup) -> None:
    with make(group_of_one) as buffer:
        check_form(buffer, all_sms())
        assert buffer.group is group_of_one
        device_bytes(buffer.base_ptrs[0], 16).fill_(3)
        assert buffer.buffer[:16].tolist() == [3] * 16
    workspace = PublicationWorkspace(group_of_one, "rs", 64, 512)
    assert workspace.peer_ptrs.tolist() == [workspace.workspace.data_ptr()]
    workspace.destroy()


@pytest.mark.parametrize("kind", ["one rank", "symmetric memory"])
def test_create_and_destroy_fifty_times_does_not_grow(kind: str, request: pytest.FixtureRequest) -> None:
    group = request.getfixturevalue("group_of_one") if kind == "symmetric memory" else None

    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    for _ in range(3):
        make(group).destroy()
    before = free()
    for _ in range(50):
        make(group).destroy()
    assert free() >= before - 2**24


def test_a_host_error_of_one_rank_reaches_idle_and_busy_peers() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group)
        if group.rank == 1:
            time.sleep(0.2)
            buffer.abort_peers("shared_x: wanted bfloat16, given float32")
        elif group.rank == 2:
            with pytest.raises(RuntimeError, match="rank 1: shared_x: wanted bfloat16, given float32"):
                first_call(buffer, {"entry": "test"}, lambda: None, 60.0)
        else:
            torch.cuda._sleep(2 * 10**9)  # a kernel in flight is not waited for
            started = time.monotonic()
            while time.monotonic() - started < 30.0 and not _refused(buffer):
                time.sleep(0.01)
            assert not torch.cuda.current_stream().query()
        with pytest.raises(RuntimeError, match="rank 1: shared_x: wanted bfloat16, given float32"):
            buffer.check()
        group.barrier("seen")

    with local_world(4) as world:
        world.run(body)


def _refused(buffer: SymmBuffer) -> bool:
    try:
        buffer.check()
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("mode", ["rs", "sp_rs"])
def test_publication_workspaces_of_a_local_world(mode: str) -> None:
    def body(group: LocalRank) -> list[int]:
        made = PublicationWorkspace(group, mode, 16, 512)
        for peer, pointer in enumerate(made.peer_ptrs.tolist()):
            device_bytes(pointer + 2 * group.rank * made.workspace.size(3), 2).fill_(16 * peer + group.rank)
        torch.cuda.current_stream().synchronize()
        group.barrier("written")
        got = made.view(0)[0, :, 0].view(torch.int16).tolist()
        assert got == [(16 * group.rank + source) * 257 for source in range(group.size)]
        group.barrier("read")
        return made.peer_ptrs.tolist()

    with local_world(4) as world:
        addresses = world.run(body)
    assert all(row == addresses[0] for row in addresses) and len(set(addresses[0])) == 4


def test_rotation_runs_inside_a_graph() -> None:
    made = PublicationWorkspace(None, "rs", 16, 512)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.rotate(3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.rotate(5)
    for step in range(4):
        assert made.generation == (1 + step) % 3
        graph.replay()
        assert made.flags.tolist()[1:5] == [(1 + step) % 3, made.generation_bytes, 1, 5 * 512 * 2]


def share_a_device(rank: int, size: int) -> str:
    with pytest.raises(GroupError) as caught:
        make()
    return str(caught.value)


def test_processes_that_share_a_device_are_refused() -> None:
    """Their kernels would take turns instead of meeting."""
    with ProcessWorld(2, "nccl", devices=(0, 0)) as world:
        for error in world.run(share_a_device, timeout_s=60.0):
            assert "device: wanted one for each process, given ranks 0 and 1 on device" in error
