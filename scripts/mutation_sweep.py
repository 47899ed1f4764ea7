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
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deep_gemm_k3.testing.plays import PLAYS  # noqa: E402
from deep_gemm_k3.testing.replay import Schedule  # noqa: E402
from deep_gemm_k3.testing.report import Reasons, document, latest_record, merged, noticed_sites, surely_noticed  # noqa: E402
from deep_gemm_k3.testing.sweep import ADVERSARIES, Slots, Sweep, Trial, Verdict, is_small, trials  # noqa: E402


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def digest(group: str, number: int) -> bytes:
    """Decides which mutants are in a sample: by their names, so that edits elsewhere do not change the choice."""
    return hashlib.sha256(f"{group} #{number}".encode()).digest()


def hints(record: dict[str, Any], name: str) -> dict[tuple[str, int], str]:
    """Which trial noticed which mutant in a record; number -1 for any of the site's."""
    found: dict[tuple[str, int], str] = {}
    for play in record["plays"]:
        if play["play"] == name:
            for v in play["verdicts"]:
                if v["trial"]:
                    found[v["site"], v["number"]] = found[v["site"], -1] = v["trial"]
    return found


def save(record: dict[str, Any], out: Path) -> None:
    """Whoever is stopped here leaves the file as it was."""
    beside = out.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.rename(out)


def part(out: Path, name: str) -> Path:
    """Where a play's part of the record is written while the sweep runs."""
    return out.with_name(f"{out.stem}.{name.replace(' ', '-')}.json")


def choose(one: Sweep, name: str, arguments: argparse.Namespace, record: dict[str, Any]) -> list[int]:
    """The mutants to run: first those of which no record knows that somebody notices them."""
    chosen = [i for i, site in enumerate(one.sites) if re.search(arguments.only, site.group)]
    if arguments.again:
        sure = surely_noticed(record, name)
        chosen = [i for i in chosen if one.sites[i].group in sure]
    if arguments.sample:
        chosen = sorted(chosen, key=lambda i: digest(one.sites[i].group, one.numbers[i]))[: arguments.sample]
    noticed = noticed_sites(record)
    return sorted(chosen, key=lambda i: one.sites[i].group in noticed)


def sweep(name: str, arguments: argparse.Namespace, slots: Slots, until: float) -> None:
    """All of one play, into its part of the record."""
    started = time.monotonic()
    one = Sweep(PLAYS[name])
    plan = trials(PLAYS[name], arguments.seeds)
    if arguments.small:
        plan = [trial for trial in plan if is_small(PLAYS[name], trial.act)]
    one.check(plan)
    record = json.loads(arguments.resume.read_text()) if arguments.resume else latest_record()
    one.hints = hints(record, name)
    chosen = choose(one, name, arguments, record)
    earlier = [v for p in record["plays"] if p["play"] == name for v in p["verdicts"]]
    known = {(v["site"], v["number"], v.get("place")): v for v in earlier}
    keys = {i: (one.sites[i].group, one.numbers[i], one.place(i)) for i in chosen}
    verdicts = [Verdict(**known[key]) for key in keys.values() if arguments.resume and key in known]
    chosen = [i for i in chosen if not (arguments.resume and keys[i] in known)]
    entry = {"play": name, "kernel": one.entry, "digest": one.digest, "mutants": len(one.sites)}
    out = part(arguments.out, name)
    print(f"{name}: {len(chosen)} of {len(one.sites)} mutants, {len(plan)} trials at most", flush=True)

    def write() -> None:
        done = sorted(verdicts, key=lambda verdict: (verdict.site, verdict.number))
        save({"commit": commit(), "plays": [{**entry, "verdicts": [asdict(v) for v in done]}]}, out)

    saved = time.monotonic()
    for verdict in one.verdicts(chosen, plan, slots, until):
        verdicts.append(verdict)
        if time.monotonic() > saved + 5:
            write()
            saved = time.monotonic()
        del keys[one.index[verdict.site, verdict.number]]
        if verdict.survived or arguments.verbose:
            print(
                f"  {'survives' if verdict.survived else '+'.join(verdict.by)}: {verdict.site} #{verdict.number}",
                flush=True,
            )
    if not arguments.resume:  # what the limit has left out: where the instructions around the site are the same
        verdicts += [Verdict(**known[key]) for key in keys.values() if key in known]
    write()
    by = Counter(kind for verdict in verdicts for kind in verdict.by)
    survived = sum(verdict.survived and verdict.reached for verdict in verdicts)
    print(
        f"{name}: {survived} of {len(verdicts)} survive, {time.monotonic() - started:.0f} s, in trials "
        f"{sum(verdict.seconds for verdict in verdicts):.0f} s; noticed by {dict(by.most_common())}",
        flush=True,
    )


