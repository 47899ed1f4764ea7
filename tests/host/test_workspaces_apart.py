"""Publication workspaces of two ranks that overlap would hold each other's payload: refused where addresses are known."""

from __future__ import annotations

import re

import calls
import pytest
from calls import HIDDEN_SHARDED, TOKEN_OWNER, Call

PLACES = pytest.mark.parametrize("entry", [HIDDEN_SHARDED, TOKEN_OWNER])
SPEC = {"num_ranks": 4, "num_experts": 8}


def placed(entry: int, rank: int, beside: int, distance: int, generation: int = 0) -> Call:
    """A call in which `rank`'s workspace lies `distance` bytes after that of `beside`."""
    call = Call(entry, spec=SPEC)
    call["shared_rs_flags"][0] = generation
    pointers = call["shared_rs_peer_ptrs"]
    pointers[rank] = pointers[beside] + distance
    return call


def stride(entry: int) -> int:
    return int(Call(entry, spec=SPEC)["shared_rs_flags"][2])


@PLACES
@pytest.mark.parametrize(
    ("rank", "beside", "generation", "reach"),
    [
        (0, 2, 0, 1),  # of a peer's workspace what this call writes is known to be its
        (0, 2, 1, 2),
        (2, 0, 2, 3),
        (0, calls.RANK, 0, calls.GENERATIONS),  # of the own one all is
    ],
)
def test_overlap_is_refused_and_what_lies_apart_is_not(
    entry: int, rank: int, beside: int, generation: int, reach: int
) -> None:
    bytes_after = reach * stride(entry)
    first, second = sorted((rank, beside))
    wanted = f"overlapping workspaces for ranks {first} and {second} [shared_rs_peer_ptrs.values]"
    for distance in (16, bytes_after - 16):
        with pytest.raises(RuntimeError, match=re.escape(wanted)):
            placed(entry, rank, beside, distance, generation).run()
    apart = placed(entry, rank, beside, bytes_after, generation)
    apart["shared_rs_peer_ptrs"] += 1 << 20  # found after all overlaps, and before a call that would write to no memory
    with pytest.raises(RuntimeError, match=r"given another address than shared_rs_workspace for its own rank 1"):
        apart.run()


@PLACES
def test_a_peer_just_below_the_own_workspace(entry: int) -> None:
    with pytest.raises(RuntimeError, match="overlapping workspaces for ranks 0 and 1"):
        placed(entry, 0, calls.RANK, -16).run()
