"""tcgen05 of kinds f16, tf32 and i8, tensor memory loads, stores and allocation, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import run_ptx
from tensor_support import STEP, body_of_product, place_along_k, place_along_rows, put, run_tensor

from deep_gemm_k3.emulator import Device, EmulatorError

RNG = np.random.default_rng(5)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "s8": torch.int8, "u8": torch.uint8}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1}
NONE = np.zeros((2, 0, 128), np.uint32)


def values(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Small integers: every product and every sum is exact."""
    low = 0 if kind == "u8" else -8
    return torch.from_numpy(RNG.integers(low, 9, shape)).to(DTYPES[kind])


def as_pieces(matrix: torch.Tensor) -> np.ndarray:
    raw = matrix.contiguous().view(torch.uint8).numpy()
    return raw.reshape(matrix.shape[0], -1, 16)


def instruction(a: str, b: str, m: int, n: int, *, d: int = 1, extra: int = 0) -> int:
    return d << 4 | CODES[a] << 7 | CODES[b] << 10 | n >> 3 << 17 | m >> 4 << 24 | extra


def result_place(m: int, n: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CTA, column and lane of every element of D."""
    row, col = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    if group == 1 and m == 128:
        return row * 0, col, row
    if group == 1:  # 64 rows: sixteen in each quarter of the lanes
        return row * 0, col, row // 16 * 32 + row % 16
    if m == 256:
        return row // 128, col, row % 128
    return row // 64, col % (n // 2), row % 64 + 64 * (col // (n // 2))  # half of the columns in the upper lanes


def product(
    kind: str, a: torch.Tensor, b: torch.Tensor, names: tuple[str, str], swizzle: str, *, group: int = 1,
    by_m: bool = False, by_n: bool = False, d: np.ndarray | None = None, a_in_tensor: bool = False, extra: int = 0,
    half: bool = False, seed: int = 0, adversary: str = "random", mask: list[int] | None = None, shift: int = 0,
    races: bool = True,
) -> np.ndarray:  # fmt: skip
    """D (m x n) as 32-bit words of a product over all of k, which may take several instructions."""
    (m, k), n = a.shape, b.shape[0]
    size = a.element_size()
    per = 32 // size  # k of an instruction
    count = k // per
    rows, columns = m // group, n // group
    image = np.zeros((group, 160 * 1024), np.uint8)
    steps = np.zeros(count, STEP)
    at, bases = 0, []
    for matrix, share, across in ((a, rows, by_m), (b, columns, by_n)):
        if across:
            placed = place_along_rows(share * size, k, swizzle)
        else:
            placed = place_along_k(share, k * size // 16, swizzle)
        for c in range(group):
            part = matrix[c * share : (c + 1) * share]
            put(image[c], at, placed, as_pieces(part.T if across else part))
        if across:
            deeper = placed.stride if swizzle != "none" else placed.leading
            advance = [i * (per // 8) * deeper for i in range(count)]
        else:
            advance = [i * (2 * placed.leading if swizzle == "none" else 32) for i in range(count)]
        bases.append([placed.descriptor(at + x) for x in advance])
        at += -(-placed.size // 1024) * 1024
    first_a = 256  # columns of A in tensor memory
    before = np.zeros((group, 256 + 8 * count if a_in_tensor else n, 128), np.uint32)
    before[:, :n] = 0xDEAD
    cta, col, lane = result_place(m, n, group)
    if d is not None:
        before[cta, col, lane] = d
    if a_in_tensor:
        words = a.contiguous().view(torch.uint8).numpy().view(np.uint32)
        for r in range(m):
            c, _, lanes = result_place(m, 2, group)
            for copy in range(2 if group == 2 and m == 128 else 1):
                before[c[r, 0], first_a : first_a + 8 * count, lanes[r, 0] + 64 * copy] = words[r]
    steps["a"], steps["b"] = bases
    steps["at"] = first_a + 8 * np.arange(count)
    steps["idesc"] = instruction(*names, m, n, d=0 if half else 2 if kind == "i8" else 1, extra=extra)
    steps["idesc"] |= int(by_m) << 15 | int(by_n) << 16
    steps["acc"] = 1
    steps["acc"][0] = d is not None
    device = Device(arch="sm_100a", seed=seed, adversary=adversary, race_detection=races)
    body = body_of_product(kind, a_in_tensor=a_in_tensor, mask=mask, shift=shift)
    after = run_tensor(body, steps, image, before, n, group=group, device=device)
    assert not device.findings, device.findings
    return after[cta, col, lane]


SHAPES = [(1, 128, 256), (1, 128, 16), (1, 64, 40), (1, 64, 8), (2, 256, 256), (2, 256, 48), (2, 128, 64), (2, 128, 16)]


@pytest.mark.parametrize(("group", "m", "n"), SHAPES)
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
def test_product_in_every_shape(group: int, m: int, n: int, swizzle: str) -> None:
    k = {"none": 48, "32B": 16, "64B": 32, "128B": 64}[swizzle]
    a, b = values((m, k), "bf16"), values((n, k), "bf16")
    got = product("f16", a, b, ("bf16", "bf16"), swizzle, group=group, seed=m + n).view(np.float32)
    assert np.array_equal(got, (a.float() @ b.float().T).numpy())


def reference(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    return (a.float() @ b.float().T).numpy()


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("by_m", "by_n"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
def test_operands_along_m_and_n(group: int, by_m: bool, by_n: bool, swizzle: str) -> None:
    m, n, k = 128 * group, 128, 16  # one instruction: the two kinds of descriptor do not share a k extent
    a, b = values((m, k), "f16"), values((n, k), "f16")
    if swizzle in ("64B", "128B"):
        by_m = by_n = True
    got = product("f16", a, b, ("f16", "f16"), swizzle, group=group, by_m=by_m, by_n=by_n).view(np.float32)
    assert np.array_equal(got, reference(a, b))


@pytest.mark.parametrize(("kind", "type_", "k"), [("f16", "bf16", 32), ("tf32", "tf32", 16), ("i8", "s8", 64)])
@pytest.mark.parametrize(("group", "m"), [(1, 64), (1, 128), (2, 128), (2, 256)])
def test_a_in_tensor_memory_and_accumulation(kind: str, type_: str, k: int, group: int, m: int) -> None:
    n = 32
    a, b = values((m, k), type_), values((n, k), type_)
    d = RNG.integers(-1000, 1000, (m, n))
    raw = d.astype(np.int32).view(np.uint32) if kind == "i8" else d.astype(np.float32).view(np.uint32)
    got = product(kind, a, b, (type_, type_), "none", group=group, a_in_tensor=True, d=raw)
    want = reference(a, b) + d
    assert np.array_equal(got.view(np.int32) if kind == "i8" else got.view(np.float32), want)


def test_integers_of_either_sign_saturate_on_demand() -> None:
    a, b = values((128, 32), "u8"), values((16, 32), "s8")
    d = np.full((128, 16), 2**31 - 5, np.int32)
    exact = reference(a, b).astype(np.int64) + d
    for saturate in (0, 1):
        got = product("i8", a, b, ("u8", "s8"), "32B", d=d.view(np.uint32), extra=saturate << 3).view(np.int32)
        want = np.minimum(exact, 2**31 - 1) if saturate else (exact + 2**31) % 2**32 - 2**31
        assert np.array_equal(got, want)


def test_half_results_take_the_lower_half_of_a_column() -> None:
    a, b = values((128, 16), "f16"), values((32, 16), "f16")
    got = product("f16", a, b, ("f16", "f16"), "32B", half=True)
    assert np.array_equal(got.astype(np.uint16).view(np.float16), reference(a, b).astype(np.float16))
    assert np.all(got >> 16 == 0)


@pytest.mark.parametrize(("bits", "sign"), [(1 << 13, -1), (1 << 14, -1), (3 << 13, 1)])
def test_negated_operands(bits: int, sign: int) -> None:
    a, b = values((128, 16), "bf16"), values((16, 16), "bf16")
    got = product("f16", a, b, ("bf16", "bf16"), "32B", extra=bits).view(np.float32)
    assert np.array_equal(got, sign * reference(a, b))


def test_input_scale_and_disabled_lanes() -> None:
    a, b = values((256, 16), "bf16"), values((32, 16), "bf16")
    d = RNG.integers(-64, 64, (256, 32)).astype(np.float32) * 8
    mask = [int(x) for x in RNG.integers(0, 1 << 32, 8)]
    got = product("f16", a, b, ("bf16", "bf16"), "32B", group=2, d=d.view(np.uint32), mask=mask, shift=3)
    skipped = np.array([mask[row // 32] >> (row % 32) & 1 for row in range(256)], bool)
    want = np.where(skipped[:, None], d, reference(a, b) + d / 8)
    assert np.array_equal(got.view(np.float32), want)


@pytest.mark.parametrize("adversary", ["earliest", "latest", "random"])
def test_products_of_one_thread_run_in_order(adversary: str) -> None:
    a, b = values((128, 64), "bf16"), values((64, 64), "bf16")
    for seed in range(3):
        got = product("f16", a, b, ("bf16", "bf16"), "128B", seed=seed, adversary=adversary, races=False)
        assert np.array_equal(got.view(np.float32), reference(a, b))


def test_sum_of_one_instruction_is_rounded_once() -> None:
    a, b = torch.zeros(128, 16, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)
    a[:, 0], a[:, 1], a[:, 2] = 2.0**40, 1.0, -(2.0**40)
    b[:, :3] = 1.0
    assert np.all(product("f16", a, b, ("bf16", "bf16"), "32B").view(np.float32) == 1.0)


# ---- loads and stores

SHAPE_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def cell(shape: str, lane: int, register: int, split: int) -> tuple[int, int]:
    """Lane and column of a thread's register, both relative to the address."""
    if shape == "32x32b":
        return lane, register
    if shape == "16x64b":  # pairs of lanes differ by 8 rows, the next bit of the lane is the column
        return lane // 4 + (lane % 2) * 8, 2 * register + lane // 2 % 2
    if shape == "16x128b":
        return lane // 4 + register % 2 * 8, register // 2 * 4 + lane % 4
    if shape == "16x256b":
        return lane // 4 + register // 2 % 2 * 8, register // 4 * 8 + lane % 4 * 2 + register % 2
    return lane % 16, register + (split if lane >= 16 else 0)


def move_kernel(shape: str, count: int, packed: bool, is_load: bool, split: int, first: int) -> str:
    registers = SHAPE_REGISTERS[shape] * count
    names = ",".join(f"%r{i}" for i in range(registers))
    modifier = (".pack::16b" if is_load else ".unpack::16b") if packed else ""
    offset = f", {split}" if shape == "16x32bx2" else ""
    text = f"""
    .reg .b32 %r<128>, %v, %t, %w, %slot, %tm, %mine, %half, %i, %a; .reg .b64 %x, %y; .reg .pred %p; .shared .align 8 .b32 slot;
    mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; mov.u32 %slot, slot; setp.ne.u32 %p, %w, 0; @%p bra AL;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 512;
    AL: bar.sync 0; ld.shared.b32 %tm, [slot]; shl.b32 %mine, %w, 21; add.u32 %mine, %mine, %tm;
    ld.param.u32 %half, [half]; ld.param.u64 %x, [words]; mad.wide.u32 %x, %t, 4, %x; mov.u32 %i, 0; mov.u32 %a, %mine;
    FILL: ld.global.b32 %v, [%x]; tcgen05.st.sync.aligned.32x32b.x1.b32 [%a], {{%v}}; add.u64 %x, %x, 512; add.u32 %a, %a, 1; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 512; @%p bra FILL;
    tcgen05.wait::st.sync.aligned; ld.param.u64 %y, [data]; mad.wide.u32 %y, %t, {4 * registers}, %y; add.u32 %a, %mine, %half;
    """
    if is_load:
        text += f"tcgen05.ld.sync.aligned.{shape}.x{count}{modifier}.b32 {{{names}}}, [%a+{first}]{offset}; tcgen05.wait::ld.sync.aligned;"
        text += "".join(f"st.global.b32 [%y+{4 * i}], %r{i};" for i in range(registers))
    else:
        text += "".join(f"ld.global.b32 %r{i}, [%y+{4 * i}];" for i in range(registers))
        text += f"tcgen05.st.sync.aligned.{shape}.x{count}{modifier}.b32 [%a+{first}]{offset}, {{{names}}}; tcgen05.wait::st.sync.aligned;"
    return (
        text
        + """ld.param.u64 %x, [words]; mad.wide.u32 %x, %t, 4, %x; mov.u32 %i, 0; mov.u32 %a, %mine;
    DUMP: tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v}, [%a]; tcgen05.wait::ld.sync.aligned; st.global.b32 [%x], %v; add.u64 %x, %x, 512; add.u32 %a, %a, 1; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 512; @%p bra DUMP;
    bar.sync 0; setp.ne.u32 %p, %w, 0; @%p bra OUT; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 512; OUT:"""
    )


MOVES = [
    (shape, count, packed)
    for shape, registers in SHAPE_REGISTERS.items()
    for count in (1, 2, 4, 8, 16, 32, 64, 128)
    for packed in (False, True)
    if registers * count <= 128 and (count in (1, 2, 8) or registers * count == 128)
]


@pytest.mark.parametrize(("shape", "count", "packed"), MOVES)
@pytest.mark.parametrize("is_load", [True, False])
def test_load_and_store_shapes(shape: str, count: int, packed: bool, is_load: bool) -> None:
    registers = SHAPE_REGISTERS[shape] * count
    split = 2 * count if packed else count + 1
    half = 0 if shape == "32x32b" else 16
    first = 0 if packed and registers == 128 else 3  # the largest take all columns
    words = RNG.integers(0, 1 << 32, (512, 128), dtype=np.uint64).astype(np.uint32)
    data = RNG.integers(0, 1 << 32, (128, registers), dtype=np.uint64).astype(np.uint32)
    if is_load:
        data[:] = 0
    before, given = words.copy(), data.copy()
    device = Device(arch="sm_100a", race_detection=True, seed=count)
    run_ptx(
        move_kernel(shape, count, packed, is_load, split, first),
        ".param .u64 words, .param .u64 data, .param .u32 half",
        [words, data, half << 16],
        block=128,
        target="sm_100a",
        device=device,
    )
    assert not device.findings
    want, kept = given.copy(), before.copy()
    for thread in range(128):
        for r in range(registers):
            row, column = cell(shape, thread % 32, r, 0 if packed else split)
            row += thread // 32 * 32 + half
            if packed:
                column = first + 2 * column + (split if shape == "16x32bx2" and thread % 32 >= 16 else 0)
                want[thread, r] = (before[column, row] & 0xFFFF) | (before[column + 1, row] << 16 & 0xFFFF0000)
                kept[column, row], kept[column + 1, row] = given[thread, r] & 0xFFFF, given[thread, r] >> 16
            else:
                want[thread, r] = before[first + column, row]
                kept[first + column, row] = given[thread, r]
    assert np.array_equal(data, want if is_load else given)
    assert np.array_equal(words, before if is_load else kept)


# ---- allocation, and what is wrong

ALLOC = """.reg .b32 %s, %t, %u, %v, %r<8>; .reg .b64 %x, %desc; .reg .pred %p, %one; .shared .align 8 .b32 slot; .shared .align 8 .b64 bar; .shared .align 1024 .b8 box[16384];
mov.u32 %s, slot; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 64; ld.shared.b32 %t, [%s]; mov.pred %one, 1;
"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 64;"
FILL = "mov.u32 %v, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%t], {%v}; tcgen05.wait::st.sync.aligned;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%t]; tcgen05.wait::ld.sync.aligned;"


def run_alloc(body: str, *, block: int = 32, seed: int = 0) -> Device:
    device = Device(arch="sm_100a", seed=seed)
    run_ptx(body, "", [], block=block, target="sm_100a", device=device)
    return device


def test_allocation_gives_what_was_freed() -> None:
    body = (
        ALLOC
        + """mov.u32 %u, %t; setp.eq.u32 %p, %u, 0; @!%p trap;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 128; ld.shared.b32 %v, [%s]; setp.eq.u32 %p, %v, 64; @!%p trap;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 64; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 32; ld.shared.b32 %u, [%s]; setp.eq.u32 %p, %u, 0; @!%p trap;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %v, 128; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %u, 32;"""
    )
    assert not run_alloc(body).findings


def test_allocation_waits_for_columns() -> None:
    body = """.reg .b32 %s, %t, %w; .reg .pred %p; .shared .align 8 .b32 slot[2]; mov.u32 %w, %tid.x; shr.u32 %w, %w, 5; mov.u32 %s, slot; mad.lo.u32 %s, %w, 4, %s;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 512; ld.shared.b32 %t, [%s]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 512;"""
    for seed in range(5):
        assert not run_alloc(body, block=64, seed=seed).findings


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (ALLOC + FREE + LOAD, "use-after-free"),
        (ALLOC + "add.u32 %t, %t, 64;" + LOAD, "not allocated"),
        (ALLOC + "add.u32 %t, %t, 512;" + LOAD, "out-of-bounds"),
        (ALLOC + "add.u32 %t, %t, 2097152;" + LOAD, "reaches lanes 0..31 only"),
        (ALLOC + FREE + FREE, "have been freed"),
        (ALLOC + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 32;", "tensor-memory"),
        (ALLOC + "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 64;", "relinquish"),
        (ALLOC.replace("], 64;", "], 48;"), "power of two"),
        (ALLOC.replace("], 64;", "], 512;") + "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 32;", "deadlock"),
    ],
)  # fmt: skip
def test_misuse_of_tensor_memory_is_a_fault(body: str, kind: str) -> None:
    with pytest.raises(EmulatorError, match=kind):
        run_alloc(body)


def test_leak_and_uninitialised_read_are_findings() -> None:
    assert {f.kind for f in run_alloc(ALLOC).findings} == {"tensor-leak"}
    assert {f.kind for f in run_alloc(ALLOC + LOAD + FREE).findings} == {"uninitialised-tensor"}
    assert not run_alloc(ALLOC + FILL + LOAD + FREE).findings
    again = FREE + "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 64; ld.shared.b32 %t, [%s];"
    assert {f.kind for f in run_alloc(ALLOC + FILL + again + LOAD + FREE).findings} == {"uninitialised-tensor"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;", "one .cta_group only"),
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r0}, [%t];", "128 registers"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0}, [%t];", "wanted 2 registers"),
        ("tcgen05.mma.cta_group::1.kind::f64 [%t], %desc, %desc, %v, %one;", "unknown kind"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%t], %desc, %desc, [%t], %v, %one;", "sparse"),
        ("tcgen05.cp.cta_group::1.32x128b [%t], %desc;", "multicast"),
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4 [%t], %desc, %desc, %v, [%t], [%t], %one;", "block_scale"),
        ("tcgen05.fence::sideways;", "unknown form"),
    ],
)
def test_unknown_forms_name_their_line(text: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=f"(?s)PTX line .*{message}"):
        run_alloc(ALLOC + text + FREE)


@pytest.mark.parametrize(
    ("target", "works"), [("sm_100a", True), ("sm_100f", True), ("sm_100", False), ("sm_90a", False)]
)
def test_target_must_have_tensor_memory(target: str, works: bool) -> None:
    body = ALLOC + FREE
    if works:
        run_ptx(body, "", [], target=target)
        return
    with pytest.raises(EmulatorError, match=f"does not exist on .target {target}"):
        run_ptx(body, "", [], target=target)


MMA = (
    ALLOC
    + "mov.u64 %desc, {desc}; mov.u32 %v, {idesc}; tcgen05.mma.cta_group::1.kind::f16 [%t], %desc, %desc, %v, %one;"
)
GOOD = 1 << 46 | 64 | 8 << 32 | 8 << 16


@pytest.mark.parametrize(
    ("desc", "idesc", "message"),
    [
        (GOOD & ~(1 << 46), 1 << 4 | 2 << 17 | 8 << 24, "bits 46-48"),
        (GOOD | 3 << 61, 1 << 4 | 2 << 17 | 8 << 24, "unknown swizzle"),
        (GOOD, 1 << 4 | 2 << 17 | 7 << 24, "no shape"),
        (GOOD, 1 << 4 | 1 << 17 | 8 << 24, "no shape"),
        (GOOD, 1 << 4 | 4 << 7 | 2 << 17 | 8 << 24, "no type"),
        (GOOD, 1 << 4 | 1 << 2 | 2 << 17 | 8 << 24, "sparse"),
        (GOOD | 0x3FFF, 1 << 4 | 2 << 17 | 8 << 24, "out-of-bounds"),
    ],
)  # fmt: skip
def test_descriptors_that_cannot_be_meant(desc: int, idesc: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run_alloc(MMA.format(desc=desc, idesc=idesc) + FREE)
