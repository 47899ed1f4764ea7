"""The disk cache: key, verification, one compile for many processes, killed compilers, disks that cannot be written."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from jit_support import CountingCompiler, probe

from deep_gemm_k3.jit import Cache
from deep_gemm_k3.jit import cache as cache_module
from deep_gemm_k3.jit.cache import DamagedArtefact, content_key, pack, unpack
from deep_gemm_k3.jit.kernel import KernelStore

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def compiler(tmp_path: Path) -> CountingCompiler:
    return CountingCompiler(tmp_path / "journal")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def only_file(cache: Cache) -> Path:
    (path,) = cache.root.glob("*.zip")
    return path


# ---- the key


def test_key_depends_on_everything_that_decides_the_result(compiler: CountingCompiler) -> None:
    keys = [
        content_key(probe(), compiler),
        content_key(probe(num_stages=5), compiler),
        content_key(probe("sm_100a"), compiler),
        content_key(probe("sm_100f"), compiler),
        content_key(probe(), CountingCompiler(compiler.journal, identity="counting 1.1")),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == content_key(probe(), compiler)


def test_key_follows_header_contents(compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content_key(probe(), compiler)
    monkeypatch.setattr("deep_gemm_k3.jit.source.headers_digest", lambda header, root: "another")
    assert content_key(probe(), compiler) != before


def test_key_and_artefact_hold_no_path(cache: Cache, compiler: CountingCompiler) -> None:
    cache.get(probe(), compiler)
    assert str(cache.root).encode() not in only_file(cache).read_bytes()


# ---- hits, damage


def test_hit_from_disk_equals_what_was_compiled(cache: Cache, compiler: CountingCompiler) -> None:
    compiled = cache.get(probe(), compiler)
    assert Cache(cache.root.parent).get(probe(), compiler) == compiled
    assert compiler.count == 1


def test_file_is_a_plain_archive(cache: Cache, compiler: CountingCompiler) -> None:
    compiled = cache.get(probe(), compiler)
    with zipfile.ZipFile(only_file(cache)) as archive:
        assert archive.read("kernel.cu").decode() == compiled.source
        assert archive.read("kernel.cubin") == compiled.cubin


def damage_nothing_left(data: bytes) -> bytes:
    return b""


def damage_truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def damage_last_byte(data: bytes) -> bytes:
    return data[:-1]


def damage_flipped(data: bytes) -> bytes:
    middle = data.index(b"\x7fELF") + 50
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [damage_nothing_left, damage_truncated, damage_last_byte, damage_flipped])
def test_damaged_file_is_rebuilt(cache: Cache, compiler: CountingCompiler, damage, caplog) -> None:
    compiled = cache.get(probe(), compiler)
    path = only_file(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert [entry.artefact for entry in cache.entries()] == [None]
    assert cache.get(probe(), compiler) == compiled
    assert compiler.count == 2
    assert caplog.text.count("is damaged") == 1
    assert cache.get(probe(), compiler) == compiled
    assert compiler.count == 2


def test_every_truncation_is_noticed(cache: Cache, compiler: CountingCompiler) -> None:
    data = pack(cache.get(probe(), compiler))
    for length in range(0, len(data), 97):
        with pytest.raises(DamagedArtefact):
            unpack(data[:length])


def test_empty_cubin_is_never_accepted(cache: Cache, compiler: CountingCompiler) -> None:
    import dataclasses

    hollow = dataclasses.replace(compiler.compile(probe()), cubin=b"")
    with pytest.raises(DamagedArtefact, match="wanted a cubin"):
        unpack(pack(hollow))


# ---- formats


def rewritten(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """The file with another meta.json, sound as an archive."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    meta = json.loads(parts["meta.json"])
    change(meta)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (parts | {"meta.json": json.dumps(meta).encode()}).items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("ptx_only"),
        lambda meta: meta.update(format=1),
        lambda meta: meta.update(format=3, later="field"),
        lambda meta: meta.update(later="field"),
    ],
)
def test_another_format_is_no_damage(cache: Cache, compiler: CountingCompiler, change, caplog) -> None:
    compiled = cache.get(probe(), compiler)
    rewritten(only_file(cache), change)
    (entry,) = cache.entries()
    assert entry.artefact is None and not entry.damage and entry.other_format
    assert cache.find(probe(), compiler) is None
    assert cache.get(probe(), compiler) == compiled and compiler.count == 2
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert cache.find(probe(), compiler) == compiled


