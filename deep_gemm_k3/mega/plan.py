"""Plans: what a call will run, before anything is allocated, compiled or launched.

A plan is a pure function of the problem (widths, token counts, options) and of the device's facts; it needs neither a GPU
nor a group. ``Plan.make`` answers for widths, ``Plan.of`` for a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import envs
from .._extension import ops
from ..arguments import check_bool, check_choice, check_int, check_int32, check_text, refuse_value, shown

if TYPE_CHECKING:
    from ..jit.source import KernelSource
    from ..jit.warmup import WarmupReport
    from .buffer import SymmBuffer

KERNELS = {"sm_90a": "mega_sm90", "sm_100a": "mega_sm100"}
ENTRIES = {
    "none": "fp8_fp4_mega_moe",
    "dense": "fp8_fp4_mega_moe_bf16_shared",
    "hidden_sharded": "fp8_fp4_mega_moe_bf16_shared_rs",
    "token_owner": "fp8_fp4_mega_moe_bf16_shared_sp_rs",
}
# What a problem is made of, by kind. Names that are in none of these are for the host library to refuse.
_COUNTS = ("num_ranks", "num_experts", "num_topk", "num_max_tokens_per_rank", "num_max_shared_tokens", "hidden",
           "intermediate_hidden", "shared_intermediate_hidden", "shared_hidden", "num_tokens", "num_shared_tokens",
           "max_tokens", "max_shared_tokens", "num_sms")  # fmt: skip
_FLAGS = ("has_clamp", "fast_math", "has_rms_norm", "has_statistics", "batch_invariant", "whole_device", "traced")
_NAMES = ("shared_output", "activation", "target")
_WHAT = {
    "routed_l1": "routed L1",
    "routed_l2": "routed L2",
    "shared_l1": "shared L1",
    "shared_l2": "shared L2",
}


def problem_json(problem: Mapping[str, Any]) -> str:
    """A problem for the host library, each value of its kind (which names there are, and what range, it knows itself)."""
    checked: dict[str, Any] = {}
    for name, value in problem.items():
        if name in _FLAGS:
            checked[name] = check_bool(name, value)
        elif name in _NAMES:
            checked[name] = check_text(name, value)
        elif name == "overrides":
            checked[name] = _checked_overrides(value)
        else:
            checked[name] = check_int32(name, value) if name in _COUNTS else value
    return json.dumps(checked)


def _checked_overrides(given: object, name: str = "overrides") -> dict[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise refuse_value(name, "choices by name", given)
    return {
        key: _checked_overrides(value, f"{name}.{key}")
        if key in ("splits", "narrow_widths")
        else check_int(f"{name}.{key}", value, 0, 2**31 - 1)
        for key, value in given.items()
    }


def mebibytes(num_bytes: int) -> str:
    """``num_bytes`` for people."""
    return f"{num_bytes} B" if num_bytes < 1 << 14 else f"{num_bytes / (1 << 20):.2f} MiB"


@dataclass(frozen=True)
class Plan:
    """One call's plan. ``data`` is all of it; the properties name the parts that programs ask for."""

    data: Mapping[str, Any]
    device: str
    executor: str = ""
    """On the CPU: "emulator", "oracle", or another route of the host library."""

    @classmethod
    def make(cls, *, device: str = "cuda", **problem: Any) -> Plan:
        """The plan for widths given by name.

        Needed: num_ranks, num_experts, num_topk, num_max_tokens_per_rank, hidden, intermediate_hidden. Optional:
        num_tokens, num_shared_tokens, num_max_shared_tokens, shared_hidden, shared_intermediate_hidden, shared_output
        ('none', 'dense', 'hidden_sharded', 'token_owner'), activation, has_clamp, fast_math, has_statistics,
        batch_invariant, target ('sm_90a', 'sm_100a'), num_sms, whole_device (False: other ranks' kernels run on the
        device's other SMs), overrides (of the planner's choices, for measurements: routed_tokens, shared_tokens,
        shared_rows, num_ctas_per_sm, num_stages, splits, narrow_widths). ``device`` is where the tensors would live.
        """
        check_choice("device", device, ("cuda", "cpu"))
        return cls(json.loads(ops().plan_explain(problem_json(problem))), device, envs.CPU_EXECUTOR.get())

    @classmethod
    def of(cls, sym_buffer: SymmBuffer, num_tokens: int, **options: Any) -> Plan:
        """The plan of a call on ``sym_buffer`` with ``num_tokens`` routed tokens; ``options`` as for ``make``."""
        _require_buffer(sym_buffer)
        made = cls.make(
            **{**problem_of(sym_buffer), "num_tokens": num_tokens, **options}, device=sym_buffer.device.type
        )
        return replace(made, executor=ops().route_of(sym_buffer.handle))

    @property
    def config(self) -> Mapping[str, Any]:
        """The kernel's compile-time configuration, by field name."""
        config: Mapping[str, Any] = self.data["config"]
        return config

    @property
    def literal(self) -> str:
        """The configuration as the JIT writes it into the generated source."""
        return str(self.data["literal"])

    @property
    def target(self) -> str:
        return str(self.data["target"])

    @property
    def total_bytes(self) -> int:
        """Bytes of the symmetric buffer on each rank."""
        return int(self.data["buffer"]["total_bytes"])

    def byte_table(self) -> str:
        """Every component of the symmetric buffer with its offset and size, for reading before allocation."""
        rows = [("component", "offset", "bytes", "")]
        for part in self.data["buffer"]["components"]:
            rows.append((part["name"], str(part["offset"]), str(part["bytes"]), mebibytes(part["bytes"])))
        rows.append(("total", "", str(self.total_bytes), mebibytes(self.total_bytes)))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            f"{name:<{widths[0]}}  {offset:>{widths[1]}}  {size:>{widths[2]}}  {text:>{widths[3]}}".rstrip()
            for name, offset, size, text in rows
        )

    def explain(self) -> str:
        """What runs where and why, in lines."""
        config, shared_memory = self.config, self.data["shared_memory"]
        shape, splits = config["shape"], config["splits"]
        lines = [
            f"entry     {ENTRIES[config['shared_output']]}, {config['activation']}, "
            f"{'fast' if config['fast_math'] else 'exact'} math{', norm' if config['has_rms_norm'] else ''}"
            f"{', batch invariant' if self.data['batch_invariant'] else ''}",
            f"runs on   {self._where()}",
            f"routed    {self.data['num_tokens']} tokens of this rank, {shape['num_experts']} experts over "
            f"{shape['num_ranks']} rank{'s' if shape['num_ranks'] > 1 else ''}, top-{shape['num_topk']}: about "
            f"{self.data['expected_tokens_per_expert']:.2f} rows per expert; tile {_tile(config['routed_tile'])}",
        ]
        if config["shared_output"] != "none":
            lines.append(
                f"shared    {self.data['num_shared_tokens']} tokens, {config['shared_hidden']} wide, slice "
                f"{shape['shared_intermediate']}; tile {_tile(config['shared_tile'])}; output {config['shared_output']}"
            )
        cut = ", ".join(f"{_WHAT[name]} {count}" for name, count in splits.items() if count > 1)
        lines += [
            f"K splits  {cut or 'none'}",
            f"grid      {self.data['grid']} CTAs of {config['num_threads']} threads ({config['num_ctas_per_sm']} on each of "
            f"{self.data['num_sms']} SMs), {config['num_stages']} stages of {shared_memory['bytes_per_stage']} B, "
            f"{shared_memory['bytes_per_cta']} of {shared_memory['limit']} B shared memory{self._tensor_memory()}",
            f"buffer    {mebibytes(self.total_bytes)} on each rank",
        ]
        if self.data["fault"]:
            lines.append(f"cannot be launched: {self.data['fault']}")
        return "\n".join(lines)

    def _tensor_memory(self) -> str:
        used = self.data["tensor_memory"]
        if not used["columns"]:
            return ""
        return f", {used['columns']} of {used['limit']} columns of tensor memory (sums of {used['accumulators']} tiles)"

    def _where(self) -> str:
        if self.device == "cpu":
            if self.executor == "emulator":
                return f"the emulator, which executes the kernel's PTX for {self.target}: the tensors are on the CPU"
            return (
                f"{'the oracle (plain torch)' if self.executor == 'oracle' else self.executor}: the tensors are on the "
                f"CPU; the configuration is that of {self.target}, which no kernel executes here"
            )
        return f"one kernel for {self.target}: the device's architecture"


