#!/usr/bin/env python3
"""The steps of verify_b200.sh: looks at the machine, runs what it can run there, and keeps one report up to date.

Exit codes: 0 all steps passed, 1 some did not (the report says which and why), 3 nothing here to verify.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "deep_gemm_k3.verify/1"
TARGETS = {10: "sm_100a", 9: "sm_90a"}  # by the major number of the compute capability
MAX_GPUS = 8
_TAIL = 6000
NOTHING_TO_DO = 3


class Refused(Exception):
    """There is nothing to verify here; the text says what was wanted and what was found."""


@dataclass(frozen=True)
class Step:
    """One command. ``record``: a JSON file it writes, which becomes part of the report."""

    name: str
    command: list[str]
    limit_s: float
    record: Path | None = None
    needs: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def query(fields: str) -> list[list[str]]:
    """One row for each GPU that nvidia-smi shows."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        raise Refused("wanted a machine with an NVIDIA driver, found no nvidia-smi on PATH")
    done = subprocess.run(
        [smi, f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise Refused(f"wanted GPUs that nvidia-smi can list, found: {(done.stderr or done.stdout).strip()}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def look(wanted: int | None) -> dict[str, Any]:
    """The GPUs to verify on: equal ones that the kernels are made for."""
    rows = query("name,compute_cap,memory.total,driver_version")
    if not rows:
        raise Refused("wanted at least one GPU, found none")
    if len({(name, capability) for name, capability, *_ in rows}) > 1:
        raise Refused(f"wanted GPUs of one kind, found {', '.join(sorted({row[0] for row in rows}))}")
    name, capability, memory, driver = rows[0]
    target = TARGETS.get(int(capability.split(".")[0]))
    if target is None:
        raise Refused(
            f"wanted compute capability 10.x (B200, GB200, B300) or 9.0 (Hopper, as a rehearsal), found {name} with "
            f"{capability}"
        )
    gpus = min(len(rows), MAX_GPUS) if wanted is None else wanted
    if not 1 <= gpus <= min(len(rows), MAX_GPUS):
        raise Refused(f"--gpus: wanted 1 to {min(len(rows), MAX_GPUS)}, given {gpus}")
    return {
        "gpu": name, "compute_capability": capability, "memory": memory, "driver": driver, "found": len(rows),
        "gpus": gpus, "target": target, "rehearsal": target != "sm_100a",
    }  # fmt: skip


def steps(python: str, gpus: int, scratch: Path) -> list[Step]:
    """What runs on ``gpus`` GPUs, the fastest answers first."""
    bench = [python, "-m", "deep_gemm_k3", "bench", "producer"]
    found = [
        Step("doctor", [python, "-m", "deep_gemm_k3", "doctor"], 120),
        Step("producer", [*bench, "--json", str(scratch / "producer.json")], 600, scratch / "producer.json"),
    ]
    if gpus > 1:
        record = scratch / f"producer-{gpus}.json"
        more = ["--gpus", str(gpus), "--shared-tokens", str(8 * gpus), "--json", str(record)]
        found.append(Step(f"producer on {gpus} GPUs", [*bench, *more], 600, record))
    marked = "gpu or gpu2" if gpus > 1 else "gpu"
    suite = [python, "scripts/gpu_report.py", "--out", str(scratch / "suite.json")]
    found.append(Step("suite", [*suite, "tests", "-m", marked, "-q"], 3600, scratch / "suite.json"))
    for tool in ("memcheck", "racecheck", "synccheck"):
        command = ["bash", "scripts/sanitize.sh", tool]
        found.append(Step(tool, command, 900, needs="compute-sanitizer", environment={"PYTHON": python}))
    return found


def run(step: Step) -> dict[str, Any]:
    """The step's outcome: passed, failed, timed out, or missing what it needs."""
    found: dict[str, Any] = {"name": step.name, "command": " ".join(step.command), "seconds": 0.0, "exit_code": None}
    if step.needs and shutil.which(step.needs) is None:
        return found | {"outcome": "missing", "tail": f"{step.needs}: wanted on PATH, found none"}
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, **step.environment},
        )  # fmt: skip
        outcome = _wait(process, step.limit_s)
        found["seconds"] = round(time.monotonic() - start, 1)
        found["exit_code"] = process.returncode
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
        found["tail"] = output.read().decode(errors="replace")
    found["outcome"] = outcome or ("passed" if process.returncode == 0 else "failed")
    if step.record is not None:
        try:
            found["record"] = json.loads(step.record.read_text())
        except (OSError, ValueError) as error:
            found["record_missing"] = str(error)
            found["outcome"] = "failed" if found["outcome"] == "passed" else found["outcome"]
    return found


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Empty when the process ended by itself. A signal goes to its whole group: ranks are processes of their own."""
    try:
        process.wait(limit_s)
        return ""
    except subprocess.TimeoutExpired:
        outcome = "timed out"
    except KeyboardInterrupt:
        outcome = "interrupted"
    for number, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    return outcome


def revision() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return done.stdout.strip() if done is not None and done.returncode == 0 else "unknown"


def save(report: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_suffix(".tmp")
    scratch.write_text(json.dumps(report, indent=1) + "\n")
    scratch.replace(out)


def verify(chosen: Sequence[Step], machine: dict[str, Any], out: Path) -> bool:
    """Run the steps one after another, whatever becomes of each."""
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": revision(),
        "machine": machine,
        "verdict": "unfinished",
        "steps": [],
    }
    for step in chosen:
        print(f"{step.name} ... (up to {step.limit_s / 60:.0f} min)", flush=True)
        done = run(step)
        report["steps"].append(done)
        save(report, out)
        print(f"    {done['outcome']} after {done['seconds']} s", flush=True)
        if done["outcome"] != "passed":
            print("    | " + "\n    | ".join(done["tail"].splitlines()[-12:]), flush=True)
        if done["outcome"] == "interrupted":
            break
    passed = len(report["steps"]) == len(chosen) and all(s["outcome"] == "passed" for s in report["steps"])
    report["verdict"] = "passed" if passed else "failed"
    save(report, out)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("verify_report.json"))
    parser.add_argument("--gpus", type=int, help="how many to use; all, up to 8, without it")
    parser.add_argument("--only", default="", help="names of steps, commas between")
    parser.add_argument("--list", action="store_true", help="show the steps and run none")
    parser.add_argument("--python", default=sys.executable, help="what runs the steps")
    options = parser.parse_args()
    try:
        machine = look(options.gpus)
    except Refused as refusal:
        print(f"verify_b200: nothing was run: {refusal}", file=sys.stderr)
        return NOTHING_TO_DO
    with tempfile.TemporaryDirectory() as scratch:
        chosen = steps(options.python, machine["gpus"], Path(scratch))
        names = [name.strip() for name in options.only.split(",") if name.strip()]
        if unknown := set(names) - {step.name for step in chosen}:
            parser.error(f"--only: wanted some of {', '.join(s.name for s in chosen)}, given {', '.join(unknown)}")
        chosen = [step for step in chosen if not names or step.name in names]
        if options.list:
            print("\n".join(f"{step.name}: {' '.join(step.command)}" for step in chosen))
            return 0
        what = f"{machine['gpus']} of {machine['found']} {machine['gpu']}, kernels for {machine['target']}"
        print(what + (": a rehearsal, these are no Blackwell GPUs" if machine["rehearsal"] else ""), flush=True)
        passed = verify(chosen, machine, options.out)
    print(
        f"{'all steps passed' if passed else 'NOT all steps passed'}; the report to send back: {options.out.resolve()}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
