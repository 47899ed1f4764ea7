"""The public calls and the operator under them: refusals, first calls, tracing, threads, cost."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_ranks import BF16, ENTRIES, SITU, Rank, alone, outcomes, small

import deep_gemm_k3 as dg
from deep_gemm_k3 import ops
from deep_gemm_k3.mega.group import GroupMismatch
from deep_gemm_k3.mega.local_world import LocalRank, local_world
from deep_gemm_k3.testing.data import make_world

# -------------------------------------------------------------------------------------------------------------- the surface
TAIL = ["cumulative_local_expert_recv_stats", "recipe", "activation"]
BETAS = ["fast_math", "situ_beta", "situ_linear_beta"]
SHARED_INPUTS = ["shared_x", "shared_l1_weights", "shared_l2_weights", "rms_weight", "rms_epsilon"]
PUBLICATION = ["shared_rs_workspace", "shared_rs_flags", "shared_rs_peer_ptrs"]
POSITIONAL = {
    "fp8_fp4_mega_moe": ["y", "l1_weights", "l2_weights", "sym_buffer", "shared_l1_weights", "shared_l2_weights", *TAIL,
                         "activation_clamp", *BETAS],
    "fp8_fp4_mega_moe_bf16_shared": ["y", "shared_y", "l1_weights", "l2_weights", *SHARED_INPUTS, "sym_buffer", *TAIL, *BETAS],
    "fp8_fp4_mega_moe_bf16_shared_rs": ["y", "l1_weights", "l2_weights", *SHARED_INPUTS, *PUBLICATION, "sym_buffer", *TAIL, *BETAS],
    "fp8_fp4_mega_moe_bf16_shared_sp_rs": ["y", "l1_weights", "l2_weights", *SHARED_INPUTS, *PUBLICATION, "sym_buffer", *TAIL, *BETAS],
    "get_symm_buffer_for_mega_moe": ["group", "num_experts", "num_max_tokens_per_rank", "num_topk", "hidden",
                                     "intermediate_hidden", "num_shared_experts", "use_fp8_dispatch", "mma_type", "activation",
                                     "bf16_shared_intermediate_hidden"],
    "transform_weights_for_mega_moe": ["l1", "l2", "activation"],
    "supports_bf16_shared_independent_tokens": [],
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONAL)
def test_names_and_order_are_the_documented_ones(name: str) -> None:
    parameters = inspect.signature(getattr(dg, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[name]
    own = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert name not in ENTRIES or own == {"batch_invariant", "validate"}
    assert inspect.getdoc(getattr(dg, name))


def test_capability_probes_have_reasons_and_touch_nothing() -> None:
    """In a process of its own: no collective is possible there, and CUDA stays as it was."""
    program = """
import deep_gemm_k3 as dg, torch
from deep_gemm_k3 import probes
assert dg.supports_bf16_shared_independent_tokens() is True
for probe in (probes.extension(), probes.cuda_driver(), probes.device_target(), probes.mega_moe(), probes.mega_moe("cpu"),
              probes.mega_moe("xpu"), probes.publication(16, 7168), probes.publication(3, 7168), probes.publication(8, 100),
              probes.publication(8, 7168, "sp_rs"), probes.publication(8, 7168, "ag")):
    assert isinstance(bool(probe), bool) and probe.reason and str(probe)
