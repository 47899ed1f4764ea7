"""Which instructions a .target has, and that nothing of an instruction is passed over in silence.

The table is what the assembler of CUDA 13.0 says of each text.
"""

from __future__ import annotations

import pytest

from deep_gemm_k3.emulator import EmulatorError, Module

REGISTERS = """.reg .b16 %h<8>; .reg .b32 %r<40>; .reg .f32 %f<16>; .reg .b64 %x<20>; .reg .pred %p<4>; .reg .b8 %b;
.shared .align 1024 .b8 box[4096]; .shared .align 8 .b64 bar;
"""
TARGETS = ["sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103a", "sm_110a", "sm_120", "sm_120a"]
EIGHT = "{%r0,%r1,%r2,%r3,%r4,%r5,%r6,%r7}"
FOUR = "{%f0,%f1,%f2,%f3}"
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
LEGAL = {  # one + or - for each target
    "wgmma.fence.sync.aligned;": "-+-------",
    "tcgen05.fence::before_thread_sync;": "---++++--",
    "setmaxnreg.inc.sync.aligned.u32 40;": "-+-++++-+",
    f"{LOAD}.cta_group::2 [box], [%x0, {{%r0,%r1}}], [bar];": "---++++--",
    f"{LOAD}.cta_group::1 [box], [%x0, {{%r0,%r1}}], [bar];": "---++++--",
    f"{LOAD} [box], [%x0, {{%r0,%r1}}], [bar];": "+++++++++",
    "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%x0], [box], %r0, %h0;": "--+++++++",
    f"ld.global.v8.b32 {EIGHT}, [%x0];": "--+++++++",
    "ld.global.v4.b64 {%x0,%x1,%x2,%x3}, [%x4];": "--+++++++",
    "ld.global.v2.b64 {%x0,%x1}, [%x4];": "+++++++++",
    f"st.global.v8.b32 [%x0], {EIGHT};": "--+++++++",
    "add.rn.f32x2 %x0, %x1, %x2;": "--+++++++",
    "fma.rn.f32x2 %x0, %x1, %x2, %x3;": "--+++++++",
    "redux.sync.min.f32 %f0, %f1, %r0;": "---+++---",
    "redux.sync.min.s32 %r0, %r1, %r2;": "+++++++++",
    "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0,%r1}, [%r2];": "---++++-+",
    "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r0}, [%r2];": "---++++-+",
    "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r2], {%r0};": "---++++-+",
    "cvt.rn.satfinite.e2m1x2.f32 %b, %f0, %f1;": "---++++-+",
    "cvt.rn.satfinite.e2m3x2.f32 %h0, %f0, %f1;": "---++++-+",
    "cvt.rz.satfinite.ue8m0x2.f32 %h0, %f0, %f1;": "---++++-+",
    "cvt.rn.satfinite.e4m3x2.f32 %h0, %f0, %f1;": "+++++++++",
    f"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {FOUR},{{%r0,%r1,%r2,%r3}},{{%r4,%r5}},{FOUR};": "+++++++++",
    "elect.sync %r0|%p0, -1;": "+++++++++",
    "min.f32 %f0, %f1, %f2, %f3;": "--+++++++",
}


@pytest.mark.parametrize("text", LEGAL)
def test_instructions_of_a_target(text: str) -> None:
    for target, sign in zip(TARGETS, LEGAL[text], strict=True):
        module = (
            f".version 9.0\n.target {target}\n.address_size 64\n.visible .entry k() {{\n{REGISTERS}\n{text}\nret; }}"
        )
        if sign == "+":
            Module(module).check()
        else:
            with pytest.raises(EmulatorError, match=f"line 8: .*(of three )?does not exist on .target {target}"):
                Module(module).check()


