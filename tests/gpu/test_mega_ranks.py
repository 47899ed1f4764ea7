"""Several local ranks on one GPU: real dispatch, combine, barriers and publication between them."""

from __future__ import annotations

import pytest
from mega_support import DENSE, EIGHT_RANKS, EXACT_SWIGLU, FOUR_RANKS, RS, SP_RS, TWO_RANKS, Family, Signature, pairs

from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.routing import ROUTINGS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


MODES = {2: SP_RS, 4: RS, 8: SP_RS}
EQUAL, PUBLISHED, ROUTING_TOKENS = (1, 8, 100, 384), (0, 8, 384), (20, 60)

UNEVEN = {
    2: [(5, 70), (0, 9), (384, 1), (0, 0)],
    4: [(0, 9, 33, 128), (1, 0, 2, 300), (129, 127, 65, 64)],
    8: [(0, 1, 2, 7, 8, 31, 64, 129), (0,) * 7 + (384,), (3,) + (0,) * 7],
}


def random_tokens(ranks: int) -> tuple[int, ...]:
    return tuple(10 + 30 * rank for rank in range(ranks))


def family(shape: WorldShape, other: Signature) -> Family:
    """Publishes in the mode of its number of ranks; the ``other`` signature is what the random inputs need beside it."""
    ranks = shape.ranks
    published = pairs(EQUAL, (8 * ranks,)) + pairs((12,), PUBLISHED)
    published += [(tokens, 2 * ranks) for case in UNEVEN[ranks] for tokens in case]
    published += pairs(random_tokens(ranks), (16,))
    counts = {MODES[ranks]: published, other: pairs(random_tokens(ranks) + ROUTING_TOKENS, (16,))}
    return Family(shape, other, MODES[ranks], counts=counts)


WORLDS = {2: family(TWO_RANKS, EXACT_SWIGLU), 4: family(FOUR_RANKS, DENSE), 8: family(EIGHT_RANKS, EXACT_SWIGLU)}
FAMILIES = tuple(WORLDS.values())


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("tokens", EQUAL)
def test_equal_ranks(ranks: int, tokens: int) -> None:
    world = WORLDS[ranks]
    world.check(world.world(tokens, 8 * ranks, seed=tokens), MODES[ranks], calls=3)


@pytest.mark.parametrize(("ranks", "tokens"), [(ranks, tokens) for ranks, cases in UNEVEN.items() for tokens in cases])
def test_uneven_ranks(ranks: int, tokens: tuple[int, ...]) -> None:
    """Ranks choose their tiles by their own token counts; nothing that crosses ranks may depend on that."""
    world = WORLDS[ranks]
    world.check(world.world(tokens, 2 * ranks, "holes", seed=sum(tokens)), MODES[ranks], calls=2)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_routings(ranks: int, routing: str) -> None:
    """Hot expert, hot rank, empty slots, duplicates; y bit for bit."""
    world = WORLDS[ranks]
    world.check(world.world(ROUTING_TOKENS * (ranks // 2), routing=routing, seed=5), EXACT_SWIGLU, calls=2)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("shared_tokens", PUBLISHED)
def test_published_tokens(ranks: int, shared_tokens: int) -> None:
    """Four calls over the generations of every rank's workspace; no shared token at all included."""
    world = WORLDS[ranks]
    world.check(world.world(12, shared_tokens), MODES[ranks], calls=4)


@pytest.mark.parametrize("ranks", WORLDS)
def test_random_inputs(ranks: int) -> None:
    """Within the tolerances; four ranks also publish, bit for bit what their dense mode writes."""
    world = WORLDS[ranks]
    given = world.world(random_tokens(ranks), 16, "k3_router", "random")
    world.check(given, RS if ranks == 4 else EXACT_SWIGLU, bitwise=False)
