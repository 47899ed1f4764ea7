"""Publication workspaces: shapes, flags, addresses, rotation."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch
from small_buffers import make as make_buffer

from deep_gemm_k3.mega.group import GroupMismatch, GroupRefused, SingleRank
from deep_gemm_k3.mega.local_world import LocalRank, local_world
from deep_gemm_k3.mega.publication import PublicationWorkspace


def make(group: Any = None, mode: str = "rs", tokens: int = 12, hidden: int = 128, **more: Any) -> PublicationWorkspace:
    return PublicationWorkspace(group or SingleRank(), mode, tokens, hidden, device="cpu", **more)


@pytest.mark.parametrize(
    ("mode", "tokens", "generations", "shape"),
    [
        ("rs", 12, 3, (3, 12, 4, 32)),
        ("rs", 13, 5, (5, 13, 4, 32)),
        ("sp_rs", 12, 1, (1, 3, 4, 128)),
        ("sp_rs", 13, 3, (3, 4, 4, 128)),
    ],
)
def test_shapes_flags_and_addresses(mode: str, tokens: int, generations: int, shape: tuple[int, ...]) -> None:
    def body(group: LocalRank) -> tuple[int, list[int]]:
        made = make(group, mode, tokens, num_generations=generations)
        assert (made.workspace.dtype, tuple(made.workspace.shape)) == (torch.bfloat16, shape)
        assert made.workspace.is_contiguous() and not made.workspace.view(torch.int16).any()
        assert (made.flags.dtype, tuple(made.flags.shape)) == (torch.int32, (12,))
        bytes_apart = made.workspace[0].numel() * 2
        assert made.flags.tolist() == [0, min(1, generations - 1), bytes_apart] + [0] * 9
        assert (made.peer_ptrs.dtype, tuple(made.peer_ptrs.shape)) == (torch.int64, (4,))
        pointers = made.peer_ptrs.tolist()
        assert pointers[group.rank] == made.workspace.data_ptr()
        assert tuple(made.view(generations - 1).shape) == shape[1:]
        group.barrier("checked")
        return made.workspace.data_ptr(), pointers

    with local_world(4) as world:
        seen = world.run(body)
    assert len({own for own, _ in seen}) == 4
    assert all(pointers == [own for own, _ in seen] for _, pointers in seen)


def test_peers_write_through_the_addresses() -> None:
    def body(group: LocalRank) -> None:
        made = make(group)
        for peer, pointer in enumerate(made.peer_ptrs.tolist()):
            value = torch.tensor(10.0 * group.rank + peer, dtype=torch.bfloat16).view(torch.int16).item()
            ctypes.c_int16.from_address(pointer + 2 * group.rank * (128 // group.size)).value = value
        group.barrier("written")
        expected = [10.0 * source + group.rank for source in range(group.size)]
        assert made.view(0)[0, :, 0].tolist() == expected

    with local_world(2) as world:
        world.run(body)


def test_rotation_follows_the_consumers_convention() -> None:
    made = make(hidden=128)
    stride = made.generation_bytes
    for call in range(7):
        generation = call % 3
        assert made.generation == generation
        made.flags[5:9] = 7  # a consumer's leftovers
        made.rotate()
        assert made.flags.tolist() == [(generation + 1) % 3, generation, stride, 1, stride, 0, 0, 0, 0, 0, 0, 0]
        assert made.view().data_ptr() == made.workspace[generation].data_ptr()


@pytest.mark.parametrize(("mode", "dirty_bytes"), [("rs", 5 * 128 * 2), ("sp_rs", 3 * 2 * 128 * 2)])
def test_rotation_tells_how_much_is_dirty(mode: str, dirty_bytes: int) -> None:
    def body(group: LocalRank) -> None:
        made = make(group, mode)
        made.rotate(5)
        assert made.flags[4].item() == dirty_bytes
        with pytest.raises(ValueError, match=r"num_tokens: wanted an integer in 0\.\.12, given 13"):
            made.rotate(13)

    with local_world(2) as world:
        world.run(body)


def test_one_generation_rotates_onto_itself() -> None:
    made = make(mode="sp_rs", num_generations=1)
    made.rotate()
    assert made.generation == 0 and made.flags[1].item() == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"mode": "dense"}, "mode: wanted 'rs' (hidden-sharded) or 'sp_rs' (token-owner), given 'dense'"),
    ({"tokens": 0}, "num_max_tokens: wanted an integer in 1..16777216, given 0"),
    ({"num_generations": 2}, "num_generations: wanted an integer in 3..65536, given 2"),
    ({"mode": "sp_rs", "num_generations": 0}, "num_generations: wanted an integer in 1..65536, given 0"),
    ({"hidden": 100}, "hidden: wanted a multiple of 8 in 8..1048576, given 100"),
    ({"tokens": 2**20, "hidden": 7168}, "num_max_tokens: wanted a generation of at most 2147483647 bytes"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**changes)


def test_a_shard_is_whole_vectors() -> None:
    def body(group: LocalRank) -> None:
        with pytest.raises(ValueError, match="hidden: wanted a multiple of 8 columns for each of 3 ranks, given 128"):
            make(group)
        make(group, "sp_rs")
        make(group, hidden=120)

    with local_world(3) as world:
        world.run(body)


def test_ranks_must_agree() -> None:
    def body(group: LocalRank) -> None:
        with pytest.raises(
            GroupMismatch, match="mode must be equal on all ranks, rank 0 gave 'rs', rank 1 gave 'sp_rs'"
        ):
            make(group, "sp_rs" if group.rank else "rs")
        kind: type[Exception] = GroupRefused if group.rank == 0 else ValueError
        with pytest.raises(kind, match="hidden: wanted a multiple of 8"):
            make(group, hidden=128 if group.rank == 0 else 7)
        make(group)

    with local_world(2) as world:
        world.run(body)


def test_a_buffer_stands_for_its_group() -> None:
    def body(group: LocalRank) -> int:
        made = PublicationWorkspace(make_buffer(group), "rs", 8, 64)
        assert made.device.type == "cpu"
        return made.peer_ptrs.numel()

    with local_world(2) as world:
        assert world.run(body) == [2, 2]


def test_destroy_frees_and_later_use_raises() -> None:
    made = make()
    kept = made.workspace
    made.destroy()
    made.destroy()
    for use in (lambda: made.workspace, lambda: made.flags, lambda: made.peer_ptrs, lambda: made.view(0), made.rotate):
        with pytest.raises(
            RuntimeError, match="publication workspace: wanted a live one, given one that was destroyed"
        ):
            use()
    kept.zero_()
