"""Loads, stores, address conversions, special registers and packing, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import cuda_module, one_op, run_ptx

from deep_gemm_k3.emulator import Device, EmulatorError

RNG = np.random.default_rng(37)
TYPES = ["b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"]
SPACES = ["global", "shared", "local", "generic global", "generic shared", "generic local", "shared::cluster"]


def width_of(kind: str) -> int:
    return int(kind[1:])


def copy_kernel(kind: str, count: int, space: str, order: str, register: int) -> str:
    """Each lane stores a vector from x in the space and loads it again into y, there `register` bits for each element."""
    size = width_of(kind) // 8
    vector = f".v{count}" if count > 1 else ""
    names = "{" + ",".join(f"%v{i}" for i in range(count)) + "}" if count > 1 else "%v0"
    name = space.split()[-1]
    declare = {
        "shared": f".shared .align 32 .b8 box[{32 * size * count}];", "local": f".local .align 32 .b8 box[{32 * size * count}];",
        "shared::cluster": f".shared .align 32 .b8 box[{32 * size * count}];", "global": "",
    }[name]  # fmt: skip
    where = "" if space.startswith("generic") else f".{name}"
    body = f".reg .b{register} %v<8>; .reg .b32 %t; .reg .b64 %x, %y, %a, %o; {declare} mov.u32 %t, %tid.x; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mul.wide.u32 %o, %t, {size * count}; add.u64 %x, %x, %o;"
    if name == "global":
        body += "ld.param.u64 %a, [a];"
    elif name == "shared::cluster":
        body += ".reg .b32 %s; mov.u32 %s, box; mapa.shared::cluster.u32 %s, %s, 0; cvt.u64.u32 %a, %s;"
    else:
        body += "mov.u64 %a, box;" + (f"cvta.{name}.u64 %a, %a;" if space.startswith("generic") else "")
    body += "add.u64 %a, %a, %o;"
    body += "".join(f"ld.global.{kind} %v{i}, [%x+{size * i}];" for i in range(count))
    store_order = order.replace("acquire", "release")
    body += f"st{store_order}{where}{vector}.{kind} [%a], {names};"
    body += "".join(f"mov.b{register} %v{i}, 0;" for i in range(count))
    body += f"ld{order}{where}{vector}.{kind} {names}, [%a]; mul.wide.u32 %o, %t, {register // 8 * count}; add.u64 %y, %y, %o;"
    body += "".join(f"st.global.b{register} [%y+{register // 8 * i}], %v{i};" for i in range(count))
    return body


def check_copy(kind: str, count: int, space: str, order: str = "", target: str = "sm_90a") -> None:
    width = width_of(kind)
    for register in sorted({max(16, width), 32, 64} if not kind.startswith("f") else {width}):
        if register < width:
            continue
        x = np.frombuffer(RNG.bytes(32 * count * width // 8), f"{'i' if kind[0] == 's' else 'u'}{width // 8}").copy()
        y, a = np.zeros(32 * count, f"u{register // 8}"), np.zeros(32 * count * width // 8 + 64, np.uint8)
        a = a[-int(a.ctypes.data) % 32 :]
        body = copy_kernel(kind, count, space, order, register)
        device = Device(arch=target, race_detection=True)
        run_ptx(body, ".param .u64 x, .param .u64 y, .param .u64 a", [x, y, a], device=device, target=target)
        assert not device.findings, device.findings
        assert np.array_equal(y, x.astype(np.int64 if kind[0] == "s" else np.uint64).astype(y.dtype))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_in_every_space(kind: str, space: str) -> None:
    check_copy(kind, 1, space)


@pytest.mark.parametrize("space", ["global", "shared", "local", "generic shared"])
@pytest.mark.parametrize(
    ("kind", "count"), [(k, n) for k in TYPES for n in (2, 4) if width_of(k) * n <= 128]
)  # fmt: skip
def test_vectors(kind: str, count: int, space: str) -> None:
    check_copy(kind, count, space)


@pytest.mark.parametrize(("kind", "count"), [("b32", 8), ("f32", 8), ("b64", 4), ("f64", 4)])
def test_vectors_of_32_bytes(kind: str, count: int) -> None:
    check_copy(kind, count, "global", target="sm_100a")


ORDERS = [".weak", ".volatile", ".relaxed.cta", ".relaxed.cluster", ".relaxed.gpu", ".relaxed.sys", ".acquire.gpu", ".acquire.sys", ".mmio.relaxed.sys"]  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared", "generic global"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str, space: str) -> None:
    if "mmio" in order and space == "shared":
        check_copy("u32", 1, "generic global", order)
    else:
        check_copy("u32", 1, space, order)


HINTS = [".ca", ".cg", ".cs", ".lu", ".cv", ".nc", ".nc.L1::no_allocate", ".L1::evict_last", ".L2::128B", ".nc.L1::no_allocate.L2::256B", ".L1::evict_first.L2::cache_hint"]  # fmt: skip


@pytest.mark.parametrize("hint", HINTS)
def test_cache_hints_change_nothing(hint: str) -> None:
    x, y = RNG.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32), np.zeros(32, np.uint32)
    policy = ", %p" if "cache_hint" in hint else ""
    body = f""".reg .b32 %t, %v; .reg .b64 %x, %y, %p; mov.u32 %t, %tid.x; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mad.wide.u32 %x, %t, 4, %x; mad.wide.u32 %y, %t, 4, %y;
    createpolicy.fractional.L2::evict_first.b64 %p, 1.0; ld.global{hint}.b32 %v, [%x]{policy}; st.global.b32 [%y], %v;"""
    run_ptx(body, ".param .u64 x, .param .u64 y", [x, y])
    assert np.array_equal(x, y)


def test_constants_and_parameters() -> None:
    module = cuda_module("""
    __constant__ int table[4] = {10, -20, 30, -40};
    __device__ short numbers[3] = {7, -8, 9};
    struct Mixed { char a; short b; long long c; float d[3]; };
    extern "C" __global__ void k(Mixed m, int* y) {
      y[threadIdx.x] = table[threadIdx.x & 3] + numbers[threadIdx.x % 3] * m.b + (int)m.c + (int)(2 * m.d[threadIdx.x % 3]) + m.a;
    }""")
    packed = np.zeros(32, np.uint8)
    packed[0] = np.uint8(256 - 3)
    packed[2:4] = np.array([-5], np.int16).view(np.uint8)
    packed[8:16] = np.array([1000], np.int64).view(np.uint8)
    packed[16:28] = np.array([0.5, -1.5, 2.5], np.float32).view(np.uint8)
    y = np.zeros(32, np.int32)
    Device().launch(module, "k", 1, 32, params=[packed.tobytes(), y])
    i = np.arange(32)
    want = (
        np.array([10, -20, 30, -40])[i & 3] + np.array([7, -8, 9])[i % 3] * -5 + 1000 + np.array([1, -3, 5])[i % 3] - 3
    )
    assert np.array_equal(y, want)


NAMES = {
    "tid": ("x", "y", "z"), "ntid": ("x", "y", "z"), "ctaid": ("x", "y", "z"), "nctaid": ("x", "y", "z"), "clusterid": ("x", "y", "z"),
    "nclusterid": ("x", "y", "z"), "cluster_ctaid": ("x", "y", "z"), "cluster_nctaid": ("x", "y", "z"),
}  # fmt: skip
SINGLE = ["laneid", "warpid", "nwarpid", "cluster_ctarank", "cluster_nctarank", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge"]  # fmt: skip


def test_special_registers_of_a_grid_of_clusters_in_three_dimensions() -> None:
    grid, block, cluster = (4, 6, 2), (5, 4, 3), (2, 3, 1)
    names = [f"{name}.{axis}" for name, axes in NAMES.items() for axis in axes] + SINGLE
    threads, ctas = int(np.prod(block)), int(np.prod(grid))
    body = """.reg .b32 %v, %a, %b; .reg .b64 %y; .reg .pred %p; mov.u32 %a, %ctaid.z; mov.u32 %b, %nctaid.y; mul.lo.u32 %a, %a, %b; mov.u32 %b, %ctaid.y; add.u32 %a, %a, %b; mov.u32 %b, %nctaid.x; mul.lo.u32 %a, %a, %b; mov.u32 %b, %ctaid.x; add.u32 %a, %a, %b;
    mov.u32 %b, %ntid.z; mul.lo.u32 %a, %a, %b; mov.u32 %b, %tid.z; add.u32 %a, %a, %b; mov.u32 %b, %ntid.y; mul.lo.u32 %a, %a, %b; mov.u32 %b, %tid.y; add.u32 %a, %a, %b; mov.u32 %b, %ntid.x; mul.lo.u32 %a, %a, %b; mov.u32 %b, %tid.x; add.u32 %a, %a, %b; ld.param.u64 %y, [y];"""
    body += f"mad.wide.u32 %y, %a, {4 * (len(names) + 1)}, %y;" + "".join(
        f"mov.u32 %v, %{name}; st.global.u32 [%y+{4 * i}], %v;" for i, name in enumerate(names)
    )
    body += f"mov.pred %p, %is_explicit_cluster; selp.u32 %v, 1, 0, %p; st.global.u32 [%y+{4 * len(names)}], %v;"
    out = np.zeros((ctas, threads, len(names) + 1), np.uint32)
    run_ptx(body, ".param .u64 y", [out], grid=grid, block=block, cluster=cluster)
    cta, thread = (x.ravel() for x in np.meshgrid(np.arange(ctas), np.arange(threads), indexing="ij"))

    def split(index: np.ndarray, size: tuple[int, ...]) -> list[np.ndarray]:
        return [index % size[0], index // size[0] % size[1], index // size[0] // size[1]]

    tid, ctaid = split(thread, block), split(cta, grid)
    inside = [c % n for c, n in zip(ctaid, cluster, strict=True)]
    lane = thread % 32
    full = np.full_like(cta, 1)
    want = dict(zip(SINGLE, [
        lane, thread // 32, full * 2, inside[0] + 2 * (inside[1] + 3 * inside[2]), full * 6, 1 << lane, (1 << lane) - 1,
        (2 << lane) - 1, (0xFFFFFFFF << lane + 1) & 0xFFFFFFFF, (0xFFFFFFFF << lane) & 0xFFFFFFFF,
    ], strict=True))  # fmt: skip
    for i, axis in enumerate("xyz"):
        want |= {
            f"tid.{axis}": tid[i], f"ntid.{axis}": full * block[i], f"ctaid.{axis}": ctaid[i], f"nctaid.{axis}": full * grid[i],
            f"clusterid.{axis}": ctaid[i] // cluster[i], f"nclusterid.{axis}": full * (grid[i] // cluster[i]),
            f"cluster_ctaid.{axis}": inside[i], f"cluster_nctaid.{axis}": full * cluster[i],
        }  # fmt: skip
    got = out.reshape(-1, len(names) + 1)
    for i, name in enumerate(names):
        assert np.array_equal(got[:, i], want[name]), name
    assert np.all(got[:, -1] == 1)


SPACE_TESTS = """.reg .b32 %t, %r, %s, %v, %o; .reg .b64 %x, %y, %a<5>; .reg .pred %p; .shared .align 8 .b8 box[64]; .local .align 8 .b8 own[64];
mov.u32 %r, %cluster_ctarank; mov.u32 %s, box; xor.b32 %t, %r, 1; mapa.shared::cluster.u32 %o, %s, %t; ld.param.u64 %a0, [x];
mov.u64 %a1, box; cvta.shared.u64 %a1, %a1; mapa.u64 %a2, %a1, %t; mov.u64 %a3, own; cvta.local.u64 %a3, %a3; ld.param.u64 %y, [y]; mad.wide.u32 %y, %r, 128, %y;
"""


def test_address_spaces() -> None:
    body, want = SPACE_TESTS, []
    tests = {"global": [1, 0, 0, 0], "shared": [0, 1, 0, 0], "shared::cta": [0, 1, 0, 0], "shared::cluster": [0, 1, 1, 0], "local": [0, 0, 0, 1]}  # fmt: skip
    for space, flags in tests.items():
        for i, flag in enumerate(flags):
            body += f"isspacep.{space} %p, %a{i}; selp.u32 %v, 1, 0, %p; st.global.u32 [%y+{4 * len(want)}], %v;"
            want.append(flag)
    body += "getctarank.shared::cluster.u32 %v, %o; st.global.u32 [%y+80], %v; getctarank.u64 %v, %a2; st.global.u32 [%y+84], %v; getctarank.u64 %v, %a1; st.global.u32 [%y+88], %v;"
    body += "cvta.to.shared.u64 %a4, %a1; cvt.u32.u64 %v, %a4; sub.u32 %v, %v, %s; st.global.u32 [%y+92], %v; cvta.to.global.u64 %a4, %a0; sub.u64 %a4, %a4, %a0; cvt.u32.u64 %v, %a4; st.global.u32 [%y+96], %v;"
    out = np.zeros((2, 32), np.uint32)
    run_ptx(body, ".param .u64 x, .param .u64 y", [np.zeros(4), out], grid=2, cluster=2, block=1)
    for rank in range(2):
        assert out[rank, :25].tolist() == [*want, rank ^ 1, rank ^ 1, rank, 0, 0]


def test_packing() -> None:
    a, b = (RNG.integers(0, 1 << 63, 256).astype(np.uint64) for _ in range(2))
    low, high = (a & 0xFFFFFFFF).astype(np.uint32), (a >> 32).astype(np.uint32)
    together, first, second, swapped, cross = one_op(
        """mov.b64 {%l, %h}, %a0; mov.b64 %d0, {%l, %h}; cvt.u64.u32 %d1, %l; mov.b64 {_, %h2}, %a0; cvt.u64.u32 %d2, %h2;
        mov.b64 {%s0, %s1, %s2, %s3}, %a0; mov.b64 %d3, {%s3, %s2, %s1, %s0}; mov.b32 {%s0, %s1}, %l; mov.b32 %l, {%s1, %s0}; mov.b64 {%c, _}, %a1; mov.b64 %d4, {%l, %c};""",
        np.uint64,
        [a, b],
        outputs=5,
        registers=".reg .b32 %l, %h, %h2, %c; .reg .b16 %s0, %s1, %s2, %s3;",
    )
    assert np.array_equal(together, a) and np.array_equal(first, low) and np.array_equal(second, high)
    assert np.array_equal(swapped.view(np.uint16).reshape(-1, 4), a.view(np.uint16).reshape(-1, 4)[:, ::-1])
    halves = low.view(np.uint16).reshape(-1, 2)[:, ::-1].copy().view(np.uint32).ravel()
    assert np.array_equal(
        cross.view(np.uint32).reshape(-1, 2), np.stack([halves, (b & 0xFFFFFFFF).astype(np.uint32)], 1)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ld.global.b32 %v, [%x+2];", "misaligned"), ("ld.global.v4.b32 {%v,%w,%v,%w}, [%x+8];", "misaligned"),
        ("ld.global.b32 %v, [%x+16];", "out-of-bounds"), ("st.global.b32 [%x-4], %v;", "out-of-bounds"),
        ("st.shared.b32 [%s+1], %v;", "misaligned"), ("st.shared.b32 [%s+4096], %v;", "out-of-bounds"), ("mov.u32 %s, 0; ld.shared.b32 %v, [%s];", "out-of-bounds"),
        ("atom.global.add.u32 %v, [%x+2], 1;", "misaligned"), ("atom.global.add.u32 %v, [%x+16], 1;", "out-of-bounds"), ("red.shared.add.u32 [%s+4096], 1;", "out-of-bounds"),
        ("mapa.shared::cluster.u32 %s, %s, 1; st.shared::cluster.b32 [%s], %v;", "out-of-bounds"), ("st.local.b32 [%o+64], %v;", "out-of-bounds"), ("ld.b32 %v, [%z];", "out-of-bounds"),
    ],
)  # fmt: skip
def test_accesses_that_are_not_allowed(text: str, message: str) -> None:
    body = ".reg .b32 %v, %w, %s, %o; .reg .b64 %x, %z; .shared .align 16 .b8 box[16]; .local .align 8 .b8 own[64]; ld.param.u64 %x, [x]; mov.u32 %s, box; mov.u32 %o, own; mov.b64 %z, 0; mov.b32 %v, 0;"
    x = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(EmulatorError, match=message):
        run_ptx(body + text, ".param .u64 x", [x], block=1)
