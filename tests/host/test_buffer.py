"""Symmetric buffers in CPU memory: one rank and a local world."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from small_buffers import PATIENCE_S, make

from deep_gemm_k3._extension import ops
from deep_gemm_k3.mega.buffer import buffer_of
from deep_gemm_k3.mega.group import GroupError, GroupMismatch, GroupRefused
from deep_gemm_k3.mega.local_world import LocalRank, local_world
from deep_gemm_k3.mega.publication import PublicationWorkspace


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_views_have_the_documented_form() -> None:
    buffer = make()
    assert buffer.num_max_tokens_per_rank == 384
    assert buffer.num_max_shared_tokens == 384
    assert (buffer.x.dtype, tuple(buffer.x.shape)) == (torch.float8_e4m3fn, (384, 256))
    assert (buffer.x_sf.dtype, tuple(buffer.x_sf.shape)) == (torch.int32, (384, 2))
    assert (buffer.topk_idx.dtype, tuple(buffer.topk_idx.shape)) == (torch.int64, (384, 2))
    assert (buffer.topk_weights.dtype, tuple(buffer.topk_weights.shape)) == (torch.float32, (384, 2))
    assert (buffer.buffer.dtype, buffer.buffer.numel()) == (torch.int8, buffer.layout.num_bytes)
    assert all(view.is_contiguous() for view in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights))
    assert not buffer.buffer.any()


def test_views_lie_inside_the_buffer_and_do_not_overlap() -> None:
    buffer = make()
    for value, view in enumerate((buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights), start=1):
        view.view(torch.int8).fill_(value)
    for value, view in enumerate((buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights), start=1):
        assert (view.view(torch.int8) == value).all()
    total = sum(v.numel() * v.element_size() for v in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights))
    assert int(buffer.buffer.ne(0).sum()) == total


def test_components_are_disjoint_aligned_and_fill_the_buffer() -> None:
    layout = make(bf16_shared_intermediate_hidden=256).layout
    end = 0
    for offset, size in layout.components.values():
        assert offset % 1024 == 0 and offset >= end
        end = offset + size
    assert end <= layout.num_bytes < end + 1024


@pytest.mark.parametrize(("asked", "given"), [(1, 384), (384, 384), (385, 768), (1000, 1152)])
def test_tokens_are_rounded_up(asked: int, given: int) -> None:
    assert make(num_max_tokens_per_rank=asked).num_max_tokens_per_rank == given


def test_integers_of_numpy_are_integers() -> None:
    """Configurations read from files bring them."""
    wanted = make().spec
    sizes = {
        name: numpy.int64(getattr(wanted, name))
        for name in ("num_experts", "num_topk", "hidden", "intermediate_hidden")
    }
    made = make(**sizes, num_max_tokens_per_rank=numpy.int32(wanted.num_max_tokens_per_rank)).spec
    assert made == wanted and type(made.hidden) is int
    with pytest.raises(ValueError, match="num_topk: wanted a 32-bit integer, given True"):
        make(num_topk=True)


def test_shared_tokens_size_the_shared_part_alone() -> None:
    few = make(bf16_shared_intermediate_hidden=256, num_max_shared_tokens=72)
    many = make(bf16_shared_intermediate_hidden=256, num_max_shared_tokens=4000)
    assert (few.num_max_shared_tokens, many.num_max_shared_tokens) == (72, 4000)
    changed = {name for name, (_, size) in few.layout.components.items() if many.layout.components[name][1] != size}
    assert changed == {"shared_intermediate", "shared_counters"}


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 0}, "num_experts: wanted 1..65535, given 0"),
    ({"num_experts": 4.0}, "num_experts: wanted a 32-bit integer, given 4.0"),
    ({"num_experts": 65536}, "num_experts: wanted 1..65535, given 65536"),
    ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank: wanted an integer in 1..1048320, given 0"),
    ({"num_topk": 33}, "num_topk: wanted 1..32, given 33"),
    ({"num_topk": 0}, "num_topk: wanted 1..32, given 0"),
    ({"hidden": 100}, "hidden: wanted a multiple of 128 in 128..131072, given 100"),
    ({"hidden": "1024"}, "hidden: wanted a 32-bit integer, given '1024'"),
    ({"intermediate_hidden": 64}, "intermediate_hidden: wanted a multiple of 128 in 128..131072, given 64"),
    (
        {"bf16_shared_intermediate_hidden": 100},
        "bf16_shared_intermediate_hidden: wanted 0 or a multiple of 128 up to 131072, given 100",
    ),
    ({"num_max_shared_tokens": -1}, "num_max_shared_tokens: wanted 0..1048576, given -1"),
    ({"num_shared_experts": 2}, "num_shared_experts: wanted 0: FP8-scaled shared experts are not served"),
    ({"use_fp8_dispatch": False}, "use_fp8_dispatch: wanted None or True"),
    ({"mma_type": "fp8xfp8"}, "mma_type: wanted 'fp8xfp4', given 'fp8xfp8'"),
    ({"activation": "gelu"}, "activation: wanted 'swiglu' or 'situ', given 'gelu'"),
    ({"device": "meta"}, "device: wanted a CPU or CUDA device, given 'meta'"),
    ({"device": "nowhere"}, "device: wanted a CPU or CUDA device, given 'nowhere'"),
    ({"num_sms": 0}, "num_sms: wanted an integer in 1..1024, given 0"),
    ({"timeout_s": 0}, "timeout_s: wanted a number of seconds above 0 and below 1e9, given 0"),
    (
        {"hidden": 65536, "num_max_tokens_per_rank": 2**19, "num_topk": 32},
        "buffer: wanted at most 1099511627776 bytes per rank, which num_max_tokens_per_rank decides first, given",
    ),
    (
        {"num_experts": 1, "num_max_tokens_per_rank": 10**6, "num_topk": 32, "num_max_shared_tokens": 2**21},
        "num_max_shared_tokens: wanted 0..1048576, given 2097152",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**changes)


@pytest.mark.parametrize("topk", [1, 16, 32])
def test_k3_sizes_are_legal(topk: int) -> None:
    buffer = make(
        num_experts=896, num_topk=topk, hidden=3584, intermediate_hidden=3072, bf16_shared_intermediate_hidden=6144
    )
    assert buffer.layout.num_bytes > 2**25


def test_experts_must_divide_over_the_ranks() -> None:
    def body(group: LocalRank) -> None:
        with pytest.raises(ValueError, match="num_experts: wanted a multiple of the 5 ranks, given 12"):
            make(group)

    with local_world(5) as world:
        world.run(body)


def test_destroy_frees_and_later_use_raises() -> None:
    buffer = make()
    handle, kept = buffer.handle, buffer.x
    buffer.destroy()
    buffer.destroy()
    for use in (
        lambda: buffer.x,
        lambda: buffer.x_sf,
        lambda: buffer.topk_idx,
        lambda: buffer.topk_weights,
        lambda: buffer.buffer,
        lambda: buffer.base_ptrs,
        lambda: buffer.check(),
        lambda: buffer_of(handle),
        lambda: ops().buffer_check(handle),
        lambda: ops().cpu_barrier(handle, 0),
        lambda: ops().buffer_destroy(handle),
    ):
        with pytest.raises(RuntimeError, match="sym_buffer: wanted a live buffer, given one that was destroyed"):
            use()
    kept.view(torch.int8).fill_(1)  # memory lives while a tensor of it does
    assert "destroyed" in repr(buffer)


def test_a_stale_handle_does_not_reach_the_next_buffer() -> None:
    first = make()
    stale = first.handle
    first.destroy()
    second = make()
    assert second.handle != stale
    with pytest.raises(RuntimeError, match="given one that was destroyed"):
        ops().buffer_check(stale)
    ops().buffer_check(second.handle)


def test_a_dropped_buffer_frees_its_handle() -> None:
    handle = make().handle
    gc.collect()
    with pytest.raises(RuntimeError, match="given one that was destroyed"):
        ops().buffer_check(handle)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize(
    "make_one", [make, lambda: PublicationWorkspace(make(), "rs", 8, 128), lambda: local_world(2)[0]]
)
def test_what_peers_know_is_not_duplicated(make_one: Callable[[], Any], duplicate: Callable[[Any], Any]) -> None:
    """A copy would free, or answer for, what the original still uses."""
    one = make_one()
    with pytest.raises(TypeError, match=f"{type(one).__name__}: wanted to be used where it was made"):
        duplicate(one)


def test_destroy_waits_for_no_call_but_refuses() -> None:
    inside, left = threading.Event(), threading.Event()

    def body(group: LocalRank) -> None:
        buffer = make(group, timeout_s=PATIENCE_S)
        if group.rank == 1:
            left.wait(PATIENCE_S)
            buffer.destroy()
            return

        def spoil() -> None:
            inside.wait(PATIENCE_S)
            while ops().buffer_calls(buffer.handle) == 0:
                time.sleep(0.01)
            with pytest.raises(
                RuntimeError, match=r"sym_buffer: wanted no call inside it, given destroy\(\) while one"
            ):
                buffer.destroy()
            buffer.abort_peers("the test is over")

        with ThreadPoolExecutor(1) as threads:
            spoiled = threads.submit(spoil)
            inside.set()
            with pytest.raises(RuntimeError, match="the test is over"):
                ops().cpu_barrier(buffer.handle, 0)
            spoiled.result()
        buffer.destroy()
        left.set()

    with local_world(2) as world:
        world.run(body)


def test_buffers_made_in_inference_mode_are_usable_outside() -> None:
    with torch.inference_mode():
        buffer = make()
        workspace = PublicationWorkspace(buffer, "rs", 8, 128)
    buffer.x.zero_()
    workspace.workspace.zero_()
    workspace.rotate()
    assert workspace.generation == 1


def test_a_forked_process_reaches_neither_memory_nor_threads() -> None:
    buffer = make()
    with local_world(2) as world:
        world.run(lambda group: group.barrier("test", PATIENCE_S))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                buffer.x_sf[0, 0] = 7  # few bytes: the threads of torch are not there either
                world.run(lambda group: None)
            except GroupError as error:
                status = 0 if "given one forked from it" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(buffer.x_sf[0, 0]) == 0


def test_the_default_device_is_not_the_buffers() -> None:
    with torch.device("meta"):
        buffer = make()
        workspace = PublicationWorkspace(buffer, "rs", 8, 128)
        workspace.rotate()
    tensors = (buffer.x, buffer.topk_idx, workspace.workspace, workspace.flags, workspace.peer_ptrs)
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert workspace.generation == 1


def test_every_rank_addresses_every_rank() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group)
        offset = buffer.layout.components["topk_weights"][0]
        for peer, base in enumerate(buffer.base_ptrs):
            ctypes.c_float.from_address(base + offset + 4 * group.rank).value = 100.0 * group.rank + peer
        ops().cpu_barrier(buffer.handle, 0)
        assert buffer.topk_weights.flatten()[:4].tolist() == [100.0 * source + group.rank for source in range(4)]
        ops().cpu_barrier(buffer.handle, 1)

    with local_world(4) as world:
        world.run(body)


def test_memory_outlives_a_rank_that_has_let_go() -> None:
    def body(group: LocalRank) -> None:
        buffer = make(group)
        bases = buffer.base_ptrs
        if group.rank == 0:
            buffer.destroy()
        group.barrier("rank 0 is done")
        if group.rank == 1:
            ctypes.memset(bases[0], 1, buffer.layout.num_bytes)

    with local_world(2) as world:
        world.run(body)


def test_buffers_live_on_from_one_run_to_the_next() -> None:
    with local_world(2) as world:
        buffers = world.run(make)
        for phase in range(4):
            world.run(lambda group, phase=phase: ops().cpu_barrier(buffers[group.rank].handle, phase))


def test_a_call_from_another_thread_raises() -> None:
    with local_world(2) as world:
        buffers = world.run(make)
        with pytest.raises(RuntimeError, match="thread: wanted the one that owns rank 0 of the local world"):
            ops().cpu_barrier(buffers[0].handle, 0)


def test_ranks_must_agree() -> None:
    def body(group: LocalRank) -> None:
        message = r"hidden must be equal on all ranks, rank 0 gave 256, rank 1 gave 512"
        with pytest.raises(GroupMismatch, match=message):
            make(group, hidden=256 * (group.rank + 1))
        make(group, num_sms=1 + group.rank, timeout_s=5.0 + group.rank)  # a rank's own business
        assert make(group).num_ranks == 2

    with local_world(2) as world:
        world.run(body)


def test_a_bad_argument_of_one_rank_raises_on_all() -> None:
    def body(group: LocalRank) -> None:
        if group.rank == 1:
            with pytest.raises(ValueError, match=r"hidden: wanted a multiple of 128 in 128\.\.131072, given 100"):
                make(group, hidden=100)
        else:
            with pytest.raises(GroupRefused, match=r"rank 1 cannot go on: .*hidden: wanted .* given 100"):
                make(group)
        assert make(group).num_ranks == 3

    with local_world(3) as world:
        world.run(body)


def test_specs_of_the_host_library_are_checked() -> None:
    buffer = make()
    good = buffer.spec.to_json()
    for spec, bases, message in (
        ("{", [1], "json: wanted"),
        ("{}", [1], "num_"),
        (good.replace('"num_ranks": 1', '"num_ranks": "one"'), [1], "num_ranks"),
        (good.replace('"rank": 0', '"rank": 7'), [1], "rank: wanted 0 <= rank < num_ranks <= 64, given 7 of 1"),
        (good, [1, 2], "base_ptrs: wanted 1 addresses, given 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops().buffer_create(spec, bases)


def test_create_and_destroy_fifty_times_does_not_grow() -> None:
    def body(group: LocalRank) -> None:
        with make(group) as buffer:
            buffer.x.view(torch.int8).fill_(1)
            buffer.component("pool_x").fill_(1)
            ops().cpu_barrier(buffer.handle, 0)
            group.barrier("used")

    with local_world(2) as world:
        for _ in range(5):
            world.run(body)
        gc.collect()
        before = open_files(), mappings(), resident_bytes()
        for _ in range(50):
            world.run(body)
        gc.collect()
        after = open_files(), mappings(), resident_bytes()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 4
    assert after[2] <= before[2] + 2**24  # one buffer's bytes, of a hundred


def test_destroy_in_one_thread_while_others_live_is_safe() -> None:
    buffers = [make() for _ in range(8)]
    threads = [threading.Thread(target=buffer.destroy) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    make().check()
