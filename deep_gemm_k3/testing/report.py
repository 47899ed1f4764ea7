"""The record of a mutation sweep in words: how many mutants of what were noticed by what, and why the others are harmless.

Reasons live in tests/emu/mutation_reasons.json: a list of ``{"sites": [pattern, ...], "reason": text}``, patterns over the
names of sites. ``"kind"`` tells other kinds of reasons, see `Reasons.of`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sweep import AROUND

ROOT = Path(__file__).resolve().parents[2]
REASONS = ROOT / "tests" / "emu" / "mutation_reasons.json"
RUNS = ROOT / "docs" / "runs"


@dataclass(frozen=True)
class Reasons:
    """Why survivors are harmless, by patterns over the names of sites; the first that matches counts."""

    entries: tuple[Mapping[str, Any], ...]

    @classmethod
    def load(cls) -> Reasons:
        return cls(tuple(json.loads(REASONS.read_text())))

    def of(self, site: str, kind: str = "survivor") -> str:
        """The reason, or an empty string. ``kind``: "copy" where another mutant of the site is noticed, so that the instruction
        is needed and the reason is one why this place is not; "unreached" for what no play executes."""
        for entry in self.entries:
            if kind == entry.get("kind", "survivor") and any(re.search(pattern, site) for pattern in entry["sites"]):
                return str(entry["reason"])
        return ""


def latest_record() -> dict[str, Any]:
    """The committed record of the last full sweep."""
    found = sorted(RUNS.glob("mutation-*.json"))
    if len(found) != 1:
        raise FileNotFoundError(f"docs/runs/mutation-COMMIT.json: wanted one, given {[path.name for path in found]}")
    record: dict[str, Any] = json.loads(found[0].read_text())
    return record


UNREACHED = "Not judged: no recorded call of any play executes it, so the mutant ran nowhere."
COPY = (
    "Needed: its mutants are noticed at other places of the kernel or in other plays. Here nothing depends on it, because the "
    "ring has not gone round, no further tile follows, or something else has ordered the same before."
)


HEAD = (
    "# Mutation of the kernels",
    "",
    "Every fence, wait, arrival, commit and expectation of bytes in the PTX of the kernels is removed, one at a time; loads,",
    "stores and reductions with acquire or release semantics are also made relaxed, and those of system scope narrowed to",
    "the device. Each mutant runs in the emulator on recorded calls of the public API (`deep_gemm_k3/testing/plays.py`),",
    "under several schedules, with race detection and without, until somebody notices: a deadlock, a finding, or a result",
    "with other bits. `scripts/mutation_sweep.py` makes the record and this page; CI runs a sample of the mutants",
    "(`tests/emu/test_emu_mutation_sweep.py`).",
    "",
    "A mutant runs only in calls in which the unchanged kernel executes the instruction under the same schedule, and in the",
    "large ones only if no small one does. About every other schedule has the lanes of a warp apart.",
    "",
)


def noticed_sites(record: Mapping[str, Any]) -> set[str]:
    """Names of sites of which at least one mutant was noticed."""
    return {v["site"] for play in record["plays"] for v in play["verdicts"] if v["by"]}


def surely_noticed(record: Mapping[str, Any], name: str) -> set[str]:
    """Names of sites of which a play's small acts noticed every mutant."""
    verdicts = [v for play in record["plays"] if play["play"] == name for v in play["verdicts"]]
    unsure = {v["site"] for v in verdicts if not v["by"] or not v["trial"].startswith(("act 0", "act 1"))}
    return {v["site"] for v in verdicts} - unsure


def reached_sites(record: Mapping[str, Any]) -> set[str]:
    """Names of sites of which at least one mutant was executed."""
    return {v["site"] for play in record["plays"] for v in play["verdicts"] if v.get("reached", True)}


def why(verdict: Mapping[str, Any], noticed: set[str], reached: set[str], reasons: Reasons) -> str:
    """The reason for a mutant that nobody noticed; empty for one that its play does not execute, though another does."""
    site = verdict["site"]
    if not verdict.get("reached", True):
        return "" if site in reached else reasons.of(site, "unreached") or UNREACHED
    return reasons.of(site, "copy") or COPY if site in noticed else reasons.of(site) or "NO REASON"


def merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Parts of a sweep in one, the last of a mutant counting; of a play whose kernel differs, the last part alone."""
    plays: dict[str, dict[str, Any]] = {}
    for play in (play for record in records for play in record["plays"]):
        known = plays.get(play["play"])
        verdicts = {(v["site"], v["number"]): v for v in play["verdicts"]}
        if known is not None and known["digest"] == play["digest"]:
            verdicts = {(v["site"], v["number"]): v for v in known["verdicts"]} | verdicts
        plays[play["play"]] = {**play, "verdicts": [verdicts[key] for key in sorted(verdicts)]}
    return {"commit": records[-1]["commit"], "plays": [plays[name] for name in sorted(plays)]}


def document(record: Mapping[str, Any], reasons: Reasons) -> str:
    """docs/mutation.md."""
    plays = record["plays"]
    digests = ", ".join(f"{play['play']} {play['digest']}" for play in plays)
    noticed, reached = noticed_sites(record), reached_sites(record)
    names = {v["site"] for play in plays for v in play["verdicts"]}
    lines = [
        *HEAD,
        f"Record: `docs/runs/mutation-{record['commit']}.json`, of the kernels of commit {record['commit']}, with these digests",
        f"(instructions without line information): {digests}.",
        *carried(plays),
        "",
        "| play | mutants | run | not executed | noticed | survive | noticed by |",
        "|---|---|---|---|---|---|---|",
    ]
    survivors: dict[str, Counter[str]] = {}
    for play in plays:
        verdicts = play["verdicts"]
        by = Counter(kind for v in verdicts for kind in v["by"])
        left = [v for v in verdicts if not v["by"]]
        idle = sum(not v.get("reached", True) for v in left)
        kinds = ", ".join(f"{kind} {count}" for kind, count in by.most_common())
        counts = f"{play['mutants']} | {len(verdicts)} | {idle} | {len(verdicts) - len(left)} | {len(left) - idle}"
        lines.append(f"| {play['play']} | {counts} | {kinds} |")
        for v in left:
            if reason := why(v, noticed, reached, reasons):
                survivors.setdefault(reason, Counter())[v["site"]] += 1
    lines += [
        "",
        f"These are {len(names)} different sites (instruction and functions); {len(reached)} of them are executed in some play, and",
        f"of {len(noticed)} a mutant is noticed. A mutant that its play does not execute is judged by the plays that do. One may be",
        "noticed in more than one way in the trial that notices it; `wrong` is a result with other bits.",
        "",
        "## Survivors",
        "",
    ]
    for reason in sorted(survivors):
        lines += [f"**{reason}**", ""]
        lines += [f"* {count} x `{site}`" for site, count in sorted(survivors[reason].items())]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def carried(plays: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says how much of a record is not of its own kernels, or missing."""
    count = sum(v.get("digest", play["digest"]) != play["digest"] for play in plays for v in play["verdicts"])
    missing = sum(play["mutants"] - len(play["verdicts"]) for play in plays)
    lines = []
    if count:
        lines.append(
            f"{count} verdicts come from earlier versions of the kernels, in which the {AROUND} instructions before and after the site were the same."
        )
    if missing:
        lines.append(f"{missing} mutants have not been run.")
    return lines
