"""Compiled kernels on disk: one file a kernel, found by content.

* The key is a hash of what decides the result: the generated source (kernel, architecture, Config), the contents of all
  package headers it includes, the compiler with its version and flags, the versions of the CUDA headers and CCCL. No path is
  part of it, so a moved install finds its kernels.
* A file is written under a temporary name and renamed: readers see all of it or nothing. It carries the hash of each part;
  a truncated, empty or altered file is rebuilt.
* A file of another FORMAT, which another release of the package wrote, is left alone: its key is another one.
* One process compiles, others wait for its file (:mod:`deep_gemm_k3.jit.lock`); a killed compiler frees the lock; whoever
  waited ``WAIT_LIMIT`` seconds compiles by itself.
* A directory that cannot be written costs a warning: kernels are compiled into memory.

The file is a plain zip archive: ``unzip KEY.zip`` gives kernel.cu, kernel.ptx, kernel.cubin, compiler.log and meta.json.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import secrets
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deep_gemm_k3 import envs
from deep_gemm_k3.jit.compiler import Artefact, CompileError, Compiler
from deep_gemm_k3.jit.lock import ProcessLock
from deep_gemm_k3.jit.source import KernelSource

DIRECTORY = "v1"  # below the cache directory; its files tell their formats themselves
FORMAT = 2  # to be raised with every change of meta.json, of the parts, or of what they mean
WAIT_LIMIT = 600.0
_SHORTEST_POLL, _LONGEST_POLL = 0.01, 0.25
_PARTS = ("kernel.cu", "kernel.ptx", "kernel.cubin", "compiler.log")
_META = ("format", "name", "arch", "config", "entry", "compiler", "seconds", "ptx_only", "sha256")

log = logging.getLogger("deep_gemm_k3")


class DamagedArtefact(Exception):
    """A cache file that does not hold what it says."""


class OtherFormat(Exception):
    """A cache file that another release of the package wrote."""


def default_cache_dir() -> Path:
    """DGK3_CACHE_DIR, else the user's cache directory."""
    named = envs.CACHE_DIR.get()
    if named:
        return Path(named)
    try:
        import platformdirs

        return Path(platformdirs.user_cache_dir("deep_gemm_k3", appauthor=False))
    except ImportError:
        return Path.home() / ".cache" / "deep_gemm_k3"


