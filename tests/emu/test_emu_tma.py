"""Tiled tensor copies in all their dimensions, element types, swizzles, reductions and multicasts, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import run_ptx
from test_emu_async import CASES, SWIZZLES, reference_box, run_tma, swizzled

from deep_gemm_k3.emulator import Device, EmulatorError, TensorMap

TYPES = {
    "uint8": torch.uint8, "uint16": torch.int16, "uint32": torch.int32, "int32": torch.int32, "uint64": torch.int64,
    "int64": torch.int64, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
    "bfloat16": torch.bfloat16, "float32_ftz": torch.float32, "tfloat32": torch.float32, "tfloat32_ftz": torch.float32,
}  # fmt: skip
FLOATS = [name for name in TYPES if "float" in name]
REDUCTIONS = ["add", "min", "max", "inc", "dec", "and", "or", "xor"]


def values(shape: list[int], name: str) -> torch.Tensor:
    """Small whole numbers, of which every sum is exact."""
    return torch.randint(0, 100, shape).to(TYPES[name])


def box_bytes(box: torch.Tensor, swizzle: str) -> np.ndarray:
    """Shared memory that holds a box."""
    raw = box.contiguous().view(torch.uint8).numpy().ravel()
    out = np.zeros(-(-len(raw) // 128) * 128, np.uint8)
    out[swizzled(np.arange(len(raw)), swizzle)] = raw
    return out


def reduced(old: torch.Tensor, new: torch.Tensor, op: str) -> torch.Tensor:
    """What a reduction leaves; of unsigned numbers that are all small."""
    match op:
        case "add":
            return old + new
        case "min":
            return torch.minimum(old, new)
        case "max":
            return torch.maximum(old, new)
        case "inc":
            return torch.where(old >= new, torch.zeros_like(old), old + 1)
        case "dec":
            return torch.where((old == 0) | (old > new), new, old - 1)
        case "and":
            return old & new
        case "or":
            return old | new
        case "xor":
            return old ^ new
        case _:
            return new


def store(tensor: torch.Tensor, name: str, box: list[int], at: list[int], swizzle: str, reduce: str) -> None:
    """Stores or reduces a box of small numbers into `tensor` and compares all of it."""
    content = values(box[::-1], name)
    want = tensor.clone()
    for index in np.ndindex(*box[::-1]):
        place = tuple(i + a for i, a in zip(index, at[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, tensor.shape, strict=True)):
            want[place] = reduced(tensor[place], content[index], reduce)
    text = "cp.reduce.async.bulk.tensor" if reduce else "cp.async.bulk.tensor"
    run_tma(tensor, name, box, at, swizzle, store=text, reduce=reduce, content=box_bytes(content, swizzle))
    assert torch.equal(tensor, want)


@pytest.mark.parametrize("reduce", ["", "add"])
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_stores_of_every_dimension_count(case: int, swizzle: str, reduce: str) -> None:
    shape, box, at = CASES[case]
    box = [min(box[0], SWIZZLES[swizzle][0] // 2 if swizzle != "none" else 256), *box[1:]]
    store(values(shape, "uint16"), "uint16", box, at, swizzle, reduce)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", ["uint32", "int32", "uint64", "int64"])
def test_reductions_of_integers(name: str, reduce: str) -> None:
    store(values([20, 16], name), name, [8, 8], [4, 15], "none", reduce)


@pytest.mark.parametrize("reduce", ["add", "min", "max"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_reductions_of_floats(name: str, reduce: str) -> None:
    store(values([20, 16], name), name, [8, 8], [-3, 15], "none", reduce)


def test_floats_have_no_bits_to_reduce() -> None:
    tensor, content = values([8, 8], "float32"), np.zeros(256, np.uint8)
    with pytest.raises(EmulatorError, match=r"tensor-map: \.xor does not exist for elements that are floats"):
        run_tma(
            tensor, "float32", [8, 8], [0, 0], "none",
            store="cp.reduce.async.bulk.tensor", reduce="xor", content=content,
        )  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_loads_of_every_type(name: str) -> None:
    tensor = values([12, 32], name)
    got = run_tma(tensor, name, [16, 4], [20, 10], "none")
    assert np.array_equal(got, reference_box(tensor, [16, 4], [20, 10], None, 0))


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", FLOATS)
def test_what_is_outside_is_nan_on_demand(name: str, case: int) -> None:
    shape, box, at = CASES[case]
    tensor = values(shape, name)
    got = torch.from_numpy(run_tma(tensor, name, box, at, "none", nan=True)).view(TYPES[name])
    want = torch.from_numpy(reference_box(tensor, box, at, None, float("nan"))).view(TYPES[name])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("at", [[64, 0], [-32, 3], [3, 40], [3, -8], [2**31 - 1, 0], [-(2**31), -(2**31)]])
def test_boxes_that_lie_outside_as_a_whole_are_zero_and_store_nothing(at: list[int]) -> None:
    tensor = values([40, 64], "uint16")
    before = tensor.clone()
    assert not run_tma(tensor, "uint16", [32, 8], at, "64B").any()
    run_tma(tensor, "uint16", [32, 8], at, "64B", store="cp.async.bulk.tensor", content=np.full(512, 9, np.uint8))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("steps", [[1, 2, 1], [3, 1, 2], [8, 8, 8]])
def test_traversal_strides_in_every_dimension(steps: list[int]) -> None:
    tensor = values([16, 20, 64], "float32")
    box = [4 * steps[0], 3 * steps[1], 2 * steps[2]]
    for at in ([0, 0, 0], [-5, 3, 9], [50, 16, -1]):
        got = run_tma(tensor, "float32", box, at, "none", steps)
        assert np.array_equal(got, reference_box(tensor, box, at, steps, 0))


MULTICAST = """.reg .b32 %r, %t, %n, %a, %v, %s, %x, %y; .reg .b16 %m; .reg .b64 %map, %o, %q; .reg .pred %p, %w, %u;
.shared .align 1024 .b8 box[SIZE]; .shared .align 8 .b64 bar;
mov.u64 %q, map; cvta.param.u64 %map, %q; mov.u32 %t, %tid.x; mov.u32 %r, %cluster_ctarank; ld.param.u64 %o, [out];
setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared::cta.b64 [bar], 1; @%p fence.mbarrier_init.release.cluster;
ld.param.u64 %q, [expected]; mad.wide.u32 %q, %r, 4, %q; ld.global.u32 %n, [%q];
@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %n;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ld.param.u64 %q, [masks]; mad.wide.u32 %q, %r, 4, %q; ld.global.u32 %v, [%q]; cvt.u16.u32 %m, %v; setp.ne.u32 %u, %v, 0; and.pred %u, %u, %p;
mov.u32 %s, box; mad.lo.u32 %s, %r, PART, %s; mov.u32 %x, 8; mul.lo.u32 %y, %r, 4;
@%u cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%s], [%map, {%x, %y}], [bar], %m;
TRY: mbarrier.try_wait.parity.shared::cta.b64 %w, [bar], 0; @!%w bra TRY;
mad.lo.u32 %v, %r, SIZE, 0; cvt.u64.u32 %q, %v; add.u64 %o, %o, %q; mad.wide.u32 %o, %t, 4, %o; mov.u32 %s, box; mad.lo.u32 %s, %t, 4, %s; mov.u32 %a, %t;
NEXT: shl.b32 %x, %a, 2; setp.ge.u32 %w, %x, SIZE; @%w bra DONE; div.u32 %x, %x, PART;
ld.param.u64 %q, [masks]; mad.wide.u32 %q, %x, 4, %q; ld.global.u32 %v, [%q]; shr.u32 %v, %v, %r; and.b32 %v, %v, 1; setp.ne.u32 %u, %v, 0; mov.u32 %v, 0;
@%u ld.shared.b32 %v, [%s]; st.global.b32 [%o], %v; add.u64 %o, %o, 128; add.u32 %s, %s, 128; add.u32 %a, %a, 32; bra NEXT; DONE:
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