assert probes.mega_moe("cpu") and not probes.mega_moe("xpu")
assert probes.publication(16, 7168) and not probes.publication(3, 7168)
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("y", None, "a tensor, given None"),
        ("y", 3, "a tensor, given 3"),
        (
            "l1_weights",
            torch.zeros(2, 2, dtype=torch.uint8),
            "a pair (weight, sf) of tensors, given Tensor uint8 [2, 2]",
        ),
        ("l2_weights", (torch.zeros(1), None), "a pair (weight, sf) of tensors, given tuple of Tensor, NoneType"),
        ("l1_weights", (torch.zeros(1),) * 3, "a pair (weight, sf) of tensors, given tuple of Tensor, Tensor, Tensor"),
        ("rms_epsilon", "small", "a number, given 'small'"),
        ("situ_beta", torch.ones(2), "a number, given Tensor float32 [2]"),
        ("activation", 5, "a string, given 5"),
        ("recipe", "1132", "(1, 1, 32), given '1132'"),
        ("fast_math", "yes", "True or False, given 'yes'"),
        ("validate", 1, "a string, given 1"),
        ("shared_x", "x", "a tensor, given 'x'"),
    ],
)
def test_wrong_types_are_named(name: str, value: Any, wanted: str) -> None:
    rank = alone()
    with pytest.raises(TypeError) as caught:
        rank.dense(**{name: value})
    assert str(caught.value) == f"fp8_fp4_mega_moe_bf16_shared: {name}: wanted {wanted} [type]"
    assert rank.y.isnan().all()
    rank.dense()  # a group of one has no peers to stop: the buffer stays usable
    assert not rank.y.isnan().any()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("meta", "one on device meta"),
        ("sparse", "sparse_coo"),
        ("csr", "sparse_csr"),
        ("nested", "nested"),
        ("negated", "a lazily negated or conjugated view"),
    ],
)
@pytest.mark.parametrize("name", ["y", "shared_x", "l2_weights"])
def test_tensors_that_are_not_plain_memory_are_named(name: str, kind: str, given: str) -> None:
    """torch's dispatcher would run nothing for a meta tensor, and refuses the others without a name."""
    convert: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "meta": lambda tensor: tensor.to("meta"),
        "sparse": torch.Tensor.to_sparse,
        "csr": torch.Tensor.to_sparse_csr,
        "nested": lambda tensor: torch.nested.nested_tensor([tensor]),
        "negated": torch._neg_view,
    }
    rank = alone()
    plain = torch.ones(3, 128, dtype=BF16)
    value = convert[kind](plain)
    with pytest.raises(TypeError, match=rf"bf16_shared: {name}: wanted .* given {given} \[type\]"):
        rank.dense(**{name: (value, plain) if name == "l2_weights" else value})
    assert rank.y.isnan().all()


@pytest.mark.parametrize(
    ("name", "value"), [("situ_beta", 10**400), ("rms_epsilon", 10**400), ("recipe", (1, 1, 2**70))]
)
def test_numbers_beyond_the_operators_types_are_named(name: str, value: Any) -> None:
    rank = alone()
    with pytest.raises(TypeError, match=rf"fp8_fp4_mega_moe_bf16_shared: {name}: wanted .*, given .* \[type\]"):
        rank.dense(**{name: value})
    assert rank.y.isnan().all()


@pytest.mark.parametrize("entry", [-1, 4, 2**40])
def test_the_operator_has_four_entries(entry: int) -> None:
    rank = alone()
    with pytest.raises(RuntimeError, match=rf"entry: wanted 0..3, given {entry}"):
        ops.mega_moe(
            rank.y, *rank.given.l1, *rank.given.l2, rank.buffer.buffer, rank.buffer.handle, entry, *([None] * 10),
            (1, 1, 32), "swiglu", None, True, None, None, False, "host",
        )  # fmt: skip
    assert rank.y.isnan().all()


def test_a_buffer_of_another_kind_is_named() -> None:
    rank = alone()
    with pytest.raises(TypeError, match="sym_buffer: wanted a SymmBuffer, given dict"):
        rank.routed(sym_buffer={})


def test_fp8_scaled_shared_weights_are_refused_with_a_way_out() -> None:
    rank = alone()
    pair = (torch.zeros(128, 128, dtype=torch.float8_e4m3fn), torch.zeros(128, 1, dtype=torch.int32))
    with pytest.raises(
        RuntimeError, match=r"shared_l1_weights: wanted None \(FP8-scaled .*fp8_fp4_mega_moe_bf16_shared\)"
    ):
        rank.routed(shared_l1_weights=pair, shared_l2_weights=pair)


def test_destroyed_buffers_are_refused() -> None:
    rank = alone()
    rank.buffer.destroy()
    with pytest.raises(RuntimeError, match="sym_buffer: wanted a live buffer, given one that was destroyed"):
        rank.routed()


@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize("bad", ["value", "type"])
def test_one_ranks_refusal_stops_the_others_and_names_it(first: bool, bad: str) -> None:
    shape = small(2)
    given = make_world(shape, 2, target="sm_90a")

    def body(group: LocalRank) -> Any:
        rank = Rank(group, given[group.rank], shape)
        if not first:
            rank.dense()
            rank.y.fill_(float("nan"))
        spoilt = {} if group.rank == 0 else {"rms_epsilon": -1.0 if bad == "value" else "none"}
        with pytest.raises((RuntimeError, TypeError)) as caught:
            rank.dense(**spoilt)
        assert rank.y.isnan().all()
        with pytest.raises(RuntimeError, match="without an abort"):
            rank.dense()
        again = Rank(group, given[group.rank], shape)
        again.dense()
        assert not again.y.isnan().any()
        return str(caught.value)

    told, refused = outcomes(body)
    assert "rms_epsilon: wanted" in refused and "rank 1" in told and "rms_epsilon: wanted" in told


