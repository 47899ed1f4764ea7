// The math warpgroups: each takes 128 of a tile's 256 rows from tensor memory to the tile's sink. While they work on
// one tile, the tensor core works on the next.
//
//   per task:  record -> [routed: row information] -> sums full -> [splits] ->
//              routed: to pool (L1) | to peer (L2);  shared: intermediate (L1) | output or publication (L2)
#pragma once
#include "../../epilogue/sm100/to_peer.cuh"
#include "../../epilogue/sm100/to_pool.cuh"
#include "../../epilogue/sm100/to_shared.cuh"
#include "../../epilogue/split.cuh"
#include "pipeline.cuh"
#include "tile_sums.cuh"

namespace deep_gemm_k3::engine {

template <Config C>
struct Consumer {
    static constexpr plan::TensorMemoryLayout kTensorLayout = Rings<C>::kTensorLayout;
    // Of two such phases (L1, L2), whether one may be split; partials hold one pass.
    static constexpr bool kSplitsRouted =
        C.routed_tile.num_tokens <= 32 && (C.splits.routed_l1 > 1 || C.splits.routed_l2 > 1);
    static constexpr bool kSplitsShared =
        C.shared_tile.num_tokens <= 32 && (C.splits.shared_l1 > 1 || C.splits.shared_l2 > 1);

    const sched::Context& ctx;
    Rings<C> rings;
    typename Rings<C>::SumsPlace sums;
    typename Rings<C>::RecordPlace record;
    uint32_t tensor_memory;

    __device__ __forceinline__ Consumer(const sched::Context& context, uint32_t address)
        : ctx(context), rings(context.shared), tensor_memory(address) {}

    __device__ __forceinline__ uint32_t warpgroup() const { return ptx::thread_index() / 128; }

    template <int kTokens>
    __device__ __forceinline__ TileSums<kTokens, C.num_cluster_ctas> tile_sums(const sched::Task& task) const {
        return {tensor_memory + sums.index * kTensorLayout.stage_columns + warpgroup() * kTensorLayout.half_columns,
            at_leader<C>(rings.sums_empty(sums.index)), task.num_valid_tokens};
    }
    __device__ __forceinline__ void wait_sums() const {
        wait_barrier(
            ctx, {sync::Role::kMath, sync::What::kStage, sums.index}, rings.sums_full(sums.index), sums.parity);
        __syncwarp(); // loads take whole warps
        ptx::tensor_fence_after_sync();
        debug::mark(ctx, debug::Event::kMultiplied);
    }
    // False: another split finishes the tile.
    template <bool kSplits, int kTokens>
    __device__ __forceinline__ bool meet_splits(
        const sched::Task& task, TileSums<kTokens, C.num_cluster_ctas>& tile) const {
        if constexpr (kSplits) {
            if (task.num_splits > 1) {
                tile.load(0);
                tile.is_loaded = true;
                return epilogue::SplitReduction<C, 2, TileSums<kTokens, C.num_cluster_ctas>::kPerBlock>::run(
                    ctx, task, tile.d);
            }
        }
        return true;
    }

    __device__ __forceinline__ void run_routed(const sched::Task& task) const {
        constexpr int kTokens = C.routed_tile.num_tokens;
        const bool is_l1 = task.phase == sched::Phase::kRoutedL1;
        epilogue::TokenRows<kTokens> rows;
        // Whoever gathered the block's tokens wrote their row information before the record was published.
        if (is_l1)
            epilogue::ToScaledPool<C>(ctx).load_rows(task, rows);
        else
            epilogue::ToPeerSM100<C>(ctx).load_rows(task, rows);
        auto tile = tile_sums<kTokens>(task);
        wait_sums();
        if (!meet_splits<kSplitsRouted>(task, tile))
            return;
        if (is_l1)
            epilogue::ToScaledPool<C>(ctx).finish(task, rows, tile);
        else
            epilogue::ToPeerSM100<C>(ctx).finish(task, rows, tile);
    }
    __device__ __forceinline__ void run_shared(const sched::Task& task) const {
        auto tile = tile_sums<C.shared_tile.num_tokens>(task);
        wait_sums();
        if (!meet_splits<kSplitsShared>(task, tile))
            return;
        if (task.phase == sched::Phase::kSharedL1)
            epilogue::SharedToIntermediateSM100<C>(ctx).finish(task, tile);
        else
            epilogue::SharedToOutputSM100<C>(ctx).finish(task, tile);
    }

    // False: there are no more tasks, or a limit has passed.
    __device__ __forceinline__ bool run_task() {
        const sync::Where where = {sync::Role::kMath, sync::What::kStage, record.index};
        if (!wait_barrier(ctx, where, rings.record_full(record.index), record.parity))
            return false;
        const TaskRecord& next = rings.record(ctx, record.index);
        const bool is_last = next.num_stages == 0;
        if (!is_last) {
            debug::mark(ctx, debug::Event::kTask, debug_argument(next.task));
            if (static_cast<int>(warpgroup()) >= num_tile_halves(C, next.task.phase, next.task.row_tile)) {
                wait_sums();
                tile_sums<32>(next.task).release();
            } else if (!sched::is_shared(next.task.phase)) {
                run_routed(next.task);
            } else if constexpr (C.has_shared()) {
                run_shared(next.task);
            }
            sums.advance();
            debug::mark(ctx, debug::Event::kFinished);
        }
        __syncwarp();
        if (ptx::thread_index() % 32 == 0)
            ptx::mbarrier_arrive(rings.record_empty(record.index));
        record.advance();
        return !is_last;
    }
};

// Called by all math warpgroups.
template <Config C>
__device__ __forceinline__ void consume(const sched::Context& ctx, uint32_t tensor_memory) {
    Consumer<C> consumer(ctx, tensor_memory);
#pragma unroll 1
    while (consumer.run_task()) {
    }
}

} // namespace deep_gemm_k3::engine