def unchanged(name: str, seeds: int) -> None:
    """The kernel as it is, in the small acts, with race detection: whatever is found is false."""
    one = Sweep(PLAYS[name])
    plan = [
        Trial(act, Schedule(seed, "random" if seed % 2 else ADVERSARIES[seed // 2 % 3], (0, 20)[seed // 6 % 2], seed % 2 == 1), True)
        for act in range(len(PLAYS[name].acts))
        if is_small(PLAYS[name], act)
        for seed in range(seeds)
    ]  # fmt: skip
    one.check(plan)
    print(f"{name}: nothing found in {len(plan)} runs of the unchanged kernel ({one.digest})", flush=True)


def side_by_side(names: Sequence[str], work: Callable[[str], None]) -> bool:
    """Each play in a process of its own. Whether all went well."""
    processes = []
    for name in names:
        process = os.fork()
        if not process:
            code = 1
            try:
                work(name)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)  # threads of recorded worlds are of no use any more
        processes.append(process)
    failed = [process for process in processes if os.waitpid(process, 0)[1] != 0]  # after all of them have ended
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", action="append", choices=sorted(PLAYS), help="these plays only")
    parser.add_argument("--only", default="", help="sites whose name matches this pattern")
    parser.add_argument(
        "--seeds", type=int, default=3, help="seeds of the small act with race detection, and as many without"
    )
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each play, always the same; 0: all")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a record to go on from: mutants in it are not run where the instructions around the site are the same",
    )
    parser.add_argument(
        "--again", action="store_true", help="only sites of which the committed record has every mutant noticed"
    )
    parser.add_argument("--small", action="store_true", help="only the small acts of each play")
    parser.add_argument(
        "--unchanged", type=int, default=0, help="run the kernels as they are under so many seeds instead"
    )
    parser.add_argument("--document", action="store_true", help="only write docs/mutation.md from the committed record")
    parser.add_argument("--merge", type=Path, nargs="+", help="only merge parts of records, the last one counting")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at once")
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        help="seconds after which no more mutant is begun; the rest is taken from the committed record",
    )
    parser.add_argument("--out", type=Path, help="the record's file; each play writes a part beside it meanwhile")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    arguments = parser.parse_args()
    if arguments.document:
        (ROOT / "docs" / "mutation.md").write_text(document(latest_record(), Reasons.load()))
        return
    arguments.out = arguments.out or ROOT / "docs" / "runs" / f"mutation-{commit()}.json"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    names = arguments.play or list(PLAYS)
    if arguments.unchanged:
        sys.exit(not side_by_side(names, lambda name: unchanged(name, arguments.unchanged)))
    if arguments.merge:
        save(merged([json.loads(path.read_text()) for path in arguments.merge]), arguments.out)
        return
    slots, until = Slots(arguments.jobs), time.monotonic() + arguments.limit
    is_well = side_by_side(names, lambda name: sweep(name, arguments, slots, until))
    parts = [path for path in (part(arguments.out, name) for name in names) if path.exists()]
    save(merged([json.loads(path.read_text()) for path in parts]), arguments.out)
    for path in parts:
        path.unlink()
    print(f"written: {arguments.out}")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
