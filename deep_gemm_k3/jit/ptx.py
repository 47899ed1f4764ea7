"""What PTX text consists of: opcodes and the argument of an entry."""

from __future__ import annotations

import re
from collections import Counter

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# A mnemonic starts a statement: after a label, a brace, a semicolon or a guard.
_INSTRUCTION = re.compile(r"(?:^|[;{}:])\s*(?:@!?%?\w+\s+)?([a-z][\w]*(?:(?:\.|::)[\w]+)*)(?=[\s;])", re.MULTILINE)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.b8\s+\w+\[(\d+)\]")


def opcodes(ptx: str) -> Counter[str]:
    """How often each opcode stands in the text, with its modifiers: ``wgmma.mma_async.sync.aligned...``."""
    bodies = _COMMENT.sub(" ", ptx)
    start = bodies.find("{")
    return Counter(_INSTRUCTION.findall(bodies[start:] if start >= 0 else ""))


def families(ptx: str) -> Counter[str]:
    """The same with modifiers dropped: ``wgmma``, ``cp``, ``ld``."""
    found: Counter[str] = Counter()
    for opcode, count in opcodes(ptx).items():
        found[opcode.split(".")[0]] += count
    return found


def argument_bytes(ptx: str, entry: str) -> int:
    """Size of the one argument of an entry that takes a struct; 0 when it takes none."""
    begin = ptx.index(f".entry {entry}")
    match = _PARAM.search(ptx, begin, ptx.index("{", begin))
    return int(match.group(1)) if match else 0
