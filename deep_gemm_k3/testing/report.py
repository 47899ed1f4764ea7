"""The record of a mutation sweep in words: how many mutants of what were noticed by what, and why the others are harmless.

Reasons live in tests/emu/mutation_reasons.json: a list of ``{"sites": [pattern, ...], "reason": text}``, patterns over the
names of sites. ``"small": true`` marks what the small acts of a play do not notice, though others do.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def of(self, site: str, small: bool = False) -> str:
        """The reason, or an empty string. ``small``: only small acts were run."""
        for entry in self.entries:
            if (small or not entry.get("small")) and any(re.search(pattern, site) for pattern in entry["sites"]):
                return str(entry["reason"])
        return ""


def latest_record() -> dict[str, Any]:
    """The committed record of the last full sweep."""
    found = sorted(RUNS.glob("mutation-*.json"))
    if len(found) != 1:
        raise FileNotFoundError(f"docs/runs/mutation-COMMIT.json: wanted one, given {[path.name for path in found]}")
    record: dict[str, Any] = json.loads(found[0].read_text())
    return record


UNREACHED = "Not judged: no recorded call of the play executes this copy, so the mutant ran nowhere."
COPY = "Another mutant of the same source line is noticed: this copy of it is not reached, or not alone in its way."


def noticed_sites(record: Mapping[str, Any]) -> set[str]:
    """Names of sites of which at least one mutant was noticed."""
    return {v["site"] for play in record["plays"] for v in play["verdicts"] if v["by"]}


def surely_noticed(record: Mapping[str, Any], name: str) -> set[str]:
    """Names of sites of which a play's small acts noticed every mutant."""
    verdicts = [v for play in record["plays"] if play["play"] == name for v in play["verdicts"]]
    unsure = {v["site"] for v in verdicts if not v["by"] or not v["trial"].startswith(("act 0", "act 1"))}
    return {v["site"] for v in verdicts} - unsure


def document(record: Mapping[str, Any], reasons: Reasons) -> str:
    """docs/mutation.md."""
    digests = [f"{play['play']} {play['digest']}" for play in record["plays"] if "digest" in play]
    lines = [
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
        f"Record: `docs/runs/mutation-{record['commit']}.json`, of the kernels with these digests (instructions without line",
        f"information): {', '.join(digests)}.",
        "",
        "| play | mutants | run | noticed | survive | noticed by |",
        "|---|---|---|---|---|---|",
    ]
    noticed = noticed_sites(record)
    survivors: dict[str, Counter[str]] = {}
    for play in record["plays"]:
        verdicts = play["verdicts"]
        by = Counter(kind for v in verdicts for kind in v["by"])
        left = [v for v in verdicts if not v["by"]]
        kinds = ", ".join(f"{kind} {count}" for kind, count in by.most_common())
        counts = f"{play['mutants']} | {len(verdicts)} | {len(verdicts) - len(left)} | {len(left)}"
        lines.append(f"| {play['play']} | {counts} | {kinds} |")
        for v in left:
            site = v["site"]
            why = COPY if site in noticed else UNREACHED if not v.get("reached", True) else reasons.of(site)
            survivors.setdefault(why or "NO REASON", Counter())[site] += 1
    lines += [
        "",
        "A record may be partial: mutants that were not run are not judged, and plays after the first may run only what the first left. A mutant may be noticed in more than one way in the trial that notices it; `wrong` is a result with other bits.",
        "",
    ]
    lines += ["## Survivors", ""]
    for reason in sorted(survivors):
        lines += [f"**{reason}**", ""]
        lines += [f"* {count} x `{site}`" for site, count in sorted(survivors[reason].items())]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
