"""Every check of a call: one way to break it, the message it gives, and outputs that stay as they were."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import calls
import pytest
import torch
from calls import DENSE, HIDDEN_SHARDED, ROUTED, TOKEN_OWNER, Call

from deep_gemm_k3._extension import ops

TABLE: dict[str, dict[str, Any]] = {check["id"]: check for check in json.loads(ops().list_checks())}
MESSAGE = re.compile(
    r"^(?P<entry>\w+): (?P<name>\S+): wanted (?P<wanted>.+), given (?P<given>.+) \[(?P<id>\S+)\]$", re.S
)
TENSORS = {name for name, suffix in (check.rsplit(".", 1) for check in TABLE if "." in check) if suffix == "dtype"}
SUFFIXES = ("presence", "target", "dtype", "rank", "shape", "contiguous", "device", "aligned")
OPERATOR_NAMES = {"sym_buffer.buffer": "buffer"}
_BIG = 1 << 40


# ------------------------------------------------------------------------------------------------- checks of tensor form
def entry_for(check: dict[str, Any]) -> int:
    """The entry with the most tensors among those the check is about."""
    found = [entry for entry, name in calls.ENTRIES.items() if name in check["entries"]]
    return max(found)


def target_for(name: str, suffix: str) -> str:
    """Scales are empty for sm_90a: nothing about an empty tensor's memory can be wrong."""
    return "sm_100a" if name.endswith("_sf") and suffix in ("contiguous", "aligned") else "sm_90a"


def spoil_tensor(name: str, suffix: str) -> Callable[[Call], None]:
    argument = OPERATOR_NAMES.get(name, name)

    def apply(call: Call) -> None:
        tensor = call[argument]
        if suffix == "presence":
            call[argument] = None
        elif suffix == "target":
            call[argument] = calls.weights("sm_100a" if call.target == "sm_90a" else "sm_90a")[argument]
        elif suffix == "dtype":
            call[argument] = calls.other_dtype(tensor)
        elif suffix == "rank":
            call[argument] = calls.other_rank(tensor)
        elif suffix == "shape":
            call[argument] = calls.resized(tensor.dim() - 1, -1 if name == "shared_rs_flags" else 1)(tensor)
        elif suffix == "contiguous":
            call[argument] = calls.with_gaps(tensor)
        else:
            assert suffix == "aligned"
            call[argument] = calls.off_by_one_element(tensor)

    return apply


def tensor_cases() -> Iterator[tuple[str, Call | None, Any]]:
    for check_id, check in TABLE.items():
        name, _, suffix = check_id.rpartition(".")
        if name in TENSORS and suffix in SUFFIXES and suffix != "device" and not unreachable(check_id):
            yield check_id, check, spoil_tensor(name, suffix)


def unreachable(check_id: str) -> bool:
    """No tensor of these kinds can be off its own element size, nor an empty scale tensor be anything."""
    natural = ("cumulative_local_expert_recv_stats", "shared_rs_flags", "shared_rs_peer_ptrs")
    return check_id in {f"{name}.aligned" for name in natural}


def expect(call: Call, check_id: str) -> re.Match[str]:
    """The call raises this check's message and leaves everything as it was."""
    before = call.outputs()
    with pytest.raises(RuntimeError) as caught:
        call.run()
    found = MESSAGE.match(str(caught.value))
    assert found is not None, str(caught.value)
    assert found["id"] == check_id, str(caught.value)
    assert found["entry"] == calls.ENTRIES[call.entry]
    assert found["name"] == TABLE[check_id]["name"]
    assert call.outputs() == before
    with pytest.raises(RuntimeError, match="without an abort"):  # its peers were told, so this buffer is spent
        call.run()
    call.close()
    return found