def test_different_signatures_are_named() -> None:
    shape = small(2)
    given = make_world(shape, 3, target="sm_90a")

    def body(group: LocalRank) -> Any:
        rank = Rank(group, given[group.rank], shape)
        rank.dense(fast_math=group.rank == 0)

    for error in outcomes(body):
        assert isinstance(error, GroupMismatch)
        assert "fast_math" in str(error) and "True" in str(error) and "False" in str(error)


def test_a_new_signature_on_one_rank_alone_is_named() -> None:
    """Its peers call what is ready and do not come to the exchange: both time out, and both say what differs."""
    shape = small(2)
    given = make_world(shape, 3, target="sm_90a")

    def body(group: LocalRank) -> Any:
        rank = Rank(group, given[group.rank], shape, timeout_s=1.0)
        rank.dense()
        rank.routed()
        rank.dense(fast_math=group.rank == 0)

    difference = f"first call of {ENTRIES[1]}, .* nearest ready one in: fast_math is False, not True$"
    for error, who in zip(outcomes(body), ("rank 1 is in", "this rank was in"), strict=True):
        assert isinstance(error, RuntimeError)
        assert re.search(f"waiting for rank 1 .*; {who} the {difference}", str(error)), error


def test_unequal_shared_tokens_are_named() -> None:
    shape = small(2)
    given = make_world(shape, 4, target="sm_90a")

    def body(group: LocalRank) -> Any:
        rank = Rank(group, given[group.rank], shape)
        space = dg.PublicationWorkspace(rank.buffer, "rs", 8, shape.shared_hidden)
        shared = rank.given.shared
        assert shared is not None
        rows = shared.x[: 4 - group.rank].contiguous()
        dg.fp8_fp4_mega_moe_bf16_shared_rs(
            rank.y, rank.given.l1, rank.given.l2, rows, shared.l1, shared.l2, shared.rms_weight, 1e-5,
            space.workspace, space.flags, space.peer_ptrs, rank.buffer, **SITU,
        )  # fmt: skip

    for error in outcomes(body):
        assert isinstance(error, RuntimeError) and "num_shared_tokens" in str(error)


def test_a_foreign_thread_is_refused() -> None:
    shape = small(2)
    given = make_world(shape, 5, target="sm_90a")
    with local_world(2) as world:
        ranks = world.run(lambda group: Rank(group, given[group.rank], shape))
        with pytest.raises(RuntimeError, match=r"thread: wanted the one that owns rank 0 .*, given another"):
            ranks[0].routed(**SITU, activation="situ")
        # Nobody was aborted: the owners go on.
        world.run(lambda group: ranks[group.rank].routed())
        assert not any(rank.y.isnan().any() for rank in ranks)


def test_the_exception_behind_a_callback_arrives_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_gemm_k3.testing import executor

    def broken(record: str) -> None:
        raise KeyError(f"no oracle for {len(record)} characters")

    monkeypatch.setattr(executor, "run", broken)
    rank = alone()
    with pytest.raises(KeyError, match="no oracle for"):
        rank.routed()
    with pytest.raises(RuntimeError, match="without an abort"):
        rank.routed()


# ------------------------------------------------------------------------------------------------------------ runs or raises
HALF_GOOD = st.sampled_from([0, 0, 0, 1, -1])


@settings(max_examples=40)
@given(
    tokens=st.integers(0, 5) | st.sampled_from([384, 385]),
    shared_tokens=st.integers(0, 5) | st.sampled_from([384, 385]),
    width_error=HALF_GOOD,
    shared_width_error=HALF_GOOD,
    rms_error=HALF_GOOD,
    ids=st.lists(st.sampled_from([-1, 0, 1, 0, 1, 2, -2]), min_size=2, max_size=2),
    epsilon=st.sampled_from([1e-5, 1e-5, 0.0, float("inf")]),
)
def test_runs_or_raises_before_it_writes(
    tokens: int,
    shared_tokens: int,
    width_error: int,
    shared_width_error: int,
    rms_error: int,
    ids: list[int],
    epsilon: float,
) -> None:
    rank = alone()
    shared = rank.given.shared
    assert shared is not None
    rank.buffer.x.view(torch.uint8).fill_(0x38)
    rank.buffer.x_sf.fill_(0x7F7F7F7F)
    rank.buffer.topk_weights.fill_(0.5)
    rank.buffer.topk_idx[:] = torch.tensor(ids)
    y = torch.full((tokens, 128 + width_error), float("nan"), dtype=BF16)
    shared_y = torch.full((shared_tokens, 128), float("nan"), dtype=BF16)
    shared_x = torch.ones(shared_tokens, 128 + shared_width_error, dtype=BF16)
    rms_weight = torch.ones(128 + rms_error, dtype=BF16)
    legal_ids = tokens == 0 or all(-1 <= value < 2 for value in ids)
    good = not (width_error or shared_width_error or rms_error) and max(tokens, shared_tokens) <= 384
    good = good and legal_ids and epsilon == 1e-5
    try:
        rank.dense(y=y, shared_y=shared_y, shared_x=shared_x, rms_weight=rms_weight, rms_epsilon=epsilon)
    except RuntimeError as error:
        assert not good, str(error)
        assert "wanted" in str(error) and "given" in str(error)
        assert y.isnan().all() and shared_y.isnan().all()
    else:
        assert good
        assert not y.isnan().any() and not shared_y.isnan().any()
        if ids == [-1, -1]:
            assert not y.view(torch.int16).any()  # no expert: exactly zero
    finally:
        rank.buffer.destroy()