BAD = [
    "prefetch.global.L2.sideways [%x0];", "prefetch.global [%x0];", "prefetchu.L3 [%x0];", "griddepcontrol.later;",
    "griddepcontrol.wait.all;", "discard.global.L1 [%x0], 128;", "applypriority.global.L2::evict_first [%x0], 128;",
    "pmevent.sideways 1;", "nanosleep.u32.fast %r0;", "nanosleep %r0, %r1;", "bra.sideways END;", "trap.now;",
    "bar.sync.sideways 0;", "barrier.cluster.arrive.relaxed.acquire;", "barrier.cluster.wait.relaxed;", "bar.red.sum.u32 %r0, 0, %p0;",
    "fence.proxy.sideways;", "fence.proxy.alias.global;", "fence.acq_rel.universe;", "fence.sc;", "membar.gpu;",
    "elect.sync.all %r0|%p0, -1;", "shfl.sync.left.b32 %r0, %r1, 1, 31, -1;", "vote.sync.most.pred %p0, %p1, -1;",
    "redux.sync.mul.u32 %r0, %r1, -1;", "redux.sync.min.abs.s32 %r0, %r1, -1;", "redux.sync.add.f32 %f0, %f1, -1;", "redux.sync.and.s32 %r0, %r1, -1;",
    "match.any.sync.b16 %r0, %r1, -1;", "mbarrier.arrive.twice.shared.b64 %x0, [bar];", "mbarrier.init.gpu.shared.b64 [bar], 1;",
    "mbarrier.try_wait.release.cta.shared::cta.b64 %p0, [bar], %x0;", "mbarrier.arrive.acquire.cta.shared::cta.b64 %x0, [bar];",
    "atom.global.nand.b32 %r0, [%x0], %r1;", "atom.global.add.b32 %r0, [%x0], %r1;", "red.global.exch.b32 [%x0], %r1;", "atom.global.and.f32 %f0, [%x0], %f1;",
    "atom.global.inc.s32 %r0, [%x0], %r1;", "atom.global.min.f32 %f0, [%x0], %f1;",
    "st.async.shared::cluster.b32 [%r0], %r1, [%r2];", "cp.async.bulk.commit_group.now;", "cp.async.bulk.wait_group.write 0;",
    "cp.async.ca.shared.global.L2::32B [%r0], [%x0], 4;", "cp.async.ca.shared.global [%r0], [%x0], 12;", "cp.async.cg.shared.global [%r0], [%x0], 8;",
    "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r0,%r1,%r2}, [%r4];", "stmatrix.sync.aligned.m8n8.x1.shared.b8 [%r4], {%r0};", "ldmatrix.sync.aligned.m8n8.x1.global.b16 {%r0}, [%x0];",
    "movmatrix.sync.aligned.m8n8.b16 %r0, %r1;", "mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32 {%f0,%f1,%f2,%f3},{%r0,%r1,%r2,%r3},{%r4,%r5},{%f0,%f1,%f2,%f3};",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {%f0,%f1,%f2,%f3},{%r0,%r1,%r2,%r3},{%r4,%r5},{%f0,%f1,%f2,%f3};",
    "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16 {%r6,%r7},{%r0,%r1,%r2,%r3},{%r4,%r5},{%r6,%r7};",
    "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32 {%f0,%f1,%f2,%f3},{%r0,%r1,%r2,%r3},{%r4,%r5},{%f0,%f1,%f2,%f3};",
    "mma.sync.aligned.m16n8kx.row.col.f32.f16.f16.f32 {%f0,%f1,%f2,%f3},{%r0,%r1,%r2,%r3},{%r4,%r5},{%f0,%f1,%f2,%f3};",
    "mma.sync.aligned.row.col.f32.f16.f16.f32 {%f0,%f1,%f2,%f3},{%r0,%r1,%r2,%r3},{%r4,%r5},{%f0,%f1,%f2,%f3};",
    "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %x0, %x1, %p0, 1, 1, 0, 0;",
    "wgmma.mma_async.sync.aligned.m64nxk16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %x0, %x1, %p0, 1, 1, 0, 0;",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.f16 {%f0,%f1,%f2,%f3}, %x0, %x1, %p0, 1, 1, 0, 0;",
    "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r0,%r1,%r2,%r3}, %x0, %x1, %p0;",
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %x0, %x1, %r0, 0, %p0, 1, 1, 0, 0;",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %x0, %x1, %p0, 2, 1, 0, 0;",
    "wgmma.fence.aligned;", "multimem.red.relaxed.sys.global.add.u32 [%x0], %r0;", "multimem.ld_reduce.relaxed.sys.global.add.u32 %r0, [%x0];",
    "multimem.st.relaxed.sys.global.u32 [%x0], %r0;", "tex.1d.v4.f32.s32 {%f0,%f1,%f2,%f3}, [box, {%r0}];", "setmaxnreg.inc.sync.aligned.u32 260;", "setmaxnreg.inc.sync.aligned.u32 44;",
    "mapa.shared.u32 %r0, %r1, 1;", "createpolicy.sideways.L2::evict_first.b64 %x0, 1.0;", "isspacep.texture %p0, %x0;", "cvt.rn.satfinite.e9m9x2.f32 %h0, %f0, %f1;",
    "cvt.rn.e4m3x2.f32 %h0, %f0, %f1;", "cvt.satfinite.e4m3x2.f32 %h0, %f0, %f1;", "cvt.s32.f32 %r0, %f0;", "add.rn.sat.ftz.s32 %r0, %r1, %r2;", "fma.f32 %f0, %f1, %f2, %f3;",
    "ex2.f32 %f0, %f1;", "div.f32 %f0, %f1, %f2;", "sqrt.f32 %f0, %f1;", "lop3.b32 %r0, %r1, %r2, %r3;", "mul.s32 %r0, %r1, %r2;", "mad.s32 %r0, %r1, %r2, %r3;",
    "ld.global.v3.b32 {%r0,%r1,%r2}, [%x0];", "ld.acquire.global.b32 %r0, [%x0];", "st.acquire.sys.global.b32 [%x0], %r0;", "ld.release.sys.global.b32 %r0, [%x0];",
]  # fmt: skip


