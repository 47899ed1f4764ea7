"""Generators and metrics: determinism, what routings promise, and that exact sums are exact in any order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deep_gemm_k3.testing import data, metrics, oracle
from deep_gemm_k3.testing.data import WorldShape, make_routed, make_shared, make_world
from deep_gemm_k3.testing.draws import Draws
from deep_gemm_k3.testing.routing import ROUTINGS, RoutingShape
from deep_gemm_k3.testing.world import mega_moe_reference
from deep_gemm_k3.utils.quantize import dequantize_e4m3, quantize_e4m3_blocks, unpack_ue8m0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products: a thread pool costs more than it saves, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_same_seed_same_bits_and_ranks_do_not_matter() -> None:
    a = make_world(WorldShape((4, 4), 4, 2, 256, 128, 3), 7)
    b = make_world(WorldShape((4, 4), 4, 2, 256, 128, 3), 7)
    other = make_world(WorldShape((4, 4), 4, 2, 256, 128, 3), 8)
    alone = make_world(WorldShape((4,), 4, 2, 256, 128, 3), 7)
    for i in range(2):
        metrics.assert_bitwise(a[i].routed.x, b[i].routed.x)
        metrics.assert_bitwise(a[i].l1[0], b[i].l1[0])
        assert metrics.bitwise_report(a[i].routed.x, other[i].routed.x) is not None
    metrics.assert_bitwise(torch.cat((a[0].l2[0], a[1].l2[0])), alone[0].l2[0])
    assert a[0].shared is not None
    assert a[1].shared is not None
    metrics.assert_bitwise(a[0].shared.x, a[1].shared.x)
    assert metrics.bitwise_report(a[0].shared.l1, a[1].shared.l1) is not None


@pytest.mark.parametrize("kind", ["random", "exact"])
def test_torch_defaults_do_not_matter(kind: str) -> None:
    """Upstream's init_dist makes BF16 the default dtype and CUDA the default device; "meta" stands in for the latter."""
    shape = WorldShape((4, 3), 4, 3, 256, 128, 3)
    options = oracle.Options("situ", None, 4.0, 25.0)
    before = make_world(shape, 7, "k3_router", kind, "sm_90a")
    expected = mega_moe_reference(before, options)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        after = make_world(shape, 7, "k3_router", kind, "sm_90a")
        outputs = mega_moe_reference(after, options)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for a, b, x, y in zip(before, after, expected, outputs, strict=True):
        metrics.assert_bitwise(b.routed.topk_weights, a.routed.topk_weights)
        metrics.assert_bitwise(b.l1[0], a.l1[0])
        metrics.assert_bitwise(y.y, x.y)
        assert x.shared_y is not None
        assert y.shared_y is not None
        metrics.assert_bitwise(y.shared_y, x.shared_y)


