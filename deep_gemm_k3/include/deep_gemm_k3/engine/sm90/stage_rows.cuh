// The dispatch warps as a second producer (see sched/stage_rows.cuh): the rows of the CTA's first task go from where
// they came from straight into the token part of its stages. The producer lane asks for the weights and completes a
// stage when both are there.
//
//   producer   first task is of routed L1 -> kFirstTask   weights of stage k      kStagesGathered > k -> full[k]
//   dispatch   kFirstTask -> its rows in the routing table -> rows into stages, fence, barrier -> kStagesGathered
//
// A stage beyond the ring waits for its empty barrier, as the producer does.
#pragma once
#include "../../roles/gather.cuh"
#include "../../sync/stage_rows.cuh"
#include "pipeline.cuh"

namespace deep_gemm_k3::engine {

// The rows of a task's block, in pool order: where their partials go, which names source rank, token and slot, and
// their weights. One warp; every word has arrived, and there is at most one to a lane.
template <Config C>
__device__ __forceinline__ void find_stage_rows(const sched::Context& ctx, const sched::Task& task) {
    const uint32_t* first_word = roles::words_at(ctx, plan::roles_memory::kFirstWord);
    const uint32_t* first_block = roles::words_at(ctx, plan::roles_memory::first_block_offset(C));
    const uint32_t word = ctx.lane_idx, first = (task.block - first_block[task.expert]) * C.routed_tile.num_tokens;
    const bool exists = word < first_word[C.shape.num_ranks];
    roles::WordCursor<C> cursor;
    ptx::Word16 route{};
    if (exists)
        route =
            ptx::load_relaxed_sys_b128(sched::component<C>(ctx, plan::Component::kMetadata) + cursor.locate(ctx, word));
    bool is_ours[2];
    uint32_t row = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        is_ours[half] = exists && roles::local_expert<C>(ctx, route.x, half) == static_cast<uint32_t>(task.expert);
        row += __popc(__ballot_sync(0xFFFFFFFFu, is_ours[half]) & ((1u << ctx.lane_idx) - 1));
    }
    row -= first; // rows of earlier blocks become large numbers
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!is_ours[half])
            continue;
        if (row < static_cast<uint32_t>(task.num_valid_tokens)) {
            roles::words_at(ctx, plan::roles_memory::kStagePlaces)[row] =
                plan::row_place(2 * (word - first_word[cursor.rank]) + half, cursor.rank);
            roles::words_at(ctx, plan::roles_memory::kStageWeights)[row] = half == 0 ? route.y : route.z;
        }
        ++row;
    }
}

// One group of 32 columns of a row.
template <Config C>
__device__ __forceinline__ roles::Group load_stage_group(const sched::Context& ctx, uint32_t place, int group) {
    constexpr int num_groups = C.shape.hidden / 32;
    const int rank = place % kMaxNumRanks, token = place / kMaxNumRanks / C.shape.num_topk;
    roles::Group values{};
    if (C.shape.num_ranks > 1 && rank != ctx.params.rank) {
        const uint8_t* words = sched::component<C>(ctx, plan::Component::kLowLatencyRows) +
                               plan::low_latency_row_offset(C.shape, ctx.parity, rank, token);
        const sync::Where where = {
            sync::Role::kDispatch, sync::What::kRow, static_cast<uint32_t>(rank) << 24 | static_cast<uint32_t>(token)};
        sync::wait_until(ctx, where, ctx.epoch,
            [&](uint32_t& seen) { return (seen = roles::read_low_latency(words + group * 48, values)) == ctx.epoch; });
    } else {
        roles::load_codes(
            values, sched::component<C>(ctx, plan::Component::kInputX) + uint64_t(token) * C.shape.hidden + group * 32);
        values.scale = sched::component<C>(ctx, plan::Component::kInputScales)[uint64_t(token) * num_groups + group];
    }
    return values;
}

// Rows that the block lacks, in every stage of the ring: products with them are not used, but have to be of something.
template <Config C>
__device__ __forceinline__ void clear_missing_rows(
    const sched::Context& ctx, const roles::DispatchWarp& self, int num_rows) {
    constexpr int num_tokens = C.routed_tile.num_tokens, num_chunks = C.num_stages * 16;
    uint8_t* stages = ctx.shared + plan::shared_memory_layout(C).stages;
#pragma unroll 1
    for (int i = self.thread; i < (num_tokens - num_rows) * num_chunks; i += roles::kNumDispatchThreads)
        *reinterpret_cast<uint4*>(stages + i % num_chunks / 16 * plan::stage_bytes(C) +
                                  plan::operand_chunk_offset(num_rows + i / num_chunks, i % 16)) = {0, 0, 0, 0};
}

// All dispatch warps, once the list is complete.
template <Config C>
__device__ __forceinline__ void gather_into_stages(const sched::Context& ctx, const roles::DispatchWarp& self) {
    if (sync::wait_first_task(ctx) != sched::FirstTask::kGathered)
        return;
    constexpr plan::SharedMemoryLayout kLayout = plan::shared_memory_layout(C);
    const TaskRecord& record = *reinterpret_cast<const TaskRecord*>(ctx.shared + kLayout.tasks);
    const sched::StageRange range = task_stages(C, record.task);
    const int num_stages = range.end - range.begin, num_groups = record.task.num_valid_tokens * 4; // of a stage
    if (self.warp == 0)
        find_stage_rows<C>(ctx, record.task);
    clear_missing_rows<C>(ctx, self, record.task.num_valid_tokens);
    roles::dispatch_barrier();
    // A group to a thread, as many stages at a time as that makes, but never a whole ring: a stage is released when the
    // one after it is being multiplied.
    const int num_at_once = min(C.num_stages - 1, max(1, roles::kNumDispatchThreads / num_groups));
    const int row = self.thread % num_groups / 4, group = self.thread % 4;
    const uint32_t place = roles::words_at(ctx, plan::roles_memory::kStagePlaces)[row];
#pragma unroll 1
    for (int first = 0; first < num_stages; first += num_at_once) {
        const int mine = self.thread / num_groups, stage = first + mine;
        if (mine < num_at_once && stage < num_stages) {
            const roles::Group values = load_stage_group<C>(ctx, place, (range.begin + stage) * 4 + group);
            Pipeline<C> pipeline(ctx.shared);
            pipeline.stage = stage % C.num_stages;
            pipeline.parity = stage / C.num_stages;
            if (stage >= C.num_stages)
                pipeline.wait_empty(ctx);
            roles::store_group<C>(ctx.shared + kLayout.stages + pipeline.stage * plan::stage_bytes(C), row, group,
                values.codes, values.scale);
        }
        ptx::fence_proxy_async_shared();
        roles::dispatch_barrier();
        if (self.thread == 0)
            sync::publish_stages_gathered(ctx, min(first + num_at_once, num_stages));
    }
}

} // namespace deep_gemm_k3::engine
