"""Compiling many kernels ahead of time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from jit_support import CountingCompiler, config, probe

from deep_gemm_k3 import doctor, envs
from deep_gemm_k3.__main__ import main
from deep_gemm_k3.jit import Artefact, Cache, CompileError, KernelSource, NvrtcCompiler, literal, warm_up
from deep_gemm_k3.jit import cli as jit_cli
from deep_gemm_k3.jit.kernel import KernelStore
from deep_gemm_k3.jit.warmup import ProgressLine


def sources(count: int) -> list[KernelSource]:
    return [probe(num_stages=1 + i) for i in range(count)]


def test_each_kernel_is_compiled_once_and_reported(tmp_path: Path) -> None:
    compiler = CountingCompiler(tmp_path / "journal")
    store = KernelStore(Cache(tmp_path / "cache"), compiler)
    steps: list[tuple[int, int]] = []
    report = warm_up(sources(3) + sources(2), store, progress=lambda done, total, source: steps.append((done, total)))
    assert (report.requested, report.compiled, compiler.count) == (3, 3, 3)
    assert steps == [(1, 3), (2, 3), (3, 3)]
    again = warm_up(sources(4), KernelStore(Cache(tmp_path / "cache"), compiler))
    assert (again.requested, again.compiled, compiler.count) == (4, 1, 4)
    assert warm_up([], store).requested == 0


def test_ranks_start_at_different_kernels(tmp_path: Path) -> None:
    seen: list[str] = []

    class Recorder(CountingCompiler):
        def compile(self, source: KernelSource):
            seen.append(source.key)
            return super().compile(source)

    store = KernelStore(Cache(tmp_path / "cache"), Recorder(tmp_path / "journal"))
    wanted = sources(4)
    warm_up(wanted, store, workers=1, first=6)
    assert seen == [wanted[i].key for i in (2, 3, 0, 1)]


def test_processes_share_the_work(tmp_path: Path) -> None:
    store = KernelStore(Cache(tmp_path / "cache"), NvrtcCompiler())
    report = warm_up(sources(3), store, workers=2)
    assert report.compiled == 3
    assert len(list(store.disk.root.glob("*.zip"))) == 3


def test_processes_hand_over_what_the_disk_cannot_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("")  # a file where the directory should be
    store = KernelStore(Cache(tmp_path / "cache"), NvrtcCompiler())
    assert warm_up(sources(2), store, workers=2).compiled == 2
    assert store.get(sources(1)[0]).cubin


def test_first_failure_is_raised_with_the_compilers_words(tmp_path: Path) -> None:
    broken = [KernelSource("probe", "sm_90a", literal(config() | {"no_such_field": i})) for i in range(2)]
    store = KernelStore(Cache(tmp_path / "cache"), NvrtcCompiler())
    with pytest.raises(CompileError, match="no_such_field"):
        warm_up(broken, store, workers=2)


def test_progress_line_stays_silent_when_quick(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLine()(1, 2, probe())
    assert capsys.readouterr().err == ""
    ProgressLine(delay=0.0)(2, 2, probe("sm_100a"))
    assert capsys.readouterr().err.startswith("deep_gemm_k3: compiled 2 of 2 kernels for sm_100a")


def run_cli(tmp_path: Path, *arguments: str, command: str = "cache") -> subprocess.CompletedProcess[str]:
    package = str(Path(__file__).resolve().parents[2])
    environment = envs.child_environment({"DGK3_CACHE_DIR": str(tmp_path), "PYTHONPATH": package})
    line = [sys.executable, "-m", "deep_gemm_k3", command, *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment)


class TextCompiler(CountingCompiler):
    """Stops at PTX."""

    def compile(self, source: KernelSource) -> Artefact:
        return replace(super().compile(source), cubin=b"", ptx_only=True)


def test_cache_commands(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.get(probe(), CountingCompiler(tmp_path / "journal"))
    assert run_cli(tmp_path, "path").stdout.strip() == str(cache.root)
    listed = run_cli(tmp_path, "list", "--configs").stdout
    assert "1 kernels" in listed and " registers " in listed
    cache.get(replace(probe(), ptx_only=True), TextCompiler(tmp_path / "journal"))
    listed = run_cli(tmp_path, "list").stdout  # what was never assembled has no registers to tell of
    assert "2 kernels" in listed and listed.count(" registers ") == 1 and "PTX for the emulator" in listed
    run_cli(tmp_path, "clear")
    cache.get(probe(), CountingCompiler(tmp_path / "journal"))
    assert run_cli(tmp_path, "verify").returncode == 0
    (path,) = cache.root.glob("*.zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("meta.json", "{}")
    damaged = run_cli(tmp_path, "verify")
    assert damaged.returncode == 1 and str(path) in damaged.stdout
    assert "1 damaged and removed" in run_cli(tmp_path, "verify", "--remove").stdout
    assert "removed" in run_cli(tmp_path, "clear").stdout
    assert list(cache.root.iterdir()) == []


def test_cache_commands_fail_where_they_cannot_look(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("list", "verify", "clear"):
        result = run_cli(tmp_path / "file", command)
        assert result.returncode == 1 and "Not a directory" in result.stderr and "Traceback" not in result.stderr
        assert run_cli(tmp_path / "nothing yet", command).returncode == 0


def test_clear_fails_when_a_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(envs.CACHE_DIR.name, str(tmp_path))
    root = Cache().root
    (root / "kept.zip").mkdir(parents=True)  # no file: it cannot be removed as one
    (root / "other.zip").write_text("")
    assert main(["cache", "clear"]) == 1
    told = capsys.readouterr()
    assert "removed 1 files" in told.out and f"not removed: {root / 'kept.zip'}: " in told.err


def test_what_a_read_only_disk_keeps_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(envs.CACHE_DIR.name, str(tmp_path))
    Cache().root.mkdir()
    path = Cache().root / "kernel.zip"
    path.write_bytes(b"half a file")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    for command in (["clear"], ["verify", "--remove"]):
        assert main(["cache", *command]) == 1
        told = capsys.readouterr()
        assert told.err == f"not removed: {path}: Read-only file system\n"
        assert "removed 0 files" in told.out or "1 damaged\n" in told.out
    assert path.exists()


def test_other_formats_are_counted_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(envs.CACHE_DIR.name, str(tmp_path))
    cache = Cache()
    cache.get(probe(), CountingCompiler(tmp_path / "journal"))
    with zipfile.ZipFile(cache.root / "old.zip", "w") as archive:
        archive.writestr("meta.json", '{"format": 1, "name": "probe"}')
    assert main(["cache", "verify", "--remove"]) == 0
    assert capsys.readouterr().out == "1 kernels are sound, 0 damaged, 1 of another format\n"
    assert main(["cache", "list"]) == 0
    told = capsys.readouterr().out
    assert "of another format (format: wanted 2, given 1)" in told and "1 kernels, 1 of another format, " in told
    (finding,) = doctor.check_cache()
    assert finding.status == doctor.OK and "1 kernels, 1 of another format" in finding.found
    assert main(["cache", "clear"]) == 0
    assert list(cache.root.iterdir()) == []


def test_warmup_command_fails_when_the_cache_does_not_keep_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jit_cli, "sources_of", lambda *_: sources(2))
    (tmp_path / "file").write_text("")
    for place, code in ((tmp_path / "file", 1), (tmp_path / "cache", 0)):
        monkeypatch.setenv(envs.CACHE_DIR.name, str(place))
        assert main(["warmup", "--ranks", "8", "--max-tokens", "8", "--workers", "1"]) == code
        told = capsys.readouterr()
        assert ("2 of 2 kernels could not be kept" in told.err) == (code == 1)
        assert ("2 kernels ready" in told.out) == (code == 0)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_warmup_command_refuses_what_cannot_be_launched(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--ranks", "1", "--max-tokens", "8", "--experts", "4096", *more]) == 1
    assert "kernels cannot be launched: fewer than two pipeline stages" in capsys.readouterr().err


def test_warmup_command_counts_what_a_call_can_choose(tmp_path: Path) -> None:
    options = ["--ranks", "8", "--max-tokens", "384", "--max-shared-tokens", "384", "--mode", "rs", "--mode", "sp_rs"]
    result = run_cli(tmp_path, *options, "--dry-run", command="warmup")
    assert result.returncode == 0, result.stderr
    count = int(result.stdout.split()[0])
    assert count >= 2 and count % 2 == 0  # both modes have as many
    assert not (tmp_path / "v1").exists()


def test_warmup_command_refuses_in_one_message(tmp_path: Path) -> None:
    result = run_cli(tmp_path, "--ranks", "5", "--max-tokens", "384", command="warmup")
    assert result.returncode == 1
    assert "num_experts" in result.stderr and "Traceback" not in result.stderr
