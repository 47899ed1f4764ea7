"""Arguments of another kind than the documented one: every public entry names the argument, what it wanted and was given."""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from small_ranks import BF16, ENTRIES, SITU, Rank, alone, outcomes, small

import deep_gemm_k3 as dg
from deep_gemm_k3 import probes
from deep_gemm_k3._extension import ops
from deep_gemm_k3.arguments import shown
from deep_gemm_k3.mega.local_world import LocalRank, local_world
from deep_gemm_k3.mega.weights import restore_weights_from_mega_moe
from deep_gemm_k3.testing.data import make_world
from deep_gemm_k3.utils import per_token_cast_to_fp4, per_token_cast_to_fp8
from deep_gemm_k3.utils.dist import init_dist

# Nothing of this kind is legal anywhere, though Python or torch would take much of it for a number or a truth value.
NOTHING = [
    b"situ", {}, {"a": 1}, {1, 32}, object(), str, torch.bfloat16, 4 + 0j, decimal.Decimal(4), range(3),
    iter((1, 1, 32)), lambda: 1, "x", "1", numpy.array([1, 1, 32]), numpy.zeros((2, 2)), (), [],
]  # fmt: skip
TENSORS = [torch.tensor(True), torch.tensor(4), torch.tensor(4.0), torch.ones(3), torch.nn.Parameter(torch.ones(2))]
FRACTIONS = [0.5, float("nan"), float("inf"), numpy.float32(4)]
BOOLEANS = [True, False, numpy.bool_(True)]
NUMBER = [*NOTHING, *TENSORS, *BOOLEANS]
WHOLE = [*NUMBER, *FRACTIONS, 2**70, -(10**40)]
FLAG = [*NOTHING, *TENSORS, *FRACTIONS, None, 0, 1, 2, 2**70, numpy.bool_(True), numpy.int64(1)]
TEXT = [*NOTHING, *TENSORS, *BOOLEANS, *FRACTIONS, 0, 1, (1, 1, 32)]
NO_TEXT = [value for value in TEXT if not isinstance(value, str)]  # strings have other words of the host library
RECIPE = [
    *NOTHING[:-1],  # an empty list is shown as a tuple
    *TENSORS,
    *BOOLEANS,
    *FRACTIONS,
    None,
    0,
    32,
    (1.0, 1, 32),
    (True, True, 32),
    (1, 1, "32"),
    ((1, 1, 32),),
]
PAIR = [*NOTHING, *TENSORS, *BOOLEANS, *FRACTIONS, None, 3, (torch.ones(1),), (torch.ones(1), None), (1, 2)]
TENSOR = [*NOTHING, *BOOLEANS, *FRACTIONS, 3, (torch.ones(1),), [torch.ones(1)]]

CALL = {
    "recipe": RECIPE,
    "activation": [*TEXT, None],
    "fast_math": FLAG,
    "batch_invariant": FLAG,
    "validate": [*TEXT, None],
}
CALL |= {"situ_beta": NUMBER, "situ_linear_beta": NUMBER, "l1_weights": PAIR, "l2_weights": PAIR, "y": [*TENSOR, None]}
CALL |= {"cumulative_local_expert_recv_stats": TENSOR, "sym_buffer": [*TENSOR, *TENSORS, None]}
SHARED = {"shared_x": TENSOR, "shared_l1_weights": TENSOR, "shared_l2_weights": TENSOR, "rms_weight": TENSOR}
SHARED |= {"rms_epsilon": NUMBER}
PUBLISHED = {"shared_rs_workspace": TENSOR, "shared_rs_flags": TENSOR, "shared_rs_peer_ptrs": TENSOR}
OF_ENTRY = {
    ENTRIES[0]: CALL | {"activation_clamp": NUMBER, "shared_l1_weights": TENSOR[:-2], "shared_l2_weights": TENSOR[:-2]},
    ENTRIES[1]: CALL | SHARED | {"shared_y": TENSOR},
    ENTRIES[2]: CALL | SHARED | PUBLISHED,
    ENTRIES[3]: CALL | SHARED | PUBLISHED,
}


def refused(action: Callable[..., Any], good: dict[str, Any], kinds: dict[str, list[Any]]) -> None:
    """``action(**good)`` with each value in turn raises the message of all checks, and none is taken for another kind."""
    for name, values in kinds.items():
        for value in values:
            with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
                action(**{**good, name: value})
            words = rf"(^|\s){name}: wanted .+, given {re.escape(shown(value))}( \[\S+\])?$"
            assert re.search(words, str(caught.value)), f"{name}={shown(value)}: {caught.value!r}"


