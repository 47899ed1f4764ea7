"""``python -m deep_gemm_k3 bench``: producer, sweep, cost, tune, plot, table.

Every command checks results against the oracle before and after it times them, and prints no time for a wrong one. When
something that was asked for has no time, the last line says so and the exit code is 1; records are written all the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)

Tokens = Annotated[int, typer.Option(min=0, help="Routed tokens of each rank.")]
SharedTokens = Annotated[int, typer.Option(min=-1, help="Rows of the shared input; -1: as many as routed tokens.")]
Experts = Annotated[int, typer.Option(min=1, help="Routed experts of each rank.")]
Topk = Annotated[int, typer.Option(min=1, help="Experts per token.")]
Ranks = Annotated[int, typer.Option(min=1, help="Local ranks; they share the device.")]
Gpus = Annotated[int, typer.Option(min=0, help="Ranks that are processes, one on each device; 0: local ranks.")]
Rounds = Annotated[int, typer.Option(min=0, help="Rounds of the comparison of the modes in turns; 0: none.")]
Hidden = Annotated[int, typer.Option(min=128, help="Routed width.")]
Intermediate = Annotated[int, typer.Option(min=128, help="Routed intermediate width.")]
SharedHidden = Annotated[int, typer.Option(min=128, help="Width of the shared expert.")]
SharedIntermediate = Annotated[int, typer.Option(min=128, help="A rank's slice of the shared intermediate.")]
Modes = Annotated[str, typer.Option(help="Of routed, dense, rs, sp_rs; commas between.")]
DeviceName = Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")]
Calls = Annotated[int, typer.Option(min=1, help="Calls in a captured graph.")]
Replays = Annotated[int, typer.Option(min=1, help="Replays of the graph, one sample each.")]
Eager = Annotated[int, typer.Option(min=0, help="Calls timed one by one; 0: none.")]
Rest = Annotated[float, typer.Option("--rest", min=0, max=5, help="Seconds a GPU rests before each replay; 0: none.")]
Seeds = Annotated[int, typer.Option(min=1, help="Routings that are drawn and timed.")]
RoutingName = Annotated[str, typer.Option(help="uniform, k3_router, hot_expert, hot_rank, holes or duplicates.")]
Sample = Annotated[int, typer.Option(min=1, help="Tokens of a rank that the oracle computes.")]
Exact = Annotated[bool, typer.Option("--exact", help="fast_math=False.")]
Invariant = Annotated[bool, typer.Option("--batch-invariant", help="batch_invariant=True.")]
Memory = Annotated[float, typer.Option(min=0, help="Ceiling of memory reads, GB/s; 0: the known one.")]
Tensor = Annotated[float, typer.Option(min=0, help="Ceiling of products, TFLOP/s; 0: the known one.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Where the records go.")]
PlotPath = Annotated[Path | None, typer.Option("--plot", help="Where the picture goes; the suffix tells the format.")]
TracePath = Annotated[Path | None, typer.Option("--trace", help="Where the in-kernel timeline goes, for Perfetto.")]
Where = Annotated[bool, typer.Option("--where", help="Say where the time goes, from a traced kernel's timeline.")]
BudgetS = Annotated[
    float, typer.Option("--budget", min=0, help="Begin no further point after so many seconds; 0: do all.")
]
Overrides = Annotated[str, typer.Option(help='Planner\'s choices to replace, as JSON: {"routed_tokens": 16}.')]


@dataclass(frozen=True)
class Numbers:
    """Options that all commands have."""

    device: str
    calls: int
    replays: int
    eager: int
    rest_s: float
    seeds: int
    routing: str
    sample: int
    exact: bool
    batch_invariant: bool
    memory_gb_s: float
    tensor_tflop_s: float
    json_path: Path | None
    plot_path: Path | None
    trace_path: Path | None
    overrides: str
    gpus: int = 0
    rounds: int = 40
    where: bool = False
    budget_s: float = 0.0


def numbers(text: str, name: str) -> list[int]:
    """Whole numbers with commas between."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise typer.BadParameter(f"wanted whole numbers with commas between, given {text!r}", param_hint=name)
    return found


def modes_of(text: str) -> list[str]:
    from .case import MODES

    found = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in found if part not in MODES]
    if unknown or not found:
        raise typer.BadParameter(f"wanted some of {', '.join(MODES)}, given {text!r}", param_hint="--modes")
    return found


def overrides_of(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"wanted a JSON object, given {text!r}", param_hint="--overrides")
    return found


