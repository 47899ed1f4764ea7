"""Many kernels at once: everything a signature can choose, compiled in parallel before it is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass

from deep_gemm_k3 import envs
from deep_gemm_k3.jit.cache import unpack
from deep_gemm_k3.jit.compiler import Artefact, CompileError, NvccCompiler, NvrtcCompiler
from deep_gemm_k3.jit.kernel import KernelStore, default_store
from deep_gemm_k3.jit.source import INCLUDE_DIR, KernelSource

Progress = Callable[[int, int, KernelSource], None]


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up found and did."""

    requested: int  # distinct kernels
    compiled: int  # of them, not in the cache
    seconds: float
    slowest: float  # compile time of the slowest kernel, when it was built

    def __str__(self) -> str:
        return (
            f"{self.requested} kernels ready in {self.seconds:.1f} s, {self.compiled} of them compiled now "
            f"(slowest {self.slowest:.1f} s)"
        )


def default_workers() -> int:
    return envs.COMPILE_WORKERS.get() or len(os.sched_getaffinity(0))


class ProgressLine:
    """One line on stderr that appears after ``delay`` seconds, so that a warm cache says nothing."""

    def __init__(self, delay: float = 2.0) -> None:
        self._start = time.monotonic()
        self._delay = delay
        self._terminal = sys.stderr.isatty()
        self._last = 0.0

    def __call__(self, done: int, total: int, source: KernelSource) -> None:
        elapsed = time.monotonic() - self._start
        if elapsed < self._delay or (done < total and elapsed - self._last < self._delay and not self._terminal):
            return
        self._last = elapsed
        text = f"deep_gemm_k3: compiled {done} of {total} kernels for {source.arch}, {elapsed:.0f} s"
        print(text, end="\r" if self._terminal and done < total else "\n", file=sys.stderr, flush=True)


class Workers:
    """Processes that compile into the store's cache directory, one for each thread that asks."""

    def __init__(self, store: KernelStore) -> None:
        self._store = store
        self._local = threading.local()
        self._processes: list[subprocess.Popen[str]] = []

    def _process(self) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] | None = getattr(self._local, "process", None)
        if process is None or process.poll() is not None:
            package = str(INCLUDE_DIR.parent.parent)
            paths = os.pathsep.join([package, *(path for path in sys.path if path)])
            process = subprocess.Popen(
                [sys.executable, "-m", "deep_gemm_k3.jit.worker", str(self._store.disk.root.parent)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=envs.child_environment({"PYTHONPATH": paths}),
            )
            self._local.process = process
            self._processes.append(process)
        return process

    def compile(self, source: KernelSource) -> Artefact:
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(source)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:  # killed, or out of memory: this process can still do it
            return self._store.get(source)
        reply = json.loads(line)
        if "error" in reply:
            raise CompileError(reply["error"])
        if "data" in reply:
            return self._store.put(unpack(base64.b64decode(reply["data"])))
        return self._store.get(source)

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def _compile_function(store: KernelStore, workers: int) -> Iterator[Callable[[KernelSource], Artefact]]:
    """Processes when that pays and the compiler is one that a new process would choose too."""
    if workers <= 1 or not isinstance(store.compiler, NvrtcCompiler | NvccCompiler):
        yield store.get
        return
    pool = Workers(store)
    try:
        yield pool.compile
    finally:
        pool.close()


def _finish(futures: dict[Future[Artefact], KernelSource], progress: Progress) -> None:
    try:
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            progress(done, len(futures), futures[future])
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def warm_up(
    sources: Sequence[KernelSource],
    store: KernelStore | None = None,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    first: int | None = None,
) -> WarmupReport:
    """Puts every kernel into the store's memory, compiling what the disk cache lacks.

    ``first`` rotates the order (at random by default): ranks that warm up together start at different kernels and so
    share the work instead of waiting for each other. The first failure is raised after the compilations that run have
    ended.
    """
    store = store or default_store()
    start = time.perf_counter()
    distinct = list({source.key: source for source in sources}.values())
    missing = [source for source in distinct if store.peek(source) is None]
    if missing:
        start_at = (random.randrange(len(missing)) if first is None else first) % len(missing)
        ordered = missing[start_at:] + missing[:start_at]
        count = min(workers or default_workers(), len(ordered))
        with _compile_function(store, count) as compile_one, ThreadPoolExecutor(count) as pool:
            _finish({pool.submit(compile_one, source): source for source in ordered}, progress or ProgressLine())
    slowest = max((store.get(source).seconds for source in distinct), default=0.0)
    return WarmupReport(len(distinct), len(missing), time.perf_counter() - start, slowest)