def arguments_of(entry: str, rank: Rank) -> dict[str, Any]:
    shared = rank.given.shared
    assert shared is not None
    found = {"y": rank.y, "l1_weights": rank.given.l1, "l2_weights": rank.given.l2, "sym_buffer": rank.buffer, **SITU}
    if entry == ENTRIES[0]:
        return found | {"activation": "situ"}
    found |= {"shared_x": shared.x, "shared_l1_weights": shared.l1, "shared_l2_weights": shared.l2}
    found |= {"rms_weight": shared.rms_weight, "rms_epsilon": 1e-5}
    if entry == ENTRIES[1]:
        return found | {"shared_y": rank.shared_y}
    place = dg.PublicationWorkspace(rank.buffer, "sp_rs" if entry == ENTRIES[3] else "rs", 4, 128)
    return found | dict(zip(PUBLISHED, (place.workspace, place.flags, place.peer_ptrs), strict=True))


@pytest.mark.parametrize("entry", ENTRIES)
def test_of_the_calls(entry: str) -> None:
    rank = alone()
    refused(getattr(dg, entry), arguments_of(entry, rank), OF_ENTRY[entry])
    assert rank.y.isnan().all() and rank.shared_y.isnan().all()
    ops().set_route(rank.buffer.handle, "none")
    getattr(dg, entry)(**arguments_of(entry, rank))  # the buffer is still good


def test_numbers_of_other_libraries_are_numbers() -> None:
    rank = alone()
    rank.dense(situ_beta=numpy.float32(4), situ_linear_beta=25, rms_epsilon=numpy.float64(1e-5), recipe=[1, 1, 32])
    expected = rank.y.clone()
    rank.dense()
    assert torch.equal(rank.y, expected) and not expected.isnan().any()


def test_peers_of_a_rank_with_a_wrong_kind_are_told() -> None:
    shape = small(2)
    given = make_world(shape, 6, target="sm_90a")

    def body(group: LocalRank) -> None:
        rank = Rank(group, given[group.rank], shape, timeout_s=30.0)
        rank.routed()
        if group.rank == 1:
            rank.routed(batch_invariant=None)
        rank.routed()

    told, own = outcomes(body)
    assert isinstance(own, TypeError) and "batch_invariant: wanted True or False, given None" in str(own)
    assert "rank 1" in str(told) and "batch_invariant: wanted True or False, given None" in str(told)


def test_of_buffers_and_workspaces() -> None:
    whole = ("num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden", "num_shared_experts",
             "bf16_shared_intermediate_hidden")  # fmt: skip
    kinds: dict[str, list[Any]] = {name: [*WHOLE, None] for name in whole}
    kinds |= {"num_max_shared_tokens": WHOLE, "num_sms": WHOLE, "timeout_s": [*NUMBER, 0, -1.0, float("nan")]}
    kinds |= {
        "mma_type": [*TEXT, None],
        "activation": [*TEXT, None],
        "target": TEXT,
        "device": [*TENSORS, *FRACTIONS, {}, 2**70],
    }
    kinds |= {"use_fp8_dispatch": [value for value in FLAG if value is not None] + [False]}
    good = {"group": None, "num_experts": 4, "num_max_tokens_per_rank": 8, "num_topk": 2, "hidden": 256}
    refused(dg.get_symm_buffer_for_mega_moe, good | {"intermediate_hidden": 128, "device": "cpu"}, kinds)
    refused(dg.get_symm_buffer_for_mega_moe, good | {"intermediate_hidden": 128}, {"device": ["x", "meta"]})
    with pytest.raises(TypeError, match=r"group: wanted a torch.distributed process group .*, given int"):
        dg.get_symm_buffer_for_mega_moe(3, 4, 8, 2, 256, 128)

    place = {"group": None, "mode": "rs", "num_max_tokens": 4, "hidden": 256, "num_generations": 3, "device": "cpu"}
    counts = {name: [*WHOLE, None] for name in ("num_max_tokens", "hidden", "num_generations")}
    refused(dg.PublicationWorkspace, place, counts | {"mode": [*TEXT, None]})
    workspace = dg.PublicationWorkspace(**place)
    refused(workspace.rotate, {}, {"num_tokens": WHOLE})
    refused(workspace.view, {}, {"generation": WHOLE})
    assert workspace.generation == 0


