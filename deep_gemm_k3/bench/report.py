"""Records of runs: JSON, and lines for people."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..jit.source import INCLUDE_DIR
from . import peers, trace
from .work import Ceilings, Shape

SCHEMA = "deep_gemm_k3.bench/1"


def kernel_digest() -> str:
    """Names the kernel sources that were measured, where there is no repository to ask."""
    digest = hashlib.sha256()
    for path in sorted(INCLUDE_DIR.rglob("*.cuh")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """The repository's commit, where this runs in one."""
    command = ["git", "-C", str(INCLUDE_DIR), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def command_line(argv: Sequence[str]) -> list[str]:
    """What to type for the same run: without this machine's paths and where the files went."""
    rest = iter(argv[1:])
    kept = ["python", "-m", "deep_gemm_k3"]
    for part in rest:
        if part in ("--json", "--plot", "--trace"):
            next(rest, None)
        elif not part.startswith(("--json=", "--plot=", "--trace=")):
            kept.append(part)
    return kept


def machine(device: torch.device) -> dict[str, Any]:
    """Where a run took place."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "sms": properties.multi_processor_count, "cuda": torch.version.cuda}
    return found


class Run:
    """Records of one command; ``save`` after every record, so that an interrupted run keeps what it has."""

    def __init__(self, kind: str, device: torch.device, command: Sequence[str], ceilings: Ceilings) -> None:
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": kind,
            "command": shlex.join(command),
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "commit": commit(),
            "kernels": kernel_digest(),
            "machine": machine(device),
            "ceilings": asdict(ceilings),
            "rows": [],
        }

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shape = row["shape"]
        # Ranks that share a device have no peer, and the peers ran on H200s.
        is_alike = shape["ranks"] == row["processes"] and "H200" in self.data["machine"]["device"]
        devices = row["processes"] if is_alike else 0
        key = (shape["tokens"], shape["experts"], shape["topk"], devices)
        best, goal = peers.best(*key), peers.goal(*key)
        complete = {**row, "best_public": best, "goal_us": goal}
        self.data["rows"].append(complete)
        return complete

    def fail(self, mode: str, shape: Shape, error: Exception, **more: Any) -> str:
        """Record that something that was asked for has no time; gives the reason in one line."""
        failure = {**more, "mode": mode, "shape": asdict(shape), "error": str(error)}
        self.data.setdefault("failures", []).append(failure)
        return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])

    @property
    def failures(self) -> list[dict[str, Any]]:
        return list(self.data.get("failures", ()))

    def save(self, path: Path | None) -> None:
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.data, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """A saved run; refuses what another program wrote."""
    try:
        data: Any = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{path}: wanted a saved run, given what is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        given = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path}: wanted schema {SCHEMA}, given {given!r}")
    return dict(data)


def load_timed(path: Path) -> dict[str, Any]:
    """A saved run that has something to show."""
    data = load(path)
    if not data["rows"]:
        raise ValueError(f"{path}: wanted a run with times, given one with none")
    return data


# --------------------------------------------------------------------------------------------------------------- tables
_HEADER = (
    f"{'mode':<7} {'ranks':>5} {'M':>5} {'experts':>7} {'topk':>4} {'us':>9} {'low':>9} {'eager':>9} {'MB':>7} {'Gop':>7} "
    f"{'memory':>7} {'tensor':>7} {'%':>4} {'GB/s':>6} {'TF/s':>6} {'error':>8} {'best':>6} {'goal':>6}  plan"
)


def header() -> str:
    return _HEADER


def line(row: Mapping[str, Any]) -> str:
    """One record as a table row: times, bytes and operations, the floors they set in us, and what was reached of them."""
    shape, work, plan = row["shape"], row["work"], row["plan"]
    low = min(t["low"] for t in row["graph"])
    eager = f"{row['eager_us']:9.1f}" if row["eager_us"] is not None else " " * 9
    best = f"{row['best_public'][0]:6.0f}" if row.get("best_public") else " " * 6
    goal = f"{row['goal_us']:6.0f}" if row.get("goal_us") else " " * 6
    splits = "/".join(str(plan["splits"][name]) for name in ("routed_l1", "routed_l2", "shared_l1", "shared_l2"))
    return (
        f"{row['mode']:<7} {shape['ranks']:>5} {shape['tokens']:>5} {shape['experts']:>7} {shape['topk']:>4} {row['us']:9.1f} "
        f"{low:9.1f} {eager} {work['bytes'] * 1e-6:7.1f} {work['operations'] * 1e-9:7.1f} {work['memory_us']:7.1f} "
        f"{work['tensor_us']:7.1f} {work['percent_of_floor']:4.0f} {work['gb_s']:6.0f} {work['tflop_s']:6.0f} "
        f"{row['relative_error']:8.1e} {best} {goal}  tile {plan['routed_tokens']} shared {plan['shared_tokens']} ctas "
        f"{plan['num_ctas_per_sm']} stages {plan['num_stages']} splits {splits}"
    )


def failure_line(failures: Sequence[Mapping[str, Any]]) -> str:
    """How many points have no time, and which."""
    named = dict.fromkeys(f"{f['mode']} M={f['shape']['tokens']}" for f in failures)
    said = "1 point has" if len(failures) == 1 else f"{len(failures)} points have"
    return f"{said} no time: {', '.join(named)}"


def baseline_line(parts: Mapping[str, float], verdicts: Mapping[str, bool]) -> str:
    """The unfused parts, and for each of their sums whether the fused call takes no longer."""
    listed = ", ".join(f"{name.removesuffix('_us')} {us:.1f}" for name, us in parts.items())
    said = ", ".join(f"{name.removesuffix('_us')} {'yes' if kept else 'NO'}" for name, kept in verdicts.items())
    return f"        unfused: {listed}; fused not slower than: {said or 'no sum'}"


def verdict_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of all token counts at once: whether the fused call is ever slower than its unfused parts together."""
    compared = [row for row in rows if row.get("not_slower_than")]
    sums = {"own_sum_us": "its own routed part, cuBLAS, gating and norm", "sum_us": "torch's parts"}
    said = []
    for name, parts in sums.items():
        found = [row for row in compared if name in row["not_slower_than"]]
        slower = [str(row["shape"]["tokens"]) for row in found if not row["not_slower_than"][name]]
        if found:
            said.append(f"{parts}: {'M=' + ', '.join(slower) if slower else 'at none'} of {len(found)} token counts")
    return "fused slower than the sum of " + ("; ".join(said) or "unfused parts: nothing was compared")


def timeline_line(mode: str, tokens: int, sums: Mapping[str, float]) -> str:
    """Where a call's time goes: shares of a CTA's time, then moments."""
    shown = ", ".join(f"{name} {share:.1f} %" for name, share in trace.shares(dict(sums)).items())
    moments = [("listed", "list"), ("gathered", "gathered"), ("finished", "last tile"), ("end", "end")]
    times = ", ".join(f"{said} {sums[f'last {name} at']:.1f}" for name, said in moments if f"last {name} at" in sums)
    lost = f"; {sums['lost']:.0f} events beyond the tracks' ends" if "lost" in sums else ""
    return f"        timeline of {mode}, M={tokens}: {shown}; us: {times}{lost}"


def overheads(samples: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Each mode's samples against the dense ones of the same rounds: the median of the ratios, and their quartiles."""
    found: list[dict[str, Any]] = []
    dense = samples.get("dense", ())
    for mode, taken in samples.items():
        if not dense or mode not in ("rs", "sp_rs"):
            continue
        ratios = sorted(100.0 * (a / b - 1.0) for a, b in zip(taken, dense, strict=True))
        quarter = len(ratios) // 4
        found.append(
            {
                "mode": mode,
                "us": statistics.median(taken),
                "dense_us": statistics.median(dense),
                "overhead_percent": statistics.median(ratios),
                "quartiles": [ratios[quarter], ratios[-1 - quarter]],
                "rounds": len(ratios),
            }
        )
    return found


def overhead_line(found: Mapping[str, Any]) -> str:
    low, high = found["quartiles"]
    return (
        f"        {found['mode']} {found['us']:.2f} us against dense {found['dense_us']:.2f}, "
        f"{'cold' if found['cold'] else 'warm'}: {found['overhead_percent']:+.2f} % (half of {found['rounds']} rounds "
        f"within {low:+.2f} .. {high:+.2f})"
    )