@pytest.mark.parametrize(
    ("check_id", "check", "spoil"), list(tensor_cases()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_tensor(check_id: str, check: dict[str, Any], spoil: Callable[[Call], None]) -> None:
    name, _, suffix = check_id.rpartition(".")
    argument = OPERATOR_NAMES.get(name, name)
    for entry in calls.ENTRIES:
        call = Call(entry, target_for(name, suffix))
        if call[argument] is not None:
            spoil(call)
            expect(call, check_id)
        else:
            call.close()


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_every_size(name: str) -> None:
    """Each dimension by itself, on every entry that takes the tensor and for both targets."""
    argument = OPERATOR_NAMES.get(name, name)
    for entry in calls.ENTRIES:
        for target in ("sm_90a", "sm_100a"):
            shape = Call(entry, target)[argument]
            for dim in range(0 if shape is None else shape.dim()):
                for change in (-1, 1):
                    call = Call(entry, target)
                    call[argument] = (
                        calls.resized(dim, change)(call[argument]) if call[argument].shape[dim] + change >= 0 else None
                    )
                    if call[argument] is None:
                        continue
                    check_id = expected_size_fault(name, entry, dim, change)
                    if check_id is not None:
                        expect(call, check_id)


def expected_size_fault(name: str, entry: int, dim: int, change: int) -> str | None:
    """Which check a size that is off by one meets; None where it is legal."""
    if name == "y" and dim == 0:
        return None
    if name == "shared_x" and dim == 1:
        return "shared_hidden"
    if name == "shared_x":
        if entry == TOKEN_OWNER:
            return "owned_tokens"
        return {DENSE: "shared_y.shape", HIDDEN_SHARDED: None if change < 0 else "shared_rs_workspace.shape"}[entry]
    if name == "shared_rs_workspace" and dim == 1 and change > 0:
        return "shared_rs_flags.stride"  # a larger workspace is legal, but its generations lie further apart
    if name == "shared_rs_workspace" and dim == 0 and (change > 0 or entry == TOKEN_OWNER):
        return "shared_rs_peer_ptrs.values"  # legal too, but this copy is another workspace than the peers know
    if name == "shared_rs_flags" and change > 0:
        return "shared_rs_flags.stride"
    if name == "shared_rs_flags":
        return "shared_rs_flags.shape"
    return f"{name}.shape"


# ----------------------------------------------------------------------------------------------------------- other rules
def set_argument(name: str, *values: Any) -> list[Callable[[Call], None]]:
    return [lambda call, value=value: call.__setitem__(name, value) for value in values]  # type: ignore[misc]


def swiglu_with(name: str, value: Any) -> Callable[[Call], None]:
    def apply(call: Call) -> None:
        call.swiglu()[name] = value

    return apply


def set_shared_width(width: int) -> Callable[[Call], None]:
    return lambda call: call.__setitem__("shared_x", torch.empty(calls.SHARED_TOKENS, width, dtype=calls.BF16))


def set_shared_rows(rows: int) -> Callable[[Call], None]:
    return lambda call: call.__setitem__("shared_x", torch.empty(rows, calls.SHARED_HIDDEN, dtype=calls.BF16))


def share_memory(first: str, second: str) -> Callable[[Call], None]:
    def apply(call: Call) -> None:
        call[first] = (
            call[second].view(torch.uint8).flatten()[: call[first].numel() * 2].view(calls.BF16).view_as(call[first])
        )

    return apply


def set_expert(value: int) -> Callable[[Call], None]:
    def apply(call: Call) -> None:
        call.component("topk_idx", torch.int64, -1, calls.TOPK)[calls.TOKENS - 1, 1] = value

    return apply


def set_flag(index: int, value: int) -> Callable[[Call], None]:
    return lambda call: call["shared_rs_flags"].__setitem__(index, value)


def set_pointer(index: int, value: int | None) -> Callable[[Call], None]:
    def apply(call: Call) -> None:
        pointers = call["shared_rs_peer_ptrs"]
        pointers[index] = pointers[calls.RANK] if value is None else value

    return apply


POSITIVE = (0.0, -1.0, float("nan"), float("inf"), 1e-60, None)
EVERY = (ROUTED, DENSE, HIDDEN_SHARDED, TOKEN_OWNER)
SHARED = (DENSE, HIDDEN_SHARDED, TOKEN_OWNER)
PUBLISHED = (HIDDEN_SHARDED, TOKEN_OWNER)

# check -> entries it is tried on, ways to break it, changes of the buffer
RULES: dict[str, tuple[tuple[int, ...], list[Callable[[Call], None]], dict[str, Any]]] = {
    "recipe": (EVERY, set_argument("recipe", (1, 1, 128), (1, 1), (), (1, 128, 32)), {}),
    "activation": ((ROUTED,), set_argument("activation", "gelu", "", "SITU"), {}),
    "activation.shared": (SHARED, set_argument("activation", "swiglu", "gelu"), {}),
    "activation_clamp.situ": ((ROUTED,), set_argument("activation_clamp", 1.0, 0.03125), {}),
    "activation_clamp": ((ROUTED,), [swiglu_with("activation_clamp", -1.0), swiglu_with("activation_clamp", float("nan"))], {}),
    "situ_beta": (EVERY, set_argument("situ_beta", *POSITIVE), {}),
    "situ_linear_beta": (EVERY, set_argument("situ_linear_beta", *POSITIVE), {}),
    "situ_beta.swiglu": ((ROUTED,), [swiglu_with("situ_beta", 4.0)], {}),
    "situ_linear_beta.swiglu": ((ROUTED,), [swiglu_with("situ_linear_beta", 4.0)], {}),
    "rms_epsilon": (SHARED, set_argument("rms_epsilon", *POSITIVE), {}),
    "rms_epsilon.routed": ((ROUTED,), set_argument("rms_epsilon", 1e-5), {}),
    "validate": (EVERY, set_argument("validate", "kernel", ""), {}),
    "sym_buffer.shared": (SHARED, [lambda call: None], {"shared_intermediate_hidden": 0}),
    "sym_buffer.memory": (EVERY, [lambda call: call.__setitem__("buffer", call.memory[0])], {}),
    "num_tokens": (EVERY, [lambda call: call.__setitem__("y", torch.empty(calls.MAX_TOKENS + 1, calls.HIDDEN, dtype=calls.BF16))], {}),
    "num_shared_tokens": (SHARED, [set_shared_rows(2 * calls.MAX_TOKENS + 2)], {}),
    "shared_hidden": (SHARED, [set_shared_width(width) for width in (0, 64, 200, 255)], {}),
    "shard.divides": ((HIDDEN_SHARDED,), [lambda call: None], {"num_ranks": 3, "num_experts": 6}),
    "shard.vectors": ((HIDDEN_SHARDED,), [lambda call: None], {"num_ranks": 64, "num_experts": 128}),
    "owned_tokens": ((TOKEN_OWNER,), [set_shared_rows(3)], {}),
    "overlap": (SHARED, [share_memory("y", "shared_x"), share_memory("y", "shared_l1_weights"), share_memory("rms_weight", "buffer")], {}),
    "topk_idx.values": (EVERY, [set_expert(value) for value in (calls.EXPERTS, -2, _BIG, -_BIG)], {}),
    "shared_rs_flags.generation": (PUBLISHED, [set_flag(0, value) for value in (-1, calls.GENERATIONS)], {}),
    "shared_rs_flags.stride": (PUBLISHED, [set_flag(2, value) for value in (0, 1, -16, 2**31 - 1)], {}),
    "shared_rs_peer_ptrs.values": (PUBLISHED, [set_pointer(0, 0), set_pointer(0, None), set_pointer(1, 1 << 20), set_pointer(0, 4097)], {}),
}  # fmt: skip


@pytest.mark.parametrize("check_id", RULES)
def test_rule(check_id: str) -> None:
    entries, ways, spec = RULES[check_id]
    for entry in entries:
        for spoil in ways:
            call = Call(entry, spec=spec)
            spoil(call)
            expect(call, check_id)


@pytest.mark.parametrize(
    "name", ["shared_x", "rms_weight", "shared_y", "shared_rs_workspace", "shared_rs_flags", "shared_l1_weights"]
)
def test_tensors_without_a_use_are_refused(name: str) -> None:
    for entry in calls.ENTRIES:
        call = Call(entry)
        if call[name] is None:
            call[name] = torch.empty(4, 256, dtype=calls.BF16)
            found = expect(call, f"{name}.presence")
            assert found["wanted"].startswith("None")


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.float64, torch.complex64,
     torch.complex128, torch.float8_e5m2],
    ids=str,
)  # fmt: skip
def test_the_dtype_that_was_given_is_named(dtype: torch.dtype) -> None:
    call = Call(EVERY[0])
    call["y"] = torch.zeros(call["y"].shape, dtype=dtype)
    found = expect(call, "y.dtype")
    assert str(dtype).removeprefix("torch.") in found["given"]


