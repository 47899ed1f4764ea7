"""The command line: which commands there are, what doctor finds and what its exit code says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deep_gemm_k3 import __main__ as cli
from deep_gemm_k3 import _extension, doctor, jit

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "deep_gemm_k3", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=240)


def test_help_lists_the_commands_without_importing_torch() -> None:
    code = "import sys; from deep_gemm_k3.__main__ import main; main(['--help']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.stdout.splitlines()[-1] == "False"
    for name in cli.available():
        assert f"\n  {name}" in result.stdout


def test_commands_that_must_be_there() -> None:
    assert {"demo", "plan", "doctor", "warmup", "cache"} <= set(cli.available())


@pytest.mark.parametrize("name", sorted(cli.available()))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"python -m deep_gemm_k3 {name}" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert "command: wanted one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("demo --device tpu", "--device: wanted cpu, cuda or cuda:N, given 'tpu'"),
        ("plan --ranks 0", "num_ranks: wanted 1..64, given 0"),
        ("plan --tokens 99999999999", "num_tokens: wanted a 32-bit integer, given 99999999999"),
        ("plan --max-tokens -1 --tokens 0", "num_max_tokens_per_rank: wanted 1..1048320, given -1"),
        ("plan --max-tokens -1", "num_max_tokens_per_rank: wanted 1..1048320, given -1"),
        ("plan --tokens 999999", "buffer: wanted at most 1099511627776 bytes per rank"),
        ("warmup --ranks 1 --max-tokens -1 --dry-run", "num_max_tokens_per_rank: wanted 1..1048320, given -1"),
        ("warmup --ranks 1 --max-tokens -400 --dry-run", "num_max_tokens_per_rank: wanted 1..1048320, given -400"),
        ("warmup --ranks 8 --max-tokens 999999 --dry-run", "buffer: wanted at most 1099511627776 bytes per rank"),
        ("warmup --ranks 0 --max-tokens 8 --dry-run", "num_ranks: wanted 1..64, given 0"),
        ("warmup --ranks 1 --max-tokens 8 --dry-run --workers -1", "'--workers'"),
        ("bench producer --device tpu", "--device: wanted cuda, cuda:N or cpu, given 'tpu'"),
        ("bench producer --device cpu --routing none", "--routing: wanted one of uniform, hot_expert"),
        ("bench producer --device cpu --calls 0", "'--calls'"),
        ("bench producer --device cpu --gpus -1", "'--gpus'"),
        ("bench producer --device cpu --seeds 0", "'--seeds'"),
        ("bench sweep --device cpu --tokens x", "--tokens: wanted whole numbers with commas between, given 'x'"),
        ("bench tune FILE --device cpu", "wanted a JSON list of objects"),
        ("bench table FILE", "wanted a saved run, given what is no JSON"),
        ("bench plot FILE.none out.png", "does not exist"),
        ("bench cost --device cpu --trace t.json", "No such option: --trace"),
        ("emulate FILE --seed -1", "'--seed'"),
        ("emulate FILE --sms 0", "'--sms'"),
        ("emulate FILE --param i32[x]", "wanted whole numbers with commas between in the shape"),
        ("emulate FILE --param seven", "wanted a number, hex:BYTES or DTYPE[SHAPE]"),
        ("emulate FILE --param 1 --grid 99999999999", "grid: wanted x[, y[, z]] in 1..2147483647"),
        ("emulate FILE --param 99999999999999999999", "params[0] of k: wanted an integer of 8 bytes"),
        (
            "emulate FILE --param 1 --trace /nowhere/trace.json",
            "--trace: wanted a file that can be written, given '/nowhere/trace.json': No such file",
        ),
    ],
)
def test_values_that_cannot_be_are_a_message_and_no_traceback(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p)\n{\n ret;\n}\n")
    assert cli.main(line.replace("FILE", str(file)).split()) in (1, 2)
    told = " ".join("".join(capsys.readouterr()).replace("│", " ").split())
    assert words in told and "Traceback" not in told


def test_unknown_option() -> None:
    assert command("doctor", "--wings").returncode == 2


def test_doctor_on_this_machine() -> None:
    result = command("doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(result.stdout)}
    assert result.returncode == (1 if any(f["status"] == "missing" for f in findings.values()) else 0)
    for subject in ("package", "python", "torch", "extension", "cache", "nvrtc", "driver", "symmetric memory"):
        assert subject in findings
    assert findings["extension"]["status"] == "ok"
    assert all(f["mend"] for f in findings.values() if f["status"] == "missing")


def test_doctor_does_not_initialise_cuda() -> None:
    code = (
        "from deep_gemm_k3 import doctor; doctor.examine(); import torch; print(torch.cuda.is_initialized(), "
        "torch.cuda.is_available() and torch.cuda.device_memory_used(0) < 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.stdout.strip() == "False False", result.stderr


def status_of(findings: list[doctor.Finding], subject: str) -> str:
    return next(finding.status for finding in findings if finding.subject == subject)


def test_missing_extension(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_extension, "_loaded", False)
    monkeypatch.setattr(_extension, "LIBRARY", tmp_path / "_C.so")
    finding = next(iter(doctor.check_extension()))
    assert finding.status == "missing"
    assert "build_ext --inplace" in finding.mend
    monkeypatch.setattr(doctor, "check_versions", lambda: iter(()))
    assert cli.main(["doctor"]) == 1


@pytest.mark.parametrize(("needed", "status"), [(True, "missing"), (False, "note")])
def test_missing_compiler_matters_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, needed: bool, status: str
) -> None:
    def nothing() -> None:
        raise jit.ToolchainError("NVRTC: wanted libnvrtc.so, found none. Mend with: pip install it")

    monkeypatch.setattr(jit, "find_toolchain", nothing)
    (finding,) = doctor.check_compiler(needed)
    assert (finding.subject, finding.status, finding.mend) == ("compiler", status, "pip install it")
    assert "NVRTC: wanted libnvrtc.so, found none." in finding.found


def test_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda name: "2.9.1+cu128" if name == "torch" else None)
    assert status_of(list(doctor.check_versions()), "torch") == "missing"


class FakeDriver(doctor.Driver):
    def __init__(self) -> None:
        pass

    def version(self) -> str:
        return "13.0"


def device(ordinal: int, capability: tuple[int, int] = (9, 0), peers: tuple[int, ...] = ()) -> doctor.Device:
    return doctor.Device(ordinal, "GPU", capability, False, peers)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "torch_has_cuda", lambda: True)
    assert status_of(list(doctor.check_devices(FakeDriver(), [])), "gpu") == "note"
    connected = list(doctor.check_devices(FakeDriver(), [device(0, peers=(1,)), device(1, (10, 0), (0,))]))
    assert [finding.status for finding in connected] == ["ok"] * 4
    apart = list(doctor.check_devices(FakeDriver(), [device(0), device(1, (8, 0))]))
    assert status_of(apart, "gpu 1") == "note"
    assert status_of(apart, "peer access") == "note"
    monkeypatch.setattr(doctor, "torch_has_cuda", lambda: False)
    assert status_of(list(doctor.check_devices(FakeDriver(), [device(0)])), "torch for CUDA") == "missing"


@pytest.mark.parametrize(("error", "status"), [(100, "ok"), (802, "missing")])
def test_a_driver_that_does_not_start_is_no_machine_without_a_gpu(error: int, status: str) -> None:
    driver = FakeDriver()
    driver.lib = SimpleNamespace(cuInit=lambda _: error)  # type: ignore[assignment]
    found = list(doctor.check_devices(driver, driver.devices()))
    assert status_of(found, "driver") == status and all(f.mend for f in found if f.status == "missing")


def test_unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("DGK3_CACHE_DIR", str(file / "below"))
    finding = next(iter(doctor.check_cache()))
    assert finding.status == "note"
    assert "DGK3_CACHE_DIR" in finding.mend


def test_damaged_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DGK3_CACHE_DIR", str(tmp_path))
    assert [finding.status for finding in doctor.check_cache()] == ["ok"]
    (jit.Cache().root / "kernel.zip").write_bytes(b"half a file")
    assert [finding.status for finding in doctor.check_cache()] == ["ok", "note"]


def test_a_failing_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "check_headers", broken)
    assert any("boom" in finding.found and finding.status == "missing" for finding in doctor.examine())


def test_plan_prints_choice_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    components = planned["buffer"]["components"]
    ends = [row["offset"] + row["bytes"] for row in components]
    assert all(end <= later["offset"] for end, later in zip(ends, components[1:], strict=False))
    assert ends[-1] <= planned["buffer"]["total_bytes"] < ends[-1] + 1024
    assert cli.main(["plan", "--literal"]) == 0
    text = capsys.readouterr().out
    assert str(planned["buffer"]["total_bytes"]) in text
    assert planned["literal"] in text
    for word in ("entry", "runs on", "routed", "shared", "K splits", "grid", "buffer", "warm-up"):
        assert f"\n{word}" in f"\n{text}"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_plan_that_cannot_be_launched_fails(form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--ranks", "1", "--experts", "4096", *form]) == 1
    assert "fewer than two pipeline stages fit into shared memory" in capsys.readouterr().out


def test_plan_without_shared_expert(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--shared", "none", "--tokens", "4096", "--target", "sm_100a", "--batch-invariant"]) == 0
    text = capsys.readouterr().out
    assert "\nshared " not in text
    assert "batch invariant" in text and "sm_100a" in text


def test_plan_says_what_serves_cpu_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--device", "cpu"]) == 0
    assert "on the CPU" in capsys.readouterr().out


def test_plan_refuses_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--experts", "9", "--ranks", "2"]) == 2
    assert "wanted" in capsys.readouterr().err
    assert cli.main(["plan", "--target", "sm_80"]) == 2
