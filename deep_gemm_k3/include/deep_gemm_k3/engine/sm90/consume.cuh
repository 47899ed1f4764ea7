// The math warpgroups: for every task the mainloop, then the tile's sink. They only ever wait for the ring.
//
//   per task:  first stage arrives, record ->
//              routed: row information -> mainloop -> [splits] -> to_pool or exchange (L1) | to_peer (L2)
//              shared:                    mainloop -> [splits] -> intermediate (L1) | output or publication (L2)
#pragma once
#include "../../debug/timeline.cuh"
#include "../../epilogue/exchange.cuh"
#include "../../epilogue/split.cuh"
#include "../../epilogue/to_peer.cuh"
#include "../../epilogue/to_pool.cuh"
#include "../../epilogue/to_shared.cuh"
#include "routed.cuh"
#include "shared.cuh"

namespace deep_gemm_k3::engine {

// Without an exchange the math warps finish every tile themselves.
struct NoExchange {
    __device__ __forceinline__ explicit NoExchange(const uint8_t*) {}
};
template <bool kHasExchange, Config C>
struct SelectExchange {
    using Type = NoExchange;
};
template <Config C>
struct SelectExchange<true, C> {
    using Type = epilogue::ExchangeWriter<C>;
};
template <Config C>
using ExchangeOf = typename SelectExchange<plan::has_exchange(C), C>::Type;

// The narrowest mainloop that has the task's tokens.
template <Config C, int kWidth>
__device__ __forceinline__ void run_mainloop(
    const TaskRecord& record, Pipeline<C>& pipeline, typename RoutedMainloop<C>::Accumulators& acc) {
    constexpr int kNarrower = plan::has_widths(C) ? plan::narrower_width(C, kWidth) : 0;
    if constexpr (kNarrower != 0) {
        if (record.task.num_valid_tokens <= kNarrower) {
            run_mainloop<C, kNarrower>(record, pipeline, acc);
            return;
        }
    }
    RoutedMainloop<C, kWidth>().run(pipeline, record.num_stages, acc);
}

template <Config C>
__device__ __forceinline__ int num_handed_over(const TaskRecord& record) {
    return plan::shares_tiles(C) ? record.num_handed_over : 0;
}

template <Config C>
__device__ __forceinline__ void consume_routed(
    const sched::Context& ctx, const TaskRecord& record, Pipeline<C>& pipeline, ExchangeOf<C>& exchange) {
    const sched::Task& task = record.task;
    using Mainloop = RoutedMainloop<C>;
    const bool is_l1 = task.phase == sched::Phase::kRoutedL1;
    const int first_row =
        task.row_tile * C.routed_tile.num_rows + ctx.warp_idx / 4 * Mainloop::kNumBlocks * plan::kUnitRows;
    if (first_row >= sched::num_weight_rows(C, task.phase)) {
        Mainloop().skip(pipeline, record.num_stages);
        return;
    }
    epilogue::TokenRows<Mainloop::kTileTokens> rows;
    typename Mainloop::Accumulators acc;
    // The first stage has arrived, and whoever gathered its tokens wrote their row information before.
    if (!is_l1)
        epilogue::ToPeer<C>(ctx).load_rows(task, rows);
    else if constexpr (!plan::overlays_exchange(C))
        epilogue::ToPool<C>(ctx).load_rows(task, rows, num_handed_over<C>(record));
    run_mainloop<C, C.routed_tile.num_tokens>(record, pipeline, acc);
    debug::mark(ctx, debug::Event::kMultiplied);
    if constexpr (epilogue::can_split(C.routed_tile) && (C.splits.routed_l1 > 1 || C.splits.routed_l2 > 1)) {
        using Splits = epilogue::SplitReduction<C, Mainloop::kNumBlocks, Mainloop::kNumAccumulators>;
        if (task.num_splits > 1 && !Splits::run(ctx, task, acc))
            return;
    }
    if (is_l1) {
        if constexpr (plan::has_exchange(C))
            if (plan::overlays_exchange(C) || num_handed_over<C>(record) != 0)
                exchange.send(task, acc, pipeline.has_failed);
        if constexpr (!plan::overlays_exchange(C))
            epilogue::ToPool<C>(ctx).finish(task, num_handed_over<C>(record), rows, acc);
        return;
    }
    if constexpr (plan::overlays_exchange(C))
        exchange.wait_empty(pipeline.has_failed);
    epilogue::ToPeer<C>(ctx).finish(task, rows, acc);
}

template <Config C>
__device__ __forceinline__ void consume_shared(
    const sched::Context& ctx, const TaskRecord& record, Pipeline<C>& pipeline, ExchangeOf<C>& exchange) {
    const sched::Task& task = record.task;
    using Mainloop = SharedMainloop<C>;
    typename Mainloop::Accumulators acc;
    Mainloop::run(ctx, pipeline, record.num_stages, acc);
    debug::mark(ctx, debug::Event::kMultiplied);
    using Splits = epilogue::SplitReduction<C, Mainloop::kNumBlocks, Mainloop::kNumAccumulators>;
    if (task.phase == sched::Phase::kSharedL1) {
        epilogue::TokenSlice slice = {0, task.num_valid_tokens};
        if constexpr (epilogue::can_split(C.shared_tile) && C.splits.shared_l1 > 1) {
            static_assert(sched::shares_splits(C, sched::Phase::kSharedL1));
            if (task.num_splits > 1)
                slice = Splits::template share<C.splits.shared_l1>(ctx, task, acc);
        }
        epilogue::SharedToIntermediate<C>(ctx).finish(task, slice, acc);
    } else {
        if constexpr (epilogue::can_split(C.shared_tile) && C.splits.shared_l2 > 1)
            if (task.num_splits > 1 && !Splits::run(ctx, task, acc))
                return;
        if constexpr (plan::overlays_exchange(C))
            exchange.wait_empty(pipeline.has_failed);
        epilogue::SharedToOutput<C>(ctx).finish(task, acc);
    }
}

// Called by all math warpgroups.
template <Config C>
__device__ __forceinline__ void consume(const sched::Context& ctx) {
    Pipeline<C> pipeline(ctx.shared);
    ExchangeOf<C> exchange(ctx.shared);
#pragma unroll 1
    while (true) {
        pipeline.wait_full();
        const TaskRecord& record = pipeline.next_record(ctx);
        if (record.num_stages == 0 || pipeline.has_failed)
            break;
        debug::mark(ctx, debug::Event::kTask, debug_argument(record.task));
        if (!sched::is_shared(record.task.phase))
            consume_routed<C>(ctx, record, pipeline, exchange);
        else if constexpr (C.has_shared())
            consume_shared<C>(ctx, record, pipeline, exchange);
        debug::mark(ctx, debug::Event::kFinished);
    }
    if constexpr (plan::has_exchange(C))
        exchange.finish(pipeline.has_failed);
    if (pipeline.has_failed)
        sync::note_fault(ctx, sync::Fault::kTimeout, {sync::Role::kMath, sync::What::kStage, pipeline.stage}, 0, 0);
}

} // namespace deep_gemm_k3::engine
