#!/usr/bin/env python3
"""Remove every fence, wait, arrival, commit and expected byte of the kernels, one at a time, and see who notices.

    python scripts/mutation_sweep.py                       all plays; writes docs/runs/mutation-COMMIT.json
    python scripts/mutation_sweep.py --play splits --only 'wgmma'

A play is a small problem for one configuration of the kernel, in one or more acts (token counts). A mutant that no trial of
its play notices has survived. docs/mutation.md lists survivors with the reason why each is harmless; the reasons come from
tests/emu/mutation_reasons.json, by patterns over a site's name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deep_gemm_k3.testing.plays import PLAYS  # noqa: E402
from deep_gemm_k3.testing.report import Reasons, document, latest_record, noticed_sites, surely_noticed  # noqa: E402
from deep_gemm_k3.testing.sweep import Sweep, Verdict, is_small, trials  # noqa: E402


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def digest(group: str, number: int) -> bytes:
    """Decides which mutants are in a sample: by their names, so that edits elsewhere do not change the choice."""
    return hashlib.sha256(f"{group} #{number}".encode()).digest()


def hints(name: str) -> dict[tuple[str, int], str]:
    """Which trial noticed which mutant, as the committed record has it."""
    plays = [play for play in latest_record()["plays"] if play["play"] == name]
    return {(v["site"], v["number"]): v["trial"] for play in plays for v in play["verdicts"]}


def save(record: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(record, indent=1) + "\n")


def sweep(name: str, arguments: argparse.Namespace, noticed: set[str], record: dict[str, Any], out: Path) -> None:
    started = time.monotonic()
    one = Sweep(PLAYS[name])
    plan = trials(PLAYS[name], arguments.seeds)
    if arguments.small:
        plan = [trial for trial in plan if is_small(PLAYS[name], trial.act)]
    one.check(plan)
    one.hints = hints(name)
    chosen = [i for i, site in enumerate(one.sites) if re.search(arguments.only, site.group)]
    if arguments.skip_noticed:
        chosen = [i for i in chosen if one.sites[i].group not in noticed]
    if arguments.again:
        sure = surely_noticed(latest_record(), name)
        chosen = [i for i in chosen if one.sites[i].group in sure]
    if arguments.sample:
        chosen = sorted(chosen, key=lambda i: digest(one.sites[i].group, one.numbers[i]))[: arguments.sample]
    earlier = [p for p in record["plays"] if p["play"] == name and p["digest"] == one.digest]
    verdicts = [Verdict(**v) for p in earlier for v in p["verdicts"]]
    done = {(verdict.site, verdict.number) for verdict in verdicts}
    chosen = [i for i in chosen if (one.sites[i].group, one.numbers[i]) not in done]
    entry = {"play": name, "kernel": one.entry, "digest": one.digest, "mutants": len(one.sites), "verdicts": []}
    record["plays"] = [p for p in record["plays"] if p["play"] != name] + [entry]
    print(f"{name}: {len(chosen)} of {len(one.sites)} mutants, {len(plan)} trials at most", flush=True)
    for verdict in one.verdicts(chosen, plan, jobs=arguments.jobs):
        verdicts.append(verdict)
        if len(verdicts) % 10 == 0:
            entry["verdicts"] = [asdict(v) for v in verdicts]
            save(record, out)
        if verdict.survived or arguments.verbose:
            print(
                f"  {'survives' if verdict.survived else '+'.join(verdict.by)}: {verdict.site} #{verdict.number}",
                flush=True,
            )
    verdicts.sort(key=lambda verdict: (verdict.site, verdict.number))
    by = Counter(kind for verdict in verdicts for kind in verdict.by)
    seconds = round(time.monotonic() - started)
    survived = sum(verdict.survived for verdict in verdicts)
    print(
        f"{name}: {survived} of {len(verdicts)} survive, {seconds} s; noticed by {dict(by.most_common())}", flush=True
    )
    noticed |= {verdict.site for verdict in verdicts if verdict.by}
    entry["verdicts"] = [asdict(v) for v in verdicts]
    save(record, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", action="append", choices=sorted(PLAYS), help="these plays only")
    parser.add_argument("--only", default="", help="sites whose name matches this pattern")
    parser.add_argument(
        "--seeds", type=int, default=3, help="seeds of the small act with race detection, and as many without"
    )
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each play, always the same; 0: all")
    parser.add_argument(
        "--skip-noticed", action="store_true", help="skip sites of which an earlier play has noticed a mutant"
    )
    parser.add_argument(
        "--resume", type=Path, help="a record to go on from: mutants of the same kernel in it are not run"
    )
    parser.add_argument("--known", type=Path, action="append", default=[], help="records of such plays")
    parser.add_argument(
        "--again", action="store_true", help="only sites of which the committed record has every mutant noticed"
    )
    parser.add_argument("--small", action="store_true", help="only the small acts of each play")
    parser.add_argument("--document", action="store_true", help="only write docs/mutation.md from the committed record")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="the record's file")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    arguments = parser.parse_args()
    if arguments.document:
        (ROOT / "docs" / "mutation.md").write_text(document(latest_record(), Reasons.load()))
        return
    out = arguments.out or ROOT / "docs" / "runs" / f"mutation-{commit()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"commit": commit(), "plays": []}
    if arguments.resume:
        record["plays"] = json.loads(arguments.resume.read_text())["plays"]
    noticed = {site for path in arguments.known for site in noticed_sites(json.loads(path.read_text()))}
    for name in arguments.play or PLAYS:
        sweep(name, arguments, noticed, record, out)
    print(f"written: {out}")
    sys.stdout.flush()
    os._exit(0)  # threads of recorded worlds are of no use any more


if __name__ == "__main__":
    main()
