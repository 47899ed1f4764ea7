// An engine whose tiles are integer hashes instead of products, with the same inputs, outputs and dependencies as a
// real one. Every value that a tile reads enters every value that it writes, so a missing wait, a wrong pool row or a
// stale partial shows as a wrong integer. Scalar code, no pipeline: for tests of the roles only.
#pragma once
#include <deep_gemm_k3/kernels/mega.cuh>
#include <deep_gemm_k3/plan/operand_tile.cuh>

namespace stand_in {

using namespace deep_gemm_k3;

// ---- the arithmetic, shared with the host's reference
DG_HOST_DEVICE inline uint32_t factor(uint32_t column) {
    return (column * 37 + 11) & 0xFF;
}
DG_HOST_DEVICE inline uint32_t hidden_value(uint32_t sum, uint32_t column, uint32_t expert, float weight) {
    return ((sum * (2 * column + 1) + expert * 977) >> 5 & 63) + static_cast<uint32_t>(weight);
}
DG_HOST_DEVICE inline int partial_value(uint32_t sum, uint32_t column, uint32_t expert) {
    return static_cast<int>((sum * (2 * column + 1) + expert * 131) >> 3 & 127) - 63;
}
// Small integers are exact in BF16.
DG_HOST_DEVICE inline uint32_t bf16_of_int(int value) {
    if (value == 0)
        return 0;
    const uint32_t magnitude = value < 0 ? -value : value;
    int exponent = 0;
    while (magnitude >> (exponent + 1) != 0)
        ++exponent;
    return (value < 0 ? 0x8000u : 0) | static_cast<uint32_t>(127 + exponent) << 7 |
           ((magnitude << (7 - exponent)) & 0x7F);
}
DG_HOST_DEVICE inline uint32_t pack_pair(int low, int high) {
    return bf16_of_int(low) | bf16_of_int(high) << 16;
}

__device__ inline uint32_t hash_chunk(uint4 chunk, uint32_t column) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    uint32_t sum = 0;
    for (int i = 0; i < 4; ++i)
        sum += (words[i] & 0xFFFF) * factor(column + 2 * i) + (words[i] >> 16) * factor(column + 2 * i + 1);
    return sum;
}
__device__ inline uint32_t warp_sum(uint32_t value) {
    return __reduce_add_sync(0xFFFFFFFFu, value);
}

template <Config C>
struct Engine {
    static constexpr int kNumMathThreads = C.num_math_warpgroups * 128;
    static constexpr int kNumMathWarps = C.num_math_warpgroups * 4;

    static __device__ void initialize(const Params&, uint8_t*) {}
    static __device__ void produce(const sched::Context&, sched::TaskIterator<C>&) {}

    static __device__ void consume(const sched::Context& ctx) {
        sched::TaskIterator<C, false> tasks(ctx);
        sched::Task task;
        auto* is_owner = reinterpret_cast<volatile uint32_t*>(ctx.shared);
        while (tasks.next(task)) {
            if (ctx.thread_idx == 0) {
                wait(ctx, task);
                *is_owner = task.num_splits == 1 || sync::arrive_split<C>(ctx, task, 0);
            }
            meet();
            if (*is_owner) {
                for (int token = ctx.warp_idx; token < task.num_valid_tokens; token += kNumMathWarps)
                    run_token(ctx, task, token);
                ptx::fence_proxy_async_global();
            }
            meet();
            if (ctx.thread_idx % 128 == 0 && *is_owner) { // one arrival per math warpgroup
                if (task.phase == sched::Phase::kRoutedL1)
                    sync::arrive_block_l1_done<C>(ctx, task.block);
                if (task.phase == sched::Phase::kSharedL1)
                    for (int split = 0; split < task.num_splits; ++split) // whose splits would arrive one by one
                        sync::arrive_shared_l1_done<C>(ctx, task.block);
            }
            meet();
        }
    }

    static __device__ void meet() { ptx::barrier_sync(ptx::NamedBarrier::kMath, kNumMathThreads); }

    static __device__ void wait(const sched::Context& ctx, const sched::Task& task) {
        sync::wait_ready(ctx, sync::dependency<C>(ctx, task), task.block);
    }

    static __device__ void run_token(const sched::Context& ctx, const sched::Task& task, int token) {
        switch (task.phase) {
        case sched::Phase::kSharedL1:
            return shared_l1(ctx, task, token);
        case sched::Phase::kRoutedL1:
            return routed_l1(ctx, task, token);
        case sched::Phase::kRoutedL2:
            return routed_l2(ctx, task, token);
        default:
            return shared_l2(ctx, task, token);
        }
    }

    // Sum over a pool row of an operand tile.
    static __device__ uint32_t hash_row(
        const sched::Context& ctx, const uint8_t* pool, int num_columns, int block, int token) {
        constexpr int tile = C.routed_tile.num_tokens;
        uint32_t sum = 0;
        for (int chunk = ctx.lane_idx; chunk < num_columns / 8; chunk += 32)
            sum += hash_chunk(
                *reinterpret_cast<const uint4*>(pool + plan::operand_tile_offset(tile, num_columns, block, chunk / 16) +
                                                plan::operand_chunk_offset(token, chunk % 16)),
                chunk * 8);
        return warp_sum(sum);
    }
    static __device__ const plan::RowInfo& row_info(const sched::Context& ctx, const sched::Task& task, int token) {
        return reinterpret_cast<const plan::RowInfo*>(
            sched::component<C>(ctx, plan::Component::kPoolRowInfo))[task.block * C.routed_tile.num_tokens + token];
    }