def test_of_weights_and_scales() -> None:
    pair = torch.ones(1, 256, 64, dtype=torch.uint8), torch.full((1, 256, 4), 127, dtype=torch.uint8)
    l2 = torch.ones(1, 128, 64, dtype=torch.uint8), torch.full((1, 128, 4), 127, dtype=torch.uint8)
    good = {"l1": pair, "l2": l2}
    pairs = [value for value in PAIR if not isinstance(value, torch.Tensor)]
    refused(
        dg.transform_weights_for_mega_moe, good, {"l1": pairs, "l2": pairs, "activation": [*TEXT, None], "target": TEXT}
    )
    refused(restore_weights_from_mega_moe, good, {"l1": pairs, "l2": pairs})
    for one in ({"l1": torch.ones(2)}, {"l2": torch.ones(2)}):
        for function in (dg.transform_weights_for_mega_moe, restore_weights_from_mega_moe):
            with pytest.raises(TypeError, match=r"l1, l2: wanted two .* or two BF16 matrices, given one of each"):
                function(**{**good, **one})

    scales = {"sf": pair[1], "mn": 256, "k": 128, "recipe": (1, 32), "num_groups": 1}
    kinds = {"sf": [*TENSOR, None], "mn": [*WHOLE, None], "k": [*WHOLE, None], "recipe": RECIPE, "num_groups": WHOLE}
    refused(dg.transform_sf_into_required_layout, scales, kinds)
    for cast in (per_token_cast_to_fp8, per_token_cast_to_fp4):
        options = {"x": torch.ones(2, 128, dtype=BF16), "use_ue8m0": True, "gran_k": 32}
        kinds = {"x": [*TENSOR, None], "use_ue8m0": FLAG, "use_packed_ue8m0": FLAG, "gran_k": [*WHOLE, None, 0, -32]}
        refused(cast, options, kinds)


def test_of_plans_and_warm_ups() -> None:
    flags = ("has_clamp", "fast_math", "has_statistics", "batch_invariant")
    kinds: dict[str, list[Any]] = dict.fromkeys(flags, FLAG)
    buffer = alone().buffer
    refused(
        dg.warmup, {"sym_buffer": buffer}, kinds | {"shared_output": [*TEXT, None], "shared_hidden": [*WHOLE, None, -1]}
    )
    refused(dg.warmup, {"sym_buffer": buffer}, {"activation": TEXT})
    refused(dg.warmup, {}, {"sym_buffer": [*TENSOR, *TENSORS, None]})
    good = {"num_ranks": 1, "num_experts": 4, "num_topk": 2, "num_max_tokens_per_rank": 384, "hidden": 256}
    good |= {
        "intermediate_hidden": 128,
        "shared_output": "dense",
        "shared_hidden": 128,
        "shared_intermediate_hidden": 128,
    }
    counts = ("num_tokens", "num_shared_tokens", "num_max_shared_tokens", "num_sms")
    kinds |= {name: [*WHOLE, None] for name in (*good, *counts) if name != "shared_output"}
    kinds |= {name: [*NO_TEXT, None] for name in ("shared_output", "activation", "target")}
    kinds["device"] = [*TEXT, None]
    kinds |= {"whole_device": FLAG, "overrides": [*TENSOR[:1], *TENSORS, None, 3, "x"]}
    refused(dg.Plan.make, good, kinds)
    refused(dg.Plan.of, {"num_tokens": 3}, {"sym_buffer": [*TENSOR, None]})
    refused(dg.Plan.of, {"sym_buffer": buffer}, {"num_tokens": [*WHOLE, None]})
    with pytest.raises(ValueError, match=r"overrides.splits.routed_l1: wanted an integer in 0\.\.\d+, given '2'"):
        dg.Plan.make(**good, overrides={"splits": {"routed_l1": "2"}})


def test_of_worlds_and_set_up() -> None:
    refused(local_world, {}, {"size": [*WHOLE, None, 0, -1]})
    with local_world(1) as world:
        refused(world.run, {"fn": len}, {"fn": [None, 3, "x"], "timeout_s": [*NUMBER, None, 0]})
    refused(init_dist, {"local_rank": 0, "num_local_ranks": 1}, {"local_rank": [*WHOLE, None, 1, -1]})
    refused(init_dist, {"local_rank": 0, "num_local_ranks": 1}, {"num_local_ranks": [*WHOLE, None, 0]})


@pytest.mark.parametrize("value", [*NOTHING, *TENSORS, *FRACTIONS, None, -1, numpy.bool_(True)], ids=lambda v: shown(v))
def test_probes_give_a_reason_for_any_argument(value: Any) -> None:
    answers = {
        "device": probes.mega_moe(value),
        "num_ranks": probes.publication(value, 256),
        "shared_hidden": probes.publication(2, value),
        "mode": probes.publication(2, 256, value),
    }
    for name, answer in answers.items():
        assert not answer and f"{name}: wanted" in answer.reason and answer.reason.endswith(f"given {shown(value)}")
    assert "index: wanted" in probes.mega_moe("cuda", value).reason


def test_of_buffers() -> None:
    buffer = alone().buffer
    refused(buffer.abort_peers, {}, {"message": [*NO_TEXT, None]})
    refused(buffer.component, {}, {"name": [*NO_TEXT, None, "nope", ""]})
    with pytest.raises(ValueError, match=r"name: wanted 'control', .* or '\w+', given 'nope'"):
        buffer.component("nope")
    buffer.check()


def test_of_devices_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device: wanted cuda or cuda:0\.\.1, given 'cuda:2'"):
        dg.get_symm_buffer_for_mega_moe(None, 4, 64, 2, 256, 128, device="cuda:2")
