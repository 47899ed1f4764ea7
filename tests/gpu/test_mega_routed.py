"""The fused kernel on one rank, routed experts: against the oracle, bit for bit where every sum is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mega_support import CLAMPED, DEVICE, EXACT_SITU, EXACT_SWIGLU, SITU, SWIGLU, TARGET, Family, Signature, pairs

from deep_gemm_k3.mega.weights import transform_weights_for_mega_moe
from deep_gemm_k3.testing import data
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.oracle import Options, RoutedInput
from deep_gemm_k3.testing.routing import ROUTINGS
from deep_gemm_k3.testing.world import RankInput
from deep_gemm_k3.utils.quantize import pack_ue8m0, unpack_ue8m0

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

CAPACITY = 2304
EXACT_CLAMPED = Signature("routed", CLAMPED)
FAST_SWIGLU, FAST_SITU = Signature("routed", SWIGLU, fast_math=True), Signature("routed", SITU, fast_math=True)

RANDOM_TOKENS, ACTIVATION_TOKENS, WIDTH_TOKENS, WIDE_TOPK_TOKENS = (
    (1, 9, 65, 129, 500),
    (3, 64, 200),
    (5, 77, 384),
    (1, 37, 384),
)
SMALL_COUNTS = {
    FAST_SWIGLU: pairs(RANDOM_TOKENS),
    FAST_SITU: pairs(RANDOM_TOKENS),
    EXACT_CLAMPED: pairs(RANDOM_TOKENS + ACTIVATION_TOKENS),
    EXACT_SITU: pairs((*RANDOM_TOKENS, *ACTIVATION_TOKENS, 300)),
}
SMALL = Family(
    WorldShape((CAPACITY,), 8, 4, 1024, 512),
    EXACT_SWIGLU, EXACT_CLAMPED, EXACT_SITU, FAST_SWIGLU, FAST_SITU,
    counts=SMALL_COUNTS,
)  # fmt: skip
# Odd multiples of 128 leave half a row tile, and the widest rows need the most shared memory. Few tokens: few tiles.
WIDTHS = {
    widths: Family(WorldShape((384,), 4, 2, *widths), EXACT_SWIGLU, counts=pairs(WIDTH_TOKENS))
    for widths in ((1152, 128), (2176, 640), (4096, 1408), (8192, 256))
}
WIDE_TOPK = Family(WorldShape((384,), 40, 32, 1024, 128), EXACT_SWIGLU, counts=pairs(WIDE_TOPK_TOKENS))
# One kernel for all token counts, so that every top-k up to the model's is cheap.
INVARIANT = Signature("routed", SWIGLU, batch_invariant=True)
TOPKS = {topk: Family(WorldShape((384,), 24, topk, 256, 128), INVARIANT) for topk in range(1, 17)}
FAMILIES = (SMALL, *WIDTHS.values(), WIDE_TOPK, *TOPKS.values())

TOKENS = (0, 1, 2, 7, 8, 9, 31, 64, 65, 127, 128, 129, 500, 2048, CAPACITY)


@pytest.mark.parametrize("tokens", TOKENS)
def test_token_counts(tokens: int) -> None:
    """Every sum exact: any tile, any split, any order must give the oracle's bits. Three calls: every parity of counters."""
    SMALL.check(SMALL.world(tokens, seed=tokens), EXACT_SWIGLU, calls=3)


@pytest.mark.parametrize("tokens", RANDOM_TOKENS)
@pytest.mark.parametrize("signature", [EXACT_SWIGLU, FAST_SWIGLU, EXACT_SITU, FAST_SITU, EXACT_CLAMPED], ids=str)
def test_random_inputs(tokens: int, signature: Signature) -> None:
    if signature is EXACT_CLAMPED:
        signature = replace(signature, options=Options("swiglu", activation_clamp=0.75))
    SMALL.check(SMALL.world(tokens, kind="random", seed=tokens), signature, bitwise=False)


@pytest.mark.parametrize("tokens", ACTIVATION_TOKENS)
@pytest.mark.parametrize("signature", [EXACT_SITU, EXACT_CLAMPED], ids=str)
def test_activations_are_exact(tokens: int, signature: Signature) -> None:
    SMALL.check(SMALL.world(tokens, seed=tokens), signature)


@pytest.mark.parametrize("tokens", [5, 100, 700])
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_routings(routing: str, tokens: int) -> None:
    SMALL.check(SMALL.world(tokens, routing=routing, seed=3 * tokens), EXACT_SWIGLU)


def test_no_token_has_an_expert() -> None:
    """y is exactly zero, not what the buffer held before."""
    ranks = SMALL.world(33)
    ranks[0].routed.topk_idx.fill_(-1)
    (result,) = SMALL.check(ranks, EXACT_SWIGLU)
    assert not result.y.view(torch.int16).any()


