"""The verification script for Blackwell machines, with stand-ins for the driver's and the sanitizer's tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
B200, H200, A100 = "NVIDIA B200, 10.0", "NVIDIA H200, 9.0", "NVIDIA A100, 8.0"

# Stands for the interpreter that runs the steps: notes its arguments, writes the record that was asked for, and does to
# each command what OUTCOMES says.
FAKE_PYTHON = """#!{python}
import json, os, sys, time
args = sys.argv[1:]
line = " ".join(args)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(line + "\\n")
for part, what in json.loads(os.environ["OUTCOMES"]).items():
    if part in line:
        print("a reason")
        if what == "hang":
            time.sleep(60)
        if what != "no record":
            sys.exit(int(what))
        args = []
for flag in ("--json", "--out"):
    if flag in args:
        with open(args[args.index(flag) + 1], "w") as record:
            json.dump({{"from": line}}, record)
"""


class Machine:
    """A PATH of its own with an nvidia-smi that lists ``gpus``."""

    def __init__(self, path: Path, gpus: list[str] | None, sanitizer: bool = True) -> None:
        self.path, self.calls = path, path / "calls"
        self.bin = path / "bin"
        self.bin.mkdir()
        rows = "\\n".join(f"{gpu}, 183359 MiB, 580.95" for gpu in gpus or [])
        if gpus is not None:
            self.tool("nvidia-smi", f"printf '{rows}\\n'")
        if sanitizer:
            self.tool("compute-sanitizer", 'echo "sanitizer $*" >> "$CALLS"')
        python = self.bin / "fake_python"
        python.write_text(FAKE_PYTHON.format(python=sys.executable))
        python.chmod(0o755)
        for name in ("bash", "dirname", "env", "timeout"):
            (self.bin / name).symlink_to(f"/usr/bin/{name}" if Path(f"/usr/bin/{name}").exists() else f"/bin/{name}")

    def tool(self, name: str, body: str) -> None:
        made = self.bin / name
        made.write_text(f"#!/bin/bash\n{body}\n")
        made.chmod(0o755)

    def verify(self, *arguments: str, outcomes: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.bin), "PYTHON": sys.executable, "CALLS": str(self.calls),
            "OUTCOMES": json.dumps(outcomes or {}), "HOME": os.environ.get("HOME", "/"),
        }  # fmt: skip
        fake = ["--out", str(self.path / "report.json"), "--python", str(self.bin / "fake_python")]
        command = [str(self.bin / "bash"), str(ROOT / "scripts/verify_b200.sh"), *fake, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.path, timeout=120)

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return found


@pytest.mark.parametrize(
    ("gpus", "arguments", "said"),
    [
        (None, (), "found no nvidia-smi"),
        ([], (), "found none"),
        ([A100], (), "found NVIDIA A100 with 8.0"),
        ([B200, H200], (), "GPUs of one kind"),
        ([B200], ("--gpus", "2"), "wanted 1 to 1, given 2"),
    ],
)
def test_other_machines_are_refused_politely(
    tmp_path: Path, gpus: list[str] | None, arguments: tuple[str, ...], said: str
) -> None:
    machine = Machine(tmp_path, gpus)
    done = machine.verify(*arguments)
    assert done.returncode == 3
    assert "nothing was run" in done.stderr and said in done.stderr
    assert not machine.calls.exists() and not (tmp_path / "report.json").exists()


def test_one_b200_runs_every_step(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [B200])
    done = machine.verify()
    assert done.returncode == 0, done.stdout + done.stderr
    report = machine.report
    assert [s["name"] for s in report["steps"]] == ["doctor", "producer", "suite", "memcheck", "racecheck", "synccheck"]
    assert {s["outcome"] for s in report["steps"]} == {"passed"}
    assert report["verdict"] == "passed"
    assert report["machine"] | {"gpu": "NVIDIA B200", "target": "sm_100a", "rehearsal": False} == report["machine"]
    records = {s["name"]: s["record"]["from"] for s in report["steps"] if "record" in s}
    assert "bench producer" in records["producer"]
    assert "tests -m gpu -q" in records["suite"]
    assert str(tmp_path / "report.json") in done.stdout
    calls = machine.calls.read_text()
    for tool in ("memcheck", "racecheck", "synccheck"):
        assert f"sanitizer --tool {tool}" in calls


def test_eight_gpus_take_part(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [B200] * 8)
    assert machine.verify("--only", "suite,producer on 8 GPUs").returncode == 0
    calls = machine.calls.read_text()
    assert "--gpus 8 --shared-tokens 64" in calls
    assert "-m gpu or gpu2" in calls
    listed = machine.verify("--list", "--gpus", "2").stdout
    assert "producer on 2 GPUs: " in listed and "--shared-tokens 16" in listed


def test_a_hopper_gpu_is_a_rehearsal(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [H200])
    done = machine.verify("--only", "doctor")
    assert done.returncode == 0 and "rehearsal" in done.stdout
    assert machine.report["machine"]["rehearsal"] is True
    assert machine.report["machine"]["target"] == "sm_90a"


def test_what_fails_is_named_and_the_rest_still_runs(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [B200], sanitizer=False)
    done = machine.verify(outcomes={"gpu_report.py": "1", "bench producer": "no record"})
    assert done.returncode == 1
    found = {s["name"]: s["outcome"] for s in machine.report["steps"]}
    assert found == {
        "doctor": "passed", "producer": "failed", "suite": "failed", "memcheck": "missing", "racecheck": "missing",
        "synccheck": "missing",
    }  # fmt: skip
    assert machine.report["verdict"] == "failed"
    assert "a reason" in done.stdout and "NOT all steps passed" in done.stdout
    suite = next(s for s in machine.report["steps"] if s["name"] == "suite")
    assert suite["exit_code"] == 1 and "a reason" in suite["tail"]


def test_a_hanging_step_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_budgets import load_script

    verify = load_script("verify_device")
    step = verify.Step("slow", [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 1.0)
    found = verify.run(step)
    assert found["outcome"] == "timed out" and found["seconds"] < 30
    assert "begun" in found["tail"]


def test_the_suite_on_gpus_takes_the_target_of_the_gpu() -> None:
    """A test that names one architecture would fail on the other: whoever names one names both."""
    lines = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((ROOT / "tests/gpu").glob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ("sm_90a" in line) != ("sm_100a" in line)
    ]
    assert lines == []
    # What lies beside them and has a target of its own when none is named.
    for helper in ("probe", "alone", "Play"):
        pattern = re.compile(rf"\b{helper}\(\)")
        assert not [path.name for path in (ROOT / "tests/gpu").glob("*.py") if pattern.search(path.read_text())]
