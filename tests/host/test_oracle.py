"""The oracle: against an independent float64 computation, and by what must not change its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import independent_reference as ref
import numpy as np
import pytest
import torch

from deep_gemm_k3.mega.weights import restore_weights_from_mega_moe, transform_weights_for_mega_moe
from deep_gemm_k3.testing import data, metrics, oracle, routing
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options, RoutedInput
from deep_gemm_k3.testing.world import RankInput, mega_moe_reference

SITU = Options("situ", None, 4.0, 25.0)
SWIGLU = Options("swiglu")
SMALL = WorldShape((5, 0, 9, 3), 8, 3, 256, 256, 8, 512, 128)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products: a thread pool costs more than it saves, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def independent(world: list[RankInput], options: Options) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """(y, shared) of every rank in float64, with the experts of all ranks in one list."""
    opts = dataclasses.asdict(options)
    experts = []
    for rank in world:
        (w1, s1), (w2, s2) = rank.l1, rank.l2
        for e in range(w1.size(0)):
            experts.append((ref.expert_matrix(w1[e], s1[e]), ref.expert_matrix(w2[e], s2[e])))
    results = []
    for rank in world:
        r = rank.routed
        y = ref.routed(ref.tokens_of(r.x, r.x_sf), r.topk_idx, r.topk_weights, experts, opts)
        shared = None
        if rank.shared is not None:
            y = ref.norm(y, rank.shared.rms_weight, rank.shared.rms_epsilon)
            shared = ref.shared(rank.shared.x, rank.shared.l1, rank.shared.l2, opts)
        results.append((y, shared))
    return results


def check_close(actual: torch.Tensor, reference: np.ndarray, name: str) -> None:
    whole, worst = ref.relative(actual.double().numpy(), reference)
    assert whole < metrics.TENSOR_TOLERANCE, f"{name}: {whole}"
    assert worst < metrics.ROW_TOLERANCE, f"{name}, worst row: {worst}"


@pytest.mark.parametrize("route", list(routing.ROUTINGS))
@pytest.mark.parametrize("options", [SITU, SWIGLU, Options("swiglu", 0.75), Options("situ", None, 0.25, 0.5)])
def test_random_against_float64(route: str, options: Options) -> None:
    world = make_world(SMALL, 11, route)
    for rank, (out, (y, shared)) in enumerate(
        zip(mega_moe_reference(world, options), independent(world, options), strict=True)
    ):
        check_close(out.y, y, f"y of rank {rank}")
        assert out.shared_y is not None
        check_close(out.shared_y, shared, f"shared of rank {rank}")


@pytest.mark.parametrize("route", ["uniform", "holes", "duplicates"])
@pytest.mark.parametrize("options", [SITU, SWIGLU, Options("swiglu", 2048.0)])
def test_exact_inputs_bitwise_against_float64(route: str, options: Options) -> None:
    """On exact-sum inputs both computations give the same BF16 numbers; the norm is left out, its sum is not exact."""
    shape = WorldShape((6, 0, 9), 6, 4, 1280, 640, 5, 1152, 640)
    world = make_world(shape, 5, route, "exact")
    norms = [rank.shared.rms_weight for rank in world if rank.shared]
    plain = [dataclasses.replace(rank, shared=None) for rank in world]
    for out, (y, _) in zip(mega_moe_reference(plain, options), independent(plain, options), strict=True):
        np.testing.assert_array_equal(out.y.double().numpy(), y)
        assert not out.y.numel() or (out.y != 0).any()
    for out, (y, shared) in zip(mega_moe_reference(world, options), independent(world, options), strict=True):
        assert out.shared_y is not None
        np.testing.assert_array_equal(out.shared_y.double().numpy(), shared)
        check_close(out.y, y, "normed y")
    assert len(norms) == 3


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_layouts_give_the_same_bits(target: str) -> None:
    plain = make_world(SMALL, 3)
    packed = make_world(SMALL, 3, target=target)
    for a, b in zip(mega_moe_reference(plain, SITU), mega_moe_reference(packed, SITU), strict=True):
        metrics.assert_bitwise(a.y, b.y)
    (w, c), _ = restore_weights_from_mega_moe(packed[2].l1, packed[2].l2)
    assert torch.equal(w.view(torch.int8), plain[2].l1[0])
    assert c.dtype == torch.uint8


def regroup(world: list[RankInput], ranks: int) -> list[RankInput]:
    """The same experts and, in order, the same tokens on another number of ranks, dealt out unevenly."""
    routed = [torch.cat([getattr(r.routed, f.name) for r in world]) for f in dataclasses.fields(RoutedInput)]
    l1, l2 = (tuple(torch.cat([getattr(r, n)[i] for r in world]) for i in (0, 1)) for n in ("l1", "l2"))
    tokens = routed[0].size(0)
    cuts = [0, *sorted(torch.randint(0, tokens + 1, (ranks - 1,)).tolist()), tokens]
    local = l1[0].size(0) // ranks
    result = []
    for rank in range(ranks):
        mine, experts = slice(cuts[rank], cuts[rank + 1]), slice(rank * local, (rank + 1) * local)
        pairs = [(w[experts], s[experts]) for w, s in (l1, l2)]
        result.append(RankInput(RoutedInput(*(t[mine] for t in routed)), *pairs))
    return result


@pytest.mark.parametrize("options", [SITU, SWIGLU])
@pytest.mark.parametrize("route", ["uniform", "hot_expert", "holes"])
def test_number_of_ranks_does_not_change_a_bit(options: Options, route: str) -> None:
    shape = WorldShape((13, 2, 40, 0), 8, 3, 384, 128)
    world = make_world(shape, 17, route)
    expected = torch.cat([out.y for out in mega_moe_reference(world, options)])
    for ranks in (1, 2, 8):
        again = mega_moe_reference(regroup(world, ranks), options)
        metrics.assert_bitwise(torch.cat([out.y for out in again]), expected, f"{ranks} ranks")


def test_a_token_does_not_depend_on_the_others() -> None:
    shape = WorldShape((70,), 4, 2, 256, 128)
    (rank,) = make_world(shape, 23)
    (full,) = mega_moe_reference([rank], SITU)
    for keep in ([0], [3, 5], list(range(33)), list(range(69, -1, -1))):
        r = rank.routed
        part = RoutedInput(r.x[keep], r.x_sf[keep], r.topk_idx[keep], r.topk_weights[keep])
        (out,) = mega_moe_reference([dataclasses.replace(rank, routed=part)], SITU)
        metrics.assert_bitwise(out.y, full.y[keep])


def test_copies_of_a_token_on_several_ranks_agree() -> None:
    shape = WorldShape((4, 4), 4, 2, 256, 128)
    a, b = make_world(shape, 29)
    first, second = mega_moe_reference([a, dataclasses.replace(b, routed=a.routed)], SITU)
    metrics.assert_bitwise(first.y, second.y)
    assert int(first.counts.sum() + second.counts.sum()) == 16


def test_duplicates_are_rows_of_their_own() -> None:
    """The same expert twice: both partials are rounded and added, and both are counted."""
    (rank,) = make_world(WorldShape((6,), 2, 1, 256, 128), 31)
    r = rank.routed
    twice = RoutedInput(r.x, r.x_sf, r.topk_idx.repeat(1, 2), r.topk_weights.repeat(1, 2))
    (one,), (two,) = (mega_moe_reference([dataclasses.replace(rank, routed=routed)], SWIGLU) for routed in (r, twice))
    metrics.assert_bitwise(two.y, (one.y.float() * 2).to(torch.bfloat16))
    assert torch.equal(two.counts, one.counts * 2)


def test_empty_slots_and_tokens() -> None:
    """-1 adds nothing wherever it stands; a token without expert is exactly +0, normed or not."""
    (rank,) = make_world(WorldShape((5,), 4, 2, 256, 128, 3), 37)
    r = rank.routed
    wide = RoutedInput(
        r.x,
        r.x_sf,
        torch.stack((torch.full((5,), -1), r.topk_idx[:, 0], torch.full((5,), -1), r.topk_idx[:, 1]), 1),
        torch.stack(
            (torch.full((5,), float("nan")), r.topk_weights[:, 0], torch.full((5,), 9.0), r.topk_weights[:, 1]), 1
        ),
    )
    wide.topk_idx[3] = -1
    (plain,), (holed,) = (mega_moe_reference([dataclasses.replace(rank, routed=x)], SITU) for x in (r, wide))
    keep = [0, 1, 2, 4]
    metrics.assert_bitwise(holed.y[keep], plain.y[keep])
    assert torch.equal(holed.y[3].view(torch.int16), torch.zeros(256, dtype=torch.int16))


def test_zero_tokens_everywhere() -> None:
    world = make_world(WorldShape((0, 0), 4, 2, 256, 128, 0), 41)
    for out in mega_moe_reference(world, SITU):
        assert list(out.y.shape) == [0, 256]
        assert out.shared_y is not None
        assert list(out.shared_y.shape) == [0, 256]
        assert int(out.counts.sum()) == 0


def test_poisoned_tokens_do_not_leak() -> None:
    """Rows of NaN and of the largest number leave every other row's bits alone."""
    (rank,) = make_world(WorldShape((12,), 2, 2, 256, 128), 43)
    r = rank.routed
    x = r.x.view(torch.uint8).clone()
    x[[2, 7]] = 0x7F
    x[5] = 0x7E
    poisoned = dataclasses.replace(rank, routed=dataclasses.replace(r, x=x.view(torch.float8_e4m3fn)))
    (plain,), (dirty,) = mega_moe_reference([rank], SWIGLU), mega_moe_reference([poisoned], SWIGLU)
    keep = [0, 1, 3, 4, 6, 8, 9, 10, 11]
    metrics.assert_bitwise(dirty.y[keep], plain.y[keep])


