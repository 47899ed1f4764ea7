"""The lock between processes."""

from __future__ import annotations

import time
from pathlib import Path

from deep_gemm_k3.jit.lock import FlockLock, LeaseLock


def test_flock_excludes_and_frees(tmp_path: Path) -> None:
    first, second = FlockLock(tmp_path / "lock"), FlockLock(tmp_path / "lock")
    assert first.try_acquire() and not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


def test_lease_excludes_and_frees(tmp_path: Path) -> None:
    first, second = LeaseLock(tmp_path / "lease"), LeaseLock(tmp_path / "lease")
    assert first.try_acquire() and not second.try_acquire()
    first.release()
    assert not (tmp_path / "lease").exists()
    assert second.try_acquire()
    second.release()


def test_live_lease_is_respected_and_dead_one_taken_over(tmp_path: Path) -> None:
    owner = LeaseLock(tmp_path / "lease", heartbeat=0.05)
    observer = LeaseLock(tmp_path / "lease", timeout=0.4)
    assert owner.try_acquire()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert not observer.try_acquire()
        time.sleep(0.02)
    owner._stop.set()  # the owner is killed: no more heartbeats, the file stays
    end = time.monotonic() + 5.0
    while not observer.try_acquire():
        assert time.monotonic() < end, "the dead lease was never taken over"
        time.sleep(0.02)
    observer.release()
    assert list(tmp_path.iterdir()) == []


def test_release_leaves_a_lease_that_somebody_else_took(tmp_path: Path) -> None:
    owner = LeaseLock(tmp_path / "lease")
    assert owner.try_acquire()
    (tmp_path / "lease").write_text("somebody else 0")
    owner.release()
    assert (tmp_path / "lease").read_text() == "somebody else 0"