@pytest.mark.parametrize("name", list(ROUTINGS))
@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "ranks"), [(0, 8, 2, 2), (64, 896, 16, 8), (33, 4, 6, 2), (5, 1, 1, 1)]
)
def test_routings(name: str, tokens: int, experts: int, topk: int, ranks: int) -> None:
    idx, weights = ROUTINGS[name](RoutingShape(tokens, experts, topk, ranks), Draws(1))
    assert (idx.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert list(idx.shape) == list(weights.shape) == [tokens, topk]
    assert bool(((idx >= -1) & (idx < experts)).all())
    assert bool(torch.isfinite(weights).all())
    if not tokens:
        return
    distinct = [len(set(row[row >= 0].tolist())) == int((row >= 0).sum()) for row in idx]
    if name == "duplicates":
        assert topk == 1 or not any(distinct)
    else:
        assert all(distinct)
    if name == "hot_rank":
        assert bool((idx[idx >= 0] >= experts - experts // ranks).all())
    if name == "hot_expert":
        assert idx[:, 0].unique().numel() == 1
    if name == "holes":
        assert bool((idx[0] == -1).all())
    if name == "k3_router" and topk <= experts:
        assert torch.allclose(weights.sum(1), torch.ones(tokens))


def summed_in(order: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """FP32 sum of ``products`` [..., K] one after the other in ``order``."""
    total = torch.zeros(products.shape[:-1])
    for k in order.tolist():
        total = total + products[..., k]
    return total


def assert_any_order(products: torch.Tensor) -> torch.Tensor:
    """``products`` float32 [..., K] sum to the same FP32 number forwards, backwards, shuffled, and in float64."""
    k = products.size(-1)
    exact = products.double().sum(-1)
    for order in (
        torch.arange(k),
        torch.arange(k - 1, -1, -1),
        torch.randperm(k),
        products.abs().flatten(0, -2).sum(0).argsort(),
    ):
        assert torch.equal(summed_in(order, products).double(), exact)
    assert float((products.double().abs().sum(-1)).max()) < 2**24 * float(products[products != 0].abs().min())
    return exact


@pytest.mark.parametrize(
    "options", [oracle.Options("situ", None, 4.0, 25.0), oracle.Options("swiglu"), oracle.Options("swiglu", 2048.0)]
)
def test_exact_sums_are_exact_in_any_order(options: oracle.Options) -> None:
    shape = WorldShape((4,), 2, 2, 1536, 640, 4, 1280, 640)
    (rank,) = make_world(shape, 3, "duplicates", "exact")
    x = dequantize_e4m3(rank.routed.x, rank.routed.x_sf)
    l1, l2 = oracle.dequantize_expert(rank.l1, 1, True), oracle.dequantize_expert(rank.l2, 1, False)
    rows = torch.cat((torch.arange(20), torch.arange(640, 660)))
    gate_up = assert_any_order(x[:, None] * l1[None, rows])
    assert torch.equal(gate_up, (gate_up / 1024).round() * 1024)
    assert gate_up.unique().numel() > 3
    gate, up = oracle.gemm(x, l1).to(torch.bfloat16).chunk(2, 1)
    hidden = oracle.activate(gate, up, options) * 0.25
    assert 0 < float((hidden == 0).float().mean()) < 1
    codes, scales = quantize_e4m3_blocks(hidden)
    assert_any_order(dequantize_e4m3(codes, scales)[:, None] * l2[None, :20])
    shared = rank.shared
    assert shared is not None
    assert_any_order(shared.x.float()[:, None] * shared.l1.float()[None, rows])
    gate, up = oracle.gemm(shared.x.float(), shared.l1.float()).to(torch.bfloat16).chunk(2, 1)
    hidden = oracle.activate(gate, up, options).to(torch.bfloat16).float()
    assert_any_order(hidden[:, None] * shared.l2.float()[None, :20])


def test_exact_combine_is_exact_in_any_order() -> None:
    shape = WorldShape((16,), 4, 16, 256, 256)
    (rank,) = make_world(shape, 5, "duplicates", "exact")
    for options in (oracle.Options("situ", None, 4.0, 25.0), oracle.Options("swiglu")):
        partials = torch.zeros(16, 16, 256, dtype=torch.bfloat16)
        oracle.run_local_experts([rank.routed], (rank.l1, rank.l2), 0, options, [partials])
        for column in range(0, 256, 16):  # the unit differs from column to column
            assert_any_order(partials.float()[:, :, column : column + 1].transpose(1, 2).contiguous())


def test_exact_inputs_use_many_codes_and_scales() -> None:
    shape = WorldShape((32,), 1, 1, 1024, 1024)
    (rank,) = make_world(shape, 9, kind="exact")
    assert unpack_ue8m0(rank.routed.x_sf).unique().numel() == 8
    assert rank.routed.x.view(torch.uint8).unique().numel() == 16
    assert (rank.l1[0].view(torch.uint8) & 15).unique().numel() == 8  # four magnitudes of either sign
    assert (rank.l2[0].view(torch.uint8) & 15).unique().numel() >= 14
    assert rank.l2[1].unique().numel() >= 9
    with pytest.raises(AssertionError, match="topk: wanted at most 42, given 43"):
        data.exact_bound(43)


def test_shapes_of_the_parts() -> None:
    shape = WorldShape((3, 5), 4, 2, 256, 128, 6, 384, 256)
    routed = make_routed(shape, 1, 1)
    assert [list(t.shape) for t in (routed.x, routed.x_sf, routed.topk_idx)] == [[5, 256], [5, 2], [5, 2]]
    shared = make_shared(shape, 1, 0)
    assert [list(t.shape) for t in (shared.x, shared.l1, shared.l2)] == [[6, 384], [512, 384], [384, 256]]
    l1, l2 = data.expert_range_weights(shape, 1, range(1, 4), target="sm_90a")
    assert (list(l1[0].shape), list(l2[0].shape)) == ([3, 4, 2, 4352], [3, 4, 1, 4352])


# ---------------------------------------------------------------------------------------------------------------- metrics
def test_relative_l2() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    assert metrics.compare(reference, reference) == metrics.Comparison(0.0, 0.0, 0)
    moved = reference.clone()
    moved[2, 1] = 0.1
    result = metrics.compare(moved, reference)
    assert (result.worst_row_index, result.worst_row) == (2, pytest.approx(0.1))
    assert result.tensor == pytest.approx(0.1 / 26**0.5)
    moved[1, 0] = 1e-9
    assert metrics.compare(moved, reference).worst_row == float("inf")
    for bad in (float("nan"), float("inf")):
        moved = reference.clone()
        moved[0, 0] = bad
        assert not metrics.compare(moved, reference).within()
        assert metrics.relative_l2(moved, reference) == float("inf")
        with pytest.raises(AssertionError, match="result: relative L2 inf, worst row inf"):
            metrics.assert_close(moved, reference)
    assert metrics.compare(reference[:0], reference[:0]).within()


def test_bitwise_report() -> None:
    a = torch.zeros(4, 8, dtype=torch.bfloat16)
    b = a.clone()
    assert metrics.bitwise_report(a, b) is None
    b[2, 5] = -0.0
    b[3, 0] = 1.0
    report = metrics.bitwise_report(a, b)
    assert report is not None
    assert "2 of 32 elements differ" in report
    assert "[2, 5]: 0.0 (0x0), wanted -0.0 (0x8000)" in report
    assert "in 2 of 4 rows: 2, 3" in report
    with pytest.raises(AssertionError, match="y: 2 of 32"):
        metrics.assert_bitwise(a, b, "y")
    assert "given torch.float32" in (metrics.bitwise_report(a.float(), a) or "")
    nan = torch.full((3,), float("nan"))
    assert metrics.bitwise_report(nan, nan.clone()) is None
