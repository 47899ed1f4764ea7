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
    static constexpr int kNumVectors = kNumAccumulators / 4; // per m64 block
    static constexpr int kNumThreads = C.num_math_warpgroups * 128;
    static constexpr uint32_t kPartialBytes = plan::kMaxSplitTileElements * 4;
    // Splits whose loads are in flight together: what the registers of two CTAs on an SM allow.
    static constexpr int kInFlight = kNumBlocks * kNumVectors <= 2 ? 8 : 1;
    static_assert(kNumBlocks * kNumVectors * kNumThreads * 16 <= kPartialBytes);
    using Accumulators = float[kNumBlocks][kNumAccumulators];

    // This thread's part of a split.
    static __device__ __forceinline__ uint8_t* partial(
        const sched::Context& ctx, const MathThread& me, int split_task) {
        return sched::component<C>(ctx, plan::Component::kSplitPartials) + uint64_t(split_task) * kPartialBytes +
               (me.warpgroup * 128 + me.thread) * 16;
    }

    // Adds splits [begin, begin + kInFlight) in their order; all loads are on their way before the first sum.
    static __device__ __forceinline__ void add(const uint8_t* first, int num_splits, Accumulators& acc) {
        ptx::Word16 words[kInFlight][kNumBlocks * kNumVectors];
#pragma unroll
        for (int s = 0; s < kInFlight; ++s)
#pragma unroll
            for (int v = 0; v < kNumBlocks * kNumVectors; ++v) {
                words[s][v] = {0, 0, 0, 0};
                if (s < num_splits)
                    words[s][v] = ptx::load_relaxed_sys_v4(first + s * kPartialBytes + v * kNumThreads * 16);
            }
#pragma unroll
        for (int s = 0; s < kInFlight; ++s)
#pragma unroll
            for (int v = 0; v < kNumBlocks * kNumVectors; ++v) {
                float* total = &acc[v / kNumVectors][v % kNumVectors * 4];
                total[0] += __uint_as_float(words[s][v].x);
                total[1] += __uint_as_float(words[s][v].y);
                total[2] += __uint_as_float(words[s][v].z);
                total[3] += __uint_as_float(words[s][v].w);
            }
    }

    // True: this warpgroup now holds the tile's sums.
    static __device__ __forceinline__ bool run(const sched::Context& ctx, const sched::Task& task, Accumulators& acc) {
        const MathThread me;
        const uint32_t verdict = staging_address<C>(ctx, me);
        uint8_t* mine = partial(ctx, me, task.split_task);
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int v = 0; v < kNumVectors; ++v)
                *reinterpret_cast<float4*>(mine + (m * kNumVectors + v) * kNumThreads * 16) =
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
        const uint8_t* first = partial(ctx, me, task.split_task - task.split);
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kNumAccumulators; ++i)
                acc[m][i] = 0.f;
#pragma unroll 1
        for (int s = 0; s < task.num_splits; s += kInFlight, first += kInFlight * kPartialBytes)
            add(first, task.num_splits - s, acc);
        return true;
    }
};

} // namespace deep_gemm_k3::epilogue
