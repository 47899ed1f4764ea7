"""A matrix product for sm_90a written in the CuTe DSL: see cute_dsl_gemms.py."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import memory, pipeline, utils
from cutlass.cute.nvgpu import cpasync, warpgroup

BF16, F32 = cutlass.BFloat16, cutlass.Float32
ALONG_K = cute.nvgpu.OperandMajorMode.K
THREAD = pipeline.Agent.Thread


def partition(atom, shared, tensor):
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tensor, 0, 2)
    )


class Warpgroups:
    """C (M x N, F32) = A (M x K, BF16) B (N x K, BF16)^T on sm_90a: two warpgroups multiply, a warp beside them copies."""

    tile, stages = (128, 128, 64), 3

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        rows = utils.LayoutEnum.ROW_MAJOR
        mma = sm90.make_trivial_tiled_mma(BF16, BF16, ALONG_K, ALONG_K, F32, (2, 1, 1), (64, self.tile[1]))
        shape_a = sm90.make_smem_layout_a(rows, self.tile, BF16, self.stages)
        shape_b = sm90.make_smem_layout_b(rows, self.tile, BF16, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        stage_a, stage_b = cute.slice_(shape_a, (None, None, 0)), cute.slice_(shape_b, (None, None, 0))
        load_a, a = cpasync.make_tiled_tma_atom(load, a, stage_a, (self.tile[0], self.tile[2]))
        load_b, b = cpasync.make_tiled_tma_atom(load, b, stage_b, (self.tile[1], self.tile[2]))
        grid = (cute.size(c, mode=[0]) // self.tile[0], cute.size(c, mode=[1]) // self.tile[1], 1)
        self.kernel(mma, load_a, a, load_b, b, c, shape_a, shape_b).launch(grid=grid, block=(288, 1, 1))

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        load_a: cute.CopyAtom,
        a: cute.Tensor,
        load_b: cute.CopyAtom,
        b: cute.Tensor,
        c: cute.Tensor,
        shape_a: cute.ComposedLayout,
        shape_b: cute.ComposedLayout,
    ):
        @cute.struct
        class Storage:
            stages: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        x, y, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        shared = memory.SmemAllocator()
        storage = shared.allocate(Storage)
        shared_a = shared.allocate_tensor(BF16, shape_a.outer, 1024, shape_a.inner)
        shared_b = shared.allocate_tensor(BF16, shape_b.outer, 1024, shape_b.inner)
        stage_a, stage_b = cute.slice_(shape_a, (None, None, 0)), cute.slice_(shape_b, (None, None, 0))
        producer, consumer = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(THREAD),
            consumer_group=pipeline.CooperativeGroup(THREAD, 8),
            tx_count=cute.size_in_bytes(BF16, stage_a) + cute.size_in_bytes(BF16, stage_b),
            barrier_storage=storage.stages.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        ).make_participants()
        at = (x, y, None)
        tile_a = cute.local_tile(a, self.tile, at, proj=(1, None, 1))
        tile_b = cute.local_tile(b, self.tile, at, proj=(None, 1, 1))
        tile_c = cute.local_tile(c, self.tile, at, proj=(1, 1, None))
        to_a, from_a = partition(load_a, shared_a, tile_a)
        to_b, from_b = partition(load_b, shared_b, tile_b)
        count = cute.size(tile_a, mode=[2])
        if warp == 8:
            for k in cutlass.range(count):
                stage = producer.acquire_and_advance()
                cute.copy(load_a, from_a[(None, k)], to_a[(None, stage.index)], tma_bar_ptr=stage.barrier)
                cute.copy(load_b, from_b[(None, k)], to_b[(None, stage.index)], tma_bar_ptr=stage.barrier)
                stage.commit()
            producer.tail()
        if warp < 8:
            group = mma.get_slice(cute.arch.make_warp_uniform(thread // 128) * 128)
            part_a = mma.make_fragment_A(group.partition_A(shared_a))
            part_b = mma.make_fragment_B(group.partition_B(shared_b))
            out = mma.get_slice(thread).partition_C(tile_c)
            result = cute.make_rmem_tensor(out.shape, F32)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for _ in cutlass.range(count):
                full = consumer.wait_and_advance()
                warpgroup.fence()
                for j in cutlass.range_constexpr(cute.size(part_a, mode=[2])):
                    piece = (None, None, j, full.index)
                    cute.gemm(mma, result, part_a[piece], part_b[piece], result)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                full.release()
            cute.autovec_copy(result, out)
