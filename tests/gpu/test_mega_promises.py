"""Nothing hangs and nothing traps: missing peers, bad values on the device, refusals by one host, SMs in other hands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from mega_support import (
    DENSE,
    DEVICE,
    EXACT_SWIGLU,
    FOUR_RANKS,
    ONE_RANK,
    RS,
    SP_RS,
    TARGET,
    Family,
    pairs,
    rank_call,
    synchronize,
)

from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.runner import RankCall
from deep_gemm_k3.testing.world import mega_moe_reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

TIMEOUT_S = 1.0
FOUR = Family(FOUR_RANKS, RS, SP_RS, counts=pairs((3, 5, 70), (4, 8)), timeout_s=TIMEOUT_S)
PATIENT_COUNTS = {EXACT_SWIGLU: pairs((3, 5)), DENSE: pairs((5,), (0, 3, 8))}
PATIENT = Family(FOUR_RANKS, EXACT_SWIGLU, DENSE, counts=PATIENT_COUNTS, timeout_s=30.0)
ONE_COUNTS = {EXACT_SWIGLU: pairs((5,)), DENSE: pairs((60, 70), (8,))}
ONE = Family(ONE_RANK, EXACT_SWIGLU, DENSE, counts=ONE_COUNTS, timeout_s=TIMEOUT_S)
FAMILIES = (FOUR, PATIENT, ONE)

ON_GPU = DEVICE.type == "cuda"


@pytest.fixture(autouse=True)
def _fresh_buffers() -> Iterator[None]:
    """Every test here ends with buffers that refuse work; the device itself must be as good as new."""
    yield
    for family in FAMILIES:
        family.drop_session()
    assert int(torch.arange(5, device=DEVICE).sum()) == 10


def warm(family: Family) -> None:
    """The first call of a signature: collective on the host, so a rank that never calls would be missed there."""
    family.run(family.world(3, 8), RS if family is FOUR else EXACT_SWIGLU)


def outcome(call: RankCall, group: LocalRank) -> tuple[str, float, str]:
    """What a call ends with on this rank: its error (of the call or of the check after it), how long it took, and what the
    next call says."""
    begin = time.monotonic()
    try:
        call.call()
        call.settle()
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    synchronize_stream()
    seconds = time.monotonic() - begin
    group.barrier("ended", 20.0)
    return error, seconds, refusal(call)


def synchronize_stream() -> None:
    if ON_GPU:
        torch.cuda.current_stream().synchronize()


def refusal(call: RankCall) -> str:
    try:
        call.call()
    except RuntimeError as caught:
        return str(caught)
    return ""


# -------------------------------------------------------------------------------------------------------- missing peers
@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_peer_is_named_on_every_rank(missing: int) -> None:
    warm(FOUR)
    ranks = FOUR.world(5, 8)

    def body(group: LocalRank, buffer: SymmBuffer) -> tuple[str, float, str]:
        call = rank_call(buffer, ranks[group.rank], RS)
        call.fill()
        call.settle()
        group.barrier("ready")
        if group.rank != missing:
            return outcome(call, group)
        group.barrier("ended", 20.0)
        with pytest.raises(RuntimeError) as caught:
            buffer.check()
        return str(caught.value), 0.0, refusal(call)

    for rank, (error, seconds, after) in enumerate(FOUR.each_rank(body)):
        assert "time-out" in error if ON_GPU else error, f"rank {rank}: {error}"
        assert f"of rank {missing}" in error or not ON_GPU, f"rank {rank}: {error}"
        assert seconds < 5 * TIMEOUT_S, f"rank {rank} took {seconds:.1f} s"
        assert "wanted one without an abort" in after, f"rank {rank}: {after}"


# ---------------------------------------------------------------------------------------------------- values on the device
def _bad_id(call: RankCall) -> None:
    call.buffer.topk_idx[2, 1] = 16


def _bad_negative_id(call: RankCall) -> None:
    call.buffer.topk_idx[0, 3] = -2


def _huge_id(call: RankCall) -> None:
    call.buffer.topk_idx[4, 0] = 2**32 + 1


def _generation(call: RankCall) -> None:
    assert call.published is not None
    call.published.flags[0] = 3


def _negative_generation(call: RankCall) -> None:
    assert call.published is not None
    call.published.flags[0] = -1


def _stride(call: RankCall) -> None:
    assert call.published is not None
    call.published.flags[2] += 16


def _shared_tokens(call: RankCall) -> None:
    shared = call.input.shared
    assert shared is not None
    call.input = replace(call.input, shared=replace(shared, x=shared.x[:4]))


def all_stop(spoil: Callable[[RankCall], None], words: str, limit_s: float, others_late_by: float = 0.0) -> None:
    """Rank 1's call is spoilt, and every rank ends with the error within the limit."""
    warm(FOUR)
    ranks = FOUR.world(5, 8)

    def body(group: LocalRank, buffer: SymmBuffer) -> tuple[str, float, str]:
        call = rank_call(buffer, ranks[group.rank], RS)
        call.fill()
        if group.rank == 1:
            spoil(call)
        call.settle()
        group.barrier("ready")
        if group.rank != 1:
            time.sleep(others_late_by)
        return outcome(call, group)

    for rank, (error, seconds, after) in enumerate(FOUR.each_rank(body)):
        assert words in error if ON_GPU else error, f"rank {rank}: {error or 'no error'}"
        assert seconds < limit_s
        assert "wanted one without an abort" in after


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_bad_id, "expert id out of range"),
        (_bad_negative_id, "expert id out of range"),
        (_huge_id, "expert id out of range"),
        (_generation, "publication generation out of range"),
        (_negative_generation, "publication generation out of range"),
        (_stride, "publication stride mismatch"),
        (_shared_tokens, "num_shared_tokens differs between ranks"),
    ],
)
def test_a_bad_value_on_one_rank_stops_all(spoil: Callable[[RankCall], None], words: str) -> None:
    all_stop(spoil, words, 5 * TIMEOUT_S)


