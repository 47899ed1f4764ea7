#!/usr/bin/env python3
"""Runs the whole GPU suite and writes one JSON report: commit, machine, versions, and every test's outcome and duration.

    python scripts/gpu_report.py [--out FILE] [--commit ID] [--limit SECONDS] [pytest arguments]

Without pytest arguments everything marked gpu runs. The exit code is pytest's. The file is kept up to date while the tests
run, so a run that is killed leaves what it has and the test it was in; one that passes its limit ends so by itself, with
exit code 124. Reports worth keeping live in docs/runs/.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc", "pytest", "numpy")


def commit(given: str | None) -> str:
    if given:
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def machine() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"cpu_cores": len(os.sched_getaffinity(0)), "platform": platform.platform()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "sms": properties.multi_processor_count,
            "gpu_bytes": properties.total_memory,
        }
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
        except OSError:
            facts["driver"] = "unknown"
    return facts


def versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "cuda_of_torch": torch.version.cuda or "none"}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


class Recorder:
    """A pytest plugin that keeps one record for each test, and the report on disk up to date."""

    def __init__(self, report: dict[str, Any], out: Path) -> None:
        self.report, self.out, self.start = report, out, time.time()
        self.tests: dict[str, dict[str, Any]] = report["tests"]
        self.written = 0.0

    def write(self) -> None:
        outcomes = [test["outcome"] for test in self.tests.values()]
        self.report["seconds"] = round(time.time() - self.start, 1)
        self.report["totals"] = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        scratch = self.out.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.report, indent=1) + "\n")
        scratch.replace(self.out)
        self.written = time.time()

    def stop(self) -> None:
        """End the process, whatever its main thread hangs in."""
        self.report["exit_code"] = 124
        self.write()
        print(f"{self.out}: stopped at the limit in {self.report.get('running')}: {self.report['totals']}", flush=True)
        os._exit(124)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.report["running"] = nodeid
        if time.time() - self.written > 1.0:
            self.write()

    def pytest_sessionfinish(self) -> None:
        del self.report["running"]
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "running", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.failed:
            test["outcome"] = "failed" if report.when == "call" else "error"
            test["message"] = str(report.longrepr)[-2000:]
        elif report.passed and report.when == "call":
            test["outcome"] = "passed"
        elif report.skipped and test["outcome"] == "running":
            test["outcome"] = "skipped"
            test["message"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_report.json"))
    parser.add_argument("--commit", help="where the tree has no repository")
    parser.add_argument("--limit", type=float, help="seconds for the whole run")
    options, arguments = parser.parse_known_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as tests/gpu/conftest.py, before CUDA starts
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    report: dict[str, Any] = {
        "commit": commit(options.commit),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["scripts/gpu_report.py", *arguments]),
        "machine": machine(),
        "versions": versions(),
        "exit_code": None,
        "running": "",
        "seconds": 0.0,
        "totals": {},
        "tests": {},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(report, options.out)
    if options.limit is not None:
        timer = threading.Timer(options.limit, recorder.stop)
        timer.daemon = True
        timer.start()
    # A test that runs too long shall fail; the other method ends the process.
    arguments = ["--timeout-method=signal", *(arguments or [str(ROOT / "tests"), "-m", "gpu", "-q"])]
    code = int(pytest.main(arguments, plugins=[recorder]))
    report["exit_code"] = code
    recorder.write()
    print(f"{options.out}: {report['totals']} in {report['seconds']} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
