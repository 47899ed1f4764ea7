"""Calls of the package, recorded once on the emulator and run again from the same memory, with other PTX or schedules.

A :class:`Scene` holds what the launches of all ranks were given, a copy of all memory as it was before the first of them,
and what the memory held after the last. ``replay`` puts the memory back, runs the launches on a device of its own (the
calls of a rank one after the other, the ranks side by side without a barrier between calls) and says what is wrong: a
fault, findings, or memory that differs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..emulator import Device, EmulatorError, Launch, Module, service
from ..mega.buffer import SymmBuffer
from .data import WorldShape, make_world
from .oracle import Options
from .runner import RankCall, RunOptions, Session


class _Params(ctypes.Structure):
    """The beginning of params.cuh's Params, as far as replaying needs it."""

    _fields_ = [
        ("buffers", ctypes.c_uint64 * 64),
        ("rank", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("routed", ctypes.c_uint64 * 4),
        ("y", ctypes.c_uint64),
        ("rms_weight", ctypes.c_uint64),
        ("statistics", ctypes.c_uint64),
        ("shared", ctypes.c_uint64 * 5),
        ("publication", ctypes.c_uint64 * 4),
        ("scalars", ctypes.c_uint64 * 4),
        ("error_record", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Memory:
    """One allocation that the launches reach. ``is_result``: what it holds in the end is compared."""

    name: str
    tensor: torch.Tensor
    is_result: bool = False
    initial: torch.Tensor | None = None  # None: nobody writes it

    @property
    def bytes(self) -> torch.Tensor:
        return _bytes(self.tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.is_contiguous() else tensor.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Schedule:
    """How the emulator schedules: the seed, when asynchronous work completes, how long a warp runs at a stretch, whether
    its lanes may run apart, and what happens when no warp can go on (see `Device`)."""

    seed: int
    adversary: str = "random"
    quantum: int = 0
    lanes_apart: bool = False
    on_deadlock: str = "report"


@dataclass
class Outcome:
    """What a replay gave rise to. ``fault`` ended it; ``findings`` by kind; ``differing`` names memory with other bits."""

    fault: str = ""
    findings: list[tuple[str, str]] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)  # lines of PTX, counted from 1; with coverage only

    def __bool__(self) -> bool:
        """Whether anybody noticed anything."""
        return bool(self.fault or self.findings or self.differing)

    @property
    def kinds(self) -> list[str]:
        """In short: kinds of fault and findings, and ``wrong`` for other bits."""
        found = {kind for kind, _ in self.findings}
        if self.fault:
            found.add(self.fault.split(":")[0])
        return sorted(found) + (["wrong"] if self.differing else [])


READER = """.version 9.0
.target TARGET
.address_size 64
.visible .entry reader(.param .u64 from, .param .u32 count) {
.reg .pred %p; .reg .b32 %i, %n, %v<4>; .reg .b64 %base, %at;
ld.param.u64 %base, [from]; ld.param.u32 %n, [count]; mov.u32 %i, %tid.x;
again:
setp.ge.u32 %p, %i, %n; @%p bra done;
mul.wide.u32 %at, %i, 16; add.u64 %at, %at, %base; ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%at];
add.u32 %i, %i, 32; bra again;
done:
ret; }"""


@dataclass
class Scene:
    """Recorded calls. ``ptx`` by entry: what ran."""

    name: str
    launches: list[dict[str, Any]]
    memory: list[Memory]
    expected: dict[str, torch.Tensor]
    ptx: dict[str, str]
    sources: dict[str, str]
    is_abort: bool = False  # the calls end by an abort: only that all ranks report it alike is compared
    keep: Any = None

    def results(self) -> list[tuple[str, torch.Tensor]]:
        """What is compared, as memory holds it now."""
        if self.is_abort:  # code and rank of every record
            return [(part.name, part.bytes[:8]) for part in self.memory if part.name.startswith("error record")]
        return [(part.name, part.bytes) for part in self.memory if part.is_result]

    def readers(self, target: str) -> list[Launch]:
        """A kernel for each rank that reads, after the rank's calls, what was published to it: when a call ends, all ranks'
        stores must be there. Not after aborts."""
        published = [part for part in self.memory if part.name.startswith("workspace of rank ") and not self.is_abort]
        module = Module(READER.replace("TARGET", target)) if published else None
        return [
            Launch(module, "reader", 1, 32, [part.tensor, part.bytes.numel() // 16], rank=int(part.name.split()[-1]))
            for part in published
            if module is not None
        ]

    def restore(self) -> None:
        for part in self.memory:
            if part.initial is not None:
                part.tensor.view(torch.uint8).copy_(part.initial)

    def replay(
        self,
        ptx: dict[str, str] | None = None,
        schedule: Schedule | None = None,
        *,
        races: bool = True,
        limit: int = 0,
        coverage: bool = False,
    ) -> Outcome:
        """Runs the launches with ``ptx`` (by entry) in place of what was recorded. ``limit``: warp instructions, at most."""
        how = schedule or Schedule(0)
        self.restore()
        outcome = Outcome()
        try:
            modules = {entry: Module(text) for entry, text in (ptx or self.ptx).items()}
            device = Device(
                arch=next(iter(modules.values())).target,
                seed=how.seed,
                adversary=how.adversary,
                quantum=how.quantum,
                lanes_apart=how.lanes_apart,
                race_detection=races,
                on_deadlock=how.on_deadlock,
                max_instructions=limit,
                coverage=coverage,
            )
        except EmulatorError as error:
            return Outcome(fault=f"refused: {error}")
        for part in self.memory:
            device.register_tensor(part.tensor, part.name)
        try:
            device.run([*(_launch(given, modules) for given in self.launches), *self.readers(device.arch)])
        except EmulatorError as error:
            outcome.fault = str(error)
        if not self.is_abort:  # who drains reads what nobody wrote, without waiting for anybody
            outcome.findings = [(finding.kind, finding.text) for finding in device.findings]
        outcome.counters, outcome.reached = device.counters, device.reached_lines()
        outcome.differing = [name for name, now in self.results() if not torch.equal(now, self.expected[name])]
        return outcome


def _launch(given: dict[str, Any], modules: dict[str, Module]) -> Launch:
    return Launch(
        modules[given["entry"]],
        given["entry"],
        given["grid"],
        given["block"],
        [bytes.fromhex(given["params"])],
        given["cluster"],
        given["shared_bytes"],
        given["rank"],
    )


@contextmanager
def scheduled(**options: Any) -> Iterator[None]:
    """The emulator's schedule is another one for a while."""
    service.configure(**options)
    try:
        yield
    finally:
        service.configure()


def _reached(buffer: SymmBuffer, call: RankCall) -> list[Memory]:
    """What one rank's launches reach, except what the host library owns."""
    of = f" of rank {buffer.rank}"
    written = [("buffer", buffer.buffer, False), ("y", call.y, True), ("statistics", call.stats, True)]
    if call.shared_y is not None:
        written.append(("shared_y", call.shared_y, True))
    given = call.input
    read = [*given.l1, *given.l2]
    if given.shared is not None:
        read += [given.shared.x, given.shared.l1, given.shared.l2, given.shared.rms_weight]
    if call.published is not None:
        written.append(("workspace", call.published.workspace, True))
        read += [call.published.flags, call.published.peer_ptrs]
    memory = [Memory(name + of, tensor, result, _bytes(tensor).clone()) for name, tensor, result in written]
    return memory + [Memory(f"input {i}{of}", tensor) for i, tensor in enumerate(read) if tensor.numel()]


def _error_records(launches: list[dict[str, Any]]) -> list[Memory]:
    """The error records that the launches name: host memory of the library, one cell for each rank."""
    found = {}
    for given in launches:
        params = _Params.from_buffer_copy(bytes.fromhex(given["params"]))
        if params.rank != given["rank"]:
            raise RuntimeError("replay: the kernel's argument is not laid out as this module thinks")
        found[params.error_record] = given["rank"]
    memory = []
    for address, rank in found.items():
        tensor = torch.frombuffer((ctypes.c_uint8 * 32).from_address(address), dtype=torch.uint8)
        memory.append(Memory(f"error record of rank {rank}", tensor, False, torch.zeros_like(tensor)))
    return memory


@dataclass(frozen=True)
class Play:
    """What is recorded: ``calls`` calls of the entry that ``mode`` names, for each act of ``acts`` (tokens of each rank) on
    the same buffers. ``overrides`` are of the planner's choices, so that all acts run one kernel. ``aborts``: further acts, of
    one call with the tokens of the first, that end as ``ABORTS`` says."""

    name: str
    shape: WorldShape
    options: Options
    mode: str
    acts: tuple[tuple[int, ...], ...]
    calls: int = 3
    num_sms: int = 2
    overrides: dict[str, Any] = field(default_factory=dict)
    how: RunOptions = field(default_factory=RunOptions)
    aborts: tuple[str, ...] = ()
    target: str = "sm_90a"
    seed: int = 1

    @staticmethod
    def is_small(tokens: tuple[int, ...]) -> bool:
        """Whether an act is among the cheap ones."""
        return sum(tokens) <= 64


def record(play: Play) -> list[Scene]:
    """A scene for each act."""

    shape = replace(play.shape, tokens=tuple(max(tokens) for tokens in zip(*play.acts, strict=True)))
    with scheduled(seed=play.seed):
        session = Session(shape, device="cpu", overrides=play.overrides, num_sms=play.num_sms, target=play.target)
        scenes = [_record_act(play, session, replace(shape, tokens=tokens), play.calls) for tokens in play.acts]
        if play.aborts:
            one = _record_act(play, session, replace(shape, tokens=play.acts[0]), 1)
            scenes += [ABORTS[what](one, session.buffers) for what in play.aborts]
        return scenes


# What the host refuses is written into the recorded memory: the kernel checks it by itself, for callers on a GPU.
EXPERT_OUT_OF_RANGE, REFUSED_BY_HOST = 2, 6  # codes of abort cells: 1 + sync::Fault
ABORT_CELL = 384  # plan::control::kAbort: where a buffer has its cell


def _aborting(scene: Scene, what: str, code: int, changes: dict[int, list[tuple[int, torch.Tensor]]]) -> Scene:
    """``scene`` with other initial bytes in the buffers: by rank, offsets and what is put there. The last rank is the one
    that every rank's error record must name."""
    memory = []
    for part in scene.memory:
        for rank, writes in changes.items():
            if part.name == f"buffer of rank {rank}" and part.initial is not None:
                initial = part.initial.clone()
                for offset, value in writes:
                    initial[offset : offset + value.numel() * value.element_size()] = value.view(torch.uint8)
                part = replace(part, initial=initial)
        memory.append(part)
    ranks = len({given["rank"] for given in scene.launches})
    verdict = torch.tensor([code, ranks - 1], dtype=torch.int32).view(torch.uint8)
    changed = replace(scene, name=f"{scene.name}, {what}", memory=memory, is_abort=True)
    changed.expected = {name: verdict for name, _ in changed.results()}
    return changed


def _with_bad_expert(scene: Scene, buffers: Sequence[SymmBuffer]) -> Scene:
    """The last rank names an expert that does not exist."""
    last = buffers[-1]
    offset = last.topk_idx.data_ptr() - last.buffer.data_ptr()
    bad = torch.tensor([1 << 40], dtype=torch.int64)
    return _aborting(scene, "no such expert", EXPERT_OUT_OF_RANGE, {last.rank: [(offset, bad)]})


def _with_set_cells(scene: Scene, buffers: Sequence[SymmBuffer]) -> Scene:
    """The last rank's host has refused the call after the launches: their kernels find the abort cells set."""
    cell = torch.tensor([REFUSED_BY_HOST, len(buffers) - 1, 0, 0, 0, 0, 0, 1], dtype=torch.int32)
    changes = {buffer.rank: [(ABORT_CELL, cell)] for buffer in buffers}
    return _aborting(scene, "refused by a host", REFUSED_BY_HOST, changes)


ABORTS = {"no such expert": _with_bad_expert, "refused by a host": _with_set_cells}


def _record_act(play: Play, session: Session, shape: WorldShape, calls: int) -> Scene:
    from ..jit.kernel import default_store

    inputs = make_world(shape, play.seed, target=play.target)
    if not play.is_small(shape.tokens):  # many routes, most of them empty, so that few rows are computed
        for one in inputs:
            one.routed.topk_idx[:, 2:] = -1

    def begin(group: Any, buffer: SymmBuffer) -> RankCall:
        call = RankCall(buffer, inputs[group.rank], play.options, play.mode, play.how)
        call.fill()
        return call

    def proceed(group: Any, buffer: SymmBuffer) -> None:
        for _ in range(calls):
            ranks[group.rank].call()
            group.barrier("replay: after a call")
        buffer.check()

    ranks = session.run(begin)
    memory = [part for call in ranks for part in _reached(call.buffer, call)]
    service.record(True)
    session.run(proceed)
    launches = sorted(service.recorded(), key=lambda given: given["rank"])  # the ranks' threads came in any order
    service.record(False)
    records = _error_records(launches)
    artefacts = {artefact.entry: artefact for artefact in default_store().loaded()}
    used = {given["entry"] for given in launches}
    scene = Scene(
        f"{play.name} {'+'.join(map(str, shape.tokens))}",
        launches,
        memory + records,
        {},
        {entry: artefacts[entry].ptx for entry in used},
        {entry: artefacts[entry].source for entry in used},
        keep=(session, ranks),
    )
    scene.expected = {name: now.clone() for name, now in scene.results()}
    return scene
