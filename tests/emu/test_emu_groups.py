"""shfl, vote, match, redux, elect and bar.red over all kinds of groups of lanes, against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from emu_support import run_ptx

from deep_gemm_k3.emulator import Device

RNG = np.random.default_rng(31)
LANE = np.arange(32)
MASKS = [0xFFFFFFFF, 0x0000FFF0, 0x80000001, 0x55555555, 0x00000100]


def lanes_of(mask: int) -> np.ndarray:
    return LANE[[bool(mask >> i & 1) for i in range(32)]]


def run_group(text: str, x: np.ndarray, mask: int, *, target: str = "sm_90a", seed: int = 0) -> np.ndarray:
    """`text` by the lanes of the mask: %v is theirs, %m the mask, %d the result (32 bits) and %q a predicate, bit 1 of 2."""
    width = 8 * x.dtype.itemsize
    body = f""".reg .b{width} %v; .reg .b32 %t, %m, %d, %e; .reg .f32 %f, %g; .reg .pred %p, %q, %in; .reg .b64 %x, %y; mov.u32 %t, %tid.x; mov.b32 %m, {mask};
    ld.param.u64 %x, [x]; mad.wide.u32 %x, %t, {x.dtype.itemsize}, %x; ld.global.b{width} %v, [%x]; ld.param.u64 %y, [y]; mad.wide.u32 %y, %t, 8, %y;
    setp.ne.u32 %q, 0, 0; mov.b32 %d, 0; shr.u32 %e, %m, %t; and.b32 %e, %e, 1; setp.ne.u32 %in, %e, 0; @!%in bra OUT;
    {text} selp.u32 %e, 1, 0, %q; st.global.v2.b32 [%y], {{%d, %e}}; OUT:"""
    out = np.full((32, 2), 0xDEAD, np.uint32)
    device = Device(arch=target, seed=seed)
    run_ptx(body, ".param .u64 x, .param .u64 y", [x, out], device=device, target=target)
    assert not device.findings, device.findings
    others = np.setdiff1d(LANE, lanes_of(mask))
    assert np.all(out[others] == 0xDEAD)
    return out[lanes_of(mask)]


REDUCTIONS: dict[str, tuple[type, Callable[[np.ndarray], object]]] = {
    "add.u32": (np.uint32, np.sum), "add.s32": (np.int32, np.sum), "min.u32": (np.uint32, np.min), "max.u32": (np.uint32, np.max),
    "min.s32": (np.int32, np.min), "max.s32": (np.int32, np.max), "and.b32": (np.uint32, np.bitwise_and.reduce),
    "or.b32": (np.uint32, np.bitwise_or.reduce), "xor.b32": (np.uint32, np.bitwise_xor.reduce),
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_redux(name: str, mask: int) -> None:
    dtype, function = REDUCTIONS[name]
    x = RNG.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
    got = run_group(f"redux.sync.{name} %d, %v, %m;", x, mask)[:, 0]
    with np.errstate(over="ignore"):
        want = np.array(function(x.view(dtype)[lanes_of(mask)])).astype(np.int64) & 0xFFFFFFFF
    assert np.all(got == want)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("mode", ["", ".abs", ".NaN", ".abs.NaN"])
@pytest.mark.parametrize("with_nan", [False, True])
def test_redux_of_floats(op: str, mode: str, mask: int, with_nan: bool) -> None:
    x = RNG.standard_normal(32).astype(np.float32)
    if with_nan:
        x[lanes_of(mask)[0]] = np.nan
    got = run_group(f"mov.b32 %f, %v; redux.sync.{op}{mode}.f32 %g, %f, %m; mov.b32 %d, %g;", x, mask, target="sm_100a")
    values = np.abs(x[lanes_of(mask)]) if "abs" in mode else x[lanes_of(mask)]
    if with_nan and ("NaN" in mode or len(values) == 1):
        assert np.all(got[:, 0] == 0x7FFFFFFF)
    else:
        want = np.nanmin(values) if op == "min" else np.nanmax(values)
        assert np.all(got[:, 0].view(np.float32) == want)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_match(kind: str, mask: int) -> None:
    for values in (RNG.integers(0, 4, 32), np.full(32, 7), RNG.integers(0, 2, 32) << (0 if kind == "b32" else 40)):
        x = values.astype(np.uint32 if kind == "b32" else np.uint64)
        lanes = lanes_of(mask)
        got = run_group(f"match.any.sync.{kind} %d, %v, %m;", x, mask)[:, 0]
        assert got.tolist() == [sum(1 << int(j) for j in lanes if x[j] == x[i]) for i in lanes]
        got = run_group(f"match.all.sync.{kind} %d|%q, %v, %m;", x, mask)
        same = bool(np.all(x[lanes] == x[lanes[0]]))
        assert np.all(got[:, 0] == (mask if same else 0)) and np.all(got[:, 1] == same)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_vote(density: float, mask: int) -> None:
    x = (RNG.random(32) < density).astype(np.uint32)
    flags = x[lanes_of(mask)].astype(bool)
    for mode, want in {"all": flags.all(), "any": flags.any(), "uni": flags.all() or not flags.any()}.items():
        got = run_group(f"setp.ne.u32 %p, %v, 0; vote.sync.{mode}.pred %q, %p, %m;", x, mask)
        assert np.all(got[:, 1] == want)
    got = run_group("setp.ne.u32 %p, %v, 0; vote.sync.ballot.b32 %d, %p, %m;", x, mask)
    assert np.all(got[:, 0] == sum(1 << int(i) for i in lanes_of(mask) if x[i]))
    got = run_group("setp.ne.u32 %p, %v, 0; vote.sync.all.pred %q, !%p, %m;", x, mask)
    assert np.all(got[:, 1] == (not flags.any()))


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode: str, width: int) -> None:
    """Within segments of `width` lanes; the predicate says whether the source lay inside."""
    x = RNG.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    for by in (0, 1, 3, 17, 31):
        got = run_group(f"shfl.sync.{mode}.b32 %d|%q, %v, {by}, {clamp}, %m;", x, 0xFFFFFFFF)
        first = LANE // width * width
        source = {"up": LANE - by, "down": LANE + by, "bfly": LANE ^ by, "idx": first + by % width}[mode]
        inside = source >= first if mode == "up" else source < first + width
        assert np.array_equal(got[:, 1], inside)
        assert np.array_equal(got[:, 0], np.where(inside, x[source % 32], x))


@pytest.mark.parametrize("mask", MASKS)
def test_elect(mask: int) -> None:
    for seed in range(3):
        got = run_group("elect.sync %d|%q, %m;", np.zeros(32, np.uint32), mask, seed=seed)
        assert len(set(got[:, 0].tolist())) == 1 and got[:, 1].sum() == 1
        leader = int(got[0, 0])
        assert mask >> leader & 1 and got[lanes_of(mask) == leader, 1] == 1


@pytest.mark.parametrize(("op", "kind"), [("popc", "u32"), ("and", "pred"), ("or", "pred")])
@pytest.mark.parametrize("form", ["bar.red", "barrier.red.aligned", "barrier.cta.red.aligned"])
def test_reductions_at_barriers(form: str, op: str, kind: str) -> None:
    for density in (0.0, 0.4, 1.0):
        x, out = (RNG.random(96) < density).astype(np.uint32), np.zeros(96, np.uint32)
        result = "%d, 2, 96, %p" if op == "popc" else "%q, 2, 96, !%p"
        text = f""".reg .b32 %t, %v, %d; .reg .pred %p, %q; .reg .b64 %x, %y; mov.u32 %t, %tid.x; ld.param.u64 %x, [x]; mad.wide.u32 %x, %t, 4, %x; ld.param.u64 %y, [y]; mad.wide.u32 %y, %t, 4, %y;
        ld.global.b32 %v, [%x]; setp.ne.u32 %p, %v, 0; {form}.{op}.{kind} {result}; {"" if op == "popc" else "selp.u32 %d, 1, 0, %q;"} st.global.b32 [%y], %d;"""
        run_ptx(text, ".param .u64 x, .param .u64 y", [x, out], block=96)
        negated = 1 - x
        assert np.all(out == {"popc": x.sum(), "and": negated.all(), "or": negated.any()}[op])
