"""What the commands do, as functions of plain values."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..mega.group import Group
from ..testing.world import SharedInput
from . import plots, report, trace
from .baselines import Baselines, compared, reduce_scatter_us
from .case import Case, Settings, compile_plans, plan_of
from .data import RankData, rank_data, routed_input, shared_input, with_shared_tokens
from .measure import Bench, CheckFailed, Effort, World
from .timing import Timer
from .work import Ceilings, Shape

_SEED = 7
_COLD_BYTES = 320 << 20  # five times an H200's L2: what lies between two uses of the same weights
_MAX_COPIES = 8
_COMPILE_S = 600.0


@dataclass(frozen=True)
class Setting:
    """Where and how a job runs."""

    device: torch.device
    target: str = "sm_90a"
    effort: Effort = field(default_factory=Effort)
    how: Settings = field(default_factory=Settings)
    ceilings: Ceilings = field(default_factory=Ceilings)
    command: Sequence[str] = field(default_factory=lambda: report.command_line(sys.argv))
    rounds: int = 40
    """Rounds of the comparison of modes in turns; 0: none."""
    json_path: Path | None = None
    plot_path: Path | None = None
    trace_path: Path | None = None
    where: bool = False
    """Also say where the time goes, from the timeline of a traced kernel."""
    budget_s: float = 0.0
    """A job begins no further point once so many seconds have passed; 0: it takes as long as it takes."""
    say: Callable[[str], None] = print
    group: Group | None = None
    """Ranks that are processes; None: local ranks."""

    @property
    def traces(self) -> bool:
        return self.where or self.trace_path is not None

    def world(self, ranks: int) -> World:
        return World(ranks, self.group)

    def run(self, kind: str) -> report.Run:
        return report.Run(kind, self.device, self.command, self.ceilings)

    def finish(self, run: report.Run) -> None:
        run.save(self.json_path)
        if self.plot_path is not None and run.data["rows"]:
            plots.plot(run.data, self.plot_path)


class Budget:
    """What is left of a job's time, from its beginning on; all processes agree on it."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._begin = setting, time.monotonic()

    def is_spent(self, run: report.Run, left: Sequence[object]) -> bool:
        """Whether the points ``left`` stay undone; then that is said, and recorded."""
        setting = self._setting
        spent = 0.0 < setting.budget_s < time.monotonic() - self._begin
        if setting.group is not None and setting.budget_s:
            spent = any(setting.group.all_gather(spent, "bench: budget", _COMPILE_S))
        if spent and left:
            setting.say(f"left out, {setting.budget_s:g} s being over: " + ", ".join(str(point) for point in left))
            run.data["left_out"] = [str(point) for point in left]
        return spent


