"""Pictures of saved runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .work import device_floor_us

Row = Mapping[str, Any]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("plot: wanted matplotlib, given none: pip install 'deep_gemm_k3[bench]'") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "deep_gemm_k3", "axes.grid": True})
    matplotlib.rcParams.update({"grid.alpha": 0.3, "legend.fontsize": 8})
    import matplotlib.pyplot as pyplot

    return pyplot


def plot(data: Row, path: Path) -> None:
    """The picture that belongs to a run's kind."""
    pyplot = _pyplot()
    draw = {"sweep": _sweep, "cost": _cost}.get(data["kind"], _bars)
    figure = draw(pyplot, data)
    figure.suptitle(f"{data['machine']['device']}, commit {data.get('commit') or 'unknown'}, kernels {data['kernels']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _ticks(axis: Any, values: Sequence[int]) -> None:
    """A logarithmic axis with the values that were measured on it."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [str(v) for v in values], fontsize=7)
    axis.minorticks_off()


def _points(rows: Sequence[Row], value: Any) -> tuple[list[int], list[float]]:
    found = sorted((r["shape"]["tokens"], value(r)) for r in rows)
    return [x for x, _ in found], [y for _, y in found]


def _sweep(pyplot: Any, data: Row) -> Any:
    """Time over tokens with floors, peers and unfused parts, and a roofline."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.2))
    rows = data["rows"]
    for mode in dict.fromkeys(r["mode"] for r in rows):
        chosen = [r for r in rows if r["mode"] == mode]
        label = {"routed": "routed alone"}.get(mode, f"everything fused, {mode}")
        left.plot(*_points(chosen, lambda r: r["us"]), "o-", label=label)
    fused = [r for r in rows if r["mode"] not in ("routed", "rs", "sp_rs")] or rows
    left.plot(*_points(fused, lambda r: r["work"]["floor_us"]), "k:", label="floor")
    public = [r for r in fused if r.get("best_public")]
    left.plot(
        *_points(public, lambda r: r["best_public"][0]), "s", label="best public, routed alone", color="tab:green"
    )
    for name, label in (("sum_us", "unfused parts, BF16"), ("own_sum_us", "own routed part, cuBLAS, gating and norm")):
        parts = [r for r in fused if name in r.get("baselines", {})]
        if parts:
            left.plot(*_points(parts, lambda r, name=name: r["baselines"][name]), "--", label=label)
    left.set(yscale="log", xlabel="tokens of the rank", ylabel="microseconds")
    _ticks(left, sorted({r["shape"]["tokens"] for r in rows}))
    left.legend()
    _roofline(right, fused, data["ceilings"])
    return figure


def _roofline(axis: Any, rows: Sequence[Row], ceilings: Row) -> None:
    memory, tensor = ceilings["memory_gb_s"] * 1e-3, ceilings["tensor_tflop_s"]
    points = [(r["work"]["operations"] / r["work"]["bytes"], r["work"]["tflop_s"], r["shape"]["tokens"]) for r in rows]
    low, high = min(x for x, _, _ in points) / 2, max(x for x, _, _ in points) * 2
    corners = sorted({low, tensor / memory, max(high, 2 * tensor / memory)})
    axis.plot(corners, [min(tensor, x * memory) for x in corners], "k-", label=f"{memory:g} TB/s, {tensor:g} TFLOP/s")
    axis.plot([x for x, _, _ in points], [y for _, y, _ in points], "o", label="everything fused, by tokens")
    for x, y, tokens in points:
        axis.annotate(str(tokens), (x, y), xytext=(5, -9), textcoords="offset points", fontsize=7)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte of the least traffic", ylabel="TFLOP/s")
    axis.legend(loc="lower right")


def _cost(pyplot: Any, data: Row) -> Any:
    """One picture per dimension that was varied."""
    axes_of: dict[str, list[Row]] = {}
    for row in data["rows"]:
        axes_of.setdefault(row["varied"], []).append(row)
    names = {"tokens": "tokens", "experts": "experts of the rank", "topk": "top-k", "ranks": "local ranks"}
    figure, axes = pyplot.subplots(1, len(axes_of), figsize=(3.6 * len(axes_of), 3.8), squeeze=False)
    for axis, (name, rows) in zip(axes[0], axes_of.items(), strict=True):
        rows = sorted(rows, key=lambda r: r["shape"][name])
        x = [r["shape"][name] for r in rows]
        axis.plot(x, [r["us"] for r in rows], "o-", label="measured")
        axis.plot(x, [device_floor_us(r) for r in rows], "k:", label="floor of the device")
        axis.set(xlabel=names.get(name, name), ylabel="microseconds")
        axis.set_ylim(bottom=0)
        _ticks(axis, x)
        axis.legend()
    return figure


def _bars(pyplot: Any, data: Row) -> Any:
    figure, axis = pyplot.subplots(figsize=(8, 4))
    rows = data["rows"]
    names = [f"{r['mode']}\n{'warm' if r['copies'] == 1 else 'cold'}" for r in rows]
    axis.bar(range(len(rows)), [r["us"] for r in rows], tick_label=names)
    axis.plot(range(len(rows)), [r["work"]["floor_us"] for r in rows], "k_", markersize=30, label="floor")
    axis.set(ylabel="microseconds")
    axis.legend()
    return figure