def test_statistics_count_received_rows() -> None:
    world = make_world(SMALL, 47, "holes")
    everything = torch.cat([rank.routed.topk_idx.flatten() for rank in world])
    for rank, out in enumerate(mega_moe_reference(world, SWIGLU)):
        assert out.counts.dtype == torch.int32
        assert out.counts.tolist() == [int((everything == 2 * rank + e).sum()) for e in range(2)]


@pytest.mark.parametrize("mode", ["rs", "sp_rs"])
def test_publication_is_the_dense_output_in_its_place(mode: str) -> None:
    ranks, hidden, rows = 4, 512, 8
    dense = mega_moe_reference(make_world(SMALL, 53), SITU)
    shape = (3, rows + 2, ranks, hidden // ranks) if mode == "rs" else (3, rows // ranks + 1, ranks, hidden)
    workspaces = [torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in range(ranks)]
    world = [dataclasses.replace(r, workspace=w) for r, w in zip(make_world(SMALL, 53), workspaces, strict=True)]
    published = mega_moe_reference(world, SITU, mode, generation=1)
    for source in range(ranks):
        expected = dense[source].shared_y
        assert expected is not None
        assert published[source].shared_y is not None
        metrics.assert_bitwise(published[source].shared_y, expected)
        for dest in range(ranks):
            got = workspaces[dest][1]
            if mode == "rs":
                part = expected[:, dest * 128 : (dest + 1) * 128]
                metrics.assert_bitwise(got[:rows, source], part)
                assert got[rows:].isnan().all()
            else:
                metrics.assert_bitwise(got[:2, source], expected[dest * 2 : dest * 2 + 2])
                assert got[2:].isnan().all()
            assert workspaces[dest][[0, 2]].isnan().all()


def test_published_fragments_sum_to_the_unsharded_expert() -> None:
    """Slices of the intermediate, published and summed over source ranks, are the whole shared MLP."""
    shape = WorldShape((1, 1, 1, 1), 4, 1, 128, 128, 8, 256, 256)
    world = make_world(shape, 59)
    workspaces = [torch.zeros(1, 2, 4, 256, dtype=torch.bfloat16) for _ in range(4)]
    world = [dataclasses.replace(r, workspace=w) for r, w in zip(world, workspaces, strict=True)]
    mega_moe_reference(world, SITU, "sp_rs")
    summed = torch.cat([w[0].double().sum(1) for w in workspaces]).numpy()
    parts = [r.shared for r in world if r.shared is not None]
    gate_up = [p.l1.chunk(2) for p in parts]
    whole_l1 = torch.cat([g for g, _ in gate_up] + [u for _, u in gate_up])
    whole = ref.shared(parts[0].x, whole_l1, torch.cat([p.l2 for p in parts], 1), dataclasses.asdict(SITU))
    error, _ = ref.relative(summed, whole)
    assert error < 5e-3


# ------------------------------------------------------------------------------------------------------------- activation
def test_activation_extremes_are_finite() -> None:
    edge = torch.tensor([0.0, -0.0, 1e-38, 1.0, -1.0, 90.0, -90.0, 3e38, -3e38], dtype=torch.bfloat16)
    gate, up = (t.flatten() for t in torch.meshgrid(edge, edge[:7], indexing="ij"))
    for options in (SITU, Options("situ", None, 1e-40, 1e-40), Options("situ", None, 4096.0, 4096.0)):
        assert torch.isfinite(oracle.activate(gate, up, options)).all()
    assert torch.isfinite(oracle.activate(gate, up, Options("swiglu", 10.0))).all()


def test_subnormal_betas_are_not_flushed() -> None:
    one = torch.full((1,), 3.0, dtype=torch.bfloat16)
    value = float(oracle.activate(one, one, Options("situ", None, 1e-40, 25.0)))
    assert value == pytest.approx(1e-40 / (1 + np.exp(-3)) * 25 * np.tanh(3 / 25), rel=1e-4)


def test_large_betas_approach_swiglu() -> None:
    g, u = (torch.randn(4, 64).to(torch.bfloat16) for _ in range(2))
    near = oracle.activate(g, u, Options("situ", None, 4096.0, 4096.0))
    assert metrics.relative_l2(near, oracle.activate(g, u, SWIGLU)) < 1e-5


def test_clamp_is_one_sided_for_gate() -> None:
    g = torch.tensor([-50.0, 50.0], dtype=torch.bfloat16)
    out = oracle.activate(g, torch.tensor([-50.0, 50.0], dtype=torch.bfloat16), Options("swiglu", 2.0))
    sigmoid = 1 / (1 + np.exp(-2.0))
    assert float(out[1]) == pytest.approx(2 * sigmoid * 2, rel=1e-6)
    assert float(out[0]) == pytest.approx(-50 * np.exp(-50.0) * -2, rel=1e-5)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="activation: wanted swiglu or situ, given 'relu'"):
        Options("relu")
    with pytest.raises(ValueError, match="situ_beta"):
        Options("situ", None, None, 2.0)
    with pytest.raises(ValueError, match=r"activation_clamp: wanted None for situ, given 3\.0"):
        Options("situ", 3.0, 1.0, 1.0)


