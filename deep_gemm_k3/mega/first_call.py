"""The first call of a signature on a buffer: the only one that talks to other hosts.

Ranks compare what they are about to run, prepare it (compile and load), and go on together, so that no kernel waits for a
peer that is still compiling. A failure on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .._extension import ops
from .buffer import SymmBuffer, buffer_of
from .group import GroupError, GroupMismatch, GroupRefused, GroupTimeout, check_equal

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
    channel, check = buffer.channel, lambda: ops().buffer_check(buffer.handle)
    tag = f"first call of {signature.get('entry', 'a signature')}"
    to_come = min(timeout_s, max(buffer.timeout_s, channel.timeout_s))
    try:
        gathered = channel.all_gather(dict(signature), tag, to_come, check)
    except (GroupRefused, GroupMismatch):
        raise
    except RuntimeError as error:
        raise _with(error, _difference(buffer, signature, f"this rank was in the {tag}")) from error
    check_equal(gathered, tag)
    try:
        result = prepare()
    except BaseException as error:
        channel.refuse(f"{type(error).__name__}: {error}")
        raise
    channel.barrier(f"{tag}: ready", timeout_s, check)
    buffer.signatures.append(dict(signature))
    return result


def explained(buffer: SymmBuffer, error: Exception) -> Exception:
    """`error` of a call or a check, with the field that differs when a peer waits in the first call of a signature.

    A rank that calls what all have made ready does not come to that exchange: both run into their limits, and the limit of
    this rank's kernel names the rank alone. Nothing is asked before something has failed.
    """
    if type(error) is not RuntimeError or buffer.num_ranks == 1 or str(error).endswith("]"):
        return error
    try:
        waiting = buffer.channel.present()
    except GroupError:  # the store has gone: that it cannot be asked does not matter beside `error`
        return error
    for rank, signature in sorted(waiting.items()):
        if isinstance(signature, Mapping) and "entry" in signature:
            where = f"rank {rank} is in the first call of {signature['entry']}"
            return _with(error, _difference(buffer, signature, where))
    return error


def _with(error: Exception, more: str) -> Exception:
    ranks = (error.ranks,) if isinstance(error, GroupError) else ()
    return type(error)(f"{error}; {more}", *ranks) if type(error) in (RuntimeError, GroupTimeout) else error


def _difference(buffer: SymmBuffer, signature: Mapping[str, Any], where: str) -> str:
    """What sets a signature apart from the most similar one that all ranks have made ready on the buffer."""

    def fields(known: Mapping[str, Any]) -> list[str]:
        return [name for name in {**known, **signature} if known.get(name) != signature.get(name)]

    if not buffer.signatures:
        return f"{where}, and no signature of this buffer was made ready on all ranks before"
    nearest = min(buffer.signatures, key=lambda known: len(fields(known)))
    shown = ", ".join(f"{name} is {signature.get(name)!r}, not {nearest.get(name)!r}" for name in fields(nearest))
    return f"{where}, whose signature differs from the nearest ready one in: {shown or 'nothing'}"
