"""atom and red: every operation, type and vector, in every space, against numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import run_ptx

from deep_gemm_k3.emulator import Device

RNG = np.random.default_rng(23)
SPACES = ["global", "generic", "shared::cta", "shared::cluster"]
INTEGERS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32, "b64": np.uint64}
OPERATIONS = {
    "add": ["u32", "s32", "u64"], "min": ["u32", "s32", "u64", "s64"], "max": ["u32", "s32", "u64", "s64"], "inc": ["u32"],
    "dec": ["u32"], "and": ["b32", "b64"], "or": ["b32", "b64"], "xor": ["b32", "b64"], "exch": ["b32", "b64"], "cas": ["b32", "b64"],
}  # fmt: skip
PAIRS = [(op, kind) for op, kinds in OPERATIONS.items() for kind in kinds]


def apply(op: str, old: np.ndarray, value: np.ndarray, swap: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return {
            "add": lambda: old + value,
            "min": lambda: np.minimum(old, value),
            "max": lambda: np.maximum(old, value),
            "inc": lambda: np.where(old >= value, 0, old + 1),
            "dec": lambda: np.where((old == 0) | (old > value), value, old - 1),
            "and": lambda: old & value,
            "or": lambda: old | value,
            "xor": lambda: old ^ value,
            "exch": lambda: value,
            "cas": lambda: np.where(old == value, swap, old),
        }[op]().astype(old.dtype)


def wild(dtype: type, count: int = 64) -> np.ndarray:
    """Numbers of all sizes; some are small, so that equal ones meet."""
    size = np.dtype(dtype).itemsize
    raw = np.frombuffer(RNG.bytes(size * count), f"u{size}").copy()
    raw[::3] %= 4
    return raw.view(dtype)


def run_atomic(
    text: str, width: int, arrays: list[np.ndarray], *, space: str = "global"
) -> tuple[np.ndarray, np.ndarray]:
    """`text` on [%m] with %v and %s, old value in %o, one cell per thread: (returned, left behind)."""
    cells, values, swaps = arrays
    size = width // 8
    shared = "shared" in space
    body = f""".reg .b{width} %v, %s, %o; .reg .b32 %t, %ms; .reg .b64 %x, %c, %m; .shared .align 16 .b8 box[{size * len(cells)}];
    mov.u32 %t, %tid.x; ld.param.u64 %x, [v]; mad.wide.u32 %x, %t, {size}, %x; ld.global.b{width} %v, [%x];
    ld.param.u64 %x, [s]; mad.wide.u32 %x, %t, {size}, %x; ld.global.b{width} %s, [%x];
    ld.param.u64 %c, [m]; mad.wide.u32 %c, %t, {size}, %c; mov.u64 %m, %c; mov.b{width} %o, 0;"""
    if shared:
        body += f"ld.global.b{width} %o, [%c]; mov.u32 %ms, box; mad.lo.u32 %ms, %t, {size}, %ms; st.shared.b{width} [%ms], %o; cvt.u64.u32 %m, %ms; mov.b{width} %o, 0;"
    body += text
    if shared:
        body += f"ld.shared.b{width} %v, [%ms]; st.global.b{width} [%c], %v;"
    body += f"ld.param.u64 %x, [o]; mad.wide.u32 %x, %t, {size}, %x; st.global.b{width} [%x], %o;"
    left, returned = cells.copy(), np.zeros_like(cells)
    params = ", ".join(f".param .u64 {name}" for name in "vsmo")
    device = run_ptx(
        body, params, [values, swaps, left, returned], block=len(cells), device=Device(race_detection=True)
    )
    assert not device.findings, device.findings
    return returned, left


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("op", "kind"), PAIRS)
def test_integers(op: str, kind: str, space: str) -> None:
    arrays = [wild(INTEGERS[kind]) for _ in range(3)]
    width = int(kind[1:])
    where = "" if space == "generic" else f".{space}"
    swap = ", %s" if op == "cas" else ""
    want = apply(op, *arrays)
    returned, left = run_atomic(f"atom.acq_rel.gpu{where}.{op}.{kind} %o, [%m], %v{swap};", width, arrays, space=space)
    assert np.array_equal(returned, arrays[0]) and np.array_equal(left, want)
    if op not in ("exch", "cas"):
        _, left = run_atomic(f"red.release.sys{where}.{op}.{kind} [%m], %v;", width, arrays, space=space)
        assert np.array_equal(left, want)


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("space", SPACES)
def test_floats(kind: str, space: str) -> None:
    dtype = {"f32": np.float32, "f64": np.float64}[kind]
    arrays = [RNG.standard_normal(64).astype(dtype) for _ in range(3)]
    where = "" if space == "generic" else f".{space}"
    returned, left = run_atomic(f"atom{where}.add.{kind} %o, [%m], %v;", int(kind[1:]), arrays, space=space)
    assert np.array_equal(returned, arrays[0]) and np.array_equal(left, arrays[0] + arrays[1])


def halves(kind: str, count: int) -> torch.Tensor:
    return torch.randn(count).to(torch.float16 if kind.startswith("f16") else torch.bfloat16)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
def test_halves(kind: str) -> None:
    per = 2 if "x2" in kind else 1
    tensors = [halves(kind, 64 * per) for _ in range(3)]
    arrays = [t.view(torch.int16).numpy().view(np.uint32 if per == 2 else np.uint16) for t in tensors]
    returned, left = run_atomic(f"atom.global.add.noftz.{kind} %o, [%m], %v;", 16 * per, arrays)
    want = (tensors[0] + tensors[1]).view(torch.int16).numpy().view(arrays[0].dtype)
    assert np.array_equal(returned, arrays[0]) and np.array_equal(left, want)


VECTORS = [("add", "f32", 2), ("add", "f32", 4)] + [
    (op, kind, n)
    for op in ("add", "min", "max")
    for kind, ns in (("f16", (2, 4, 8)), ("bf16", (2, 4, 8)), ("f16x2", (2, 4)), ("bf16x2", (2, 4)))
    for n in ns
]


@pytest.mark.parametrize(("op", "kind", "n"), VECTORS)
def test_vectors(op: str, kind: str, n: int) -> None:
    dtype = torch.float32 if kind == "f32" else torch.float16 if kind.startswith("f16") else torch.bfloat16
    width = 32 if kind == "f32" or "x2" in kind else 16
    per = width * n // (8 * torch.empty(0, dtype=dtype).element_size())
    cells, values = torch.randn(32, per).to(dtype), torch.randn(32, per).to(dtype)
    want = {"add": cells + values, "min": torch.minimum(cells, values), "max": torch.maximum(cells, values)}[op]
    old, size = torch.zeros_like(cells), width // 8
    names = {x: "{" + ",".join(f"%{x}{i}" for i in range(n)) + "}" for x in "vo"}
    noftz = "" if kind == "f32" else ".noftz"
    body = f".reg .b{width} %v<8>, %o<8>; .reg .b32 %t; .reg .b64 %m, %x; mov.u32 %t, %tid.x; ld.param.u64 %m, [m]; mad.wide.u32 %m, %t, {size * n}, %m; ld.param.u64 %x, [v]; mad.wide.u32 %x, %t, {size * n}, %x;"
    body += "".join(f"ld.global.b{width} %v{i}, [%x+{size * i}];" for i in range(n))
    body += f"atom.relaxed.gpu.global.{op}{noftz}.v{n}.{kind} {names['o']}, [%m], {names['v']}; ld.param.u64 %x, [o]; mad.wide.u32 %x, %t, {size * n}, %x;"
    body += "".join(f"st.global.b{width} [%x+{size * i}], %o{i};" for i in range(n))
    first = cells.clone()
    run_ptx(body, ".param .u64 v, .param .u64 m, .param .u64 o", [values, first, old])
    assert torch.equal(first, want) and torch.equal(old, cells)
    again = cells.clone()
    run_ptx(body.replace(f"{names['o']}, [%m]", "[%m]").replace("atom.", "red."), ".param .u64 v, .param .u64 m, .param .u64 o", [values, again, old])  # fmt: skip
    assert torch.equal(again, want)


@pytest.mark.parametrize("op", ["exch", "cas"])
def test_sixteen_bytes(op: str) -> None:
    cells, values, swaps, old = (RNG.integers(0, 3, (32, 2)).astype(np.uint64) for _ in range(4))
    body = ".reg .b64 %l, %h, %m, %x; .reg .b32 %t; .reg .b128 %v, %s, %o; mov.u32 %t, %tid.x; ld.param.u64 %m, [m]; mad.wide.u32 %m, %t, 16, %m;"
    for name in "vs":
        body += f"ld.param.u64 %x, [{name}]; mad.wide.u32 %x, %t, 16, %x; ld.global.v2.b64 {{%l, %h}}, [%x]; mov.b128 %{name}, {{%l, %h}};"
    body += f"atom.global.{op}.b128 %o, [%m], %v{', %s' if op == 'cas' else ''}; mov.b128 {{%l, %h}}, %o; ld.param.u64 %x, [o]; mad.wide.u32 %x, %t, 16, %x; st.global.v2.b64 [%x], {{%l, %h}};"
    left = torch.from_numpy(cells.view(np.int64).copy())
    run_ptx(body, ".param .u64 v, .param .u64 s, .param .u64 m, .param .u64 o", [values, swaps, left, old])
    same = (cells == values).all(1, keepdims=True)
    assert np.array_equal(left.numpy().view(np.uint64), values if op == "exch" else np.where(same, swaps, cells))
    assert np.array_equal(old, cells)


def test_sixteen_bits_are_compared_and_exchanged() -> None:
    cells, values, swaps = (RNG.integers(0, 3, 64).astype(np.uint16) for _ in range(3))
    returned, left = run_atomic("atom.global.cas.b16 %o, [%m], %v, %s;", 16, [cells, values, swaps])
    assert np.array_equal(returned, cells) and np.array_equal(left, np.where(cells == values, swaps, cells))


@pytest.mark.parametrize("op", ["inc", "dec", "add", "xor"])
def test_all_threads_on_one_cell(op: str) -> None:
    """The values returned are the cell's history, whatever the order."""
    body = f""".reg .b32 %t, %b, %o, %v; .reg .b64 %m, %x; mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mad.lo.u32 %t, %b, 64, %t; add.u32 %v, %t, 1;
    ld.param.u64 %m, [m]; ld.param.u64 %x, [o]; mad.wide.u32 %x, %t, 4, %x; {"mov.u32 %v, 200;" if op in ("inc", "dec") else ""}
    atom.global.{op}.{"b32" if op == "xor" else "u32"} %o, [%m], %v; st.global.u32 [%x], %o;"""
    cell, old = np.full(1, 150 if op == "inc" else 50, np.uint32), np.zeros(256, np.uint32)
    first = int(cell[0])
    run_ptx(body, ".param .u64 m, .param .u64 o", [cell, old], grid=4, block=64, device=Device(seed=3))
    added = np.arange(1, 257)
    if op == "add":
        assert cell[0] == first + added.sum() and len(set(old.tolist())) == 256 and old.min() == first
    elif op == "xor":
        assert cell[0] == first ^ np.bitwise_xor.reduce(added)
    else:
        steps = [(first + i) % 201 if op == "inc" else (first - i) % 201 for i in range(257)]
        assert sorted(old.tolist()) == sorted(steps[:256]) and cell[0] == steps[256]
