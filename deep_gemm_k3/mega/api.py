"""The fused calls. Names and positional order are those of upstream DeepGEMM; what is ours are keywords at the end.

Common to all four. T = ``y.size(0)`` routed tokens of this rank, H and I the routed widths, E_local = experts per rank, S =
``shared_x.size(0)`` shared tokens, Hs and Is the shared widths (Is: this rank's slice).

* The caller has filled the first T rows of ``sym_buffer.x``, ``x_sf``, ``topk_idx`` and ``topk_weights``. After the call, in
  stream order, every input may be overwritten. In a CUDA graph T and S are frozen: rows of -1 stand for missing tokens.
* ``l1_weights`` and ``l2_weights`` are pairs made by ``transform_weights_for_mega_moe`` for the buffer's target.
* ``cumulative_local_expert_recv_stats``: int32 [E_local]; the rows received for each local expert are added.
* ``fast_math`` allows exponentials and divisions with relative errors below 2^-20. ``situ_beta`` and ``situ_linear_beta``
  belong to activation ``'situ'``, ``activation_clamp`` to ``'swiglu'``.
* ``batch_invariant=True``: a token's bits depend neither on the other tokens, nor their number, nor the number of ranks.
  On an H200 it costs 11 to 21 % of a call's time up to 64 tokens and half of it again from 512 on (docs/performance.md).
* ``validate='device'`` also reads expert ids, generation and peer addresses back to the host, which waits for the stream;
  with ``'host'`` the kernel checks what it can. CPU tensors are always checked.

A call runs, or raises ``RuntimeError`` (``TypeError`` for an argument of another type) before anything is launched. The
message names the argument, what was wanted, what was given, and the check's id in brackets. Outputs are then untouched,
and in a group of several ranks the others stop as well: the buffer has to be made anew. (Not for a second call while one is
inside the buffer: that one goes on.) What only the device can find, a time-out or a bad value in device memory, is raised by
a later call or by ``sym_buffer.check()``, with CPU tensors by the call itself: outputs of that call are undefined on every
rank, and the buffer refuses work. The first call of a signature (all but the token counts) on a buffer is collective on the
host.

Under ``torch.compile`` a call is one opaque operator. Its inputs lie at fixed addresses, so fill the buffer's views outside
the compiled region or inside an operator of your own; a compiler that hands over a copy of the buffer is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from .. import ops
from ..arguments import is_int, is_number, shown
from .buffer import SymmBuffer
from .first_call import explained

_mega_moe = ops.mega_moe

_ROUTED, _DENSE, _HIDDEN_SHARDED, _TOKEN_OWNER = range(4)

WeightPair = tuple[torch.Tensor, torch.Tensor]


def fp8_fp4_mega_moe(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    sym_buffer: SymmBuffer,
    shared_l1_weights: WeightPair | None = None,
    shared_l2_weights: WeightPair | None = None,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: Sequence[int] = (1, 1, 32),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    batch_invariant: bool = False,
    validate: str = "host",
) -> None:
    """Dispatch, routed experts and combine in one launch: y = sum over top-k of weight * expert(x).

    ``y``: BF16 [T, H], written. No norm, no shared expert: ``shared_l1_weights`` and ``shared_l2_weights`` must be None
    (FP8-scaled shared experts are not served). ``activation_clamp`` bounds gate from above and up on both sides.
    """
    try:
        numbers = activation_clamp, situ_beta, situ_linear_beta
        _require_kinds(recipe, activation, validate, fast_math, batch_invariant, numbers)
        (l1, l1_sf), (l2, l2_sf) = l1_weights, l2_weights
        _mega_moe(
            y, l1, l1_sf, l2, l2_sf, sym_buffer.buffer, sym_buffer.handle, _ROUTED,
            None, _first(shared_l1_weights), _first(shared_l2_weights), None, None, None, None, None, None,
            cumulative_local_expert_recv_stats, recipe, activation, activation_clamp, fast_math, situ_beta,
            situ_linear_beta, batch_invariant, validate,
        )  # fmt: skip
    except Exception as error:
        _raise_explained(error, "fp8_fp4_mega_moe", locals())


def fp8_fp4_mega_moe_bf16_shared(
    y: torch.Tensor,
    shared_y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    shared_x: torch.Tensor,
    shared_l1_weights: torch.Tensor,
    shared_l2_weights: torch.Tensor,
    rms_weight: torch.Tensor,
    rms_epsilon: float,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: Sequence[int] = (1, 1, 32),
    activation: str = "situ",
    fast_math: bool = True,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    batch_invariant: bool = False,
    validate: str = "host",
) -> None:
    """The routed call with RMSNorm, and the BF16 shared expert with a dense output, in one launch.

    ``y``: BF16 [T, H], written: the normed routed sum, ``rms_weight`` BF16 [H]. ``shared_y``: BF16 [S, Hs], written: this
    rank's partial of the shared expert. ``shared_x``: BF16 [S, Hs]; ``shared_l1_weights``: BF16 [2 * Is, Hs], rows [gate;
    up]; ``shared_l2_weights``: BF16 [Hs, Is]. S is independent of T and of other ranks' S, up to the buffer's
    ``num_max_shared_tokens``.
    """
    try:
        numbers = rms_epsilon, situ_beta, situ_linear_beta
        _require_kinds(recipe, activation, validate, fast_math, batch_invariant, numbers)
        (l1, l1_sf), (l2, l2_sf) = l1_weights, l2_weights
        _mega_moe(
            y, l1, l1_sf, l2, l2_sf, sym_buffer.buffer, sym_buffer.handle, _DENSE,
            shared_x, shared_l1_weights, shared_l2_weights, rms_weight, rms_epsilon, shared_y, None, None, None,
            cumulative_local_expert_recv_stats, recipe, activation, None, fast_math, situ_beta, situ_linear_beta,
            batch_invariant, validate,
        )  # fmt: skip
    except Exception as error:
        _raise_explained(error, "fp8_fp4_mega_moe_bf16_shared", locals())


def fp8_fp4_mega_moe_bf16_shared_rs(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    shared_x: torch.Tensor,
    shared_l1_weights: torch.Tensor,
    shared_l2_weights: torch.Tensor,
    rms_weight: torch.Tensor,
    rms_epsilon: float,
    shared_rs_workspace: torch.Tensor,
    shared_rs_flags: torch.Tensor,
    shared_rs_peer_ptrs: torch.Tensor,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: Sequence[int] = (1, 1, 32),
    activation: str = "situ",
    fast_math: bool = True,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    batch_invariant: bool = False,
    validate: str = "host",
) -> None:
    """As ``fp8_fp4_mega_moe_bf16_shared``, but each rank's shared partial is published by columns.

    Rank d receives columns [d * Hs / ranks, (d + 1) * Hs / ranks) of every rank's partial in its ``shared_rs_workspace``:
    BF16 [generations >= 3, tokens >= S, ranks, Hs / ranks], zero or not; only the rows below S of generation
    ``shared_rs_flags[0]`` are written. ``shared_rs_flags``: int32, at least 9, on the device; [2] holds the workspace's
    bytes per generation. ``shared_rs_peer_ptrs``: int64 [ranks], every rank's workspace as this process addresses it.
    S must be equal on all ranks. Work ordered after the call on every rank sees the whole payload.
    """
    try:
        numbers = rms_epsilon, situ_beta, situ_linear_beta
        _require_kinds(recipe, activation, validate, fast_math, batch_invariant, numbers)
        (l1, l1_sf), (l2, l2_sf) = l1_weights, l2_weights
        _mega_moe(
            y, l1, l1_sf, l2, l2_sf, sym_buffer.buffer, sym_buffer.handle,
            _HIDDEN_SHARDED, shared_x, shared_l1_weights, shared_l2_weights, rms_weight, rms_epsilon, None,
            shared_rs_workspace, shared_rs_flags, shared_rs_peer_ptrs, cumulative_local_expert_recv_stats, recipe,
            activation, None, fast_math, situ_beta, situ_linear_beta, batch_invariant, validate,
        )  # fmt: skip
    except Exception as error:
        _raise_explained(error, "fp8_fp4_mega_moe_bf16_shared_rs", locals())


def fp8_fp4_mega_moe_bf16_shared_sp_rs(
    y: torch.Tensor,
    l1_weights: WeightPair,
    l2_weights: WeightPair,
    shared_x: torch.Tensor,
    shared_l1_weights: torch.Tensor,
    shared_l2_weights: torch.Tensor,
    rms_weight: torch.Tensor,
    rms_epsilon: float,
    shared_rs_workspace: torch.Tensor,
    shared_rs_flags: torch.Tensor,
    shared_rs_peer_ptrs: torch.Tensor,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: Sequence[int] = (1, 1, 32),
    activation: str = "situ",
    fast_math: bool = True,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    batch_invariant: bool = False,
    validate: str = "host",
) -> None:
    """As ``fp8_fp4_mega_moe_bf16_shared_rs``, but each token's partials go to the rank that owns it, at full width.

    ``shared_x`` holds the gathered tokens in rank order, S / ranks for each. Rank d receives its own tokens in
    ``shared_rs_workspace``: BF16 [generations >= 1, tokens >= S / ranks, ranks, Hs].
    """
    try:
        numbers = rms_epsilon, situ_beta, situ_linear_beta
        _require_kinds(recipe, activation, validate, fast_math, batch_invariant, numbers)
        (l1, l1_sf), (l2, l2_sf) = l1_weights, l2_weights
        _mega_moe(
            y, l1, l1_sf, l2, l2_sf, sym_buffer.buffer, sym_buffer.handle,
            _TOKEN_OWNER, shared_x, shared_l1_weights, shared_l2_weights, rms_weight, rms_epsilon, None,
            shared_rs_workspace, shared_rs_flags, shared_rs_peer_ptrs, cumulative_local_expert_recv_stats, recipe,
            activation, None, fast_math, situ_beta, situ_linear_beta, batch_invariant, validate,
        )  # fmt: skip
    except Exception as error:
        _raise_explained(error, "fp8_fp4_mega_moe_bf16_shared_sp_rs", locals())


# ---------------------------------------------------------------------------------------------------- when it went wrong
def _first(weights: Any) -> Any:
    """The tensor of a pair, so that the checks can name a shared expert that is given where none is served."""
    return weights[0] if isinstance(weights, tuple | list) and weights else weights


def _require_kinds(
    recipe: Any, activation: Any, validate: Any, fast_math: Any, batch_invariant: Any, numbers: tuple[Any, ...]
) -> None:
    """Raise for what torch would convert to the operator's types without a word; `_raise_explained` finds the name."""
    for number in numbers:
        if number is not None and type(number) is not float and not is_number(number):
            raise _OtherKind
    flags = isinstance(fast_math, bool) and isinstance(batch_invariant, bool)
    if not (flags and isinstance(activation, str) and isinstance(validate, str) and _is_recipe(recipe)):
        raise _OtherKind