def setting_of(n: Numbers) -> Any:
    import torch

    from ..arguments import is_device
    from ..mega.buffer_spec import target_of
    from ..testing.routing import ROUTINGS
    from .case import Settings
    from .jobs import Setting
    from .measure import Effort
    from .work import CEILINGS

    if not is_device(n.device):
        raise typer.BadParameter(f"wanted cuda, cuda:N or cpu, given {n.device!r}", param_hint="--device")
    device = torch.device(n.device)
    if n.routing not in ROUTINGS:
        raise typer.BadParameter(f"wanted one of {', '.join(ROUTINGS)}, given {n.routing!r}", param_hint="--routing")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("wanted a CUDA device, given a machine without one; --device cpu runs the emulator",
                                 param_hint="--device")  # fmt: skip
    if device.type == "cuda" and n.gpus > torch.cuda.device_count():
        raise typer.BadParameter(f"wanted at most {torch.cuda.device_count()} devices, given {n.gpus}",
                                 param_hint="--gpus")  # fmt: skip
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if not n.gpus:
            torch.cuda.set_device(device)
    how = Settings(overrides_of(n.overrides), not n.exact, n.batch_invariant, sample=n.sample)
    effort = Effort(n.calls, n.replays, n.eager, tuple(range(1, n.seeds + 1)), n.routing, rest_s=n.rest_s)
    target = target_of(device)
    known = CEILINGS[target]
    return Setting(
        device,
        target,
        effort,
        how,
        replace(
            known,
            memory_gb_s=n.memory_gb_s or known.memory_gb_s,
            tensor_tflop_s=n.tensor_tflop_s or known.tensor_tflop_s,
        ),
        rounds=n.rounds,
        json_path=n.json_path,
        plot_path=n.plot_path,
        trace_path=n.trace_path,
        where=n.where,
        budget_s=n.budget_s,
    )


@app.command()
def producer(
    *,
    tokens: Tokens = 8,
    shared_tokens: SharedTokens = 64,
    experts: Experts = 1,
    topk: Topk = 1,
    ranks: Ranks = 1,
    gpus: Gpus = 0,
    hidden: Hidden = 3584,
    intermediate: Intermediate = 3072,
    shared_hidden: SharedHidden = 7168,
    shared_intermediate: SharedIntermediate = 768,
    modes: Modes = "dense,rs,sp_rs",
    warm: Annotated[bool, typer.Option(help="Also without rotating the weights.")] = True,
    rounds: Rounds = 40,
    where: Where = False,
    device: DeviceName = "cuda",
    calls: Calls = 100,
    replays: Replays = 7,
    eager: Eager = 100,
    rest_s: Rest = 0.2,
    seeds: Seeds = 1,
    routing: RoutingName = "uniform",
    sample: Sample = 64,
    exact: Exact = False,
    batch_invariant: Invariant = False,
    memory_gb_s: Memory = 0.0,
    tensor_tflop_s: Tensor = 0.0,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    trace_path: TracePath = None,
    overrides: Overrides = "{}",
) -> None:
    """One decode step of K3: eight routed and 64 shared tokens, one expert per rank, in every mode, cold and warm."""
    given = locals()
    _start("producer", (_shape(given), modes_of(modes)), _numbers(given), ((True, False) if warm else (True,),))


@app.command()
def sweep(
    *,
    tokens: Annotated[str, typer.Option(help="Token counts, commas between.")] = ",".join(str(2**i) for i in range(14)),
    shared_tokens: SharedTokens = -1,
    experts: Experts = 112,
    topk: Topk = 16,
    ranks: Ranks = 1,
    gpus: Gpus = 0,
    hidden: Hidden = 3584,
    intermediate: Intermediate = 3072,
    shared_hidden: SharedHidden = 7168,
    shared_intermediate: SharedIntermediate = 768,
    modes: Modes = "dense,routed",
    baselines: Annotated[bool, typer.Option(help="Time the unfused parts too.")] = True,
    rounds: Rounds = 10,
    where: Where = False,
    device: DeviceName = "cuda",
    calls: Calls = 20,
    replays: Replays = 5,
    eager: Eager = 20,
    rest_s: Rest = 0.2,
    seeds: Seeds = 3,
    routing: RoutingName = "uniform",
    sample: Sample = 64,
    exact: Exact = False,
    batch_invariant: Invariant = False,
    memory_gb_s: Memory = 0.0,
    tensor_tflop_s: Tensor = 0.0,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    trace_path: TracePath = None,
    overrides: Overrides = "{}",
    budget_s: BudgetS = 0.0,
) -> None:
    """The fused call over token counts, the routed part alone, and the unfused parts beside them."""
    given = locals()
    from .jobs import Sweep

    counts = numbers(tokens, "--tokens")
    given["tokens"] = counts[0]
    what = Sweep(counts, modes_of(modes), None if shared_tokens < 0 else shared_tokens, baselines)
    _start("sweep", (_shape(given), what), _numbers(given))


