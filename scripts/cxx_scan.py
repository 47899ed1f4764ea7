"""A small reader of C++ and CUDA sources: enough to find functions, template heads, loops and inline assembly.

It is no parser. Comments, literals and preprocessor lines are blanked out first (line numbers stay), then braces are
followed: at namespace or class level a block whose head holds a parameter list is a function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LITERAL = re.compile(
    r"""//[^\n]*(?:\\\n[^\n]*)*            # line comment
      | /\*.*?\*/                          # block comment
      | R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)"   # raw string
      | "(?:\\.|[^"\\\n])*"                # string
      | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'  # character, but no digit separator
    """,
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#[^\n]*(?:\\\n[^\n]*)*", re.MULTILINE)
_NOISE = re.compile(
    r"\b(?:__attribute__|__launch_bounds__|alignas|decltype|noexcept|explicit|requires|__declspec)\s*\("
)


@dataclass(frozen=True)
class Function:
    name: str
    first_line: int
    last_line: int
    parameters: int

    @property
    def lines(self) -> int:
        return self.last_line - self.first_line + 1


@dataclass(frozen=True)
class Loop:
    line: int
    header: str
    body: str
    endless: bool


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def strip(source: str) -> str:
    """The source with comments, literals and preprocessor lines blanked; same length, same lines."""

    def replace(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] in "\"'" and len(found) >= 2:
            return found[0] + _blank(found[1:-1]) + found[-1]
        return _blank(found)

    return _DIRECTIVE.sub(lambda m: _blank(m.group()), _LITERAL.sub(replace, source))


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def closing(text: str, at: int) -> int:
    """Index of the bracket that closes the one at ``at``; the end of the text if none does."""
    opens, closes = text[at], {"(": ")", "{": "}", "[": "]"}[text[at]]
    depth = 0
    for i in range(at, len(text)):
        if text[i] == opens:
            depth += 1
        elif text[i] == closes:
            depth -= 1
            if depth == 0:
                return i
    return len(text)


def closing_angle(text: str, at: int) -> int:
    """Like ``closing`` for the ``<`` of a template head; what stands in other brackets is skipped."""
    depth, i = 0, at
    while i < len(text):
        char = text[i]
        if char in "({[":
            i = closing(text, i)
        elif char == "<":
            depth += 1
        elif char == ">" and text[i - 1] != "-":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return len(text)


def split_commas(text: str) -> list[str]:
    """The parts between commas that stand in no bracket; an empty text has none."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        char = text[i]
        if char in "({[":
            i = closing(text, i)
        elif char == "<":
            depth += 1
        elif char == ">" and text[i - 1] != "-":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def template_heads(stripped: str) -> list[tuple[int, int]]:
    """(line, number of parameters) of every template head."""
    heads = []
    for match in re.finditer(r"\btemplate\s*<", stripped):
        at = match.end() - 1
        end = closing_angle(stripped, at)
        heads.append((line_of(stripped, match.start()), len(split_commas(stripped[at + 1 : end]))))
    return heads


def _without_noise(head: str) -> str:
    """The head of a block without template heads, attributes and the like."""
    while match := re.search(r"\btemplate\s*<", head):
        end = closing_angle(head, match.end() - 1)
        head = head[: match.start()] + _blank(head[match.start() : end + 1]) + head[end + 1 :]
    head = re.sub(r"\[\[.*?\]\]", lambda m: _blank(m.group()), head, flags=re.DOTALL)
    while match := _NOISE.search(head):
        end = closing(head, match.end() - 1)
        head = head[: match.start()] + _blank(head[match.start() : end + 1]) + head[end + 1 :]
    return head


def _function_of(head: str) -> tuple[str, int] | None:
    """(name, number of parameters) when the head of a block is that of a function."""
    head = _without_noise(head)
    at = head.find("(")
    if at < 0 or re.match(r"\s*(?:typedef\s+)?(?:enum|namespace)\b", head):
        return None
    if re.match(r"\s*(?:class|struct|union)\s+[\w:<>, ]+?\s*(?:final\s*)?(?::(?!:)|$)", head):
        return None
    before = head[:at]
    if re.search(r"\boperator\s*$", before):  # operator()(...)
        at = head.find("(", at + 1)
        if at < 0:
            return None
        before = head[:at]
    if "=" in re.sub(r"operator\s*[=<>!+\-*/|&^%]+", "", before) and "[" not in before:
        return None
    name = re.search(r"([\w~]+|operator\s*\S+)\s*$", before)
    parameters = split_commas(head[at + 1 : closing(head, at)])
    if parameters == ["void"]:
        parameters = []
    return (name.group(1) if name else "lambda"), len(parameters)


def _opens_initializer(head: str, before: str) -> bool:
    """A brace in a constructor's initializer list, as in ``A(int n) : n_{n} {``."""
    return bool(re.search(r"\)[\s\w]*:(?!:)", head)) and bool(re.search(r"[\w>]\s*$", before)) and "(" in head


def functions(stripped: str) -> list[Function]:
    """Functions at namespace and class level; what is nested in a function belongs to it."""
    found: list[Function] = []
    head_start = i = 0
    while i < len(stripped):
        char = stripped[i]
        if char == "(":
            i = closing(stripped, i)
        elif char in ";}" or (char == ":" and re.search(r"\b(?:public|private|protected)\s*$", stripped[head_start:i])):
            head_start = i + 1
        elif char == "{":
            head = stripped[head_start:i]
            end = closing(stripped, i)
            if _opens_initializer(_without_noise(head), head):
                i = end + 1
                continue
            function = _function_of(head)
            if function:
                first = head_start + len(head) - len(head.lstrip())
                found.append(Function(function[0], line_of(stripped, first), line_of(stripped, end), function[1]))
                i = end
            elif re.search(r"=\s*$", head) or re.match(r"\s*(?:typedef\s+)?enum\b", head):
                i = end
            head_start = i + 1
        i += 1
    return found


def loops(stripped: str) -> list[Loop]:
    """Every while, for and do loop with its header and body."""
    found = []
    for match in re.finditer(r"\b(while|for)\s*\(", stripped):
        at = match.end() - 1
        end = closing(stripped, at)
        header = stripped[at + 1 : end]
        rest = stripped[end + 1 :]
        gap = len(rest) - len(rest.lstrip())
        start = end + 1 + gap
        if start < len(stripped) and stripped[start] == "{":
            body = stripped[start : closing(stripped, start) + 1]
        else:
            body = stripped[start : stripped.find(";", start) + 1]
        condition = header if match.group(1) == "while" else ([*header.split(";"), ""])[1]
        endless = condition.strip() in ("true", "1", "")
        found.append(Loop(line_of(stripped, match.start()), header, body, endless))
    for match in re.finditer(r"\bdo\s*\{", stripped):
        at = match.end() - 1
        body = stripped[at : closing(stripped, at) + 1]
        found.append(Loop(line_of(stripped, match.start()), "", body, True))
    return found


def inline_assembly(stripped: str) -> list[int]:
    """Lines with an asm statement."""
    pattern = r"\b(?:asm|__asm__|__asm)\s*(?:volatile|__volatile__|goto)?\s*\("
    return [line_of(stripped, m.start()) for m in re.finditer(pattern, stripped)]
