"""Tensor maps of packed 4- and 6-bit types, and loads of a pair of CTAs, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import cuda_module, run_ptx
from tensor_support import HELPERS

from deep_gemm_k3.emulator import Device, EmulatorError, TensorMap

RNG = np.random.default_rng(7)

LOAD = (
    (
        HELPERS
        + """
extern "C" __global__ void CLUSTER k(const __grid_constant__ uint4_map map, u32* out, int words, int bytes, int x, int y) {
  extern __shared__ __align__(1024) u32 box[];
  u32 rank, bar = sptr(box) + 4 * words; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(bar) : "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0) {
    if (EXPECTS) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes * COUNT) : "memory");
    if (LOADS) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytesMODS [%0], [%1, {%2, %3}], [%4]MASK;" :: "r"(sptr(box)), "l"(&map), "r"(x), "r"(y + (int)rank * 16), "r"(BAR), "h"((unsigned short)3) : "memory");
  }
  if (EXPECTS) wait(bar, 0);
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  for (int i = threadIdx.x; i < words; i += 32) if (KEPT) out[rank * words + i] = box[i];
}"""
    )
    .replace("uint4_map", "Map")
    .replace("struct Step", "struct alignas(64) Map { char bytes[128]; };\nstruct Step")
)


def run_load(
    tensor_map: TensorMap, size: int, x: int, y: int, *, bits: int = 8, kept: str = "true", form: str = "one"
) -> np.ndarray:
    """The shared memory of each CTA after its load; of a pair, the first one's barrier counts both loads. A barrier counts
    ``bits`` per byte of shared memory: the elements of an expanding type, without their gaps."""
    forms = {
        "one": ("", "", "true", "true", "1", "bar", ""),
        "pair": ("__cluster_dims__(2, 1, 1)", ".cta_group::2", "rank == 0", "true", "2", "bar & 0xfeffffff", ""),
        "multicast": (
            "__cluster_dims__(2, 1, 1)", ".multicast::cluster.cta_group::2", "rank == 0", "rank == 0", "2", "bar", ", %5",
        ),
    }  # fmt: skip
    cluster, mods, expects, loads, count, bar, mask = forms[form]
    source = LOAD
    for name, value in (
        ("CLUSTER", cluster), ("MODS", mods), ("EXPECTS", expects), ("LOADS", loads), ("COUNT", count), ("BAR", bar),
        ("MASK", mask), ("KEPT", kept),
    ):  # fmt: skip
        source = source.replace(name, value)
    group = 1 if form == "one" else 2
    out = np.zeros((group, size), np.uint8)
    device = Device(arch="sm_100a", race_detection=True)
    device.launch(
        cuda_module(source, "sm_100a"),
        "k",
        group,
        32,
        params=[tensor_map, out, size // 4, size * bits // 8, x, y],
        shared_bytes=size + 16,
    )
    assert not device.findings, device.findings
    return out


def aligned(data: np.ndarray) -> np.ndarray:
    """A copy at an address that is a multiple of 64, as tensor maps want it."""
    return torch.from_numpy(data).clone().numpy()


def packed_tensor(rows: int, columns: int, bits: int) -> np.ndarray:
    return aligned(RNG.integers(0, 256, (rows, columns * bits // 8)).astype(np.uint8))


def swizzled(offset: np.ndarray, name: str) -> np.ndarray:
    if name == "128B":
        return offset ^ ((offset >> 7 & 7) << 4)
    return offset ^ ((offset >> 7 & 3) << 5) if name == "128B_atom_32B" else offset


@pytest.mark.parametrize(("dtype", "bits"), [("16u4_align16b", 4), ("16u6_align16b", 6)])
@pytest.mark.parametrize("swizzle", ["none", "128B", "128B_atom_32B"])
@pytest.mark.parametrize("form", ["one", "pair", "multicast"])
def test_expanding_types_leave_a_gap_after_sixteen_elements(dtype: str, bits: int, swizzle: str, form: str) -> None:
    data = packed_tensor(64, 256, bits)
    tensor_map = TensorMap(data, dtype, [256, 64], [data.shape[1]], [128, 16], swizzle=swizzle)
    kept = f"i % 4 < {bits // 2}"  # what follows the elements has no value: reading it would be a finding
    got = run_load(tensor_map, 16 * 128, 128, 8, bits=bits, kept=kept, form=form)
    for c in range(got.shape[0]):
        first = 8 + (16 * c if form == "pair" else 0)
        want = np.zeros((16, 8, 16), np.uint8)
        rows = data[first : first + 16, 128 * bits // 8 :].reshape(16, 8, -1)
        want[..., : 2 * bits] = rows
        where = swizzled(np.arange(16 * 128), swizzle)
        assert np.array_equal(got[c][where], want.ravel())


def test_expanded_padding_has_no_value() -> None:
    data = packed_tensor(64, 256, 4)
    tensor_map = TensorMap(data, "16u4_align16b", [256, 64], [128], [128, 16])
    with pytest.raises(AssertionError, match="uninitialised-shared"):
        run_load(tensor_map, 16 * 128, 0, 0, bits=4)


def test_dense_packed_type_is_copied_as_it_is() -> None:
    data = packed_tensor(64, 256, 4)
    tensor_map = TensorMap(data, "16u4_align8b", [256, 64], [128], [64, 16], swizzle="32B")
    got = run_load(tensor_map, 16 * 32, 64, 8)[0]
    where = np.arange(16 * 32)
    where ^= (where >> 7 & 1) << 4
    assert np.array_equal(got[where], data[8:24, 32:64].ravel())


def test_rows_outside_are_zero() -> None:
    data = packed_tensor(64, 256, 4)
    tensor_map = TensorMap(data, "16u4_align16b", [256, 64], [128], [128, 16])
    got = run_load(tensor_map, 16 * 128, 0, 56, bits=4, kept="i % 4 < 2")[0].reshape(16, 8, 16)
    assert np.array_equal(got[:8, :, :8], data[56:, :64].reshape(8, 8, 8))
    assert np.all(got[8:] == 0)


def test_a_first_coordinate_inside_a_block_is_a_fault() -> None:
    data = packed_tensor(64, 256, 4)
    tensor_map = TensorMap(data, "16u4_align16b", [256, 64], [128], [128, 16])
    with pytest.raises(EmulatorError, match="multiple of 128"):
        run_load(tensor_map, 16 * 128, 16, 0)


STORE = (
    HELPERS
    + """