def test_ranks_that_call_different_entries_are_told() -> None:
    """Both entries are ready on all ranks, so no host compares anything: the headers do."""
    for signature in (RS, SP_RS):
        FOUR.run(FOUR.world(3, 8), signature)
    ranks = FOUR.world(5, 8)

    def body(group: LocalRank, buffer: SymmBuffer) -> tuple[str, float, str]:
        calls = [rank_call(buffer, ranks[group.rank], signature) for signature in (RS, SP_RS)]
        call = calls[1 if group.rank == 1 else 0]
        call.fill()
        call.settle()
        group.barrier("ready")
        return outcome(call, group)

    for rank, (error, seconds, after) in enumerate(FOUR.each_rank(body)):
        assert "entry or options differ between ranks: wanted" in error, f"rank {rank}: {error or 'no error'}"
        assert seconds < 5 * TIMEOUT_S or not ON_GPU
        assert "wanted one without an abort" in after


def test_dense_calls_take_as_many_shared_rows_as_each_rank_has() -> None:
    given = []
    for rank, rows in zip(PATIENT.world(5, 8), (8, 0, 3, 8), strict=True):
        assert rank.shared is not None
        given.append(replace(rank, shared=replace(rank.shared, x=rank.shared.x[:rows])))
    for got, wanted in zip(PATIENT.run(given, DENSE), mega_moe_reference(given, DENSE.options), strict=True):
        assert got.shared_y is not None and wanted.shared_y is not None
        metrics.assert_bitwise(got.shared_y, wanted.shared_y, "shared_y")
        metrics.assert_close(got.y, wanted.y, "y")


def test_ranks_that_start_after_the_abort_end_at_once() -> None:
    """Their kernels find the abort cell set in their first instructions; their hosts knew nothing of it: the bad id ends rank
    1's kernel without anybody else."""
    all_stop(_bad_id, "expert id out of range", TIMEOUT_S, others_late_by=0.3)