@pytest.mark.parametrize("adversary", ["random", "earliest", "latest"])
@pytest.mark.parametrize("masks", [[15, 15, 15, 15], [1, 2, 4, 8], [14, 0, 9, 6], [8, 0, 0, 1]])
def test_multicast_to_some_of_a_cluster(masks: list[int], adversary: str) -> None:
    """Every CTA's box goes to the CTAs of its mask, at the same place in each, and each one's own barrier counts it."""
    part, size = 4 * 128, 4 * 4 * 128
    tensor = values([16, 128], "uint16")
    tensor_map = TensorMap(tensor, "uint16", [128, 16], [256], [64, 4], swizzle="128B")
    arriving = [[bool(mask >> rank & 1) for mask in masks] for rank in range(4)]
    expected = np.array([part * sum(row) for row in arriving], np.uint32)
    out = np.zeros((4, size), np.uint8)
    body = MULTICAST.replace("SIZE", str(size)).replace("PART", str(part))
    params = ".param .align 64 .b8 map[128], .param .u64 out, .param .u64 masks, .param .u64 expected"
    device = Device(adversary=adversary, race_detection=True)
    run_ptx(
        body, params, [tensor_map, out, np.array(masks, np.uint32), expected], grid=4, cluster=4, device=device
    )  # fmt: skip
    assert not device.findings, device.findings
    for rank in range(4):
        want = np.zeros(size, np.uint8)
        for source in range(4):
            if arriving[rank][source]:
                box = reference_box(tensor, [64, 4], [8, 4 * source], None, 0)
                want[swizzled(source * part + np.arange(part), "128B")] = box
        assert np.array_equal(out[rank], want)