def _tile(tile: Mapping[str, int]) -> str:
    return f"{tile['num_rows']} rows x {tile['num_tokens']} tokens x {tile['num_k']} k"


def _require_buffer(given: object) -> None:
    from .buffer import SymmBuffer

    if not isinstance(given, SymmBuffer):
        raise TypeError(f"sym_buffer: wanted a SymmBuffer, given {shown(given)}")


def problem_of(sym_buffer: SymmBuffer) -> dict[str, Any]:
    """What a buffer fixes of a problem."""
    return {
        "num_ranks": sym_buffer.num_ranks,
        "num_experts": sym_buffer.num_experts,
        "num_topk": sym_buffer.num_topk,
        "num_max_tokens_per_rank": sym_buffer.num_max_tokens_per_rank,
        "num_max_shared_tokens": sym_buffer.num_max_shared_tokens,
        "hidden": sym_buffer.hidden,
        "intermediate_hidden": sym_buffer.intermediate_hidden,
        "shared_intermediate_hidden": sym_buffer.bf16_shared_intermediate_hidden,
        "target": sym_buffer.target,
        "num_sms": sym_buffer.num_sms,
        "whole_device": _is_whole(sym_buffer),
    }


def _is_whole(sym_buffer: SymmBuffer) -> bool:
    import torch

    device = sym_buffer.device
    if device.type != "cuda":
        return True
    return sym_buffer.num_sms >= torch.cuda.get_device_properties(device).multi_processor_count


