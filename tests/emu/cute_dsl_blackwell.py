"""Matrix products for sm_100a written in the CuTe DSL: see cute_dsl_gemms.py."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as scale_layout
from cutlass import memory, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.experimental.primitives.nvvm_wrapper import tcgen05_fence

BF16, F32, F8, F4 = cutlass.BFloat16, cutlass.Float32, cutlass.Float8E4M3FN, cutlass.Float4E2M1FN
SCALE, BYTE = cutlass.Float8E8M0FNU, cutlass.Uint8
ALONG_K = cute.nvgpu.OperandMajorMode.K
THREAD = pipeline.Agent.Thread


def one_stage(layout):
    return cute.select(layout, [0, 1, 2])


def partition(atom, shared, tensor):
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tensor, 0, 3)
    )


def storage_of(stages):
    @cute.struct
    class Storage:
        full: cute.struct.MemRange[cutlass.Int64, 2 * stages]
        result: cute.struct.MemRange[cutlass.Int64, 2]
        freed: cutlass.Int64
        slot: cutlass.Int32

    return Storage


def tensor_memory(storage, count):
    return memory.TmemAllocator(
        storage.slot.ptr,
        barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=128),
        is_two_cta=count == 2,
        two_cta_tmem_dealloc_mbar_ptr=storage.freed.ptr,
    )


def pipelines(storage, stages, size, cluster, count):
    """From the copies to the products, and from the products to all threads of the CTAs."""
    thread = pipeline.CooperativeGroup(THREAD)
    full = pipeline.PipelineTmaUmma.create(
        num_stages=stages,
        producer_group=thread,
        consumer_group=thread,
        tx_count=size,
        barrier_storage=storage.full.data_ptr(),
        cta_layout_vmnk=cluster,
    )
    result = pipeline.PipelineUmmaAsync.create(
        num_stages=1,
        producer_group=thread,
        consumer_group=pipeline.CooperativeGroup(THREAD, 128 * count),
        barrier_storage=storage.result.data_ptr(),
        cta_layout_vmnk=cluster,
    )
    return full, result


def store(result, tile, thread):
    """From tensor memory through registers to the CTA's part of C."""
    read = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), F32), result[None, 0, 0]
    )
    lane = read.get_slice(thread)
    out = lane.partition_D(tile[None, 0, 0])
    registers = cute.make_rmem_tensor(out.shape, F32)
    tcgen05_fence("after_thread_sync")
    cute.copy(read, lane.partition_S(result[None, 0, 0]), registers)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(registers, out)