@pytest.mark.parametrize("tokens", [40, 384])
def test_one_expert_takes_all_slots(tokens: int) -> None:
    """The pool holds what duplicates can make of it: every slot of every token on one expert."""
    ranks = SMALL.world(tokens)
    ranks[0].routed.topk_idx.fill_(5)
    SMALL.check(ranks, EXACT_SWIGLU)


@pytest.mark.parametrize("width", list(WIDTHS), ids=str)
@pytest.mark.parametrize("tokens", WIDTH_TOKENS)
def test_widths(width: tuple[int, int], tokens: int) -> None:
    family = WIDTHS[width]
    family.check(family.world(tokens, routing="holes", seed=tokens), EXACT_SWIGLU)


@pytest.mark.parametrize("topk", TOPKS)
def test_every_topk(topk: int) -> None:
    family = TOPKS[topk]
    for tokens, routing in ((1, "uniform"), (45, "k3_router"), (150, "holes"), (33, "duplicates")):
        family.check(family.world(tokens, routing=routing, seed=tokens), INVARIANT)


@pytest.mark.parametrize("tokens", WIDE_TOPK_TOKENS)
def test_topk_of_32(tokens: int) -> None:
    """Weights of 1/2 and 1/4 only: 32 terms of one sign stay exact."""
    WIDE_TOPK.check(WIDE_TOPK.world(tokens, routing="holes", seed=tokens), EXACT_SWIGLU)


# ------------------------------------------------------------------------------------------------------------- scales
def _spread_scales(shape: WorldShape, tokens: int) -> RankInput:
    """The exact world with every 32 columns of L1 scaled by 2^e and of the tokens by 2^-e, e over [-110, 6]: the same sums
    from scales that differ by orders of magnitude inside a row; and every row of L2 by a power of its own."""
    g = torch.Generator(device=DEVICE).manual_seed(8)
    pairs = data.expert_range_weights(shape, 1, range(shape.experts), "exact", drawn_on=DEVICE)
    columns = torch.randint(-110, 7, (shape.hidden // 32,), generator=g, device=DEVICE)
    rows = torch.randint(-110, 6, (shape.hidden, 1), generator=g, device=DEVICE)
    (l1, l1_sf), (l2, l2_sf) = pairs
    l1_codes, l2_codes = l1_sf.int() + columns, l2_sf.int() + rows
    assert int(l1_codes.min()) >= 127 - 124 and int(l1_codes.max()) <= 127 + 9
    routed = data.make_routed(replace(shape, tokens=(tokens,)), 2, 0, kind="exact", drawn_on=DEVICE)
    x_codes = unpack_ue8m0(routed.x_sf).int() - columns
    done = transform_weights_for_mega_moe((l1, l1_codes.to(torch.uint8)), (l2, l2_codes.to(torch.uint8)), target=TARGET)
    x_sf = pack_ue8m0(x_codes.to(torch.uint8))
    return RankInput(RoutedInput(routed.x, x_sf, routed.topk_idx, routed.topk_weights), *done)


@pytest.mark.parametrize("tokens", [3, 300])
def test_scales_of_every_size_cancel(tokens: int) -> None:
    SMALL.check([_spread_scales(SMALL.shape, tokens)], EXACT_SWIGLU)


@pytest.mark.parametrize("tokens", [3, 300])
def test_scales_mixed_inside_a_row(tokens: int) -> None:
    """Random codes with scales over the whole range [2^-124, 2^9], and the largest and smallest in every row."""
    g = torch.Generator(device=DEVICE).manual_seed(9)
    s = SMALL.shape
    pairs = []
    for n, k in ((2 * s.intermediate, s.hidden), (s.hidden, s.intermediate)):
        codes = torch.randint(3, 137, (s.experts, n, k // 32), generator=g, device=DEVICE, dtype=torch.uint8)
        codes[:, :, 0], codes[:, :, -1] = 3, 136
        weight = torch.randint(0, 256, (s.experts, n, k // 2), generator=g, device=DEVICE, dtype=torch.uint8)
        pairs.append((weight, codes))
    routed = data.make_routed(replace(s, tokens=(tokens,)), 2, 0, drawn_on=DEVICE)
    # Outputs that BF16 can hold: gate and up reach 2^12, their products and the sums over 1024 columns stay far below 2^127.
    ranks = [RankInput(routed, *transform_weights_for_mega_moe(*pairs, target=TARGET))]
    SMALL.check(ranks, EXACT_SWIGLU, bitwise=False)
    SMALL.check(ranks, EXACT_SITU, bitwise=False)