# -------------------------------------------------------------------------------------------------------------- first calls
def test_only_the_first_call_of_a_signature_is_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = ops.first_call

    def counted(handle: int, signature: dict[str, Any], prepare: Callable[[], Any]) -> Any:
        seen.append(signature["entry"])
        return real(handle, signature, prepare)

    monkeypatch.setattr(ops, "first_call", counted)
    rank = alone()
    rank.routed()
    rank.routed(y=rank.y[:1])  # token counts are no part of a signature
    assert seen == ["fp8_fp4_mega_moe"]
    rank.routed(fast_math=False)
    rank.dense()
    rank.dense(shared_x=rank.given.shared.x[:2], shared_y=rank.shared_y[:2])  # type: ignore[union-attr]
    rank.dense(situ_beta=7.0)  # nor are the scalars that kernels take at run time
    assert seen == ["fp8_fp4_mega_moe", "fp8_fp4_mega_moe", "fp8_fp4_mega_moe_bf16_shared"]


def test_warmup_does_the_first_calls_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = small(2)
    given = make_world(shape, 6, target="sm_90a")

    def body(group: LocalRank) -> None:
        rank = Rank(group, given[group.rank], shape)
        dg.warmup(rank.buffer, shared_output="dense", shared_hidden=shape.shared_hidden)
        group.barrier("warm")
        monkeypatch.setattr(ops, "first_call", None)  # a later first call would fail
        rank.dense()
        assert not rank.y.isnan().any()
        with pytest.raises(ValueError, match=r"shared_output: wanted 'none', .* or 'token_owner', given 'rs'"):
            dg.warmup(rank.buffer, shared_output="rs")

    assert outcomes(body) == [None, None]


def test_the_path_taken_is_logged_once_per_signature(caplog: pytest.LogCaptureFixture) -> None:
    rank = alone()
    with caplog.at_level("INFO", logger="deep_gemm_k3"):
        rank.routed()
        rank.routed()
    lines = [record.getMessage() for record in caplog.records if "computed by the oracle:" in record.getMessage()]
    assert len(lines) == 1 and "fp8_fp4_mega_moe" in lines[0]


@pytest.mark.parametrize(("ranks", "width"), [(2, 384), (8, 384), (16, 896)])
@pytest.mark.parametrize("mode", ["rs", "sp_rs"])
def test_publication_where_a_shard_is_no_whole_number_of_tiles(mode: str, ranks: int, width: int) -> None:
    """A tile is 128 columns; shards are 192, 48 and 56. What arrives is what the dense call of each source wrote."""
    shape = small(ranks, shared_hidden=width, shared_tokens=2 * ranks)
    given = make_world(shape, 3, target="sm_90a")
    publish = getattr(dg, f"fp8_fp4_mega_moe_bf16_shared_{mode}")

    def body(group: LocalRank) -> tuple[torch.Tensor, torch.Tensor]:
        rank = Rank(group, given[group.rank], shape)
        rank.dense()
        place = dg.PublicationWorkspace(rank.buffer, mode, 2 * ranks, width)
        s = rank.given.shared
        assert s is not None
        publish(
            rank.y, rank.given.l1, rank.given.l2, s.x, s.l1, s.l2, s.rms_weight, 1e-5, place.workspace, place.flags,
            place.peer_ptrs, rank.buffer, **SITU,
        )  # fmt: skip
        return rank.shared_y.clone(), place.workspace[0].clone()

    with local_world(ranks) as world:
        results = world.run(body)
    for source, (dense, _) in enumerate(results):
        arrived = [workspace[:, source] for _, workspace in results]
        assert torch.equal(torch.cat(arrived, dim=1 if mode == "rs" else 0), dense)
