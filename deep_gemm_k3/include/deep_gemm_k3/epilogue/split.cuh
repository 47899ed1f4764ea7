// Splits of a tile along K. Every split stores its FP32 accumulators and arrives; the last to arrive sums all of them
// in ascending split order, its own included, and carries on with the tile's sink. The order of arrival does not matter
// to the result. Each math warpgroup does this for its own rows, with a counter of its own.
//
// A partial is kMaxSplitTileElements floats; thread i of the math threads keeps its vectors of four at (v * threads +
// i).
#pragma once
#include "../plan/workspace.cuh"
#include "../sync/dependencies.cuh"
#include "math_thread.cuh"

namespace deep_gemm_k3::epilogue {

// Larger tiles are never split: there are enough of them.
DG_HOST_DEVICE constexpr bool can_split(const TileShape& tile) {
    return tile.num_rows * tile.num_tokens <= plan::kMaxSplitTileElements;
}

template <Config C, int kNumBlocks, int kNumAccumulators>
struct SplitReduction {
    static constexpr int kNumVectors = kNumAccumulators / 4;
    static constexpr int kNumThreads = C.num_math_warpgroups * 128;
    static_assert(kNumBlocks * kNumAccumulators * kNumThreads <= plan::kMaxSplitTileElements);
    using Accumulators = float[kNumBlocks][kNumAccumulators];

    // This thread's part of a vector of a split.
    static __device__ __forceinline__ uint8_t* partial(
        const sched::Context& ctx, const MathThread& me, int split_task, int vector) {
        const int thread = me.warpgroup * 128 + me.thread;
        return sched::component<C>(ctx, plan::Component::kSplitPartials) +
               (uint64_t(split_task) * plan::kMaxSplitTileElements + (vector * kNumThreads + thread) * 4) * 4;
    }

    // True: this warpgroup now holds the tile's sums.
    static __device__ __forceinline__ bool run(const sched::Context& ctx, const sched::Task& task, Accumulators& acc) {
        const MathThread me;
        const uint32_t verdict = staging_address<C>(ctx, me);
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int v = 0; v < kNumVectors; ++v)
                *reinterpret_cast<float4*>(partial(ctx, me, task.split_task, m * kNumVectors + v)) =
                    make_float4(acc[m][4 * v], acc[m][4 * v + 1], acc[m][4 * v + 2], acc[m][4 * v + 3]);
        me.sync();
        if (me.thread == 0)
            ptx::store_shared_4(verdict, sync::arrive_split<C>(ctx, task, me.warpgroup));
        me.sync();
        // A vote, so that the assembler knows that warps stay together: else every wgmma waits for its descriptor.
        const bool is_last = __all_sync(0xFFFFFFFFu, ptx::load_shared_4(verdict) != 0);
        me.sync(); // the staging memory is free again
        if (!is_last)
            return false;
        const int first = task.split_task - task.split;
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kNumAccumulators; ++i)
                acc[m][i] = 0.f;
#pragma unroll 1
        for (int s = 0; s < task.num_splits; ++s)
#pragma unroll
            for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
                for (int v = 0; v < kNumVectors; ++v) {
                    const ptx::Word16 w = ptx::load_relaxed_sys_v4(partial(ctx, me, first + s, m * kNumVectors + v));
                    acc[m][4 * v] += __uint_as_float(w.x);
                    acc[m][4 * v + 1] += __uint_as_float(w.y);
                    acc[m][4 * v + 2] += __uint_as_float(w.z);
                    acc[m][4 * v + 3] += __uint_as_float(w.w);
                }
        return true;
    }
};

} // namespace deep_gemm_k3::epilogue
