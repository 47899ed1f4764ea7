"""Which process of which machine a rank is, and whether it still runs."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def machine() -> str:
    """Equal for processes that can see each other: one kernel, one process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process, None when there is none of that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # what follows the command's name
    return fields[0], fields[19]


def identity() -> str:
    """This process, told apart from a later one of the same number."""
    found = _state_and_start(os.getpid())
    return f"{machine()} {os.getpid()} {found[1] if found else '-'}"


def has_ended(given: str) -> bool:
    """Whether the process of that identity is known to have ended. Those of other machines never are."""
    where, pid, start = given.split(" ")
    if where != machine():
        return False
    found = _state_and_start(int(pid))
    return found is None or found[0] in "ZX" or (start != "-" and found[1] != start)