# ------------------------------------------------------------------------------- what can only be described, not allocated
def described(call: Call) -> dict[str, Any]:
    """The call in the form that the operator ``check_call`` takes."""
    tensors = {}
    for name in TENSORS:
        tensor = call[OPERATOR_NAMES.get(name, name)]
        if tensor is not None:
            kind = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": kind, "shape": list(tensor.shape), "address": tensor.data_ptr()}
    names = ("entry", "recipe", "activation", "situ_beta", "situ_linear_beta", "rms_epsilon", "validate")
    return {"tensors": tensors, **{name: call[name] for name in names}}


def verdict(call: Call, description: dict[str, Any]) -> str:
    text: str = ops().check_call(call.handle, json.dumps(description))
    return text


@pytest.mark.parametrize("entry", EVERY)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_good_calls_pass(entry: int, target: str) -> None:
    call = Call(entry, target)
    assert verdict(call, described(call)) == ""
    if entry == ROUTED:
        call.swiglu()["activation_clamp"] = 7.0
        assert verdict(call, described(call)) == ""


@pytest.mark.parametrize("name", sorted(TENSORS))
@pytest.mark.parametrize("device", ["cuda:0", "cuda:3"])
def test_device(name: str, device: str) -> None:
    call = Call(entry_for(TABLE[f"{name}.device"]))
    description = described(call)
    description["tensors"][name]["device"] = device
    found = MESSAGE.match(verdict(call, description))
    assert found is not None and found["id"] == f"{name}.device"
    assert found["given"] == device and found["wanted"] == "device cpu as the buffer"


