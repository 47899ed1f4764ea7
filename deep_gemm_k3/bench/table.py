"""Saved runs as Markdown tables, for documents: no number is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .trace import shares
from .work import device_floor_us

Row = Mapping[str, Any]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _floors(row: Row) -> list[str]:
    work = row["work"]
    return [f"{work['memory_us']:.0f} / {work['tensor_us']:.0f}", f"{work['percent_of_floor']:.0f} %"]


def _peers(row: Row) -> list[str]:
    best, goal = row.get("best_public"), row.get("goal_us")
    return [f"{best[0]:g}" if best else "", f"{goal:g}" if goal else ""]


def _where(data: Row, mode: str, tokens: int) -> str:
    """The largest shares of a CTA's time, and when the last rows were gathered."""
    found = [t["us"] for t in data.get("traces", ()) if (t["mode"], t["tokens"]) == (mode, tokens)]
    if not found:
        return ""
    largest = sorted(shares(found[0]).items(), key=lambda item: -item[1])[:4]
    text = ", ".join(f"{name} {share:.0f} %" for name, share in largest if share >= 1)
    return text + (f"; gathered at {found[0]['last gathered at']:.0f} us" if "last gathered at" in found[0] else "")


def sweep(data: Row) -> str:
    """Everything fused and the routed part alone over tokens; the unfused sums where they were timed."""
    by_mode: dict[str, dict[int, Row]] = {}
    for row in data["rows"]:
        by_mode.setdefault(row["mode"], {})[row["shape"]["tokens"]] = row
    fused = [mode for mode in by_mode if mode != "routed"]
    main = (fused or ["routed"])[0]
    # Where the main mode has no time the next one's row says the rest.
    first = {n: row for mode in ("routed", *reversed(fused)) for n, row in by_mode.get(mode, {}).items()}
    turns = any(row.get("in_turns_us") for row in first.values())
    compared = any("baselines" in row for row in first.values())
    located = any(_where(data, main, tokens) for tokens in first)
    shown = {mode: f"everything fused, {mode}" for mode in fused}
    if "routed" in by_mode:
        shown["routed"] = "routed alone"
    head = ["tokens", *(f"{said}, us (lowest replay)" for said in shown.values())]
    head += ["sustained, us"] if turns else []
    head += ["floors: memory / tensor, us", "of the floor", "best public, routed alone, us", "goal, us"]
    if compared:
        head += ["sums: own / parts / GEMMs, us", "longer than"]
    head += ["where the time goes"] if located else []
    lines = []
    for tokens, row in sorted(first.items()):
        cells = [f"{tokens}", *(_time(by_mode[mode].get(tokens)) for mode in shown)]
        if turns:
            sustained = row.get("in_turns_us", {})
            cells.append(" / ".join(f"{sustained[mode]:.1f}" if mode in sustained else "-" for mode in shown))
        cells += [*_floors(row), *_peers(row)]
        if compared:
            cells += _sums(row)
        lines.append(cells + ([_where(data, main, tokens)] if located else []))
    return _table(head, lines) + "\n" + publication(data)


def _time(row: Row | None) -> str:
    return "" if row is None else f"{row['us']:.1f} ({min(t['low'] for t in row['graph']):.1f})"


def _sums(row: Row) -> list[str]:
    parts, kept = row.get("baselines", {}), row.get("not_slower_than", {})
    names = {"own_sum_us": "own", "sum_us": "parts", "gemms_sum_us": "GEMMs"}
    figures = " / ".join(f"{parts[name]:.0f}" if name in parts else "-" for name in names)
    return [figures, ", ".join(said for name, said in names.items() if kept.get(name) is False) or "none"]


def publication(data: Row) -> str:
    """What publication costs against the dense output, and the reduce-scatter beside it."""
    found = data.get("publication", ())
    if not found:
        return ""
    beside = {r["shared_tokens"]: r["us"] for r in data.get("reduce_scatter", ())}
    text = _table(
        ["tokens", "weights", "mode", "us", "dense, us", "over dense (half of the rounds within)"],
        [
            [
                f"{f['tokens']}", "cold" if f["cold"] else "warm", f"`{f['mode']}`", f"{f['us']:.2f}",
                f"{f['dense_us']:.2f}",
                f"{f['overhead_percent']:+.2f} % ({f['quartiles'][0]:+.2f} .. {f['quartiles'][1]:+.2f})",
            ]
            for f in found
        ],
    )  # fmt: skip
    if beside:
        text += "\n" + _table(
            ["shared rows", "reduce-scatter, us"], [[f"{n}", f"{us:.1f}"] for n, us in beside.items()]
        )
    return text


def producer(data: Row) -> str:
    head = ["weights", "mode", "us", "single calls, us", "floors: memory / tensor, us", "of the floor"]
    head += ["best public, routed alone, us", "goal, us"]
    lines = []
    for row in data["rows"]:
        eager = f"{row['eager_us']:.1f}" if row["eager_us"] is not None else ""
        weights = "warm" if row["copies"] == 1 else "cold"
        lines.append([weights, f"`{row['mode']}`", f"{row['us']:.1f}", eager, *_floors(row), *_peers(row)])
    return _table(head, lines) + "\n" + publication(data)


def cost(data: Row) -> str:
    head = ["varied", "tokens", "experts of a rank", "top-k", "local ranks", "us", "floor of the device, us"]
    lines = []
    for row in data["rows"]:
        s = row["shape"]
        figures = [str(s[name]) for name in ("tokens", "experts", "topk", "ranks")]
        lines.append([row["varied"], *figures, f"{row['us']:.1f}", f"{device_floor_us(row):.1f}"])
    return _table(head, lines)


def markdown(data: Row) -> str:
    """The tables that belong to a run's kind."""
    kinds: dict[str, Callable[[Row], str]] = {"sweep": sweep, "producer": producer, "cost": cost}
    made = kinds.get(data["kind"])
    if made is None:
        raise ValueError(f"run: wanted one of {', '.join(kinds)}, given {data['kind']!r}")
    return made(data)


def _rested(data: Row) -> str:
    """How the rows' replays followed one another; the earliest records, all without rest, do not say it."""
    rest_s = max(row.get("rest_s", 0.0) for row in data["rows"])
    return f"each replay after {rest_s:g} s of rest" if rest_s else "replays back to back"


def put(data: Row, name: str, document: Path) -> None:
    """Replace what stands in ``document`` between ``<!-- NAME -->`` and the next ``<!-- end -->`` by the run's tables."""
    text = document.read_text()
    head, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, found, rest = text.partition(head)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{document}: wanted a place between {head.strip()!r} and {end!r}, found none")
    said = (
        f"{data['machine']['device']}, torch {data['machine']['torch']}, commit {data['commit'] or 'unknown'}, kernels "
    )
    said += f"{data['kernels']}, {data['date']}, {_rested(data)}:\n\n    {data['command']}\n\n"
    document.write_text(before + head + said + markdown(data).strip() + "\n" + end + after)
