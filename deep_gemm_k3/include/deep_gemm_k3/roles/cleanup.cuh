// What a call leaves behind: published values visible everywhere, counters ready for the next call, a verdict for the
// host.
#pragma once
#include "../sync/dependencies.cuh"
#include "list.cuh"

namespace deep_gemm_k3::roles {

// Publication visibility. Every CTA, after its last publication store, adds one to its rank's count on every rank
// (release, system scope: it covers the stores of all math warps, which met this warp at a barrier, bulk stores having
// completed before). A CTA without tiles to publish need not wait for its last task. CTA 0 of each rank waits until all
// CTAs of all ranks have done so; the kernel cannot end before it. Counts are cumulative and only calls that publish
// take part, so the expected values live beside them. One warp.
template <Config C>
__device__ __forceinline__ void make_publication_visible(const Context& ctx, bool healthy) {
    const auto wait_tasks_done = [] {
        __syncwarp();
        ptx::barrier_sync(ptx::NamedBarrier::kTasksDone, C.num_math_warpgroups * 128 + 32);
    };
    const bool is_early =
        __all_sync(0xFFFFFFFFu, sync::wait_publishes(ctx) == static_cast<uint32_t>(sched::Publishes::kNothing));
    if (!is_early)
        wait_tasks_done();
#pragma unroll 1
    for (int rank = lane_index(); rank < C.shape.num_ranks; rank += 32)
        ptx::red_release_sys_add(
            ctx.params.buffers[rank] + plan::control::kPublicationCount + ctx.params.rank * plan::kControlLineBytes, 1);
    if (is_early)
        wait_tasks_done();
    if (ctx.cta_idx != 0 || !healthy)
        return;
    auto* expected = reinterpret_cast<uint32_t*>(ctx.buffer + plan::control::kPublicationExpected);
#pragma unroll 1
    for (int rank = lane_index(); rank < C.shape.num_ranks; rank += 32) {
        const uint32_t wanted = expected[rank] + words_at(ctx, plan::roles_memory::kRankCtas)[rank];
        expected[rank] = wanted;
        const uint8_t* count = ctx.buffer + plan::control::kPublicationCount + rank * plan::kControlLineBytes;
        const Where where = {sync::Role::kPublication, sync::What::kPublicationDone, static_cast<uint32_t>(rank)};
        sync::wait_until(ctx, where, wanted, [&](uint32_t& seen) {
            seen = ptx::load_acquire_sys(count);
            return static_cast<int32_t>(seen - wanted) >= 0; // a fast rank may already count for its next call
        });
    }
    __syncwarp();
}

// Zeroes what the previous call used of the other parity's counters, and notes what this call uses. See
// sync/dependencies.cuh for why nobody else can be using them.
template <Config C>
__device__ __forceinline__ void reset_counters(const Context& ctx, const DispatchWarp& self) {
    // Read anew: what the beginning of dispatch computed need not live until here.
    const int first = ptx::cta_index() * kNumDispatchThreads + self.thread(),
              stride = ptx::cta_count() * kNumDispatchThreads;
    const uint32_t other = ctx.parity ^ 1;
    auto* used_blocks = reinterpret_cast<uint32_t*>(ctx.buffer + plan::control::kUsedBlocks);
    const auto zero = [&](uint8_t* counters, int count) {
#pragma unroll 1
        for (int i = first; i < count; i += stride)
            reinterpret_cast<uint32_t*>(counters)[i] = 0;
    };
    const int num_used = static_cast<int>(used_blocks[other]);
    zero(sync::block_counter<C>(ctx, other, sync::BlockCounter::kGathered, 0), num_used);
    zero(sync::block_counter<C>(ctx, other, sync::BlockCounter::kL1Done, 0), num_used);
    // Buffers outlive signatures: the previous call may have had a shared expert or splits where this one has none.
    if (C.shape.shared_intermediate > 0)
        zero(sync::shared_counter<C>(ctx, other, 0), plan::num_shared_rows(C.shape) / plan::kMinSharedTokenTile);
    zero(sync::split_counter<C>(ctx, other, 0), plan::kMaxSplitTasks);
    if (first == 0) {
        zero(ctx.buffer + plan::control::kScanBarrier + other * plan::kControlLineBytes, 1);
        zero(ctx.buffer + plan::control::kTaskClaim + other * plan::kControlLineBytes, 1);
        used_blocks[ctx.parity] = *words_at(ctx, plan::roles_memory::kNumBlocks);
    }
}

template <Config C>
__device__ __forceinline__ void add_statistics(const Context& ctx, const DispatchWarp& self) {
    const uint32_t* num_rows = words_at(ctx, plan::roles_memory::num_rows_offset(C));
#pragma unroll 1
    for (int expert = self.thread(); expert < C.shape.num_local_experts(); expert += kNumDispatchThreads)
        if (num_rows[expert] != 0)
            atomicAdd(&ctx.params.statistics[expert], static_cast<int32_t>(num_rows[expert]));
}

// The call's verdict for the host. Every CTA that sees the abort writes the same bytes.
__device__ __forceinline__ void report_abort(const Context& ctx) {
    const uint8_t* cell = ctx.buffer + plan::control::kAbort;
    if (ptx::load_acquire_sys(cell + sync::kAbortCode) == 0)
        return;
#pragma unroll 1
    for (int i = sizeof(plan::AbortCell) - 4; i >= 0; i -= 4) // the code last
        ptx::store_release_sys(static_cast<uint8_t*>(ctx.params.error_record) + i, ptx::load_relaxed_sys(cell + i));
}

// One thread per CTA, after all others of the CTA are done. The last CTA of the rank closes the call: from here on a
// new kernel finds epoch e and an exit count of zero. Relaxed: nobody learns anything else from the count, and the end
// of the kernel orders the rest. The abort cell is looked at meanwhile; who fails later reports it itself.
__device__ __forceinline__ void leave(const Context& ctx) {
    sync::publish_fault(ctx);
    const uint32_t abort_code = ptx::load_relaxed_sys(ctx.buffer + plan::control::kAbort + sync::kAbortCode);
    const uint32_t num_left = ptx::atom_relaxed_gpu_add(ctx.buffer + plan::control::kExitCount, 1);
    if (abort_code != 0)
        report_abort(ctx);
    if (num_left == static_cast<uint32_t>(ctx.num_ctas) - 1) {
        ptx::store_relaxed_sys(ctx.buffer + plan::control::kExitCount, 0);
        ptx::store_relaxed_sys(ctx.buffer + plan::control::kEpoch, ctx.epoch);
    }
}

} // namespace deep_gemm_k3::roles
