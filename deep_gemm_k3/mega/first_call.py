"""The first call of a signature on a buffer: the only one that talks to other hosts.

Ranks compare what they are about to run, prepare it (compile and load), and go on together, so that no kernel waits for a
peer that is still compiling. A failure on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .buffer import SymmBuffer, buffer_of
from .group import check_equal

T = TypeVar("T")

# A compile may take minutes on a busy machine; a peer that ended is still reported.
FIRST_CALL_TIMEOUT_S = 900.0


def first_call(
    buffer: SymmBuffer | int,
    signature: Mapping[str, Any],
    prepare: Callable[[], T],
    timeout_s: float = FIRST_CALL_TIMEOUT_S,
) -> T:
    """Collective: compare `signature` over all ranks, run `prepare`, and return its result once all ranks have.

    Raises `GroupMismatch` naming rank, field and both values; `GroupRefused` naming the rank whose `prepare` failed (that
    rank raises its own error); `GroupTimeout` naming the ranks that did not come. The buffer stays usable after these.
    An abort of the buffer by any rank ends the waits. Ranks are awaited as long as the buffer or its group allow, and up
    to `timeout_s` for what they prepare.
    """
    if not isinstance(buffer, SymmBuffer):
        buffer = buffer_of(buffer)
    channel, check = buffer.channel, buffer.check
    tag = f"first call of {signature.get('entry', 'a signature')}"
    to_come = min(timeout_s, max(buffer.timeout_s, channel.timeout_s))
    check_equal(channel.all_gather(dict(signature), tag, to_come, check), tag)
    try:
        result = prepare()
    except BaseException as error:
        channel.refuse(f"{type(error).__name__}: {error}")
        raise
    channel.barrier(f"{tag}: ready", timeout_s, check)
    return result
