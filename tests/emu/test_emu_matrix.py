"""ldmatrix, stmatrix, movmatrix and wgmma against torch, with the fragment layouts of the PTX documentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import run_ptx

from deep_gemm_k3.emulator import Device

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "tf32": torch.float32,
}


def exact_values(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Small integers: every product and sum is exact in any order."""
    return torch.randint(-4, 5, shape).to(torch.float32).to(DTYPES[kind])


def words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().view(np.uint32)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, trans: str) -> None:
    regs = ",".join(f"%r{i}" for i in range(count))
    matrices = torch.randint(-30000, 30000, (count, 8, 8), dtype=torch.int16)
    body = f""".reg .b32 %r<4>, %t, %s, %v; .reg .b64 %x, %y, %z; .reg .pred %p; .shared .align 16 .b8 box[{count * 128}]; .shared .align 16 .b8 back[{count * 128}];
    mov.u32 %t, %tid.x; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; ld.param.u64 %z, [z]; mov.u32 %s, box;
    """ + "".join(
        f"mad.wide.u32 %x, %t, 4, %x; mad.lo.u32 %s, %t, 4, %s; ld.global.b32 %v, [%x]; st.shared.b32 [%s], %v; ld.param.u64 %x, [x]; add.u64 %x, %x, {128 * (i + 1)}; mov.u32 %s, box; add.u32 %s, %s, {128 * (i + 1)};"
        for i in range(count)
    )
    body += f"""bar.warp.sync -1; mov.u32 %s, box; and.b32 %v, %t, {8 * count - 1}; mad.lo.u32 %s, %v, 16, %s;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{regs}}}, [%s];
    mov.u32 %s, back; mad.lo.u32 %s, %v, 16, %s; stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%s], {{{regs}}}; bar.warp.sync -1; mad.wide.u32 %y, %t, {4 * count}, %y;"""
    body += "".join(f"st.global.b32 [%y+{4 * i}], %r{i};" for i in range(count))
    body += "".join(
        f"mov.u32 %s, back; mad.lo.u32 %s, %t, 4, %s; ld.shared.b32 %v, [%s+{128 * i}]; mad.wide.u32 %x, %t, 4, %z; st.global.b32 [%x+{128 * i}], %v;"
        for i in range(count)
    )
    y, back = np.zeros(32 * count, np.uint32), np.zeros(32 * count, np.uint32)
    run_ptx(body, ".param .u64 x, .param .u64 y, .param .u64 z", [matrices, y, back])
    source = matrices.transpose(1, 2) if trans else matrices
    want = torch.stack([source[:, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2] for lane in range(32)])  # lane, matrix, 2
    assert np.array_equal(y, words(want).ravel())
    assert np.array_equal(back, words(matrices).ravel())


def byte_rows(count: int, rows: int) -> np.ndarray:
    return np.random.default_rng(count * rows).integers(0, 256, (count, rows, 16)).astype(np.uint8)


def expanded(rows: np.ndarray, kind: str) -> np.ndarray:
    """Sixteen packed elements at the beginning of a row as bytes."""
    if kind == "b8":
        return rows
    width = 4 if "b4" in kind else 6
    bits = np.unpackbits(rows, axis=-1, bitorder="little")[..., : 16 * width].reshape(*rows.shape[:-1], 16, width)
    return (bits << np.arange(width, dtype=np.uint8)).sum(-1).astype(np.uint8)


