"""Every mutant of a kernel against recorded calls: who notices which, and who survives.

Each mutant runs in a forked process, so that neither a crash nor an endless run stops the sweep; the recorded memory is
the parent's and stays as it was.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import math
import os
import re
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..jit.source import INCLUDE_DIR
from .mutation import Site, sites, together
from .replay import Outcome, Play, Scene, Schedule, record

CPU_SECONDS = 90  # of one mutant, at most
ADVERSARIES = ("random", "latest", "earliest")
FOR_LANES = 200  # seeds from here on are for barriers of a warp
AROUND = 24  # instructions before a site and after it that tell its place
BUDGET = 20  # times the instructions of the unchanged kernel, at most


_INSTRUCTION = re.compile(r"\s*(?:@!?%\w+\s+)?[a-z][\w.:]*.*;")
_OPERAND = re.compile(r"%[\w.]+|\$\w+|\b_Z\w+")  # registers, labels, and names with a number of the process


@dataclass(frozen=True)
class Trial:
    """One run of a mutant: which act, how scheduled, with race detection or without."""

    act: int
    schedule: Schedule
    races: bool


@dataclass
class Verdict:
    """What became of one mutant. ``by``: kinds of what was noticed, ``limit`` for no end within the budget, ``crash`` and
    ``hang`` for what the parent saw; empty when it survived all trials."""

    site: str
    number: int  # among the sites of the same group
    digest: str = ""  # of the kernel that was run
    place: str = ""  # the instructions around the site, see `Sweep.place`
    by: list[str] = field(default_factory=list)
    trial: str = ""
    text: str = ""
    seconds: float = 0.0
    reached: bool = True  # whether any trial executes it

    @property
    def survived(self) -> bool:
        return not self.by


def is_small(play: Play, act: int) -> bool:
    return act >= len(play.acts) or play.is_small(play.acts[act])


def trials(play: Play, seeds: int) -> list[Trial]:
    """Cheap ones first: without race detection, then with it; the small act before the large ones; every other one with
    the lanes of a warp apart. Whoever drains after an abort waits for nobody, so such acts run without race detection."""
    num_acts = len(play.acts)

    def trial(act: int, seed: int, mode: str, quantum: int, races: bool, apart: bool) -> Trial:
        if apart and mode == "latest":  # lanes that part while they poll are never found waiting
            mode = "random"
        return Trial(act, Schedule(seed, mode, quantum, apart), races)

    found = [trial(0, 0, "latest", 0, False, False)]
    for seed in range(seeds):
        found.append(trial(0, seed, ADVERSARIES[seed % 3], (0, 20)[seed % 2], True, seed % 2 == 1))
        found.append(trial(0, 100 + seed, ADVERSARIES[seed % 3], 10, False, seed % 2 == 0))
    for act in range(1, num_acts):
        found += [trial(act, 0, "latest", 0, False, False), trial(act, 1, "random", 0, True, True)]
        if is_small(play, act):
            found += [trial(act, seed, ADVERSARIES[seed % 3], 20, True, seed % 2 == 1) for seed in (2, 3)]
    for act in range(num_acts, num_acts + len(play.aborts)):
        found += [trial(act, seed, ADVERSARIES[seed % 3], 10, False, seed % 2 == 1) for seed in range(3)]
    for act in range(num_acts):
        count = 10 if is_small(play, act) else 2
        found += [trial(act, FOR_LANES + seed, ADVERSARIES[seed % 3], 0, seed % 4 == 3, True) for seed in range(count)]
    return found


def with_lines(source: str, arch: str, expression: str) -> str:
    """PTX of a kernel's source with line information; the instructions are those of the product's own compilation."""
    from cuda.bindings import nvrtc

    from ..jit.compiler import _blob, _ok
    from ..jit.toolchain import find_toolchain

    program = _ok(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        _ok(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        options = [f"--gpu-architecture=compute_{arch.removeprefix('sm_')}", "--std=c++20", "--generate-line-info"]
        options += [f"--include-path={path}" for path in (INCLUDE_DIR, *find_toolchain().include_dirs)]
        _ok(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
        return str(_blob(nvrtc, "PTX", program).rstrip(b"\0").decode())
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Sweep:
    """A kernel, the acts that it is run in, and its mutants."""

    def __init__(self, play: Play) -> None:
        torch.set_num_threads(1)  # thread pools do not outlive a fork
        self.play = play
        self.scenes: list[Scene] = record(play)
        entries = {entry for scene in self.scenes for entry in scene.ptx}
        if len(entries) != 1:
            raise ValueError(
                f"acts of {play.name}: wanted one kernel for all, given {len(entries)}; pin the planner's choices"
            )
        (self.entry,) = entries
        name = "mega_sm90" if play.target == "sm_90a" else "mega_sm100"
        expression = f"deep_gemm_k3::kernels::{name}<deep_gemm_k3::config>"
        self.ptx = with_lines(self.scenes[0].sources[self.entry], play.target, expression)
        self.sites: list[Site] = list(sites(self.ptx))
        self.sites += together(self.sites)
        numbers: dict[str, int] = {}
        self.numbers = [numbers.setdefault(site.group, -1) for site in self.sites]
        for i, site in enumerate(self.sites):
            numbers[site.group] += 1
            self.numbers[i] = numbers[site.group]
        self.index = {
            (site.group, number): i for i, (site, number) in enumerate(zip(self.sites, self.numbers, strict=True))
        }
        self._lines = self.ptx.split("\n")
        self._code = [i for i, line in enumerate(self._lines) if _INSTRUCTION.match(line)]
        self.instructions: dict[int, int] = {}
        self.reached: dict[Trial, set[int]] = {}
        self.hints: dict[tuple[str, int], str] = {}  # by site and number: the trial that noticed the mutant last time

    def run(self, text: str, trial: Trial, *, coverage: bool = False) -> Outcome:
        limit = BUDGET * self.instructions[trial.act] if self.instructions else 0
        return self.scenes[trial.act].replay(
            {self.entry: text}, trial.schedule, races=trial.races, limit=limit, coverage=coverage
        )

    def check(self, plan: Sequence[Trial]) -> None:
        """Raises unless the unchanged kernel passes every trial; learns how long it takes, and what it executes: where the
        unchanged kernel does not reach an instruction, neither does a kernel that differs in nothing else."""
        instructions: dict[int, int] = {}
        for trial in plan:
            outcome = self.run(self.ptx, trial, coverage=True)
            self.reached[trial] = outcome.reached
            if outcome:
                raise RuntimeError(
                    f"{self.play.name}, {trial}: {outcome.fault} {outcome.findings[:3]} {outcome.differing}"
                )
            known = instructions.get(trial.act, 0)
            instructions[trial.act] = max(known, outcome.counters["instructions"])
        self.instructions = instructions

    def place(self, index: int) -> str:
        """Of the instructions around a site, without registers: where it is the same in another version of the kernel, what
        became of the mutant there holds here. Sites that are mutated together have their number for a place."""
        site = self.sites[index]
        if site.also:
            return str(1 + len(site.also))
        at = bisect.bisect(self._code, site.line)
        around = (self._lines[i] for i in self._code[max(at - AROUND, 0) : at + AROUND])
        text = "\n".join(_OPERAND.sub("", line).strip() for line in around)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @functools.cached_property
    def digest(self) -> str:
        """Of the kernel's instructions, without line information: which version of the kernel a record is of."""
        lines = [
            line
            for line in self.ptx.split(".section")[0].split("\n")
            if not line.lstrip().startswith((".loc", ".file", "$L__tmp", "//"))
        ]
        text = re.sub(r"_ZN\d+_INTERNAL_\w+_kernel_cu_[0-9a-f]+_\d+", "", "\n".join(lines))  # a number of the process
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def reaching(self, site: Site, plan: Sequence[Trial]) -> bool:
        return any(part.line + 1 in self.reached[trial] for trial in plan for part in (site, *site.also))

    def useful(self, site: Site, number: int, plan: Sequence[Trial]) -> list[Trial]:
        """The trials that execute a site: those of large acts only where no small one does, and first the one that noticed
        the mutant last time. For barriers of a warp those that know what lanes owe each other: with race detection or apart."""
        lines = {part.line + 1 for part in (site, *site.also)}
        found = [trial for trial in plan if lines & self.reached[trial]]
        is_of_lanes = site.op.startswith("bar.warp")
        if is_of_lanes:
            found = [trial for trial in found if trial.races or trial.schedule.lanes_apart]
        else:
            found = [trial for trial in found if trial.schedule.seed < FOR_LANES]
        small = [] if site.also else [trial for trial in found if is_small(self.play, trial.act)]
        hint = self.hints.get((site.group, number)) or self.hints.get((site.group, -1))
        return sorted(small or found, key=lambda trial: (trial_name(trial) != hint, is_of_lanes and not trial.races))

    def judge(self, index: int, plan: Sequence[Trial]) -> Verdict:
        """Runs one mutant until somebody notices; what has noticed it before comes first."""
        site = self.sites[index]
        text = site.mutate(self.ptx)
        verdict = Verdict(site.group, self.numbers[index], self.digest, self.place(index))
        started = time.perf_counter()
        verdict.reached = self.reaching(site, plan)
        for trial in self.useful(site, verdict.number, plan):
            outcome = self.run(text, trial)
            if outcome:
                verdict.by = outcome.kinds
                verdict.trial = trial_name(trial)
                texts = [outcome.fault, *(f"{kind}: {text}" for kind, text in outcome.findings), *outcome.differing]
                verdict.text = next(text for text in texts if text).replace(f"{INCLUDE_DIR}/", "")[:400]
                break
        verdict.seconds = round(time.perf_counter() - started, 2)
        return verdict

    def _answer(self, index: int, plan: Sequence[Trial]) -> dict[str, Any]:
        return asdict(self.judge(index, plan))

    def verdicts(
        self, chosen: Sequence[int], plan: Sequence[Trial], slots: Slots, until: float = math.inf
    ) -> Iterator[Verdict]:
        """Of the mutants named by index, as they come. None is begun after ``until`` (of `time.monotonic`)."""
        pending = list(reversed(chosen))
        running: dict[int, tuple[int, int]] = {}  # pipe -> index, process
        while pending or running:
            if time.monotonic() > until:
                pending = []
            while pending and slots.take(wait=not running):
                index = pending.pop()
                pipe, process = forked(functools.partial(self._answer, index, plan))
                running[pipe] = (index, process)
            if not running:
                continue
            for pipe in select.select(list(running), [], [], 0.2 if pending else None)[0]:
                yield self._collect(pipe, *running.pop(pipe))
                slots.give()

    def _collect(self, pipe: int, index: int, process: int) -> Verdict:
        with os.fdopen(pipe) as stream:
            answer = stream.read()
        _, status = os.waitpid(process, 0)
        if answer:
            return Verdict(**json.loads(answer))
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        by = ["hang" if is_late else "crash"]
        return Verdict(self.sites[index].group, self.numbers[index], self.digest, self.place(index), by)


def trial_name(trial: Trial) -> str:
    how = trial.schedule
    apart = ", lanes apart" if how.lanes_apart else ""
    return f"act {trial.act}, seed {how.seed}, {how.adversary}{apart}{', races' if trial.races else ''}"


class Slots:
    """How many mutants run at once, in all processes that were forked since: a byte in a pipe for each."""

    def __init__(self, count: int) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.write(self._writer, b"x" * count)

    def take(self, *, wait: bool) -> bool:
        """Whether there was one. ``wait``: for half a second."""
        if wait:
            select.select([self._reader], [], [], 0.5)
        try:
            return bool(os.read(self._reader, 1))
        except BlockingIOError:
            return False

    def give(self) -> None:
        os.write(self._writer, b"x")


def forked(work: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    """A pipe from which the child's answer comes, and the child."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return reader, process
    try:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        with os.fdopen(writer, "w") as stream:
            stream.write(json.dumps(work()))
    finally:
        os._exit(0)