def test_a_bad_value_on_a_single_rank() -> None:
    """Nobody else waits, and still the call ends with the error, at once."""

    def body(group: LocalRank, buffer: SymmBuffer) -> tuple[str, float, str]:
        call = rank_call(buffer, ONE.world(5, 8)[0], EXACT_SWIGLU)
        call.fill()
        buffer.topk_idx[1, 1] = 8
        return outcome(call, group)

    ((error, _, after),) = ONE.each_rank(body)
    assert "expert id out of range" in error if ON_GPU else error
    assert "wanted one without an abort" in after or not ON_GPU, after


# ---------------------------------------------------------------------------------------------------- one host refuses
def test_a_refusal_of_one_host_stops_the_others_at_once() -> None:
    """The others' kernels wait with 30 s of patience; they end in a fraction of that, with the refusing rank's words."""
    warm(PATIENT)
    ranks = PATIENT.world(5, 8)

    def body(group: LocalRank, buffer: SymmBuffer) -> tuple[str, float, str]:
        call = rank_call(buffer, ranks[group.rank], EXACT_SWIGLU)
        call.fill()
        call.settle()
        group.barrier("ready")
        if group.rank == 2:
            time.sleep(0.3)  # the others are inside the call
            call.y = call.y.float()
        return outcome(call, group)

    for rank, (error, seconds, _) in enumerate(PATIENT.each_rank(body)):
        assert "y: wanted dtype bfloat16, given float32" in error and (rank == 2 or "rank 2" in error), (
            f"rank {rank}: {error}"
        )
        assert seconds < 5.0, f"rank {rank} took {seconds:.1f} s"


# ------------------------------------------------------------------------------------------------------------- side kernel
def hold_sms(share: float, seconds: float) -> None:
    """A kernel on a stream of its own that fills an SM with each of its CTAs, and this share of all SMs."""
    from jit_support import probe
    from test_launch import Probe

    from deep_gemm_k3.jit.kernel import default_store

    kernel = Probe(default_store(), probe(TARGET))
    grid = math.ceil(share * torch.cuda.get_device_properties(DEVICE).multi_processor_count)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel.launch(grid=grid, shared=200 << 10, hold_ns=int(seconds * 1e9), num_bytes=0)


@pytest.mark.parametrize(("share", "seconds"), [(0.15, 0.3), (1.0, 0.3), (0.5, 2.5)])
def test_a_side_kernel_on_the_sms(share: float, seconds: float) -> None:
    """The grid becomes resident when the side kernel leaves: a result when that is within the limit, else a time-out."""
    ranks = ONE.world(60, 8)
    (expected,) = ONE.check(ranks, DENSE)

    def body(group: LocalRank, buffer: SymmBuffer) -> str:
        call = rank_call(buffer, ranks[0], DENSE)
        call.fill()
        call.settle()
        hold_sms(share, seconds)
        try:
            call.call()
            call.settle()
        except RuntimeError as caught:
            return str(caught)
        metrics.assert_bitwise(call.y, expected.y, "y")
        return ""

    if not ON_GPU:
        return
    begin = time.monotonic()
    (error,) = ONE.each_rank(body)
    assert time.monotonic() - begin < seconds + 5 * TIMEOUT_S
    if seconds < TIMEOUT_S:
        assert error == ""
    else:
        assert error == "" or "time-out" in error
    synchronize()


# ---------------------------------------------------------------------------------------------------------------- zeroing
@pytest.mark.parametrize("family", [ONE, FOUR], ids=["1", "4"])
def test_zeroing_the_buffer_between_calls_is_legal(family: Family) -> None:
    """All protocol state lives in the buffer, and zero is a valid start: after any number of calls, with any history."""
    signature = DENSE if family is ONE else RS
    ranks = family.world(70, 8, kind="random")

    def body(group: LocalRank, buffer: SymmBuffer) -> list[torch.Tensor]:
        call = rank_call(buffer, ranks[group.rank], signature)
        results = []
        for calls in (1, 2, 3, 1):
            group.barrier("idle")
            buffer.buffer.zero_()
            call.fill()
            synchronize_stream()
            group.barrier("zeroed")
            for _ in range(calls):
                call.call()
            call.settle()
            results.append(call.y.clone())
        group.barrier("done")
        call.destroy()
        return results

    for results in family.each_rank(body):
        for result in results[1:]:
            metrics.assert_bitwise(result, results[0])
