"""What is said when there is not enough memory for a buffer or a workspace."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from small_buffers import make

import deep_gemm_k3 as dg
from deep_gemm_k3.mega.local_world import LocalRank, local_world
from deep_gemm_k3.mega.publication import PublicationWorkspace


@contextmanager
def little_memory() -> Iterator[None]:
    """This process may map 2 GiB more than it has."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**31, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_buffer_names_its_bytes_and_what_decides_them() -> None:
    with (
        little_memory(),
        pytest.raises(
            MemoryError,
            match=r"^buffer: wanted \d{11,} bytes of cpu memory for num_max_tokens_per_rank 1000320, num_topk 16, hidden "
            r"3584, .*, given less: Cannot allocate memory$",
        ),
    ):
        dg.get_symm_buffer_for_mega_moe(None, 896, 999999, 16, 3584, 3072, device="cpu")


def test_a_workspace_names_its_bytes_and_what_decides_them() -> None:
    buffer = make()
    with (
        little_memory(),
        pytest.raises(
            MemoryError,
            match=r"^buffer: wanted 3221225472 bytes of cpu memory for a workspace of 3 generations for num_max_tokens "
            r"4194304, given less: Cannot allocate memory$",
        ),
    ):
        PublicationWorkspace(buffer, "rs", 2**22, 128)


def test_all_ranks_are_told() -> None:
    def body(group: LocalRank) -> str:
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            make(group, num_max_tokens_per_rank=999999, hidden=3584)
        return str(caught.value)

    with local_world(2) as world, little_memory():
        texts = world.run(body)
    assert all("buffer: wanted " in text and "num_max_tokens_per_rank 1000320" in text for text in texts), texts