def all_configs(problem: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every config that ``problem`` can choose as its token counts run over what the buffer allows, in rising order.

    ``max_tokens`` and ``max_shared_tokens`` in ``problem`` narrow the range. Each has ``config`` (by field name),
    ``literal`` (for the JIT), ``launch`` (grid, block, cluster, shared bytes) and ``fault`` (why it cannot be launched, or
    None).
    """
    found: list[dict[str, Any]] = json.loads(ops().all_configs(problem_json(problem)))
    return found


def load_kernels(problem: Mapping[str, Any], place: str) -> WarmupReport:
    """Compile and load into one place (``cuda:N``) everything that ``problem`` can choose; refuse what cannot be resident."""
    from ..jit.kernel import default_store
    from ..jit.warmup import warm_up

    target = str(problem.get("target", "sm_90a"))
    traced = bool(problem.get("traced", False))
    configs = all_configs(problem)
    sources = [_source(target, entry["literal"], traced) for entry in configs]
    store = default_store()
    report = warm_up(sources, store)
    for source, entry in zip(sources, configs, strict=True):
        handle = store.load(source, place, ops().params_bytes())
        # Also sets the kernel's attributes: nothing is left to do while a peer's kernel spins on the same device.
        ops().check_co_resident(handle, entry["launch"], int(problem["num_sms"]))
    return report


def load_kernel(place: str, target: str, literal: str, traced: bool = False) -> None:
    """Compile and load one config into one place (``emulator`` or ``null``)."""
    from ..jit.kernel import default_store

    if place == "emulator":
        from ..emulator.service import apply_environment

        apply_environment()
    source = _source(target, literal, traced, ptx_only=place == "emulator")
    default_store().load(source, place, ops().params_bytes())


def _source(target: str, literal: str, traced: bool, ptx_only: bool = False) -> KernelSource:
    from ..jit.source import KernelSource

    return KernelSource(KERNELS[target] + ("_traced" if traced else ""), target, literal, ptx_only)


def warmup(
    sym_buffer: SymmBuffer,
    *,
    shared_output: str = "none",
    shared_hidden: int = 0,
    activation: str | None = None,
    has_clamp: bool = False,
    fast_math: bool = True,
    has_statistics: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Do the first call's work for one signature ahead of time: collective on the host, runs nothing on the device.

    Needed before a call is captured into a CUDA graph. ``shared_output`` names the entry: 'none', 'dense',
    'hidden_sharded' (rs) or 'token_owner' (sp_rs).
    """
    from .. import ops as lent

    _require_buffer(sym_buffer)
    try:
        check_choice("shared_output", shared_output, ENTRIES)
        options = {
            "entry": list(ENTRIES).index(shared_output),
            "shared_hidden": check_int("shared_hidden", shared_hidden, 0, 2**31 - 1),
            "activation": ("swiglu" if shared_output == "none" else "situ")
            if activation is None
            else check_text("activation", activation),
            "has_clamp": check_bool("has_clamp", has_clamp),
            "fast_math": check_bool("fast_math", fast_math),
            "has_statistics": check_bool("has_statistics", has_statistics),
            "batch_invariant": check_bool("batch_invariant", batch_invariant),
        }
    except ValueError as error:
        sym_buffer.refuse_call(f"warmup: {error}")
        raise
    try:
        ops().warm_up(sym_buffer.handle, json.dumps(options))
    except RuntimeError as error:
        raise (lent.take_pending() or error) from None
