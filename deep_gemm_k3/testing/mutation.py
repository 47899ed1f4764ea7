"""Mutants of PTX: one synchronising instruction removed or weakened, each named by where it comes from in the source.

Every fence, wait, arrival, commit and expectation of bytes is a site; so is every load, store or reduction with acquire
or release semantics: it becomes relaxed, or that of one device where its scope is the system. A site's place is the chain of functions that line information gives
(innermost first), so that its name outlives edits elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_ORDER = r"\.(?:acquire|release|acq_rel)\b"


@dataclass(frozen=True)
class Rule:
    """What is done to instructions that match: ``replacement`` is text with groups of ``pattern``, empty to remove."""

    kind: str
    pattern: re.Pattern[str]
    replacement: str = ""


def _rule(kind: str, pattern: str, replacement: str = "") -> Rule:
    return Rule(kind, re.compile(pattern), replacement)


RULES = (
    _rule("fence", r"(?:fence\.|membar\.).*"),
    _rule("fence", r"(?:wgmma\.fence|tcgen05\.fence).*"),
    _rule("wait", r"mbarrier\.(?:try|test)_wait\S* ([%\w]+),.*", r"setp.eq.u32 \1, 0, 0;"),
    _rule("wait", r"(?:wgmma\.wait_group|cp\.async(?:\.bulk)?\.wait|tcgen05\.wait|griddepcontrol\.wait|barrier\.cluster\.wait).*"),
    _rule("wait", r"(?:bar|barrier)(?:\.cta)?\.red\.\S+ ([%\w]+),.* ([%\w]+);", r"mov.pred \1, \2;"),
    _rule("wait", r"(?:bar|barrier)(?:\.cta)?\.sync.*"),
    _rule("wait", r"bar\.warp\.sync.*"),
    _rule("arrive", r"mbarrier\.arrive(?!\.expect_tx)\S* (?:_, )?\[.*"),
    _rule("arrive", r"mbarrier\.arrive\.expect_tx\S* _, \[.*"),
    _rule("arrive", r"(?:bar|barrier)(?:\.cta)?\.arrive.*"),
    _rule("arrive", r"barrier\.cluster\.arrive.*"),
    _rule("arrive", r"red(?:\.async)?\.release.*"),
    _rule("arrive", r"st\.release.*"),
    _rule("commit", r"(?:cp\.async(?:\.bulk)?\.commit_group|wgmma\.commit_group|tcgen05\.commit).*"),
    _rule("expect", r"mbarrier\.expect_tx.*"),
    _rule("expect", r"mbarrier\.arrive\.expect_tx\S*?(\.shared::\w+\.b64) _, (\[[^\]]*\]), .*", r"mbarrier.arrive\1 _, \2;"),
    _rule("weaker", rf"(ld|st|red|atom){_ORDER}(.*)", r"\1.relaxed\2"),
    _rule("narrower", rf"((?:ld|st|red|atom|fence){_ORDER})\.sys\b(.*)", r"\1.gpu\2"),
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One mutation of one statement of a PTX text."""

    line: int  # index of the text's line
    kind: str
    op: str
    chain: tuple[str, ...]  # functions, innermost first
    text: str  # the mutated line
    also: tuple[Site, ...] = ()  # mutated with it

    @property
    def group(self) -> str:
        """What instructions of the same source have in common, whatever is unrolled or inlined where."""
        return f"{self.kind} {self.op} in {' < '.join(self.chain) or 'no function'}"

    def mutate(self, ptx: str) -> str:
        lines = ptx.split("\n")
        for site in (self, *self.also):
            lines[site.line] = site.text
        return "\n".join(lines)


_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+) (\d+)(?:, function_name (\S+), inlined_at (\d+) (\d+) (\d+))?")
_STATEMENT = re.compile(r"(\s*(?:@!?[%\w]+\s+)?)([a-z][\w.:]*.*;.*)$")
_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}")


@functools.cache
def _demangler() -> Callable[[bytes], bytes | None]:
    library = ctypes.CDLL("libstdc++.so.6")
    function, free = library.__cxa_demangle, ctypes.CDLL(None).free
    function.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]

    def demangle(name: bytes) -> bytes | None:
        status = ctypes.c_int()
        made = function(name, None, None, ctypes.byref(status))
        if not made:
            return None
        text = ctypes.string_at(made)
        free(made)
        return text

    return demangle


@functools.cache
def plain_name(mangled: str) -> str:
    """The qualified name in a mangled one, without the package, template arguments and parameters."""
    mangled = re.sub(r"Li\d+E", "Li0E", mangled)  # numbers among template arguments: names above 1024 bytes are refused
    text = (_demangler()(mangled.encode()) or mangled.encode()).decode()
    text = re.sub(r"operator(\(\)|<+|>+)", "operator", text)
    while (shorter := _BRACKETS.sub(lambda m: "lambda" if m[0].startswith("{lambda") else "", text)) != text:
        text = shorter
    name = next((word for word in text.split() if "::" in word), text)
    return name.replace("deep_gemm_k3::", "").replace("::lambda::operator", "::lambda")


def _strings(lines: list[str]) -> dict[str, str]:
    """Labels of .debug_str and what they hold."""
    found: dict[str, str] = {}
    label, data = "", bytearray()
    inside = False
    for line in lines:
        inside |= ".debug_str" in line
        if not inside:
            continue
        if line.startswith("$L__info_string"):
            label, data = line.strip().rstrip(":"), bytearray()
        elif line.startswith(".b8"):
            data += bytes(int(number) for number in line[3:].split(","))
            if data.endswith(b"\0"):
                found[label] = data[:-1].decode()
    return found


def sites(ptx: str) -> Iterator[Site]:
    """All mutations of a PTX text, in its order. Without line information the chains are empty."""
    lines = ptx.split("\n")
    strings = _strings(lines)
    chains: dict[tuple[str, str, str], tuple[str, ...]] = {}
    chain: tuple[str, ...] = ()
    for number, line in enumerate(lines):
        if loc := _LOC.match(line):
            label, outer = loc[4], (loc[5], loc[6], loc[7])
            name = plain_name(strings.get((label or "").split("+")[0], "")) if label else ""
            outside = chains.get(outer, ())
            chain = () if not label else outside if name.startswith("ptx::") else (name, *outside)
            chains[loc[1], loc[2], loc[3]] = chain
            continue
        statement = _STATEMENT.match(line)
        if statement is None:
            continue
        body = statement[2].strip()
        for rule in RULES:
            if match := rule.pattern.fullmatch(body):
                changed = match.expand(rule.replacement)
                yield Site(
                    number, rule.kind, body.split()[0].rstrip(";"), chain, statement[1] + changed if changed else ""
                )


def together(found: Iterable[Site]) -> Iterator[Site]:
    """For each instruction that occurs more than once: all its sites of one kind mutated at once. Where two instructions
    do the same work twice, only these show that it is needed."""
    groups: dict[tuple[str, str], list[Site]] = {}
    for site in found:
        groups.setdefault((site.kind, site.op), []).append(site)
    for (kind, op), members in groups.items():
        if len(members) > 1:
            yield Site(members[0].line, kind, op, ("every function",), members[0].text, tuple(members[1:]))


def census(ptx: str) -> Counter[str]:
    """How many sites of each group there are."""
    return Counter(site.group for site in sites(ptx))
