// Counters between the tasks of one rank. Each counter belongs to one pool block or shared token block and counts up to
// a number that every CTA knows. Writers: every writing thread runs ptx::fence_proxy_async_global() after its generic
// stores, the writers meet at a barrier, then one thread arrives (release). Readers: one thread waits (acquire) and
// fences, then issues its bulk copies.
//
// Counters come in two copies, one per parity of the epoch. Call e counts in copy e & 1 and zeroes what call e - 1 used
// of the other. That is safe because they are private to the rank: all of call e - 1 lies before this kernel in stream
// order, all of call e + 1 after it, and no peer ever touches them.
#pragma once
#include "../plan/roles_memory.cuh"
#include "../sched/task.cuh"
#include "wait.cuh"

namespace deep_gemm_k3::sync {

// Each math warpgroup of a tile arrives for its own rows; twice, or the dispatch warps for it, where they may finish
// some of its tokens.
DG_HOST_DEVICE constexpr uint32_t num_l1_arrivals(const Config& c, sched::Phase phase, const TileShape& tile) {
    const int rows_per_warpgroup = tile.num_rows / (c.num_math_warpgroups * c.num_cluster_ctas);
    return ceil_div(sched::num_weight_rows(c, phase), rows_per_warpgroup);
}
template <Config C>
constexpr uint32_t kNumL1Arrivals =
    num_l1_arrivals(C, sched::Phase::kRoutedL1, C.routed_tile) * (plan::shares_tiles(C) ? 2 : 1);
// Splits that share a tile arrive one by one.
template <Config C>
__device__ __forceinline__ uint32_t num_shared_l1_arrivals(const sched::Context& ctx) {
    constexpr uint32_t of_tiles = C.has_shared() ? num_l1_arrivals(C, sched::Phase::kSharedL1, C.shared_tile) : 0;
    if constexpr (!sched::shares_splits(C, sched::Phase::kSharedL1) || C.splits.shared_l1 == 1)
        return of_tiles;
    const int num_blocks = sched::num_shared_blocks<C>(ctx);
    return of_tiles * sched::phase_splits<C>(sched::Phase::kSharedL1, num_blocks, 0, ctx.num_ctas).num_splits;
}

enum class BlockCounter : int { kGathered = 0, kL1Done = 1 };

template <Config C>
__device__ __forceinline__ uint8_t* block_counter(
    const sched::Context& ctx, uint32_t parity, BlockCounter which, int block) {
    constexpr uint64_t num_blocks = plan::num_max_pool_blocks(C.shape);
    return sched::component<C>(ctx, plan::Component::kBlockCounters) +
           ((parity * 2 + static_cast<int>(which)) * num_blocks + block) * 4;
}
// The call's number is read anew: nothing derived from it need live in a register through a loop.
__device__ __forceinline__ uint32_t parity_of_call(const sched::Context& ctx) {
    return *reinterpret_cast<const volatile uint32_t*>(ctx.roles + plan::roles_memory::kEpoch) & 1;
}
template <Config C>
__device__ __forceinline__ uint8_t* block_counter_of_call(const sched::Context& ctx, BlockCounter which, int block) {
    return block_counter<C>(ctx, parity_of_call(ctx), which, block);
}
template <Config C>
__device__ __forceinline__ uint8_t* shared_counter(const sched::Context& ctx, uint32_t parity, int block) {
    constexpr uint64_t num_blocks = ceil_div(plan::num_shared_rows(C.shape), uint64_t(plan::kMinSharedTokenTile));
    return sched::component<C>(ctx, plan::Component::kSharedCounters) + (parity * num_blocks + block) * 4;
}
template <Config C>
__device__ __forceinline__ uint8_t* split_counter(const sched::Context& ctx, uint32_t parity, int split_task) {
    return sched::component<C>(ctx, plan::Component::kSplitCounters) +
           (parity * uint64_t(plan::kMaxSplitTasks) + split_task) * 4;
}

// What a task's tokens wait for: a counter and the value it reaches. A null counter: nothing.
struct Dependency {
    const uint8_t* counter;
    uint32_t wanted;
    What what;
};
template <Config C>
__device__ __forceinline__ Dependency gathered(const sched::Context& ctx, const sched::Task& task) {
    return {block_counter<C>(ctx, ctx.parity, BlockCounter::kGathered, task.block),
        task.num_valid_tokens * *reinterpret_cast<const uint32_t*>(ctx.roles + plan::roles_memory::kRowParts),
        What::kBlockGathered};
}
template <Config C>
__device__ __forceinline__ Dependency dependency(const sched::Context& ctx, const sched::Task& task) {
    switch (task.phase) {
    case sched::Phase::kRoutedL1:
        return gathered<C>(ctx, task);
    case sched::Phase::kRoutedL2:
        return {
            block_counter<C>(ctx, ctx.parity, BlockCounter::kL1Done, task.block), kNumL1Arrivals<C>, What::kBlockL1};
    case sched::Phase::kSharedL2:
        return {shared_counter<C>(ctx, ctx.parity, task.block), num_shared_l1_arrivals<C>(ctx), What::kSharedL1};
    default:
        return {nullptr, 0, What::kNone};
    }
}
// Whether there is nothing to wait for, and then as wait_ready.
__device__ __forceinline__ bool is_ready(const Dependency& on) {
    if (on.counter != nullptr && ptx::load_acquire_gpu(on.counter) != on.wanted)
        return false;
    ptx::fence_proxy_async_global();
    return true;
}
// Waits until a moment of the device's timer, but no longer than until is_ready, which it returns.
__device__ __forceinline__ bool is_ready_before(const Dependency& on, uint64_t nanoseconds) {
    while (ptx::global_timer() < nanoseconds)
        if (is_ready(on))
            return true;
    return false;
}
// Called by the one thread that issues a task's copies, before the first copy of its tokens.
__device__ __forceinline__ void wait_ready(const sched::Context& ctx, const Dependency& on, uint32_t index) {
    if (on.counter == nullptr)
        return;
    wait_until(ctx, {Role::kProducer, on.what, index}, on.wanted, [&](uint32_t& seen) {
        seen = ptx::load_acquire_gpu(on.counter);
        return seen == on.wanted;
    });
    ptx::fence_proxy_async_global();
}

// Called by the same thread, before the math warps get a task whose results go to other ranks: they must not overtake
// the end of the last call there.
template <Config C>
__device__ __forceinline__ void wait_receivers(const sched::Context& ctx, sched::Phase phase) {
    if constexpr (C.shape.num_ranks > 1)
        if (phase == sched::Phase::kRoutedL2 || (C.is_published() && phase == sched::Phase::kSharedL2))
            wait_ranks_begun(ctx);
}

// ---- called by one thread per math warpgroup, once per finished tile, after all writers have fenced and met at a
// barrier
template <Config C>
__device__ __forceinline__ void arrive_block_l1_done(const sched::Context& ctx, int block, int num_warpgroups = 1) {
    ptx::red_release_gpu_add(block_counter<C>(ctx, ctx.parity, BlockCounter::kL1Done, block), num_warpgroups);
}
template <Config C>
__device__ __forceinline__ void arrive_shared_l1_done(const sched::Context& ctx, int block) {
    ptx::red_release_gpu_add(shared_counter<C>(ctx, ctx.parity, block), 1);
}
// This split's counter of a tile: each math warpgroup has one of its own.
template <Config C>
__device__ __forceinline__ uint8_t* split_counter_of(
    const sched::Context& ctx, const sched::Task& task, uint32_t warpgroup) {
    // The call's number is read anew: nothing derived from it need live in a register during the mainloop.
    const uint32_t parity = ptx::load_acquire_cta_shared(role_word(ctx, plan::roles_memory::kEpoch)) & 1;
    return split_counter<C>(ctx, parity, task.split_task - task.split + warpgroup);
}
template <Config C>
__device__ __forceinline__ void arrive_shared_split(
    const sched::Context& ctx, const sched::Task& task, uint32_t warpgroup) {
    ptx::red_release_gpu_add(split_counter_of<C>(ctx, task, warpgroup), 1);
}
// Arrival of one split of a tile; true for the last one, which then owns all partials of the tile. The writers of the
// partial met at a barrier before it; the result goes to the other threads through another barrier.
template <Config C>
__device__ __forceinline__ bool arrive_split(const sched::Context& ctx, const sched::Task& task, uint32_t warpgroup) {
    const uint32_t arrived = ptx::atom_acq_rel_gpu_add(split_counter_of<C>(ctx, task, warpgroup), 1);
    return static_cast<int>(arrived) == task.num_splits - 1;
}
// Waits for all splits of a tile, acquiring their partials. Whole warps, each thread for itself: a warp that one thread
// of it made wait would count as divided. Only where all splits of the tile run at once (sched::shares_splits).
template <Config C>
__device__ __forceinline__ void wait_splits(const sched::Context& ctx, const sched::Task& task, uint32_t warpgroup) {
    const uint8_t* counter = split_counter_of<C>(ctx, task, warpgroup);
    wait_together(
        ctx, {Role::kMath, What::kSharedL1, static_cast<uint32_t>(task.block)}, task.num_splits, [&](uint32_t& seen) {
            return (seen = ptx::load_acquire_gpu(counter)) == static_cast<uint32_t>(task.num_splits);
        });
}

} // namespace deep_gemm_k3::sync