def _is_recipe(given: Any) -> bool:
    """Whole numbers in a row; which ones they are is for the checks to say."""
    if type(given) is not tuple and not isinstance(given, tuple | list):
        return False
    for item in given:  # noqa: SIM110 (an all() over a generator takes twice the time, on every call)
        if type(item) is not int and not is_int(item):
            return False
    return True


class _OtherKind(TypeError):
    """An argument is of another kind than the documented one."""


_PAIRS = ("l1_weights", "l2_weights")
_OPTIONAL_TENSORS = {"cumulative_local_expert_recv_stats"}
_NOT_TENSORS = {"sym_buffer", "recipe", "activation", "activation_clamp", "fast_math", "situ_beta", "situ_linear_beta"}
_NOT_TENSORS |= {"rms_epsilon", "batch_invariant", "validate", "error", "numbers"}
_NUMBERS = ("rms_epsilon", "activation_clamp", "situ_beta", "situ_linear_beta")


_SCHEMA_FAULT = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(\w+)'")


def _storage_fault(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being plain memory on a CPU or CUDA device: the dispatcher refuses it without a name."""
    if tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        return f"wanted a plain strided tensor, given {kind.removeprefix('torch.')}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"wanted a tensor in CPU or CUDA memory, given one on device {tensor.device}"
    if tensor.is_neg() or tensor.is_conj():
        return "wanted a plain strided tensor, given a lazily negated or conjugated view"
    return None


def _storage_faults(arguments: dict[str, Any]) -> str | None:
    """The first tensor, by the names of the other checks, that is not plain memory."""
    named: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _PAIRS and isinstance(value, tuple | list):
            named |= {name: value[0], f"{name}_sf": value[-1]}
        else:
            named[name] = value
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and (fault := _storage_fault(value)) is not None:
            return f"{name}: {fault}"
    return None


def _schema_fault(error: Exception) -> str | None:
    """What torch's own check of the operator's arguments found, in the form of all checks."""
    found = _SCHEMA_FAULT.search(str(error))
    if found is None:
        return None
    wanted = {"Optional[float]": "a number in the range of a double", "List[int]": "(1, 1, 32)"}
    return f"{found[2]}: wanted {wanted.get(found[1], found[1])}, given {found[3]} of another kind or size"


def _type_fault(arguments: dict[str, Any]) -> str | None:
    """The first argument that is not of the documented type, in the message form of all checks."""
    routed = "shared_x" not in arguments
    for name, value in arguments.items():
        if name in _PAIRS:
            good = (
                isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(t, torch.Tensor) for t in value)
            )
            wanted = "a pair (weight, sf) of tensors"
        elif name in _NUMBERS:
            good = value is None or is_number(value)
            wanted = "a number"
        elif name in ("activation", "validate"):
            good, wanted = isinstance(value, str), "a string"
        elif name == "recipe":
            good, wanted = _is_recipe(value), "(1, 1, 32)"
        elif name in ("fast_math", "batch_invariant"):
            good, wanted = isinstance(value, bool), "True or False"
        elif name in _NOT_TENSORS:
            continue
        elif routed and name.startswith("shared_"):
            good, wanted = value is None or isinstance(_first(value), torch.Tensor), "None"
        else:
            # None stands for an absent tensor; whether one may be absent is checked with the rest.
            good = isinstance(value, torch.Tensor) or (value is None and name != "y")
            wanted = "a tensor"
        if not good:
            return f"{name}: wanted {wanted}, given {shown(value)}"
    return None


def _raise_explained(error: Exception, entry: str, arguments: dict[str, Any]) -> NoReturn:
    """Raise what a caller can act on: the exception behind a callback's text, a type fault by name, or `error` itself."""
    pending = ops.take_pending()
    buffer = arguments["sym_buffer"]
    if pending is not None:
        raise explained(buffer, pending) if isinstance(pending, Exception) else pending
    if not isinstance(buffer, SymmBuffer):
        raise TypeError(f"{entry}: sym_buffer: wanted a SymmBuffer, given {shown(buffer)}") from error
    fault = _type_fault(arguments) or _storage_faults(arguments) or _schema_fault(error)
    if fault is None:
        raise explained(buffer, error)
    message = f"{entry}: {fault} [type]"
    buffer.refuse_call(message)
    raise TypeError(message) from error