extern "C" __global__ void k(const __grid_constant__ Map map, const u32* in, int words) {
  extern __shared__ __align__(1024) u32 box[];
  for (int i = threadIdx.x; i < words; i += 32) box[i] = in[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {0, 8}], [%1]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" :: "l"(&map), "r"(sptr(box)) : "memory");
  }
}"""
).replace("struct Step", "struct alignas(64) Map { char bytes[128]; };\nstruct Step")


def test_six_bits_of_each_byte_are_stored_packed() -> None:
    data, codes = aligned(np.zeros((32, 96), np.uint8)), RNG.integers(0, 64, (16, 128)).astype(np.uint8)
    tensor_map = TensorMap(data, "16u6_align16b", [128, 32], [96], [128, 16])
    noisy = codes | (RNG.integers(0, 4, codes.shape) << 6).astype(np.uint8)
    device = Device(arch="sm_100a")
    device.launch(cuda_module(STORE, "sm_100a"), "k", 1, 32, params=[tensor_map, noisy, 512], shared_bytes=2048)
    bits = (codes[..., None] >> np.arange(6)) & 1
    want = np.packbits(bits.reshape(16, -1).astype(np.uint8), axis=-1, bitorder="little")
    assert np.array_equal(data[8:24], want)
    assert not data[:8].any()
    assert not data[24:].any()


def test_four_bits_that_expand_cannot_be_stored() -> None:
    data = packed_tensor(32, 128, 4)
    tensor_map = TensorMap(data, "16u4_align16b", [128, 32], [64], [128, 16])
    with pytest.raises(EmulatorError, match="cannot be stored"):
        Device(arch="sm_100a").launch(
            cuda_module(STORE, "sm_100a"),
            "k",
            1,
            32,
            params=[tensor_map, np.zeros(512, np.uint32), 512],
            shared_bytes=2048,
        )


@pytest.mark.parametrize(
    "text",
    [
        "multimem.red.relaxed.sys.global.add.u32 [%x], %r0;",
        "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0,%f1,%f2,%f3}, {%r0,%r1}, {%r0,%r1}, {%f0,%f1,%f2,%f3}, %r0, 0;",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r0], [%x, {%r0,%r0,%r0}], [%r0], {%h0};",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r0,%r1}, %r0, [%r0];",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %x, %x, 1, 1, 1, 0, 0;",
    ],
    ids=lambda text: text.split(".")[0] + text.split(".")[1],
)
def test_what_has_no_model_names_its_line(text: str) -> None:
    body = ".reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b16 %h<2>; .reg .b64 %x;\n" + text
    with pytest.raises(EmulatorError, match=r"PTX line 6: .*" + text.split(".")[0]):
        run_ptx(body, "", [], target="sm_100a")


def test_a_kernel_of_no_instruction_ends() -> None:
    assert not run_ptx("", "", [], target="sm_100a").findings


def test_interleaved_maps_have_no_model() -> None:
    data = aligned(RNG.integers(0, 256, (4, 4, 64)).astype(np.uint8))
    tensor_map = TensorMap(data, "uint8", [64, 4, 4], [64, 256], [16, 4, 1], interleave=1)
    body = """.reg .b32 %a; .reg .b64 %m; .shared .align 128 .b8 box[1024]; .shared .align 8 .b64 bar; mov.u64 %m, map; cvta.param.u64 %m, %m; mov.u32 %a, 0;
    mbarrier.init.shared::cta.b64 [bar], 1; cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%m, {%a,%a,%a}], [bar];"""
    with pytest.raises(EmulatorError, match="interleaved"):
        run_ptx(body, ".param .align 64 .b8 map[128]", [tensor_map], block=1, target="sm_100a")