def test_the_format_is_raised_when_the_fields_change(cache: Cache, compiler: CountingCompiler) -> None:
    cache.get(probe(), compiler)
    with zipfile.ZipFile(only_file(cache)) as archive:
        meta, names = json.loads(archive.read("meta.json")), archive.namelist()
    fields = {2: "arch compiler config entry format name ptx_only seconds sha256"}
    assert " ".join(sorted(meta)) == fields[meta["format"]]
    assert names == ["meta.json", "kernel.cu", "kernel.ptx", "kernel.cubin", "compiler.log"]


@pytest.mark.parametrize("lost", ["format", "kernel.cubin"])
def test_what_is_missing_is_named(cache: Cache, compiler: CountingCompiler, lost: str) -> None:
    cache.get(probe(), compiler)
    rewritten(only_file(cache), lambda meta: meta.pop(lost, None) or meta["sha256"].pop(lost, None))
    (entry,) = cache.entries()
    assert entry.damage == f"no {lost}"


def test_damage_is_told_once_per_damage(cache: Cache, compiler: CountingCompiler, caplog) -> None:
    for times in (1, 2):
        cache.get(probe(), compiler)
        only_file(cache).write_bytes(b"half a file")
        assert cache.find(probe(), compiler) is None  # as a warm-up looks before it compiles
        cache.get(probe(), compiler)
        assert caplog.text.count("is damaged") == times


# ---- many processes


def compile_in_child(root: Path, compiler: CountingCompiler, start, results) -> None:
    start.wait()
    try:
        results.put(len(Cache(root).get(probe(), compiler).cubin))
    except BaseException as error:
        results.put(repr(error))


def test_sixteen_processes_compile_once(cache: Cache, tmp_path: Path) -> None:
    compiler = CountingCompiler(tmp_path / "journal", seconds=0.5)
    start, results = FORK.Event(), FORK.Queue()
    children = [
        FORK.Process(target=compile_in_child, args=(cache.root.parent, compiler, start, results)) for _ in range(16)
    ]
    for child in children:
        child.start()
    start.set()
    sizes = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join(60)
    assert compiler.count == 1
    assert len(sizes) == 1 and all(isinstance(size, int) for size in sizes), sizes
    assert list(cache.root.glob("*.tmp")) == []


def test_killed_compiler_frees_the_lock(cache: Cache, tmp_path: Path) -> None:
    slow, fast = CountingCompiler(tmp_path / "slow", seconds=60), CountingCompiler(tmp_path / "fast")
    start, results = FORK.Event(), FORK.Queue()
    victim = FORK.Process(target=compile_in_child, args=(cache.root.parent, slow, start, results))
    victim.start()
    start.set()
    while slow.count == 0:
        time.sleep(0.01)
    waiter = FORK.Process(target=compile_in_child, args=(cache.root.parent, fast, start, results))
    waiter.start()
    time.sleep(0.2)
    assert fast.count == 0  # it waits while the victim lives
    os.kill(victim.pid, signal.SIGKILL)
    assert isinstance(results.get(timeout=10), int)
    assert fast.count == 1
    victim.join(10)
    waiter.join(10)


