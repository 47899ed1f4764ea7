// Splits of a tile along K. Every split stores its FP32 accumulators and arrives; sums are taken in ascending split
// order, a split's own from memory too, so neither the order of arrival nor who sums enters the result. Each math
// warpgroup does this for its own rows, with a counter of its own.
//
//   run    the last to arrive sums the whole tile and carries on with its sink; the others have done with it
//   share  every split waits for all others, then sums and sinks the tokens that are its share. Only where all splits
//          of a tile run at once. The way from the last product to the last store is a fraction of the other one's.
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

// Some tokens of a tile.
struct TokenSlice {
    int first;
    int count;
};

template <Config C, int kNumBlocks, int kNumAccumulators>
struct SplitReduction {
    static constexpr int kNumVectors = kNumAccumulators / 4;
    static constexpr int kNumThreads = C.num_math_warpgroups * 128;
    static_assert(kNumBlocks * kNumAccumulators * kNumThreads <= plan::kMaxSplitTileElements);
    using Accumulators = float[kNumBlocks][kNumAccumulators];
    // Vectors in flight beside the sums: a round trip to memory is most of what a sum costs.
    static constexpr int kInFlight = kNumBlocks * kNumAccumulators <= 16 ? 16 : 8;
    // No tile has more; registers for splits that cannot be would be spilled.
    static constexpr int kMaxSplits =
        max_of(max_of(C.splits.routed_l1, C.splits.routed_l2), max_of(C.splits.shared_l1, C.splits.shared_l2));

    // This thread's part of a split's partials, and from there to its next vector or the next split.
    static constexpr int kVectorStride = kNumThreads * 16, kSplitStride = plan::kMaxSplitTileElements * 4;
    static __device__ __forceinline__ uint8_t* partials(
        const sched::Context& ctx, const MathThread& me, int split_task) {
        const int thread = me.warpgroup * 128 + me.thread;
        return sched::component<C>(ctx, plan::Component::kSplitPartials) + uint64_t(split_task) * kSplitStride +
               thread * 16;
    }
    static __device__ __forceinline__ void store(
        const sched::Context& ctx, const MathThread& me, const sched::Task& task, const Accumulators& acc) {
        uint8_t* to = partials(ctx, me, task.split_task);
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int v = 0; v < kNumVectors; ++v)
                *reinterpret_cast<float4*>(to + (m * kNumVectors + v) * kVectorStride) =
                    make_float4(acc[m][4 * v], acc[m][4 * v + 1], acc[m][4 * v + 2], acc[m][4 * v + 3]);
    }

    // acc[m][0 .. 4 * kCount) = the sums of vectors m * kNumVectors + 0 .. kCount - 1 from `from` on.
    template <int kCount>
    static __device__ __forceinline__ void sum(const uint8_t* from, int num_splits, Accumulators& acc) {
        constexpr int kSplits = min_of(kMaxSplits, max_of(1, kInFlight / (kNumBlocks * kCount))); // in flight
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < 4 * kCount; ++i)
                acc[m][i] = 0.f;
#pragma unroll 1
        for (int first = 0; first < num_splits; first += kSplits) {
            ptx::Word16 words[kSplits][kNumBlocks][kCount];
#pragma unroll
            for (int s = 0; s < kSplits; ++s)
#pragma unroll
                for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
                    for (int v = 0; v < kCount; ++v) {
                        words[s][m][v] = {0, 0, 0, 0};
                        if (first + s < num_splits)
                            words[s][m][v] = ptx::load_relaxed_sys_v4(
                                from + s * kSplitStride + (m * kNumVectors + v) * kVectorStride);
                    }
#pragma unroll
            for (int s = 0; s < kSplits; ++s)
#pragma unroll
                for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
                    for (int v = 0; v < kCount; ++v) {
                        acc[m][4 * v] += __uint_as_float(words[s][m][v].x);
                        acc[m][4 * v + 1] += __uint_as_float(words[s][m][v].y);
                        acc[m][4 * v + 2] += __uint_as_float(words[s][m][v].z);
                        acc[m][4 * v + 3] += __uint_as_float(words[s][m][v].w);
                    }
            from += kSplits * kSplitStride;
        }
    }

    // All of it, one split at a time, its address found anew for each: SM100's kernel has no register left for more.
    static __device__ __forceinline__ void sum_in_turn(
        const sched::Context& ctx, const MathThread& me, const sched::Task& task, Accumulators& acc) {
        const int first = task.split_task - task.split;
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kNumAccumulators; ++i)
                acc[m][i] = 0.f;
#pragma unroll 1
        for (int s = 0; s < task.num_splits; ++s) {
            const uint8_t* from = partials(ctx, me, first + s);
#pragma unroll
            for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
                for (int v = 0; v < kNumVectors; ++v) {
                    const ptx::Word16 word = ptx::load_relaxed_sys_v4(from + (m * kNumVectors + v) * kVectorStride);
                    acc[m][4 * v] += __uint_as_float(word.x);
                    acc[m][4 * v + 1] += __uint_as_float(word.y);
                    acc[m][4 * v + 2] += __uint_as_float(word.z);
                    acc[m][4 * v + 3] += __uint_as_float(word.w);
                }
        }
    }

    // True: this warpgroup now holds the tile's sums.
    static __device__ __forceinline__ bool run(const sched::Context& ctx, const sched::Task& task, Accumulators& acc) {
        const MathThread me;
        const uint32_t verdict = staging_address<C>(ctx, me);
        store(ctx, me, task, acc);
        me.sync();
        if (me.thread == 0)
            ptx::store_shared_4(verdict, sync::arrive_split<C>(ctx, task, me.warpgroup));
        me.sync();
        // A vote, so that the assembler knows that warps stay together: else every wgmma waits for its descriptor.
        const bool is_last = __all_sync(0xFFFFFFFFu, ptx::load_shared_4(verdict) != 0);
        me.sync(); // the staging memory is free again
        if (!is_last)
            return false;
        if constexpr (C.arch == Architecture::kSM100)
            sum_in_turn(ctx, me, task, acc);
        else
            sum<kNumVectors>(partials(ctx, me, task.split_task - task.split), task.num_splits, acc);
        return true;
    }

    // Groups of 8 tokens that are one split's share: equal shares, so late splits may have none.
    static DG_HOST_DEVICE constexpr int groups_of_share(int num_splits) {
        int count = ceil_div(kNumVectors, num_splits);
        while (kNumVectors % count != 0)
            ++count;
        return count;
    }

    // The sums of this split's share of the tokens, from acc[m][0] on; `kNumSplits` is what task.num_splits is.
    template <int kNumSplits>
    static __device__ __forceinline__ TokenSlice share(
        const sched::Context& ctx, const sched::Task& task, Accumulators& acc) {
        constexpr int kCount = groups_of_share(kNumSplits);
        const MathThread me;
        store(ctx, me, task, acc);
        me.sync();
        if (me.thread == 0)
            sync::arrive_shared_split<C>(ctx, task, me.warpgroup);
        sync::wait_splits<C>(ctx, task, me.warpgroup);
        const int first = min(task.split * kCount, kNumVectors - kCount);
        sum<kCount>(partials(ctx, me, task.split_task - task.split) + first * kVectorStride, kNumSplits, acc);
        const int begin = min(task.split * kCount * 8, task.num_valid_tokens);
        return {begin, min(task.num_valid_tokens - begin, kCount * 8)};
    }
};

} // namespace deep_gemm_k3::epilogue