def test_norm_and_combine_by_hand() -> None:
    v = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    out = oracle.rms_norm(v, torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 0.0)
    scale = 1 / np.sqrt(12.5)
    assert out[0].tolist() == pytest.approx([3 * scale, 8 * scale], rel=2**-8)
    # 1 + 2^-8 + 2^-8: two BF16 roundings on the way would lose both small terms, one at the end keeps their sum
    partials = torch.tensor([[[1.0], [2.0**-8], [2.0**-8], [float("nan")]]], dtype=torch.bfloat16)
    assert float(oracle.combine(partials, torch.tensor([[0, 3, 3, -1]]))) == 1 + 2.0**-7


def test_wide_weight_scales() -> None:
    """Scales over all of sm_90a's range mixed inside a row, against float64."""
    g = torch.Generator().manual_seed(1)
    (rank,) = make_world(WorldShape((4,), 1, 1, 256, 256), 61)
    l1 = rank.l1[0], torch.randint(100, 137, (1, 512, 8), dtype=torch.uint8, generator=g)
    l2 = rank.l2[0], torch.randint(3, 137, (1, 256, 8), dtype=torch.uint8, generator=g)
    world = [dataclasses.replace(rank, l1=l1, l2=l2)]
    done1, done2 = transform_weights_for_mega_moe(l1, l2, target="sm_90a")
    options = Options("situ", None, 4.0, 25.0)
    ((y, _),) = independent(world, options)
    for pairs in ((l1, l2), (done1, done2)):
        (out,) = mega_moe_reference([dataclasses.replace(rank, l1=pairs[0], l2=pairs[1])], options)
        check_close(out.y, y, "y")


def test_k3_widths() -> None:
    """One expert and few tokens at the model's widths, through the sm_90a layout."""
    shape = WorldShape((3,), 1, 1, 3584, 3072)
    (rank,) = make_world(shape, 67, kind="exact", target="sm_90a")
    (out,) = mega_moe_reference([rank], SITU)
    (w1, s1), (w2, s2) = restore_weights_from_mega_moe(rank.l1, rank.l2)
    ((y, _),) = independent([dataclasses.replace(rank, l1=(w1, s1), l2=(w2, s2))], SITU)
    np.testing.assert_array_equal(out.y.double().numpy(), y)
    assert data.exact_bound(16) < 1 << 24
