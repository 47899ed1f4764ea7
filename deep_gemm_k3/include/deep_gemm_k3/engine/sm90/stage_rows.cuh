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

// A lane's word of the routing table. Every word has arrived, and there is at most one to a lane.
struct LaneRoutes {
    bool exists;
    int source_rank;
    ptx::Word16 word;
};
template <Config C>
__device__ __forceinline__ LaneRoutes load_lane_routes(const sched::Context& ctx) {
    LaneRoutes routes{};
    roles::WordCursor<C> cursor;
    const uint32_t word = ctx.lane_idx;
    routes.exists = word < roles::words_at(ctx, plan::roles_memory::kFirstWord)[C.shape.num_ranks];
    if (routes.exists)
        routes.word =
            ptx::load_relaxed_sys_b128(sched::component<C>(ctx, plan::Component::kMetadata) + cursor.locate(ctx, word));
    routes.source_rank = cursor.rank;
    return routes;
}

// The rows of a task's block, in pool order: where their partials go, which names source rank, token and slot, and
// their weights. One warp.
template <Config C>
__device__ __forceinline__ void find_stage_rows(
    const sched::Context& ctx, const sched::Task& task, const LaneRoutes& routes) {
    const uint32_t* first_word = roles::words_at(ctx, plan::roles_memory::kFirstWord);
    const uint32_t* first_block = roles::words_at(ctx, plan::roles_memory::first_block_offset(C));
    bool is_ours[2];
    uint32_t row = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        is_ours[half] =
            routes.exists && roles::local_expert<C>(ctx, routes.word.x, half) == static_cast<uint32_t>(task.expert);
        row += __popc(__ballot_sync(0xFFFFFFFFu, is_ours[half]) & ptx::lower_lanes());
    }
    row -= (task.block - first_block[task.expert]) * C.routed_tile.num_tokens; // earlier blocks: large numbers
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!is_ours[half])
            continue;
        if (row < static_cast<uint32_t>(task.num_valid_tokens)) {
            roles::words_at(ctx, plan::roles_memory::kStagePlaces)[row] =
                plan::row_place(2 * (ctx.lane_idx - first_word[routes.source_rank]) + half, routes.source_rank);
            roles::words_at(ctx, plan::roles_memory::kStageWeights)[row] = half == 0 ? routes.word.y : routes.word.z;
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
    for (int i = self.thread(); i < (num_tokens - num_rows) * num_chunks; i += roles::kNumDispatchThreads)
        *reinterpret_cast<uint4*>(stages + i % num_chunks / 16 * plan::stage_bytes(C) +
                                  plan::operand_chunk_offset(num_rows + i / num_chunks, i % 16)) = {0, 0, 0, 0};
}

// Who writes what: a thread takes one group of 32 columns of one row of a stage, all of them together as many stages as
// that makes, but never a whole ring: wgmma releases a stage only when the one after it is being multiplied.
template <Config C>
struct StageWave {
    int num_groups; // of a stage
    int num_stages; // of a wave
    int stage;      // of the wave, this thread's; beyond the wave: none
    int row, group;

    __device__ __forceinline__ StageWave(const roles::DispatchWarp& self, int num_rows)
        : num_groups(num_rows * 4), num_stages(min(C.num_stages - 1, max(1, roles::kNumDispatchThreads / num_groups))),
          stage(self.thread() / num_groups), row(self.thread() % num_groups / 4), group(self.thread() % 4) {
        if (stage >= num_stages)
            stage = 1 << 20;
    }
};

// All dispatch warps, once the list is complete.
template <Config C>
__device__ __forceinline__ void gather_into_stages(const sched::Context& ctx, const roles::DispatchWarp& self) {
    LaneRoutes routes{};
    if (self.warp == 0)
        routes = load_lane_routes<C>(ctx);
    if (sync::wait_first_task(ctx) != sched::FirstTask::kGathered)
        return;
    constexpr plan::SharedMemoryLayout kLayout = plan::shared_memory_layout(C);
    const TaskRecord& record = *reinterpret_cast<const TaskRecord*>(ctx.shared + kLayout.tasks);
    const sched::StageRange range = task_stages(C, record.task);
    const int num_stages = range.end - range.begin;
    if (self.warp == 0)
        find_stage_rows<C>(ctx, record.task, routes);
    clear_missing_rows<C>(ctx, self, record.task.num_valid_tokens);
    roles::dispatch_barrier();
    const StageWave<C> wave(self, record.task.num_valid_tokens);
    const uint32_t place = roles::words_at(ctx, plan::roles_memory::kStagePlaces)[wave.row];
    // A wave is on its way while the one before is written, where registers allow: a round trip to memory is longer
    // than all the rest.
    constexpr bool kIsAhead = C.shape.num_ranks == 1;
    roles::Group values{};
#pragma unroll 1
    for (int first = -wave.num_stages; first < num_stages; first += wave.num_stages) {
        const int stage = first + wave.stage, next = stage + wave.num_stages;
        roles::Group next_values{};
        if (kIsAhead && next < num_stages)
            next_values = load_stage_group<C>(ctx, place, (range.begin + next) * 4 + wave.group);
        if (first >= 0) {
            if (stage < num_stages) {
                Pipeline<C> pipeline(ctx.shared);
                pipeline.stage = stage % C.num_stages;
                pipeline.parity = stage / C.num_stages;
                if (stage >= C.num_stages)
                    pipeline.wait_empty(ctx);
                roles::store_group<C>(ctx.shared + kLayout.stages + pipeline.stage * plan::stage_bytes(C), wave.row,
                    wave.group, values.codes, values.scale);
            }
            ptx::fence_proxy_async_shared();
            roles::dispatch_barrier();
            if (self.thread() == 0)
                sync::publish_stages_gathered(ctx, min(first + wave.num_stages, num_stages));
        }
        if (kIsAhead)
            values = next_values;
        else if (next < num_stages)
            values = load_stage_group<C>(ctx, place, (range.begin + next) * 4 + wave.group);
    }
}

} // namespace deep_gemm_k3::engine