    static __device__ void routed_l1(const sched::Context& ctx, const sched::Task& task, int token) {
        const uint32_t sum =
            hash_row(ctx, sched::component<C>(ctx, plan::Component::kPoolX), C.shape.hidden, task.block, token);
        const float weight = row_info(ctx, task, token).weight;
        const uint32_t expert = ctx.params.rank * C.shape.num_local_experts() + task.expert;
        if (ctx.lane_idx < 16) {
            constexpr int tile = C.routed_tile.num_tokens;
            uint32_t words[4];
            for (int i = 0; i < 4; ++i) {
                const int column = task.row_tile * 128 + ctx.lane_idx * 8 + 2 * i;
                words[i] =
                    pack_pair(hidden_value(sum, column, expert, weight), hidden_value(sum, column + 1, expert, weight));
            }
            *reinterpret_cast<uint4*>(sched::component<C>(ctx, plan::Component::kPoolIntermediate) +
                                      plan::operand_tile_offset(tile, C.shape.intermediate, task.block, task.row_tile) +
                                      plan::operand_chunk_offset(token, ctx.lane_idx)) = {
                words[0], words[1], words[2], words[3]};
        }
    }

    static __device__ void routed_l2(const sched::Context& ctx, const sched::Task& task, int token) {
        const uint32_t sum = hash_row(
            ctx, sched::component<C>(ctx, plan::Component::kPoolIntermediate), C.shape.intermediate, task.block, token);
        const plan::RowInfo& info = row_info(ctx, task, token);
        const uint32_t expert = ctx.params.rank * C.shape.num_local_experts() + task.expert;
        const int column = task.row_tile * 256 + ctx.lane_idx * 8;
        if (column >= C.shape.hidden || info.source_rank >= C.shape.num_ranks)
            return; // a row that never came, after an abort
        uint32_t words[4];
        for (int i = 0; i < 4; ++i)
            words[i] =
                ~pack_pair(partial_value(sum, column + 2 * i, expert), partial_value(sum, column + 2 * i + 1, expert));
        ptx::store_relaxed_sys_v4(sched::peer_component<C>(ctx, info.source_rank, plan::Component::kPartials) +
                                      plan::partial_offset(C.shape, info.token_slot) + column * 2,
            {words[0], words[1], words[2], words[3]});
    }

    static __device__ void shared_l1(const sched::Context& ctx, const sched::Task& task, int token_in_block) {
        const int token = task.block * C.shared_tile.num_tokens + token_in_block;
        const auto* x = static_cast<const uint4*>(ctx.params.shared.x) + int64_t(token) * (C.shared_hidden / 8);
        uint32_t sum = 0;
        for (int chunk = ctx.lane_idx; chunk < C.shared_hidden / 8; chunk += 32)
            sum += hash_chunk(x[chunk], chunk * 8);
        sum = warp_sum(sum);
        auto* row = reinterpret_cast<uint32_t*>(sched::component<C>(ctx, plan::Component::kSharedIntermediate)) +
                    int64_t(token) * (C.shape.shared_intermediate / 2);
        const int column = task.row_tile * 64 + ctx.lane_idx * 2;
        row[column / 2] = pack_pair(hidden_value(sum, column, 1, 0), hidden_value(sum, column + 1, 1, 0));
    }

    static __device__ void shared_l2(const sched::Context& ctx, const sched::Task& task, int token_in_block) {
        const int token = task.block * C.shared_tile.num_tokens + token_in_block;
        const auto* row =
            reinterpret_cast<const uint4*>(sched::component<C>(ctx, plan::Component::kSharedIntermediate)) +
            int64_t(token) * (C.shape.shared_intermediate / 8);
        uint32_t sum = 0;
        for (int chunk = ctx.lane_idx; chunk < C.shape.shared_intermediate / 8; chunk += 32)
            sum += hash_chunk(row[chunk], chunk * 8);
        sum = warp_sum(sum);
        if (ctx.lane_idx >= 16)
            return;
        const int column = task.row_tile * 128 + ctx.lane_idx * 8;
        uint32_t words[4];
        for (int i = 0; i < 4; ++i)
            words[i] = pack_pair(partial_value(sum, column + 2 * i, ctx.params.rank),
                partial_value(sum, column + 2 * i + 1, ctx.params.rank));
        *reinterpret_cast<uint4*>(shared_destination(ctx, token, column)) = {words[0], words[1], words[2], words[3]};
    }

    static __device__ uint8_t* shared_destination(const sched::Context& ctx, int token, int column) {
        constexpr int num_ranks = C.shape.num_ranks, hidden = C.shared_hidden;
        if constexpr (!C.is_published())
            return static_cast<uint8_t*>(ctx.params.shared.output) + (int64_t(token) * hidden + column) * 2;
        const uint64_t base = ctx.params.publication.flags[0] * ctx.params.publication.generation_stride;
        if constexpr (C.shared_output == SharedOutput::kHiddenSharded) {
            constexpr int shard = hidden / num_ranks;
            return reinterpret_cast<uint8_t*>(ctx.params.publication.peer_ptrs[column / shard]) + base +
                   (int64_t(token) * hidden + ctx.params.rank * shard + column % shard) * 2;
        }
        const int tokens_per_rank = ctx.params.shared.num_tokens / num_ranks;
        return reinterpret_cast<uint8_t*>(ctx.params.publication.peer_ptrs[token / tokens_per_rank]) + base +
               (int64_t(token % tokens_per_rank) * num_ranks * hidden + ctx.params.rank * hidden + column) * 2;
    }
};

} // namespace stand_in