MORE = [
    "ld.gpu.global.u32 %r0, [%x0];", "st.sys.global.u32 [%x0], %r0;", "mbarrier.arrive.release.shared::cta.b64 %x0, [bar];", "mbarrier.test_wait.cta.shared::cta.b64 %p0, [bar], %x0;",
    "mbarrier.complete_tx.cluster.shared::cluster.b64 [%r0], %r1;", "isspacep %p0, %x0;", "cp.async.bulk.shared::cluster.mbarrier::complete_tx::bytes [box], [%x0], %r1, [bar];",
    "cp.async.bulk.global.bulk_group [%x0], [box], %r1;", "cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.u32 [%x0], [box], %r1;", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%x0], [box], %r1;",
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.f32 [%r0], %f1, [%r2];", "fma.bf16x2 %r0, %r1, %r2, %r3;", "tanh.f16x2 %r0, %r1;", "add.approx.f16 %h0, %h1, %h2;",
    "cvt.rn.e4m3.s32 %r1, %r0;", "cvt.rn.f64.e4m3x2 %x0, %h0;", "ld.global.e4m3x2 %h0, [%x0];", "selp.e4m3 %r0, %r1, %r2, %p0;", "dp4a.u32 %r0, %r1, %r2, %r3;", "dp4a.u32.b32 %r0, %r1, %r2, %r3;",
    f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e2m1.f32 {FOUR},{{%r0,%r1,%r2,%r3}},{{%r4,%r5}},{FOUR};",
    f"mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0 {FOUR},{{%r0,%r1,%r2,%r3}},{{%r4,%r5}},{FOUR}, %r6, {{0, 1}}, %r7, {{0, 1}};",
    f"mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {FOUR},{{%r0,%r1}},{{%r2,%r3}},{FOUR},%r4,0x0;", f"mma.sp.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {FOUR},{{%r0,%r1}},{{%r2,%r3}},{FOUR},%r4,0x0;",
]  # fmt: skip
BLACKWELL = [
    "tcgen05.mma.cta_group::1.kind::f16.ashift [%r0], [%r2], %x1, %r1, %p0;", "tcgen05.mma.cta_group::1.kind::i8.collector::b0::use [%r0], %x0, %x1, %r1, %p0;",
    "tcgen05.mma.ws.cta_group::1.kind::i8.collector::a::use [%r0], %x0, %x1, %r1, %p0;", "tcgen05.mma.sp.cta_group::1.kind::f16 [%r0], %x0, %x1, [%r2], %r1, %p0;", "tcgen05.cp.cta_group::1.128x256b.b8x16 [%r0], %x0;",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r0,%r1}, %r0, [%r0];", "tcgen05.alloc.sync.aligned.shared::cta.b32 [%r0], 64;", "tcgen05.commit.cta_group::1.shared::cluster.b64 [%r0];", "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [box], [bar];",
    "cvt.rs.bf16x2.f32 %r0, %f0, %f1, %r1;", "add.f32.f16 %f0, %h0, %f1;", "st.bulk.weak.shared::cta [%x0], 64, 0;",
]  # fmt: skip


@pytest.mark.parametrize("text", BLACKWELL)
def test_what_does_not_exist_or_has_no_model_on_blackwell_is_an_error_with_its_line(text: str) -> None:
    module = f".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k() {{\n{REGISTERS}\n{text}\nret; }}"
    with pytest.raises(EmulatorError, match="line 8: "):
        Module(module).check()


HINTS = [
    "tcgen05.mma.cta_group::1.kind::f16.collector::a::fill [%r0], [%r2], %x1, %r1, %p0;", "tcgen05.mma.cta_group::1.kind::f16.collector::a::lastuse [%r0], %x0, %x1, %r1, %p0;",
    "tcgen05.mma.ws.cta_group::1.kind::i8.collector::b0::use [%r0], %x0, %x1, %r1, %p0;", "tcgen05.mma.ws.cta_group::1.kind::f16.collector::b3::discard [%r0], %x0, %x1, %r1, %p0;",
]  # fmt: skip


@pytest.mark.parametrize("text", HINTS)
def test_hints_of_the_collector_are_accepted(text: str) -> None:
    Module(
        f".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k() {{\n{REGISTERS}\n{text}\nret; }}"
    ).check()


@pytest.mark.parametrize("text", BAD + MORE)
def test_what_does_not_exist_is_an_error_with_its_line(text: str) -> None:
    module = (
        f".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {{\n{REGISTERS}\n{text}\nEND: ret; }}"
    )
    with pytest.raises(EmulatorError, match="line 8: "):
        Module(module).check()
