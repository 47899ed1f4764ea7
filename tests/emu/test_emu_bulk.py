"""Bulk copies between all spaces, bulk reductions, byte masks, red.async, and arrivals after ordinary copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import run_ptx
from test_emu_tma import reduced

from deep_gemm_k3.emulator import Device, EmulatorError

RNG = np.random.default_rng(43)
ADVERSARIES = ["random", "earliest", "latest"]
TYPES = {
    "u32": torch.int32, "s32": torch.int32, "u64": torch.int64, "s64": torch.int64, "b32": torch.int32, "b64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
TO_GLOBAL = (
    [("add", t) for t in ("u32", "s32", "u64", "f16", "bf16", "f32", "f64")]
    + [(op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16", "bf16")]
    + [("inc", "u32"), ("dec", "u32")]
    + [(op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")]
)
TO_SHARED = [(op, t) for op, t in TO_GLOBAL if t in ("u32", "s32", "b32") or (op, t) == ("add", "u64")]


def values(name: str, count: int = 64) -> torch.Tensor:
    return torch.randint(0, 100, (count,)).to(TYPES[name])


FILL = """.reg .b32 %t, %v, %s, %n; .reg .b64 %x, %y; .reg .pred %p, %w; .shared .align 128 .b8 box[512]; .shared .align 8 .b64 bar;
mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; ld.param.u64 %x, [x]; mad.wide.u32 %x, %t, 16, %x; mov.u32 %s, box; mad.lo.u32 %s, %t, 16, %s;
.reg .b32 %a<4>; ld.global.v4.b32 {%a0,%a1,%a2,%a3}, [%x]; st.shared.v4.b32 [%s], {%a0,%a1,%a2,%a3}; fence.proxy.async.shared::cta; bar.warp.sync -1; ld.param.u64 %y, [y]; mov.u32 %n, BYTES;
"""


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize(("op", "name"), TO_GLOBAL)
def test_reductions_into_global_memory(op: str, name: str, adversary: str) -> None:
    tensor, content = values(name), values(name)
    want = reduced(tensor, content, op)
    noftz = ".noftz" if op == "add" and name in ("f16", "bf16") else ""
    body = FILL.replace("BYTES", str(tensor.nbytes))
    body += f"@%p cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}{noftz}.{name} [%y], [box], %n; @%p cp.async.bulk.commit_group; @%p cp.async.bulk.wait_group 0;"
    block = tensor.nbytes // 16
    device = Device(adversary=adversary, race_detection=True)
    run_ptx(body, ".param .u64 x, .param .u64 y", [content, tensor], block=block, device=device)
    assert torch.equal(tensor, want)
    assert not device.findings, device.findings


CLUSTER = """.reg .b32 %r, %o, %b, %k; mov.u32 %r, %cluster_ctarank; xor.b32 %k, %r, 1; .shared .align 128 .b8 into[512];
@%p mbarrier.init.shared::cta.b64 [bar], 1; @%p fence.mbarrier_init.release.cluster; @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %n;
mad.wide.u32 %y, %r, %n, %y; cvt.u64.u32 %x, %t; mad.lo.u64 %y, %x, 16, %y; ld.global.v4.b32 {%a0,%a1,%a2,%a3}, [%y]; mov.u32 %s, into; mad.lo.u32 %s, %t, 16, %s; st.shared.v4.b32 [%s], {%a0,%a1,%a2,%a3};
fence.proxy.async.shared::cta; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %o, into; mapa.shared::cluster.u32 %o, %o, %k; mov.u32 %b, bar; mapa.shared::cluster.u32 %b, %b, %k;
@%p COPY [%o], [box], %n, [%b];
TRY: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %w, [bar], 0; @!%w bra TRY;
ld.shared.v4.b32 {%a0,%a1,%a2,%a3}, [%s]; st.global.v4.b32 [%y], {%a0,%a1,%a2,%a3}; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize(("op", "name"), [("", "u32"), *TO_SHARED])
def test_copies_and_reductions_into_another_cta(op: str, name: str, adversary: str) -> None:
    """Both CTAs send the same content to each other's memory."""
    tensor, content = values(name, 128), values(name)
    want = torch.cat([reduced(part, content, op) for part in tensor.split(64)])
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    if op:
        copy = copy.replace("cp.", "cp.reduce.") + f".{op}.{name}"
    body = (FILL + CLUSTER.replace("COPY", copy)).replace("BYTES", str(content.nbytes))
    device = Device(adversary=adversary, race_detection=True)
    block = content.nbytes // 16
    run_ptx(body, ".param .u64 x, .param .u64 y", [content, tensor], grid=2, cluster=2, block=block, device=device)
    assert torch.equal(tensor, want)
    assert not device.findings, device.findings


def test_copies_of_some_bytes() -> None:
    content, tensor = RNG.integers(1, 256, 512).astype(np.uint8), np.zeros(512, np.uint8)
    mask = 0b1010_0000_1111_0011
    body = (
        FILL.replace("BYTES", "512")
        + f".reg .b16 %m; mov.b16 %m, {mask}; @%p cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%y], [box], %n, %m; @%p cp.async.bulk.commit_group; @%p cp.async.bulk.wait_group 0;"
    )
    run_ptx(body, ".param .u64 x, .param .u64 y", [content, tensor], target="sm_100a")
    chosen = np.array([bool(mask >> i % 16 & 1) for i in range(512)])
    assert np.array_equal(tensor, np.where(chosen, content, 0))