def content_key(source: KernelSource, compiler: Compiler) -> str:
    parts = {
        "format": FORMAT,
        "source": source.text,
        "headers": source.sources_digest(),
        "arch": source.arch,
        "ptx_only": source.ptx_only,
        "compiler": compiler.identity,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def pack(artefact: Artefact) -> bytes:
    parts = {
        "kernel.cu": artefact.source.encode(),
        "kernel.ptx": artefact.ptx.encode(),
        "kernel.cubin": artefact.cubin,
        "compiler.log": artefact.log.encode(),
    }
    meta = {
        "format": FORMAT,
        "name": artefact.name,
        "arch": artefact.arch,
        "config": artefact.config,
        "entry": artefact.entry,
        "compiler": artefact.compiler,
        "seconds": round(artefact.seconds, 3),
        "ptx_only": artefact.ptx_only,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()},
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ({"meta.json": json.dumps(meta, indent=1).encode()} | parts).items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return buffer.getvalue()


def _check_format(meta: dict[str, Any]) -> None:
    # The archive's own checksum stands for the text of meta.json, so other fields are no damage either.
    if meta["format"] != FORMAT:
        raise OtherFormat(f"format: wanted {FORMAT}, given {meta['format']}")
    odd = sorted(set(_META) ^ set(meta))
    if odd:
        raise OtherFormat(f"meta.json: wanted the fields of format {FORMAT}, given others: {', '.join(odd)}")


def unpack(data: bytes) -> Artefact:
    """Raises :class:`OtherFormat` for what another release wrote, :class:`DamagedArtefact` unless every part is there and
    hashes to what the archive says."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            meta: dict[str, Any] = json.loads(archive.read("meta.json"))
            _check_format(meta)
            parts = {name: archive.read(name) for name in _PARTS}
        for name, content in parts.items():
            if hashlib.sha256(content).hexdigest() != meta["sha256"][name]:
                raise DamagedArtefact(f"{name} does not hash to what the archive says")
        artefact = Artefact(
            name=meta["name"],
            arch=meta["arch"],
            config=meta["config"],
            entry=meta["entry"],
            ptx=parts["kernel.ptx"].decode(),
            cubin=parts["kernel.cubin"],
            source=parts["kernel.cu"].decode(),
            log=parts["compiler.log"].decode(),
            compiler=meta["compiler"],
            seconds=meta["seconds"],
            ptx_only=meta["ptx_only"],
        )
        artefact.check()
    except KeyError as error:
        what = str(error.args[0])  # a field, or zipfile's sentence about a part
        raise DamagedArtefact(what if " " in what else f"no {what}") from error
    except (zipfile.BadZipFile, TypeError, ValueError, EOFError, NotImplementedError, CompileError) as error:
        raise DamagedArtefact(str(error) or type(error).__name__) from error
    return artefact


@dataclass(frozen=True)
class Entry:
    """One file of the cache, for people."""

    path: Path
    size: int
    artefact: Artefact | None  # None: damaged, or of another format
    damage: str = ""
    other_format: str = ""


class Cleared(NamedTuple):
    """How many files were removed, of how many bytes, and which could not be, with the reason."""

    files: int
    size: int
    kept: list[str]


class Cache:
    """All processes that use one directory share it."""

    def __init__(
        self, root: Path | None = None, wait_limit: float = WAIT_LIMIT, *, tells_of_damage: bool = True
    ) -> None:
        self.root = (root or default_cache_dir()) / DIRECTORY
        self.wait_limit = wait_limit
        self._warned = False
        self._tells_of_damage = tells_of_damage  # False: whoever asks has read the file and told of it
        self._damaged: set[str] = set()  # keys whose damage has been told

    def path(self, key: str) -> Path:
        return self.root / f"{key}.zip"

    def get(self, source: KernelSource, compiler: Compiler) -> Artefact:
        """From disk, or compiled (by exactly one process) and published."""
        key = content_key(source, compiler)
        return self._read(key) or self._build(key, source, compiler)

    def find(self, source: KernelSource, compiler: Compiler) -> Artefact | None:
        """From disk, or None."""
        return self._read(content_key(source, compiler))

    def _read(self, key: str) -> Artefact | None:
        try:
            return unpack(self.path(key).read_bytes())
        except DamagedArtefact as error:
            if self._tells_of_damage and key not in self._damaged:
                self._damaged.add(key)
                log.warning("%s is damaged (%s): it is compiled again", self.path(key), error)
        except OtherFormat as error:
            log.debug("%s is of another format (%s): it is compiled again", self.path(key), error)
        except OSError:
            pass
        return None

    def _build(self, key: str, source: KernelSource, compiler: Compiler) -> Artefact:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            return self._build_once(key, source, compiler)
        except OSError as error:
            self._warn(error)
            return compiler.compile(source)

    def _build_once(self, key: str, source: KernelSource, compiler: Compiler) -> Artefact:
        lock = ProcessLock(self.root / f"{key}.lock")
        deadline = time.monotonic() + self.wait_limit
        pause = _SHORTEST_POLL
        while not lock.try_acquire():
            if time.monotonic() > deadline:
                log.warning(
                    "%s: another process has been compiling it for %.0f s; not waiting longer",
                    source.name,
                    self.wait_limit,
                )
                return self._compile(key, source, compiler)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 1.5, _LONGEST_POLL)
            found = self._read(key) if self._published(key) else None
            if found is not None:
                return found
        try:
            found = self._read(key) if self._published(key) else None
            return found or self._compile(key, source, compiler)
        finally:
            lock.release()

    def _published(self, key: str) -> bool:
        """Asks the directory, not the name: a network file system may remember for a while that a name was absent."""
        return self.path(key).name in os.listdir(self.root)

    def _compile(self, key: str, source: KernelSource, compiler: Compiler) -> Artefact:
        log.info("compiling %s", source.log_line)
        artefact = compiler.compile(source)
        log.info("compiled %s for %s in %.1f s", source.name, source.arch, artefact.seconds)
        try:
            self._publish(key, artefact)
        except OSError as error:
            self._warn(error)
        return artefact

    def _publish(self, key: str, artefact: Artefact) -> None:
        self._replace(self.path(key), pack(artefact))
        self._damaged.discard(key)
        if envs.KEEP_SOURCES.get():
            self._replace(self.root / f"{key}.cu", artefact.source.encode())
            self._replace(self.root / f"{key}.ptx", artefact.ptx.encode())
            self._replace(self.root / f"{key}.log", artefact.log.encode())

    def _replace(self, path: Path, data: bytes) -> None:
        scratch = self.root / f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            scratch.write_bytes(data)
            os.replace(scratch, path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "the kernel cache %s cannot be written (%s): kernels are compiled again in every process. "
                "Mend with: free or writable space there, or DGK3_CACHE_DIR=some writable directory",
                self.root,
                error.strerror or error,
            )

    # ---- for people

    def _files(self) -> list[Path]:
        """None before the first kernel. Raises OSError for a directory that cannot be read."""
        try:
            return sorted(self.root.iterdir())
        except FileNotFoundError:
            return []

    def entries(self) -> Iterator[Entry]:
        """Every artefact, verified. Raises OSError for a directory that cannot be read."""
        for path in self._files():
            if path.suffix != ".zip":
                continue
            try:
                data = path.read_bytes()
            except OSError as error:
                yield Entry(path, 0, None, str(error))
                continue
            try:
                yield Entry(path, len(data), unpack(data))
            except DamagedArtefact as error:
                yield Entry(path, len(data), None, str(error))
            except OtherFormat as error:
                yield Entry(path, len(data), None, other_format=str(error))

    def clear(self) -> Cleared:
        """Removes every file, those of other formats too. Running processes keep what they have loaded."""
        files = size = 0
        kept = []
        for path in self._files():
            try:
                num_bytes = path.stat().st_size
                path.unlink()
            except FileNotFoundError:  # somebody else removed it
                continue
            except OSError as error:
                kept.append(f"{path}: {error.strerror or error}")
                continue
            files, size = files + 1, size + num_bytes
        return Cleared(files, size, kept)