@pytest.mark.parametrize(
    ("shape", "count", "kind"),
    [("m16n16", n, k) for n in (1, 2) for k in ("b8", "b8x16.b4x16_p64", "b8x16.b6x16_p32")]
    + [("m8n16", n, k) for n in (1, 2, 4) for k in ("b8x16.b4x16_p64", "b8x16.b6x16_p32")],
)
def test_ldmatrix_of_bytes(shape: str, count: int, kind: str) -> None:
    square = shape == "m16n16"
    rows, n = (16, 2 * count) if square else (8, count)
    data, y = byte_rows(count, rows), np.zeros((32, n), np.uint32)
    regs = ",".join(f"%r{i}" for i in range(n))
    trans = ".trans" if square else ""
    body = f""".reg .b32 %r<8>, %t, %s, %v; .reg .b64 %x, %y; .shared .align 16 .b8 box[{data.size}];
    mov.u32 %t, %tid.x; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %s, box; mad.wide.u32 %x, %t, 4, %x; mad.lo.u32 %s, %t, 4, %s;"""
    body += "".join(f"ld.global.b32 %v, [%x+{i}]; st.shared.b32 [%s+{i}], %v;" for i in range(0, data.size, 128))
    body += f"""bar.warp.sync -1; mov.u32 %s, box; and.b32 %v, %t, {rows * count - 1}; mad.lo.u32 %s, %v, 16, %s;
    ldmatrix.sync.aligned.{shape}.x{count}{trans}.shared.{kind} {{{regs}}}, [%s]; mad.wide.u32 %y, %t, {4 * n}, %y;"""
    body += "".join(f"st.global.b32 [%y+{4 * i}], %r{i};" for i in range(n))
    run_ptx(body, ".param .u64 x, .param .u64 y", [data, y], target="sm_100a")
    values = expanded(data, kind)
    want = np.zeros((32, n, 4), np.uint8)
    for lane in range(32):
        for r in range(n):
            for i in range(4):
                if square:  # two of four neighbouring rows in each register, of a column and the one eight further
                    want[lane, r, i] = values[r // 2, lane % 4 * 4 + r % 2 * 2 + i % 2, lane // 4 + 8 * (i // 2)]
                else:
                    want[lane, r, i] = values[r, lane // 4, lane % 4 * 4 + i]
    assert np.array_equal(y.view(np.uint8).reshape(32, n, 4), want)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(count: int) -> None:
    data, y = byte_rows(32, count)[:, :, :4].copy(), np.zeros((count, 8, 16), np.uint8)
    regs = ",".join(f"%r{i}" for i in range(count))
    body = f""".reg .b32 %r<8>, %t, %s, %v; .reg .b64 %x, %y; .shared .align 16 .b8 box[{y.size}];
    mov.u32 %t, %tid.x; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mad.wide.u32 %x, %t, {4 * count}, %x; mad.wide.u32 %y, %t, 4, %y;"""
    body += "".join(f"ld.global.b32 %r{i}, [%x+{4 * i}];" for i in range(count))
    body += f"""mov.u32 %s, box; and.b32 %v, %t, {8 * count - 1}; mad.lo.u32 %s, %v, 16, %s;
    stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%s], {{{regs}}}; bar.warp.sync -1; mov.u32 %s, box; mad.lo.u32 %s, %t, 4, %s;"""
    body += "".join(f"ld.shared.b32 %v, [%s+{i}]; st.global.b32 [%y+{i}], %v;" for i in range(0, y.size, 128))
    run_ptx(body, ".param .u64 x, .param .u64 y", [data, y], target="sm_100a")
    want = np.zeros_like(y)
    for lane in range(32):
        for k in range(count):
            for i in range(4):
                want[k, lane % 4 * 2 + i % 2, lane // 4 + 8 * (i // 2)] = data[lane, k, i]
    assert np.array_equal(y, want)


def test_movmatrix() -> None:
    matrix = torch.randint(-30000, 30000, (8, 8), dtype=torch.int16)
    y = np.zeros(32, np.uint32)
    body = ".reg .b32 %t, %v; .reg .b64 %x, %y; mov.u32 %t, %tid.x; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mad.wide.u32 %x, %t, 4, %x; mad.wide.u32 %y, %t, 4, %y; ld.global.b32 %v, [%x]; movmatrix.sync.aligned.m8n8.trans.b16 %v, %v; st.global.b32 [%y], %v;"
    run_ptx(body, ".param .u64 x, .param .u64 y", [matrix, y])
    assert np.array_equal(y, words(matrix.T.contiguous()).ravel())


def fragment_a(a: torch.Tensor, per: int) -> np.ndarray:
    """Registers of A (16 x k): (lane, register), `per` elements along k in each."""
    k = a.shape[1]
    out = []
    for lane in range(32):
        for r in range(16 * k // (32 * per)):
            row, at = lane // 4 + 8 * (r % 2), r // 2 * 4 * per + lane % 4 * per
            out.append(a[row, at : at + per])
    return words(torch.stack(out)).reshape(32, -1)


# ---- wgmma

MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


def swizzle(offset: int, name: str) -> int:
    return offset ^ ((offset >> 7 & (SPAN[name] // 16 - 1)) << 4)


def place(matrix: torch.Tensor, name: str, transposed: bool) -> tuple[np.ndarray, int, int, int]:
    """An operand (rows x 32 bytes of k) in shared memory: bytes, leading and stride offsets, size.

    Transposed: rows are contiguous. Row pieces of 16 bytes of a swizzle row lie side by side; 8 rows (or 8 k) make an
    atom; atoms follow each other.
    """
    size = matrix.element_size()
    rows, k = matrix.shape
    per, span = 16 // size, SPAN[name]
    raw = matrix.contiguous().view(torch.uint8).numpy().reshape(rows, k * size)
    atom = 8 * span
    memory = np.zeros(rows * k * size * (4 if name == "128B" else 2 if name == "64B" else 1) + 2048, np.uint8)
    if not transposed:
        stride = atom if name != "none" else 8 * 32
        leading = 128 if name == "none" else 16
        for r in range(rows):
            for byte in range(k * size):
                piece, rest = divmod(byte, 16)
                at = r // 8 * stride + r % 8 * span + piece * (leading if name == "none" else 16) + rest
                memory[swizzle(at, name)] = raw[r, byte]
        return memory, leading, stride, len(memory)
    groups = -(-rows // (span // size))
    if name == "none":
        stride, leading = 128, 128 * groups
        outer, deeper = stride, leading
    else:
        leading, stride = atom, atom * groups
        outer, deeper = leading, stride
    for r in range(rows):
        for c in range(k):
            inner, along = r % (span // size), r // (span // size)
            at = along * outer + c // 8 * deeper + c % 8 * span + inner * size
            memory[swizzle(at, name) : swizzle(at, name) + size] = raw[r, c * size : (c + 1) * size]
    assert per
    return memory, leading, stride, len(memory)


def run_wgmma(
    kind: str,
    n: int,
    a: torch.Tensor,
    b: torch.Tensor,
    c: np.ndarray,
    *,
    mode: str,
    in_registers: bool,
    ta: bool = False,
    tb: bool = False,
    scale_d: int = 1,
    negate: str = "1, 1",
    seed: int = 0,
    second: str = "",
) -> np.ndarray:
    size = a.element_size()
    k = 32 // size
    memory_a, la, sa, bytes_a = place(a, mode, ta)
    memory_b, lb, sb, bytes_b = place(b, mode, tb)

    def descriptor(leading: int, stride: int) -> int:
        return leading >> 4 << 16 | stride >> 4 << 32 | MODES[mode] << 62

    body = f""".reg .b32 %a<4>, %t, %s, %v, %i; .reg .f32 %d<{n // 2}>; .reg .b64 %x, %y, %da, %db; .reg .pred %p, %w;
    .shared .align 1024 .b8 sa[{bytes_a}]; .shared .align 1024 .b8 sb[{bytes_b}]; mov.u32 %t, %tid.x;"""
    for name, total in (("a", bytes_a), ("b", bytes_b)):
        body += f"""ld.param.u64 %x, [{name}]; mad.wide.u32 %x, %t, 4, %x; mov.u32 %s, s{name}; mad.lo.u32 %s, %t, 4, %s; mov.u32 %i, %t;
        L{name}: setp.ge.u32 %w, %i, {total // 4}; @%w bra E{name}; ld.global.b32 %v, [%x]; st.shared.b32 [%s], %v; add.u64 %x, %x, 512; add.u32 %s, %s, 512; add.u32 %i, %i, 128; bra L{name}; E{name}:"""
    body += "bar.sync 0; fence.proxy.async.shared::cta; bar.sync 0;"
    for name, leading, stride in (("a", la, sa), ("b", lb, sb)):
        body += f"mov.u32 %s, s{name}; shr.u32 %s, %s, 4; and.b32 %s, %s, 16383; cvt.u64.u32 %d{name}, %s; or.b64 %d{name}, %d{name}, {descriptor(leading, stride)};"
    body += f"ld.param.u64 %y, [c]; mad.wide.u32 %y, %t, {2 * n}, %y;" + "".join(
        f"ld.global.f32 %d{i}, [%y+{4 * i}];" for i in range(n // 2)
    )
    if in_registers:
        body += "ld.param.u64 %x, [f]; mad.wide.u32 %x, %t, 16, %x; ld.global.v4.b32 {%a0,%a1,%a2,%a3}, [%x];"
    transposes = "" if size != 2 else f", {int(tb)}" if in_registers else f", {int(ta)}, {int(tb)}"
    operand_a = "{%a0,%a1,%a2,%a3}" if in_registers else "%da"
    accumulators = ",".join(f"%d{i}" for i in range(n // 2))
    body += f"setp.ne.u32 %p, {scale_d}, 0; wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{second or kind} {{{accumulators}}}, {operand_a}, %db, %p, {negate}{transposes}; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    body += "".join(f"st.global.f32 [%y+{4 * i}], %d{i};" for i in range(n // 2))
    fragments = np.concatenate([fragment_a(a[16 * w : 16 * w + 16], 4 // size) for w in range(4)])
    result = c.copy()
    device = run_ptx(
        body,
        ".param .u64 a, .param .u64 b, .param .u64 c, .param .u64 f",
        [memory_a, memory_b, result, fragments],
        block=128,
        device=Device(seed=seed),
    )
    assert not device.findings, device.findings
    return result


def accumulator(matrix: torch.Tensor) -> np.ndarray:
    """(thread, register) of a 64 x n accumulator."""
    n = matrix.shape[1]
    out = np.zeros((128, n // 2), np.float32)
    values = matrix.numpy()
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(n // 2):
            out[thread, i] = values[16 * warp + lane // 4 + 8 * (i // 2 % 2), lane % 4 * 2 + i % 2 + i // 4 * 8]
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["bf16", "f16", "e4m3", "e5m2", "tf32"])
@pytest.mark.parametrize("in_registers", [False, True])
def test_wgmma_every_swizzle(kind: str, mode: str, in_registers: bool) -> None:
    n, k = 32, 32 // DTYPES[kind].itemsize
    a, b = exact_values((64, k), kind), exact_values((n, k), kind)
    c = torch.randint(-50, 50, (64, n)).float()
    got = run_wgmma(kind, n, a, b, accumulator(c), mode=mode, in_registers=in_registers)
    assert np.array_equal(got, accumulator(a.float() @ b.float().T + c))


@pytest.mark.parametrize("n", range(8, 264, 8))
def test_wgmma_widths(n: int) -> None:
    kind, mode = [("bf16", "128B"), ("e4m3", "64B"), ("e5m2", "none")][n // 8 % 3]
    k = 32 // DTYPES[kind].itemsize
    a, b = exact_values((64, k), kind), exact_values((n, k), kind)
    got = run_wgmma(kind, n, a, b, accumulator(torch.ones(64, n)), mode=mode, in_registers=n % 16 == 0, scale_d=0)
    assert np.array_equal(got, accumulator(a.float() @ b.float().T))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("ta", "tb"), [(False, True), (True, False), (True, True)])
def test_wgmma_transposed_operands(mode: str, ta: bool, tb: bool) -> None:
    n = 64
    a, b = exact_values((64, 16), "bf16"), exact_values((n, 16), "bf16")
    c = torch.zeros(64, n)
    got = run_wgmma("bf16", n, a, b, accumulator(c), mode=mode, in_registers=False, ta=ta, tb=tb)
    assert np.array_equal(got, accumulator(a.float() @ b.float().T))


def test_wgmma_mixed_types_and_signs() -> None:
    a, b = exact_values((64, 32), "e4m3"), exact_values((16, 32), "e5m2")
    c = torch.randint(-50, 50, (64, 16)).float()
    got = run_wgmma("e4m3", 16, a, b, accumulator(c), mode="64B", in_registers=False, second="e5m2", negate="-1, 1")
    assert np.array_equal(got, accumulator(c - a.float() @ b.float().T))


def test_wgmma_on_random_values_is_within_the_documented_bound() -> None:
    torch.manual_seed(3)
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    got = run_wgmma("bf16", 64, a, b, accumulator(torch.zeros(64, 64)), mode="128B", in_registers=False)
    want = accumulator((a.double() @ b.double().T).float())
    assert np.max(np.abs(got - want)) <= 2.0**-22 * 16