PREFIX = """.reg .b32 %a; .reg .b64 %m; .shared .align 128 .b8 box[1024]; .shared .align 8 .b64 bar; mov.u64 %m, map; cvta.param.u64 %m, %m; mov.u32 %a, 0;
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%m, {%a,%a,%a}], [bar];", "3 dimensions with a map of 2"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%m, {%a,%a,%a}], [bar];", "wanted 2 coordinates"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box+64], [%m, {%a,%a}], [bar];", "misaligned"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%m+32, {%a,%a}], [bar];", "misaligned"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%m, {%a,%a}], [bar];", "mbarrier"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes [box], [%m, {%a,%a,%a,%a,%a}], [bar];", "PTX line 7: .*gather4"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%m, {%a,%a,%a,%a,%a}], [box];", "PTX line 7: .*scatter4"),
        ("cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [box], [%m, {%a,%a,%a}], [bar], {%h};", "PTX line 7: .*im2col"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.im2col_no_offs.bulk_group [%m, {%a,%a}], [box];", "PTX line 7: .*im2col"),
        ("cp.async.bulk.prefetch.tensor.2d.L2.global.tile.sideways [%m, {%a,%a}];", "PTX line 7: .*sideways"),
        ("cp.async.bulk.prefetch.sideways [%m], 16;", "PTX line 7: .*"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_or_has_no_model_is_an_error(text: str, message: str) -> None:
    tensor_map = TensorMap(torch.zeros(16, 64, dtype=torch.int16), "uint16", [64, 16], [128], [8, 8])
    with pytest.raises(EmulatorError, match=message):
        run_ptx(PREFIX + "\n" + text, ".param .align 64 .b8 map[128]", [tensor_map], block=1)


def test_prefetches_read_the_map_and_nothing_else() -> None:
    tensor_map = TensorMap(torch.zeros(16, 64, dtype=torch.int16), "uint16", [64, 16], [128], [8, 8])
    text = """prefetch.tensormap [%m]; cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%m, {%a,%a}];
    cp.async.bulk.prefetch.tensor.2d.L2.global [%m, {%a,%a}]; ld.param.u64 %m, [x]; cp.async.bulk.prefetch.L2.global [%m], 64;"""
    device = run_ptx(
        PREFIX + text,
        ".param .align 64 .b8 map[128], .param .u64 x",
        [tensor_map, np.zeros(64, np.uint8)],
        block=1,
    )
    assert not device.findings