class Dense:
    """C (M x N, F32) = A (M x K, BF16) B (N x K, BF16)^T by pairs of CTAs: one warp copies and multiplies."""

    tile, stages = (256, 128, 64), 3

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        mma = sm100.make_trivial_tiled_mma(BF16, BF16, ALONG_K, ALONG_K, F32, tcgen05.CtaGroup.TWO, self.tile[:2])
        shape_a = sm100.make_smem_layout_a(mma, self.tile, BF16, self.stages)
        shape_b = sm100.make_smem_layout_b(mma, self.tile, BF16, self.stages)
        cluster = cute.tiled_divide(cute.make_layout((2, 1, 1)), (mma.thr_id.shape,))
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        load_a, a = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_stage(shape_a), self.tile, mma, cluster.shape)
        load_b, b = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_stage(shape_b), self.tile, mma, cluster.shape)
        grid = (cute.size(c, mode=[0]) // 128, cute.size(c, mode=[1]) // 128, 1)
        self.kernel(mma, load_a, a, load_b, b, c, shape_a, shape_b, cluster).launch(
            grid=grid, block=(128, 1, 1), cluster=(2, 1, 1)
        )

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
        cluster: cute.Layout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        x, y, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        half = x % 2
        shared = memory.SmemAllocator()
        storage = shared.allocate(storage_of(self.stages))
        shared_a = shared.allocate_tensor(BF16, shape_a.outer, 1024, shape_a.inner)
        shared_b = shared.allocate_tensor(BF16, shape_b.outer, 1024, shape_b.inner)
        tensor = tensor_memory(storage, 2)
        size = cute.size_in_bytes(BF16, one_stage(shape_a)) + cute.size_in_bytes(BF16, one_stage(shape_b))
        stages, results = pipelines(storage, self.stages, 2 * size, cluster, 2)
        producer, consumer = stages.make_participants()
        giver, taker = results.make_participants()
        at = (x // 2, y, None)
        tile_a = cute.local_tile(a, self.tile, at, proj=(1, None, 1))
        tile_b = cute.local_tile(b, self.tile, at, proj=(None, 1, 1))
        tile_c = cute.local_tile(c, self.tile, at, proj=(1, 1, None))
        mine = mma.get_slice(half)
        to_a, from_a = partition(load_a, shared_a, mine.partition_A(tile_a))
        to_b, from_b = partition(load_b, shared_b, mine.partition_B(tile_b))
        part_a, part_b = mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b)
        shape = mma.make_fragment_C(mma.partition_shape_C(self.tile[:2])).layout
        tensor.allocate(128)
        tensor.wait_for_alloc()
        columns = tensor.retrieve_ptr(F32)
        result = cute.make_tensor(columns, shape)
        if warp == 0:
            if half == 0:
                giver.acquire()
            for k in cutlass.range(cute.size(tile_a, mode=[2])):
                stage = producer.acquire_and_advance()
                cute.copy(load_a, from_a[(None, k)], to_a[(None, stage.index)], tma_bar_ptr=stage.barrier)
                cute.copy(load_b, from_b[(None, k)], to_b[(None, stage.index)], tma_bar_ptr=stage.barrier)
                if half == 0:
                    full = consumer.wait_and_advance()
                    for j in cutlass.range_constexpr(cute.size(part_a, mode=[2])):
                        piece = (None, None, j, full.index)
                        cute.gemm(mma, result, part_a[piece], part_b[piece], result)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    full.release()
            if half == 0:
                giver.commit()
        tensor.relinquish_alloc_permit()
        taker.wait()
        store(result, mine.partition_C(tile_c), thread)
        taker.release()
        pipeline.sync(barrier_id=1)
        tensor.free(columns)


class Scaled:
    """C (M x N, F32) = A (M x K, E4M3) B (N x K, E2M1)^T with a UE8M0 scale for 32 of K, by one CTA or a pair."""

    stages = 2

    def __init__(self, count: int) -> None:
        self.count = count
        self.group = tcgen05.CtaGroup.TWO if count == 2 else tcgen05.CtaGroup.ONE
        self.tile = (128 * count, 128, 128)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, scale_a: cute.Tensor, scale_b: cute.Tensor, c: cute.Tensor):
        tile, count = self.tile, self.count
        mma = sm100.make_blockscaled_trivial_tiled_mma(F8, F4, ALONG_K, ALONG_K, SCALE, 32, self.group, tile[:2])
        # both CTAs of a pair hold the scales of all columns
        single = sm100.make_blockscaled_trivial_tiled_mma(
            F8, F4, ALONG_K, ALONG_K, SCALE, 32, tcgen05.CtaGroup.ONE, (128, tile[1])
        )
        shapes = (
            sm100.make_smem_layout_a(mma, tile, F8, self.stages),
            sm100.make_smem_layout_b(mma, tile, BYTE, self.stages),
            scale_layout.make_smem_layout_sfa(mma, tile, 32, self.stages),
            scale_layout.make_smem_layout_sfb(mma, tile, 32, self.stages),
        )
        cluster = cute.tiled_divide(cute.make_layout((count, 1, 1)), (mma.thr_id.shape,))
        alone = cute.tiled_divide(cute.make_layout((count, 1, 1)), (single.thr_id.shape,))
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        first = [cute.slice_(shape, (None, None, None, 0)) for shape in shapes]
        scale_a = cute.make_tensor(scale_a.iterator, scale_layout.tile_atom_to_shape_SF(a.shape, 32))
        scale_b = cute.make_tensor(scale_b.iterator, scale_layout.tile_atom_to_shape_SF(b.shape, 32))
        grid = (cute.size(c, mode=[0]) // 128, cute.size(c, mode=[1]) // 128, 1)
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        load_a, a = make_a(load, a, first[0], tile, mma, cluster.shape)
        load_b, b = make_b(load, b, first[1], tile, mma, cluster.shape, internal_type=BYTE)  # expands to bytes
        load_sa, scale_a = make_a(load, scale_a, first[2], tile, mma, cluster.shape, internal_type=cutlass.Int16)
        load_sb, scale_b = make_b(
            load, scale_b, first[3], (128, *tile[1:]), single, alone.shape, internal_type=cutlass.Int16
        )
        self.kernel(
            mma, single, (load_a, load_b, load_sa, load_sb), (a, b, scale_a, scale_b), c, *shapes, cluster
        ).launch(grid=grid, block=(128, 1, 1), cluster=(count, 1, 1))

    def to_tensor_memory(self, shared, tensor):
        """The copy of a stage's scales to the columns of `tensor`: atom, descriptors per stage, target."""
        compact = cute.filter_zeros(tensor)
        copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), SCALE), compact)
        piece = copy.get_slice(0)
        source = tcgen05.get_s2t_smem_desc_tensor(copy, piece.partition_S(cute.filter_zeros(shared)))
        return copy, source, piece.partition_D(compact)

    def boxes(self, shared, shapes):
        return (
            shared.allocate_tensor(F8, shapes[0].outer, 1024, shapes[0].inner),
            shared.allocate_tensor(BYTE, shapes[1].outer, 1024, shapes[1].inner),
            shared.allocate_tensor(SCALE, shapes[2], 1024),
            shared.allocate_tensor(SCALE, shapes[3], 1024),
        )

    def scale_columns(self, mma, columns, shapes):
        """The scales of a stage in tensor memory, behind the columns of the result."""
        first = [cute.slice_(shape, (None, None, None, 0)) for shape in shapes[2:]]
        layouts = (
            scale_layout.make_tmem_layout_sfa(mma, self.tile, 32, first[0]),
            scale_layout.make_tmem_layout_sfb(mma, self.tile, 32, first[1]),
        )
        at = (columns + 128, columns + 160)
        return [cute.make_tensor(cute.recast_ptr(a, dtype=SCALE), x) for a, x in zip(at, layouts, strict=True)]

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        single: cute.TiledMma,
        loads: tuple[cute.CopyAtom, ...],
        tensors: tuple[cute.Tensor, ...],
        c: cute.Tensor,
        shape_a: cute.ComposedLayout,
        shape_b: cute.ComposedLayout,
        shape_scale_a: cute.Layout,
        shape_scale_b: cute.Layout,
        cluster: cute.Layout,
    ):
        shapes = (shape_a, shape_b, shape_scale_a, shape_scale_b)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        x, y, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        half = x % self.count
        shared = memory.SmemAllocator()
        storage = shared.allocate(storage_of(self.stages))
        boxes = self.boxes(shared, shapes)
        tensor = tensor_memory(storage, self.count)
        size = 0  # what the copies read: the gaps after the expanded elements do not count
        for kind, shape in zip((F8, F4, SCALE, SCALE), shapes, strict=True):
            size += cute.size_in_bytes(kind, cute.slice_(shape, (None, None, None, 0)))
        stages, results = pipelines(storage, self.stages, self.count * size, cluster, self.count)
        producer, consumer = stages.make_participants()
        giver, taker = results.make_participants()
        at = (x // self.count, y, None)
        a, b, scale_a, scale_b = (t[None, None, 0] for t in tensors)
        mine, whole = mma.get_slice(half), single.get_slice(0)
        tile_a = cute.local_tile(a, self.tile, at, proj=(1, None, 1))
        parts = (
            mine.partition_A(tile_a),
            mine.partition_B(cute.local_tile(b, self.tile, at, proj=(None, 1, 1))),
            mine.partition_A(cute.local_tile(scale_a, self.tile, at, proj=(1, None, 1))),
            whole.partition_B(cute.local_tile(scale_b, self.tile, at, proj=(None, 1, 1))),
        )
        tile_c = mine.partition_C(cute.local_tile(c[None, None, 0], self.tile, at, proj=(1, 1, None)))
        copies = []
        for load, box, part in zip(loads, boxes, parts, strict=True):
            to, source = partition(load, box, part)
            copies.append((load, cute.filter_zeros(to), cute.filter_zeros(source)))
        part_a, part_b = mma.make_fragment_A(boxes[0]), mma.make_fragment_B(boxes[1])
        shape = mma.make_fragment_C(mma.partition_shape_C(self.tile[:2])).layout
        tensor.allocate(256)
        tensor.wait_for_alloc()
        columns = tensor.retrieve_ptr(F32)
        result = cute.make_tensor(columns, shape)
        columns_a, columns_b = self.scale_columns(mma, columns, shapes)
        moves = (self.to_tensor_memory(boxes[2], columns_a), self.to_tensor_memory(boxes[3], columns_b))
        if warp == 0:
            if half == 0:
                giver.acquire()
            for k in cutlass.range(cute.size(tile_a, mode=[2])):
                stage = producer.acquire_and_advance()
                for atom, goal, origin in copies:
                    cute.copy(atom, origin[(None, k)], goal[(None, stage.index)], tma_bar_ptr=stage.barrier)
                if half == 0:
                    full = consumer.wait_and_advance()
                    for move, descriptors, scales in moves:
                        cute.copy(move, descriptors[(None, None, None, None, full.index)], scales)
                    for j in cutlass.range_constexpr(cute.size(part_a, mode=[2])):
                        piece = (None, None, j, full.index)
                        mma.set(tcgen05.Field.SFA, columns_a[(None, None, j)].iterator)
                        mma.set(tcgen05.Field.SFB, columns_b[(None, None, j)].iterator)
                        cute.gemm(mma, result, part_a[piece], part_b[piece], result)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    full.release()
            if half == 0:
                giver.commit()
        tensor.relinquish_alloc_permit()
        taker.wait()
        store(result, tile_c, thread)
        taker.release()
        pipeline.sync(barrier_id=1)
        tensor.free(columns)
