"""Kimi K3's widths: routed 3584/3072, shared 7168/768 per rank; 1, 16 and 112 local experts, and the whole 896 over eight
local ranks."""

from __future__ import annotations

import pytest
import torch
from mega_support import (
    DENSE,
    DEVICE,
    EXACT_SITU,
    SP_RS,
    Counts,
    Family,
    Signature,
    bits,
    pairs,
    rank_call,
)

from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.testing.data import WorldShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

H, I, SHARED_H, SHARED_I = 3584, 3072, 7168, 768
REPEATS = 1500


def k3(ranks: int, experts: int, topk: int, tokens: int, signature: Signature, counts: Counts | None = None) -> Family:
    shape = WorldShape((tokens,) * ranks, experts, topk, H, I, 384, SHARED_H, SHARED_I)
    return Family(shape, signature, counts=counts)


SMALL_COUNTS = (0, 1, 2, 7, 8, 9, 31, 64, 65, 127, 128, 129, 384)
UNEVEN = (0, 1, 2, 7, 8, 31, 64, 129)

ONE = k3(1, 1, 1, 384, EXACT_SITU, pairs(SMALL_COUNTS))
SIXTEEN = k3(1, 16, 16, 384, EXACT_SITU, pairs(SMALL_COUNTS))
RANK = k3(1, 112, 16, 2304, DENSE)  # all that a first call of the model compiles
WORLD = k3(8, 896, 16, 384, SP_RS, pairs(UNEVEN, (24,)) + pairs((384,), (64,)))
FAMILIES = (ONE, SIXTEEN, RANK, WORLD)


@pytest.mark.parametrize("tokens", SMALL_COUNTS)
def test_one_expert(tokens: int) -> None:
    ONE.check(ONE.world(tokens), EXACT_SITU)


@pytest.mark.parametrize("tokens", SMALL_COUNTS)
def test_every_expert_for_every_token(tokens: int) -> None:
    SIXTEEN.check(SIXTEEN.world(tokens), EXACT_SITU, calls=2)


@pytest.mark.parametrize(
    ("tokens", "shared_tokens", "routing"),
    [
        (0, 9, "uniform"),
        (1, 8, "uniform"),
        (2, 0, "duplicates"),
        (7, 7, "hot_expert"),
        (8, 8, "k3_router"),
        (9, 31, "holes"),
        (31, 2, "k3_router"),
        (64, 1, "uniform"),
        (65, 129, "duplicates"),
        (127, 65, "k3_router"),
        (128, 127, "hot_expert"),
        (129, 128, "holes"),
        (500, 64, "k3_router"),
        (2048, 384, "uniform"),
        (2304, 200, "k3_router"),
    ],
)
def test_a_rank_of_112_experts(tokens: int, shared_tokens: int, routing: str) -> None:
    RANK.check(RANK.world(tokens, shared_tokens, routing), DENSE)


@pytest.mark.parametrize("tokens", [8, 32, 64])
def test_calls_at_full_width_repeat_their_bits(tokens: int) -> None:
    """Words of a stage that are overwritten before they are read spoil one call of many, and only under the load that
    thousands of tiles beside the shared expert put on a device."""
    ranks = RANK.world(tokens, tokens)

    def body(group: LocalRank, buffer: SymmBuffer) -> list[int]:
        call = rank_call(buffer, ranks[group.rank], DENSE)
        try:
            call.fill()
            call.call()
            call.settle()
            assert call.shared_y is not None
            results = call.y, call.shared_y
            wanted = [result.clone() for result in results]
            wrong = torch.zeros(2, dtype=torch.int64, device=DEVICE)
            for _ in range(REPEATS):
                call.call()
                wrong += torch.stack([(bits(a) != bits(b)).any() for a, b in zip(results, wanted, strict=True)])
            call.settle()
            return wrong.tolist()
        finally:
            call.destroy()

    assert RANK.each_rank(body) == [[0, 0]], "calls with other bits in y, in shared_y"


def test_a_rank_of_112_experts_within_tolerance() -> None:
    RANK.check(RANK.world(300, 100, "k3_router", "random"), DENSE, bitwise=False)
    RANK.close()


@pytest.mark.parametrize(
    ("tokens", "shared_tokens", "routing"),
    [(UNEVEN, 24, "k3_router"), ((384,) * 8, 64, "uniform")],
)
def test_the_whole_world(tokens: tuple[int, ...], shared_tokens: int, routing: str) -> None:
    """896 experts over eight local ranks, token-owner publication."""
    WORLD.check(WORLD.world(tokens, shared_tokens, routing), SP_RS, calls=2)