@app.command()
def cost(
    *,
    vary: Annotated[
        str, typer.Option(help="Dimensions and values: name=v,v,... with spaces between.")
    ] = "tokens=1,8,64,512 experts=8,16,32,64,112 topk=1,2,4,8,16 ranks=1,2,4,8",
    tokens: Tokens = 8,
    shared_tokens: SharedTokens = 64,
    experts: Experts = 112,
    topk: Topk = 8,
    hidden: Hidden = 3584,
    intermediate: Intermediate = 3072,
    shared_hidden: SharedHidden = 7168,
    shared_intermediate: SharedIntermediate = 768,
    device: DeviceName = "cuda",
    calls: Calls = 10,
    replays: Replays = 3,
    eager: Eager = 0,
    rest_s: Rest = 0.2,
    seeds: Seeds = 1,
    routing: RoutingName = "uniform",
    sample: Sample = 16,
    exact: Exact = False,
    batch_invariant: Invariant = False,
    memory_gb_s: Memory = 0.0,
    tensor_tflop_s: Tensor = 0.0,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
    overrides: Overrides = "{}",
    budget_s: BudgetS = 0.0,
) -> None:
    """How the fused call's time grows with tokens, experts, experts per token and local ranks."""
    given = {**locals(), "ranks": 1, "trace_path": None}
    from .jobs import cost as job

    _conclude([job(_shape(given), varied_of(vary), setting_of(_numbers(given))).failures])


@app.command()
def tune(
    points: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="JSON: a list of {tokens, shared_tokens, experts, topk, mode, overrides}."
        ),
    ],
    *,
    device: DeviceName = "cuda",
    calls: Calls = 20,
    replays: Replays = 3,
    rest_s: Rest = 0.2,
    sample: Sample = 16,
    json_path: JsonPath = None,
) -> None:
    """Time plans that differ from the planner's choice, at K3's widths."""
    from .jobs import tune as job
    from .work import Shape

    given = Numbers(
        device, calls, replays, 0, rest_s, 1, "uniform", sample, False, False, 0.0, 0.0, json_path, None, None, "{}"
    )
    _conclude([job(Shape(8, shared_tokens=64), points_of(points), setting_of(given)).failures])


def points_of(path: Path) -> list[dict[str, Any]]:
    """The points of a file for `tune`."""
    from .case import check_point

    try:
        found = json.loads(path.read_text())
    except ValueError:  # not JSON, or not text
        found = None
    if not isinstance(found, list) or not all(isinstance(point, dict) for point in found):
        raise typer.BadParameter(f"{path}: wanted a JSON list of objects", param_hint="POINTS")
    for number, point in enumerate(found):
        check_point(point, f"points[{number}]")
    return found


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="A saved run.", exists=True, dir_okay=False)],
    picture: Annotated[Path, typer.Argument(help="The picture to write: .png, .svg or .pdf.")],
) -> None:
    """Draw a saved run."""
    from . import plots, report

    plots.plot(report.load_timed(run), picture)
    print(f"wrote {picture}")


@app.command()
def table(
    run: Annotated[Path, typer.Argument(help="A saved run: a sweep, producer or cost.", exists=True, dir_okay=False)],
    *,
    into: Annotated[
        Path | None, typer.Option(help="A document with a place for it: <!-- FILE NAME --> .. <!-- end -->.")
    ] = None,
) -> None:
    """A saved run as Markdown, printed or put into a document."""
    from . import report
    from . import table as tables

    data = report.load_timed(run)
    if into is None:
        print(tables.markdown(data))
    else:
        tables.put(data, run.name, into)
        print(f"wrote {into}")


def varied_of(text: str) -> dict[str, list[int]]:
    """``name=v,v name=v`` as a table."""
    names = ("tokens", "shared_tokens", "experts", "topk", "ranks")
    found = {}
    for part in text.split():
        name, _, values = part.partition("=")
        if name not in names:
            raise typer.BadParameter(f"wanted one of {', '.join(names)}, given {name!r}", param_hint="--vary")
        found[name] = numbers(values, "--vary")
    return found


def _numbers(given: dict[str, Any]) -> Numbers:
    return Numbers(**{name: given[name] for name in Numbers.__dataclass_fields__ if name in given})


def _start(name: str, arguments: tuple[Any, ...], given: Numbers, more: tuple[Any, ...] = ()) -> None:
    """Run a job here, or in one process per device; ``more`` are arguments that follow the setting."""
    from . import jobs, processes

    setting = setting_of(given)
    if given.gpus:
        _conclude(processes.launch(given.gpus, name, arguments, setting, more))
    else:
        _conclude([getattr(jobs, name)(*arguments, setting, *more).failures])


def _conclude(failures: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Ends the command by what each process has no time for; what fails on several is told once."""
    from .report import failure_line

    found = next(filter(None, failures), None)
    if found:
        print(failure_line(found))
        raise typer.Exit(1)


def _shape(given: dict[str, Any]) -> Any:
    from .work import Shape

    shape = Shape(**{name: given[name] for name in Shape.__dataclass_fields__})
    if given.get("gpus"):
        shape = replace(shape, ranks=given["gpus"])
    if shape.shared_tokens < 0:
        shape = replace(shape, shared_tokens=shape.tokens)
    return shape