def test_stopped_owner_delays_but_never_blocks(tmp_path: Path, caplog) -> None:
    slow, fast = CountingCompiler(tmp_path / "slow", seconds=60), CountingCompiler(tmp_path / "fast")
    start, results = FORK.Event(), FORK.Queue()
    cache = Cache(tmp_path / "cache", wait_limit=0.3)
    victim = FORK.Process(target=compile_in_child, args=(cache.root.parent, slow, start, results))
    victim.start()
    start.set()
    while slow.count == 0:
        time.sleep(0.01)
    try:
        assert cache.get(probe(), fast).cubin
        assert fast.count == 1
        assert "not waiting longer" in caplog.text
    finally:
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)


# ---- disks


def test_read_only_directory_compiles_in_memory_with_one_warning(
    tmp_path: Path, compiler: CountingCompiler, caplog, monkeypatch
) -> None:
    cache = Cache(tmp_path / "cache")

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert cache.get(probe(), compiler).cubin
    assert cache.get(probe(num_stages=5), compiler).cubin
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "Read-only file system" in caplog.text and "DGK3_CACHE_DIR" in caplog.text


def test_read_only_directory_still_gives_what_it_has(cache: Cache, compiler: CountingCompiler, monkeypatch) -> None:
    cache.get(probe(), compiler)

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    cache.get(probe(), compiler)
    monkeypatch.undo()
    assert compiler.count == 1


def test_full_disk_leaves_no_half_file(cache: Cache, compiler: CountingCompiler, caplog, monkeypatch) -> None:
    real = Path.write_bytes

    def fill(self: Path, data: bytes) -> int:
        real(self, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fill)
    assert cache.get(probe(), compiler).cubin
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    assert [path.suffix for path in cache.root.iterdir()] == [".lock"]
    assert cache.get(probe(), compiler).cubin
    assert compiler.count == 2


def test_directory_is_a_file(tmp_path: Path, compiler: CountingCompiler, caplog) -> None:
    (tmp_path / "cache").write_text("")
    assert Cache(tmp_path / "cache").get(probe(), compiler).cubin
    assert "cannot be written" in caplog.text


def test_no_file_locks_falls_back_to_a_lease(cache: Cache, tmp_path: Path, monkeypatch) -> None:
    def no_flock(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_flock)
    compiler = CountingCompiler(tmp_path / "journal", seconds=0.3)
    start, results = FORK.Event(), FORK.Queue()
    children = [
        FORK.Process(target=compile_in_child, args=(cache.root.parent, compiler, start, results)) for _ in range(8)
    ]
    for child in children:
        child.start()
    start.set()
    assert all(isinstance(results.get(timeout=30), int) for _ in children)
    for child in children:
        child.join(30)
    assert compiler.count == 1
    assert list(cache.root.glob("*.lease")) == []


# ---- the process' own memory, and housekeeping


def test_memory_comes_before_disk(cache: Cache, compiler: CountingCompiler) -> None:
    store = KernelStore(cache, compiler)
    first = store.get(probe())
    only_file(cache).unlink()
    assert store.get(probe()) is first
    assert compiler.count == 1


def test_keep_sources(cache: Cache, compiler: CountingCompiler, monkeypatch) -> None:
    monkeypatch.setenv("DGK3_KEEP_SOURCES", "1")
    compiled = cache.get(probe(), compiler)
    stem = only_file(cache).stem
    assert (cache.root / f"{stem}.cu").read_text() == compiled.source
    assert (cache.root / f"{stem}.ptx").read_text() == compiled.ptx


def test_clear_removes_everything(cache: Cache, compiler: CountingCompiler) -> None:
    cache.get(probe(), compiler)
    files, size, kept = cache.clear()
    assert files == 2 and size > 0 and not kept  # artefact and lock
    assert list(cache.entries()) == [] and list(cache.root.iterdir()) == []
    cache.get(probe(), compiler)
    assert compiler.count == 2


def test_directory_comes_from_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DGK3_CACHE_DIR", str(tmp_path / "named"))
    assert Cache().root == tmp_path / "named" / cache_module.DIRECTORY


def test_directory_without_platformdirs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("DGK3_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "platformdirs", None)
    assert cache_module.default_cache_dir() == tmp_path / ".cache" / "deep_gemm_k3"
