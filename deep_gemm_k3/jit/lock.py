"""A lock between processes that no dead process can hold.

``flock`` where the file system has it: the kernel drops it with its owner. Where it has none (some network directories), a
lease: a file created exclusively, refreshed by its owner; a lease that did not change for ``LEASE_TIMEOUT`` seconds of the
*observer's* clock is taken over. Two processes may then work at once in the worst case; publication is atomic, so that costs
time, never a wrong result.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from pathlib import Path

LEASE_TIMEOUT = 10.0
HEARTBEAT = 2.0
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


class FlockLock:
    """Non-blocking attempts at an exclusive flock; ``unsupported`` says that the file system has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unsupported = False
        self._fd = -1

    def try_acquire(self) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in _NO_FLOCK:
                self.unsupported = True
                return False
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                return False
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        os.close(self._fd)
        self._fd = -1


class LeaseLock:
    """A file that its owner refreshes."""

    def __init__(self, path: Path, timeout: float = LEASE_TIMEOUT, heartbeat: float = HEARTBEAT) -> None:
        self.path = path
        self.timeout = timeout
        self.heartbeat = heartbeat
        self._token = f"{os.uname().nodename} {os.getpid()} {secrets.token_hex(8)}"
        self._seen: tuple[str, float] | None = None  # content, when it was first seen like that
        self._stop = threading.Event()
        self._beats = 0
        self._mutex = threading.Lock()  # a heartbeat must not outlive the release

    def _content(self) -> str | None:
        try:
            return self.path.read_text()
        except FileNotFoundError:
            return None

    def try_acquire(self) -> bool:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            self._break_if_dead()
            return False
        os.write(fd, self._line().encode())
        os.close(fd)
        self._stop.clear()
        threading.Thread(target=self._beat, name="deep_gemm_k3-lease", daemon=True).start()
        return True

    def _line(self) -> str:
        return f"{self._token} {self._beats}"

    def _break_if_dead(self) -> None:
        content, now = self._content(), time.monotonic()
        if content is None:
            self._seen = None
        elif self._seen is None or self._seen[0] != content:
            self._seen = (content, now)
        elif now - self._seen[1] > self.timeout:
            grave = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.dead")
            try:
                os.rename(self.path, grave)
                if grave.read_text() != content:  # somebody was faster and already holds a new lease
                    os.link(grave, self.path)
                os.unlink(grave)
            except OSError:
                pass
            self._seen = None

    def _owned(self) -> bool:
        return (self._content() or "").startswith(self._token)

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat):
            with self._mutex:
                if self._stop.is_set() or not self._refresh():
                    return

    def _refresh(self) -> bool:
        try:
            if not self._owned():
                return False
            self._beats += 1
            scratch = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.beat")
            scratch.write_text(self._line())
            os.replace(scratch, self.path)
        except OSError:
            return False
        return True

    def release(self) -> None:
        with self._mutex:
            self._stop.set()
            try:
                if self._owned():
                    os.unlink(self.path)
            except OSError:
                pass


class ProcessLock:
    """flock, or a lease where there is none. Only ever tried, never waited for: the caller polls and decides."""

    def __init__(self, path: Path) -> None:
        self._flock = FlockLock(path)
        self._lease = LeaseLock(path.with_name(path.name + ".lease"))
        self._held: FlockLock | LeaseLock | None = None

    def try_acquire(self) -> bool:
        if not self._flock.unsupported and self._flock.try_acquire():
            self._held = self._flock
        elif self._flock.unsupported and self._lease.try_acquire():
            self._held = self._lease
        return self._held is not None

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()