@pytest.mark.parametrize(
    ("name", "target", "by"),
    [(name, "sm_90a", 2) for name in ("cumulative_local_expert_recv_stats", "shared_rs_flags", "shared_rs_peer_ptrs")]
    + [(name, "sm_100a", 16) for name in ("l1_weights", "l2_weights")],  # tensor maps of packed codes
)
def test_alignment_of_its_kind(name: str, target: str, by: int) -> None:
    call = Call(HIDDEN_SHARDED, target)
    description = described(call)
    description["tensors"][name]["address"] |= by  # of allocations that lie at multiples of 64
    found = MESSAGE.match(verdict(call, description))
    assert found is not None and found["id"] == f"{name}.aligned"


def test_generations_must_stay_below_two_gigabytes() -> None:
    call = Call(HIDDEN_SHARDED)
    description = described(call)
    workspace = description["tensors"]["shared_rs_workspace"]
    workspace["address"] = 1 << 45
    row = workspace["shape"][2] * workspace["shape"][3] * 2
    for rows, fine in ((2**31 // row - 1, True), (2**31 // row, False), (2**40 // row, False)):
        workspace["shape"][1] = rows
        text = verdict(call, description)
        found = MESSAGE.match(text)
        assert (text == "") == fine
        assert fine or (found is not None and found["id"] == "generation_stride")


# --------------------------------------------------------------------------------------------------- table against tests
ELSEWHERE = {
    "type": "test_ops.test_wrong_types_are_named",
    "signature": "test_ops.test_different_signatures_are_named",
    "shared_x.equal": "test_ops.test_unequal_shared_tokens_are_named",
    "sym_buffer.alive": "test_buffer.py",
    "sym_buffer.aborted": "expect",
    "sym_buffer.busy": "test_one_call.py",
    "sym_buffer.thread": "test_ops.test_a_foreign_thread_is_refused",
    "generation_stride": "test_generations_must_stay_below_two_gigabytes",
}


def test_table_and_tests_list_the_same_checks() -> None:
    tried = {check_id for check_id, _, _ in tensor_cases()}
    tried |= {f"{name}.device" for name in TENSORS}
    tried |= {check_id for check_id in TABLE if unreachable(check_id)}  # described, not allocated
    tried |= set(RULES) | set(ELSEWHERE) | {check_id for check_id in TABLE if check_id.startswith("buffer.")}
    assert tried == set(TABLE)
    assert len(TABLE) == len(json.loads(ops().list_checks())), "an id is used twice"


def test_table_is_complete_in_words() -> None:
    for check in TABLE.values():
        assert check["wanted"] and check["name"] and check["entries"]
        assert check["where"] in (
            "host",
            "values",
            "values, kernel",
            "kernel",
            "registry",
            "creation",
            "first call",
            "python",
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_ranks", 65),
        ("num_ranks", 0),
        ("num_experts", 5),
        ("num_experts", 0),
        ("num_experts", 65536),
        ("num_topk", 0),
        ("num_topk", 33),
        ("num_max_tokens_per_rank", 0),
        ("num_max_tokens_per_rank", 384 * 5462),
        ("num_max_tokens_per_rank", 2**31 - 1),
        ("hidden", 0),
        ("hidden", 200),
        ("intermediate_hidden", 64),
        ("shared_intermediate_hidden", 100),
        ("shared_intermediate_hidden", -128),
        ("num_max_shared_tokens", -1),
    ],
)
def test_shapes_are_refused_before_anything_is_sized(name: str, value: int) -> None:
    good = {"num_ranks": 2, "num_experts": 896, "num_topk": 16, "num_max_tokens_per_rank": 64, "hidden": 3584}
    good |= {"intermediate_hidden": 3072, "shared_intermediate_hidden": 768}
    assert json.loads(ops().workspace_bytes(json.dumps(good)))["total_bytes"] > 0
    shown = {"shared_intermediate_hidden": "bf16_shared_intermediate_hidden"}.get(name, name)
    with pytest.raises(RuntimeError, match=f"^{shown}: wanted .*, given {value}$"):
        ops().workspace_bytes(json.dumps({**good, name: value}))
