#!/usr/bin/env python3
"""Puts what the records of ``check_emulator_coverage.py`` say into the documents.

python scripts/coverage_table.py            # docs/blackwell.md and docs/emulator.md, between their marks
python scripts/coverage_table.py --check    # only say whether they are as the records are
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLACKWELL = [(target, compiler) for compiler in ("nvrtc", "nvcc") for target in ("sm_100a", "sm_100f")]
HEADINGS = (
    "target, compiler", "kernels", "registers", "spilled, stack (bytes)", "shared memory (bytes, of 232,448)",
    "tensor memory (columns, of 512)", "statements of PTX", "CPU seconds to compile: median, most", "without a model",
    "faults", "headers",
)  # fmt: skip


def load(path: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def span(low: float, high: float) -> str:
    return f"{low:,g}" if low == high else f"{low:,.15g} to {high:,.15g}"


def row(record: dict[str, Any], name: str) -> str:
    ranges = {
        key: [float(number) for number in text.split()] for key, text in record["lowest, median, highest"].items()
    }
    low, high = ({key: found[i] for key, found in ranges.items()} for i in (0, 2))
    compiler = re.sub(r"^(nvrtc|nvcc) (?:cuda_)?([\d.]+\d).*", r"\1 \2", record["compiler"]).replace("nvrtc", "NVRTC")
    cells = (
        f"{record['target']}, {compiler} ([record](runs/{name}))",
        f"{record['decoded']} of {record['kernels']}",
        span(low["registers"], high["registers"]),
        f"{high['spilled bytes']:g}, {high['stack bytes']:g}",
        span(low["shared bytes"], high["shared bytes"]),
        span(low["tensor columns"], high["tensor columns"]),
        span(low["statements"], high["statements"]),
        f"{ranges['cpu seconds'][1]:.1f}, {high['cpu seconds']:.1f}",
        str(len(record["lacking"])),
        str(len(record["faults"])),
        f"`{record['headers'][:8]}`",
    )
    return "| " + " | ".join(cells) + " |"


def compared(record: dict[str, Any], compiler: str) -> str:
    counts, differs = record.get("compared with sm_100a", {}), record.get("differs from sm_100a", {})
    texts, codes = counts.get("text", 0), counts.get("machine code", 0)
    if not codes:
        return ""
    return (
        f"{compiler}: text compared on {texts} kernels, {len(differs.get('text', []))} differ; machine code on {codes}, "
        f"{len(differs.get('machine code', []))} differ."
    )


def blackwell(runs: Path) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    opcodes: set[str] = set()
    said = []
    for target, compiler in BLACKWELL:
        name = f"compiled-{target}-{compiler}.json"
        record = load(runs / name)
        if record is None:
            lines.append(f"| {target}, {compiler} | none recorded" + " | " * (len(HEADINGS) - 2) + " |")
            continue
        lines.append(row(record, name))
        opcodes |= set(record["opcodes_with_modifiers"])
        if target == "sm_100f":
            said.append(compared(record, {"nvrtc": "NVRTC", "nvcc": "nvcc"}[compiler]))
    lines += ["", f"{len({name.split('.')[0] for name in opcodes})} opcodes, {len(opcodes)} with their modifiers."]
    if any(said):
        lines += ["", "sm_100f beside sm_100a: " + " ".join(filter(None, said))]
    return "\n".join(lines)


def emulator(runs: Path) -> str:
    said = []
    for name in ("emulator-coverage-sm90a.json", *(f"compiled-{t}-{c}.json" for t, c in BLACKWELL)):
        record = load(runs / name)
        if record is not None:
            compiler = "nvcc" if "nvcc" in name else "NVRTC"
            said.append(
                f"* {record['target']}, {compiler} ([record](runs/{name})): {record['decoded']} of {record['kernels']} kernels "
                f"decoded, {len(record['lacking'])} with an instruction that has no model; {record['opcodes']} opcodes, "
                f"{len(record['opcodes_with_modifiers'])} with their modifiers"
            )
    return "\n".join(said)


def replaced(text: str, block: str) -> str:
    found, count = re.subn(
        r"(<!-- records: begin -->\n).*?(\n<!-- records: end -->)", lambda m: m[1] + block + m[2], text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"wanted one pair of marks '<!-- records: begin -->' and end, given {count}")
    return found


def documents(root: Path) -> dict[Path, str]:
    """Every document as the records of ``root`` want it."""
    return {
        root / "docs" / name: replaced((root / "docs" / name).read_text(), block(root / "docs" / "runs"))
        for name, block in (("blackwell.md", blackwell), ("emulator.md", emulator))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    other = {path: text for path, text in documents(ROOT).items() if path.read_text() != text}
    for path, text in other.items():
        print(f"{path.relative_to(ROOT)}: {'not what the records say' if check else 'written'}")
        if not check:
            path.write_text(text)
    return 1 if check and other else 0


if __name__ == "__main__":
    sys.exit(main())