@pytest.mark.parametrize("read", ["", ".read"])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_groups_complete_in_order(read: str, adversary: str) -> None:
    """Four stores, one group each; with .read the memory they come from may change once they have read it."""
    content, tensor = RNG.integers(1, 1000, 128).astype(np.int32), np.zeros(128, np.int32)
    body = FILL.replace("BYTES", "128")
    for i in range(4):
        body += f"@%p cp.async.bulk.global.shared::cta.bulk_group [%y+{128 * i}], [box+{128 * i}], %n; @%p cp.async.bulk.commit_group;"
    body += f"@%p cp.async.bulk.wait_group{read} 2; @%p st.shared.b32 [box], 0; @%p st.shared.b32 [box+128], 0; @%p cp.async.bulk.wait_group 0;"
    device = Device(adversary=adversary, race_detection=True)
    run_ptx(body, ".param .u64 x, .param .u64 y", [content, tensor], device=device)
    assert np.array_equal(tensor, content)
    assert not device.findings, device.findings


RED = """.reg .b32 %t, %r, %o, %b, %v, %n; .reg .b64 %y, %v64; .reg .pred %p, %w; .shared .align 16 .b8 cell[16]; .shared .align 8 .b64 bar; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; mov.u32 %r, %cluster_ctarank; ld.param.u64 %y, [y];
mov.u64 %v64, FIRST; @%p st.shared.b64 [cell], %v64; mov.u32 %n, BYTES; @%p mbarrier.init.shared::cta.b64 [bar], 1; @%p fence.mbarrier_init.release.cluster; @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %n;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; xor.b32 %b, %r, 1; mov.u32 %o, cell; mapa.shared::cluster.u32 %o, %o, %b; mov.u32 %v, bar; mapa.shared::cluster.u32 %b, %v, %b; mad.lo.u32 %v, %r, 32, %t; add.u32 %v, %v, 1; cvt.u64.u32 %v64, %v;
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.OP [%o], VALUE, [%b];
TRY: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %w, [bar], 0; @!%w bra TRY; ld.shared.b64 %v64, [cell]; mad.wide.u32 %y, %r, 8, %y; @%p st.global.b64 [%y], %v64;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("op", ["add.u32", "add.s32", "add.u64", "min.u32", "max.u32", "min.s32", "max.s32", "inc.u32", "dec.u32", "and.b32", "or.b32", "xor.b32"])  # fmt: skip
def test_asynchronous_reductions(op: str, adversary: str) -> None:
    """Thirty-two lanes reduce into one cell of the other CTA."""
    first, size = 70, int(op[-2:]) // 8
    text = RED.replace("FIRST", str(first)).replace("BYTES", str(32 * size)).replace("OP", op).replace("VALUE", "%v64" if size == 8 else "%v")  # fmt: skip
    out = np.zeros(2, np.uint64)
    device = Device(seed=7, adversary=adversary, race_detection=True)
    run_ptx(text, ".param .u64 y", [out], grid=2, cluster=2, device=device)
    assert not device.findings, device.findings
    for rank in range(2):
        given = np.arange(32, dtype=np.uint32) + 32 * (rank ^ 1) + 1
        if op[:3] in ("inc", "dec"):  # these depend on the order
            assert out[rank] <= 100
            continue
        want = {
            "add": first + int(given.sum()), "min": min(first, given.min()), "max": max(first, given.max()),
            "and": int(np.bitwise_and.reduce(given)) & first, "or.": int(np.bitwise_or.reduce(given)) | first, "xor": int(np.bitwise_xor.reduce(given)) ^ first,
        }[op[:3]]  # fmt: skip
        assert out[rank] == want


@pytest.mark.parametrize("noinc", [False, True])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_arrivals_after_ordinary_copies(noinc: bool, adversary: str) -> None:
    """Without .noinc the arrival adds to what is pending and takes it away: the barrier's own count is another's."""
    x, y = RNG.integers(1, 1000, 128).astype(np.int32), np.zeros(128, np.int32)
    count = 32 if noinc else 1
    body = f""".reg .b32 %t, %s, %a<4>; .reg .b64 %x, %y; .reg .pred %p, %w; .shared .align 16 .b8 box[512]; .shared .align 8 .b64 bar; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;
    ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mad.wide.u32 %x, %t, 16, %x; mad.wide.u32 %y, %t, 16, %y; mov.u32 %s, box; mad.lo.u32 %s, %t, 16, %s; @%p mbarrier.init.shared::cta.b64 [bar], {count}; bar.warp.sync -1;
    cp.async.cg.shared.global [%s], [%x], 16; cp.async.mbarrier.arrive{".noinc" if noinc else ""}.shared::cta.b64 [bar]; {"" if noinc else "bar.warp.sync -1; @%p mbarrier.arrive.shared::cta.b64 _, [bar];"}
    TRY: mbarrier.try_wait.parity.shared::cta.b64 %w, [bar], 0; @!%w bra TRY; xor.b32 %t, %t, 31; mov.u32 %s, box; mad.lo.u32 %s, %t, 16, %s; ld.shared.v4.b32 {{%a0,%a1,%a2,%a3}}, [%s]; st.global.v4.b32 [%y], {{%a0,%a1,%a2,%a3}};"""
    for seed in range(3):
        device = Device(seed=seed, adversary=adversary)
        run_ptx(body, ".param .u64 x, .param .u64 y", [x, y], device=device)
        assert np.array_equal(y.reshape(32, 4), x.reshape(32, 4)[::-1])


ORDER = """.reg .b32 %t, %s, %n; .reg .b64 %x, %y, %z; .reg .pred %p; .shared .align 128 .b8 box[512]; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %n, 512;
mul.wide.u32 %z, %t, 16; add.u64 %x, %x, %z; mov.u32 %s, box; mad.lo.u32 %s, %t, 16, %s; WRITTEN cp.async.cg.shared.global [%s], [%x], 16; cp.async.wait_all; FENCE bar.warp.sync -1;
@%p cp.async.bulk.global.shared::cta.bulk_group [%y], [box], %n; @%p cp.async.bulk.commit_group; @%p cp.async.bulk.wait_group 0;"""


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("written", ["", "mov.b32 %n, 0; st.shared.b32 [%s], %n; mov.u32 %n, 512;"])
def test_ordinary_copies_are_of_the_generic_proxy(written: str, fenced: bool) -> None:
    """They need no fence after an ordinary store; a bulk copy of what they have written does."""
    x, y = RNG.integers(0, 256, 512).astype(np.uint8), np.zeros(512, np.uint8)
    device = Device(race_detection=True)
    body = ORDER.replace("WRITTEN", written).replace("FENCE", "fence.proxy.async.shared::cta;" if fenced else "")
    run_ptx(body, ".param .u64 x, .param .u64 y", [x, y], device=device)
    assert np.array_equal(x, y)
    assert {f.kind for f in device.findings} == (set() if fenced else {"proxy"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cp.async.bulk.global.shared::cta.bulk_group [%y], [box], 24;", "not a multiple of 16"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%y+8], [box], 16;", "misaligned"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%y], [box+8], 16;", "misaligned"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%y+112], [box], 32;", "out-of-bounds"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%y], [box+240], 32;", "out-of-bounds"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [box], [%y], 32, [bar];", "no initialised mbarrier"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [box], [%y+112], 32, [bar];", "out-of-bounds"),
        ("cp.async.cg.shared.global [box+8], [%y], 16;", "misaligned"),
        ("cp.async.ca.shared.global [box], [%y+2], 4;", "misaligned"),
    ],
)  # fmt: skip
def test_copies_that_are_not_allowed(text: str, message: str) -> None:
    body = ".reg .b64 %y; .shared .align 8 .b64 bar; .shared .align 16 .b8 box[256]; ld.param.u64 %y, [y]; .reg .b32 %v; mov.b32 %v, 0; st.shared.b32 [box], %v; st.shared.b32 [box+4], %v; st.shared.b32 [box+8], %v; st.shared.b32 [box+12], %v;"
    with pytest.raises(EmulatorError, match=message):
        run_ptx(body + text, ".param .u64 y", [torch.zeros(128, dtype=torch.uint8)], block=1)


SPACES = """.reg .b32 %t, %s, %n; .reg .b64 %x, %y; .reg .pred %p; .shared .align 128 .b8 box[512]; .shared .align 8 .b64 bar; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mad.wide.u32 %x, %t, 4, %x; mov.u32 %s, box; mad.lo.u32 %s, %t, 4, %s;
"""
STORED = "st.shared.b32 [%s], %t; FENCE bar.warp.sync -1; @%p cp.async.bulk.global.shared::cta.bulk_group [%y], [box], 128; @%p cp.async.bulk.commit_group; @%p cp.async.bulk.wait_group 0;"
LOADED = """st.global.b32 [%x], %t; FENCE @%p mbarrier.init.shared::cta.b64 [bar], 1; bar.warp.sync -1; ld.param.u64 %x, [x]; @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
@%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [box], [%x], 128, [bar]; TRY: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra TRY;"""
FENCES = {
    "": "", "fence.proxy.async;": "sg", "fence.proxy.async.global;": "g", "fence.proxy.async.shared::cta;": "s",
    "fence.proxy.async.shared::cluster;": "s", "fence.proxy.alias;": "",
}  # fmt: skip


@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("memory", ["s", "g"])
def test_a_proxy_fence_is_of_the_memory_it_names(memory: str, fence: str) -> None:
    x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    body = SPACES + (STORED if memory == "s" else LOADED).replace("FENCE", fence)
    device = Device(race_detection=True)
    run_ptx(body, ".param .u64 x, .param .u64 y", [x, y], device=device)
    assert {f.kind for f in device.findings} == (set() if memory in FENCES[fence] else {"proxy"})