def cold_copies(shape: Shape) -> int:
    """Weight sets to rotate through so that none is in the L2 when it is used again."""
    experts = min(shape.experts, shape.tokens * shape.topk)
    touched = int(experts * shape.expert_parameters * 0.53) + 2 * shape.shared_parameters
    return max(2, min(_MAX_COPIES, -(-_COLD_BYTES // max(touched, 1)) + 1))


def make_data(shape: Shape, world: World, setting: Setting, copies: int) -> list[RankData]:
    """Of every rank, for the oracle; with ``copies`` where the rank runs here."""

    def of(rank: int) -> RankData:
        times = copies if rank in world.ranks else 1
        return rank_data(shape, _SEED, rank, setting.device, setting.target, times)

    return [of(rank) for rank in range(world.size)]


def _prepare(shapes: Sequence[tuple[Shape, str, Mapping[str, Any]]], setting: Setting) -> None:
    """Compile all kernels of a job at once; of several processes one does it, into the cache that all read."""
    if setting.device.type == "cuda" and (setting.group is None or setting.group.rank == 0):
        setting.say(_compile(shapes, setting))
    if setting.group is not None:
        setting.group.barrier("bench: compiled", _COMPILE_S)


def _compile(shapes: Sequence[tuple[Shape, str, Mapping[str, Any]]], setting: Setting) -> str:
    sms = torch.cuda.get_device_properties(setting.device).multi_processor_count
    plans, traced = [], []
    for shape, mode, overrides in shapes:
        how = replace(setting.how, overrides=overrides)
        on_device = shape.ranks if setting.group is None else 1
        share = how.num_sms or sms // on_device
        facts = {"target": setting.target, "num_sms": share, "whole_device": on_device == 1}
        plans.append(plan_of(shape, mode, how, **facts))
        if setting.traces and mode == shapes[0][1]:  # the mode that is traced
            traced.append(plans[-1])
    return compile_plans(plans, traced)


def _measure(bench: Bench, mode: str, setting: Setting, run: report.Run, **more: Any) -> dict[str, Any] | None:
    """One record, or a line that says why there is none."""
    begin = time.monotonic()
    try:
        row = {**bench.measure(mode, setting.effort, setting.ceilings), **more}
    except (CheckFailed, RuntimeError) as error:
        setting.say(f"{mode} M={bench.shape.tokens}: no time: {run.fail(mode, bench.shape, error, **more)}")
        bench.renew()  # a buffer that saw an abort refuses all further calls
        return None
    row = run.add({**row, "took_s": round(time.monotonic() - begin, 2)})
    setting.say(report.line(row))
    return row


def producer(shape: Shape, modes: Sequence[str], setting: Setting, cold: Sequence[bool] = (True, False)) -> report.Run:
    """The microbenchmark of one step of a decoder: every mode, with rotating weights (cold) and without (warm)."""
    run, world = setting.run("producer"), setting.world(shape.ranks)
    _prepare([(shape, mode, setting.how.overrides) for mode in modes], setting)
    data = make_data(shape, world, setting, cold_copies(shape) if True in cold else 1)
    setting.say(report.header())
    try:
        for is_cold in cold:
            chosen = data if is_cold else [RankData(d.routed[:1], d.shared[:1]) for d in data]
            bench = Bench(world, shape, chosen, setting.device, setting.how)
            for mode in modes:
                _measure(bench, mode, setting, run, cold=is_cold)
                run.save(setting.json_path)
            _turns(bench, modes, setting, run, is_cold)
            run.save(setting.json_path)
            _communication(world, shape, setting, run)
            run.save(setting.json_path)
            if setting.traces and is_cold:
                traced(bench, modes[0], setting, run)
            bench.destroy()
    finally:
        world.close()
    setting.finish(run)
    return run


def _turns(
    bench: Bench,
    modes: Sequence[str],
    setting: Setting,
    run: report.Run,
    is_cold: bool,
    beside: Mapping[str, Timer] = MappingProxyType({}),
) -> dict[str, float]:
    """The modes and the timers ``beside`` them in turns, so that what drifts is common to them: each one's median, and
    what publication costs against the dense output."""
    if len(modes) < 2 or not setting.rounds:
        return {}
    try:
        samples = bench.in_turns(modes, setting.effort, setting.rounds, beside)
    except (CheckFailed, RuntimeError) as error:
        setting.say(f"modes in turns: no times: {run.fail('in turns', bench.shape, error, cold=is_cold)}")
        return {}
    for found in report.overheads(samples):
        found |= {"cold": is_cold, "tokens": bench.shape.tokens}
        run.data.setdefault("publication", []).append(found)
        setting.say(report.overhead_line(found))
    medians = {mode: statistics.median(taken) for mode, taken in samples.items()}
    setting.say("        in turns: " + ", ".join(f"{mode} {us:.1f}" for mode, us in medians.items()))
    return medians


def _communication(world: World, shape: Shape, setting: Setting, run: report.Run) -> None:
    """Between devices: the reduce-scatter that would follow a dense output."""
    if setting.group is None or not shape.shared_tokens:
        return
    try:
        rows = shape.shared_tokens
        us = max(world.agreed(lambda: [reduce_scatter_us(rows, shape, setting.device, setting.effort)]))
    except RuntimeError as error:
        setting.say(f"        reduce-scatter: no time: {run.fail('reduce-scatter', shape, error)}")
        return
    run.data.setdefault("reduce_scatter", []).append({"shared_tokens": shape.shared_tokens, "us": us})
    setting.say(f"        reduce-scatter of a dense output [{shape.shared_tokens}, {shape.shared_hidden}]: {us:.1f} us")


def traced(bench: Bench, mode: str, setting: Setting, run: report.Run) -> None:
    """One call of the traced kernel per rank: a Perfetto file each where one is wanted, and the sums in the record."""
    try:
        memory = _traced_calls(bench, mode, setting.device)
    except RuntimeError as error:
        reason = run.fail(f"timeline of {mode}", bench.shape, error)
        setting.say(f"        timeline of {mode}, M={bench.shape.tokens}: none: {reason}")
        return
    path = setting.trace_path
    for rank, part in memory.items():
        if path is not None:
            trace.write(part, _numbered(path, f"rank{rank}") if bench.world.size > 1 else path, rank)
    sums = trace.summary(next(iter(memory.values())))
    run.data.setdefault("traces", []).append({"mode": mode, "tokens": bench.shape.tokens, "us": sums})
    setting.say(report.timeline_line(mode, bench.shape.tokens, sums))


def _traced_calls(bench: Bench, mode: str, device: torch.device) -> dict[int, torch.Tensor]:
    """Every rank's timeline of the last of some calls of the traced kernel, queued at once: ranks are in step by then."""
    grid = bench.each(lambda case: case.use(mode))[0].data["grid"]
    size = trace.layout().num_bytes(grid)
    memory = {rank: torch.zeros(size, dtype=torch.uint8, device=device) for rank in bench.cases}
    bench.each(lambda case: case.use(mode, memory[case.rank]))
    bench.together(lambda case: case.call_and_settle())

    def in_a_row(case: Case) -> None:
        for number in range(4):
            case.call(number)
        case.settle()

    bench.together(in_a_row)
    return memory


@dataclass(frozen=True)
class Sweep:
    """What `sweep` varies: tokens; ``modes`` per point; ``shared_tokens`` None: as many as routed ones."""

    tokens: Sequence[int]
    modes: Sequence[str] = ("dense", "routed")
    shared_tokens: int | None = None
    baselines: bool = True

    def rows_beside(self, tokens: int, ranks: int) -> int:
        """Shared rows of a call; where tokens are owned by ranks, each owns equally many."""
        if self.shared_tokens is not None:
            return self.shared_tokens
        return -(-tokens // ranks) * ranks if "sp_rs" in self.modes else tokens


def sweep(shape: Shape, what: Sweep, setting: Setting) -> report.Run:
    """Everything fused and the routed part alone over tokens, with the unfused parts beside them."""
    run, world, budget = setting.run("sweep"), setting.world(shape.ranks), Budget(setting)
    shapes = [replace(shape, tokens=m, shared_tokens=what.rows_beside(m, world.size)) for m in what.tokens]
    _prepare([(s, mode, setting.how.overrides) for s in shapes for mode in what.modes], setting)
    data = make_data(shapes[0], world, setting, cold_copies(shapes[0]))
    baselines = Baselines(shape, setting.device, setting.effort) if what.baselines and world.size == 1 else None
    setting.say(report.header())
    try:
        for number, s in enumerate(shapes):
            if number and budget.is_spent(run, [f"M={left.tokens}" for left in shapes[number:]]):
                break
            bench = Bench(world, s, [with_shared_tokens(d, s, _SEED) for d in data], setting.device, setting.how)
            rows = [_measure(bench, mode, setting, run) for mode in what.modes]
            apart = {"apart": baselines.apart(s)} if baselines and setting.rounds else {}
            turns = _turns(bench, what.modes, setting, run, is_cold=True, beside=apart)
            if rows[0] is not None and turns:
                rows[0]["in_turns_us"] = turns
            if setting.traces:
                path = setting.trace_path and _numbered(setting.trace_path, s.tokens)
                traced(bench, what.modes[0], replace(setting, trace_path=path), run)
            _communication(world, s, setting, run)
            bench.destroy()
            if baselines is not None and rows[0] is not None:
                _add_baselines(baselines, s, rows[0], setting, run)
            run.save(setting.json_path)
    finally:
        world.close()
    if baselines is not None:
        setting.say(report.verdict_line(run.data["rows"]))
    setting.finish(run)
    return run


def _numbered(path: Path, mark: object) -> Path:
    """The path with a mark before all its suffixes."""
    name = path.name.removesuffix("".join(path.suffixes))
    return path.with_name(f"{name}-{mark}{''.join(path.suffixes)}")


def _add_baselines(baselines: Baselines, shape: Shape, row: dict[str, Any], setting: Setting, run: report.Run) -> None:
    """The unfused parts to the fused call's record, with the verdicts."""
    routed = routed_input(shape, setting.effort.seeds[0], 0, setting.device, setting.effort.routing)
    try:
        parts = baselines.all(shape, routed.topk_idx)
    except RuntimeError as error:  # the fused call's records do not depend on what torch can do
        setting.say(f"        unfused: no times: {run.fail('unfused', shape, error)}")
        return
    row |= compared(row, parts)
    setting.say(report.baseline_line(row["baselines"], row["not_slower_than"]))


def cost(shape: Shape, varied: Mapping[str, Sequence[int]], setting: Setting) -> report.Run:
    """How the fused call's time grows in each of ``varied`` (tokens, experts, topk, ranks), the others held.

    ``ranks`` splits the device: every rank gets its share of the SMs and of ``shape.experts``.
    """
    run, budget = setting.run("cost"), Budget(setting)
    points = [(name, _varied(shape, name, value)) for name, values in varied.items() for value in values]
    _prepare([(s, "dense", setting.how.overrides) for _, s in points], setting)
    most = replace(shape, experts=max(s.experts * s.ranks for _, s in points), ranks=1)
    weights = rank_data(most, _SEED, 0, setting.device, setting.target, 1)
    setting.say(report.header())
    todo = list(dict.fromkeys(s for _, s in points))
    for number, s in enumerate(todo):
        if number and budget.is_spent(run, [_point_name(left) for left in todo[number:]]):
            break
        world = setting.world(s.ranks)
        try:
            data = [_part_of(weights, s, rank, setting.device) for rank in range(s.ranks)]
            bench = Bench(world, s, data, setting.device, setting.how)
            axes = [name for name, point in points if point == s]  # a point may lie on several
            row = _measure(bench, "dense", setting, run, varied=axes[0])
            bench.destroy()
        finally:
            world.close()
        for name in axes[1:] if row is not None else ():
            run.add({**(row or {}), "varied": name})
        run.save(setting.json_path)
    setting.finish(run)
    return run


def _point_name(s: Shape) -> str:
    return f"M={s.tokens} experts={s.experts} topk={s.topk} ranks={s.ranks}"


def _part_of(weights: RankData, shape: Shape, rank: int, device: torch.device) -> RankData:
    """A rank's share of the experts, twice where both copies together are small, and a shared slice of its own."""
    some = _experts_of(weights, rank * shape.experts, shape.experts).routed[0]
    routed = [some]
    if shape.experts * shape.ranks <= 16:
        routed.append(tuple((w.clone(), sf.clone()) for w, sf in some))  # type: ignore[arg-type]
    s = shared_input(shape, _SEED, rank, device)
    again = SharedInput(s.x, s.l1.clone(), s.l2.clone(), s.rms_weight, s.rms_epsilon)
    return RankData(routed, [s, again])


def _varied(shape: Shape, name: str, value: int) -> Shape:
    if name == "ranks":
        return replace(shape, ranks=value, experts=max(1, shape.experts // value))
    return replace(shape, **{name: value})


def tune(shape: Shape, points: Sequence[Mapping[str, Any]], setting: Setting) -> report.Run:
    """Time plans that differ from the planner's choice. A point: ``tokens`` and, each optional, ``shared_tokens``,
    ``experts``, ``topk``, ``mode`` and ``overrides``."""
    run, world = setting.run("tune"), World(1)
    fields = ("tokens", "shared_tokens", "experts", "topk")
    todo = [
        (
            replace(shape, **{k: p[k] for k in fields if k in p}),
            str(p.get("mode", "dense")),
            dict(p.get("overrides", {})),
        )
        for p in points
    ]
    _prepare(todo, setting)
    most = max((s for s, _, _ in todo), key=lambda s: s.experts)
    data = rank_data(most, _SEED, 0, setting.device, setting.target, max(cold_copies(s) for s, _, _ in todo))
    setting.say(report.header())
    for s, mode, overrides in todo:
        part = with_shared_tokens(_experts_of(data, 0, s.experts), s, _SEED)
        bench = Bench(world, s, [part], setting.device, replace(setting.how, overrides=overrides))
        _measure(bench, mode, setting, run, overrides=overrides)
        bench.destroy()
        run.save(setting.json_path)
    setting.finish(run)
    return run


def _experts_of(data: RankData, first: int, count: int) -> RankData:
    chosen = slice(first, first + count)
    pairs = [((a[0][chosen], a[1][chosen]), (b[0][chosen], b[1][chosen])) for a, b in data.routed]
    return RankData(pairs, data.shared)
