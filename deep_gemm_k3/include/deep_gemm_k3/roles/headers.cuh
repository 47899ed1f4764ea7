// Dispatch: what the dispatch warps of a CTA share, and what they learn first: every rank's header, that every rank has
// begun the call, and whether this rank was told to publish to a sane place.
#pragma once
#include "../debug/timeline.cuh"
#include "push.cuh"

namespace deep_gemm_k3::roles {

constexpr int kNumDispatchThreads = plan::kNumDispatchWarps * 32;

__device__ __forceinline__ void dispatch_barrier() {
    __syncwarp(); // lanes may come out of a wait one by one; the barrier takes whole warps
    ptx::barrier_sync(ptx::NamedBarrier::kDispatch, kNumDispatchThreads);
}
__device__ __forceinline__ uint32_t* words_at(const Context& ctx, int offset) {
    return reinterpret_cast<uint32_t*>(ctx.roles + offset);
}
template <Config C>
__device__ __forceinline__ uint32_t* cursors(const Context& ctx, int warp) {
    return words_at(ctx, plan::roles_memory::cursors_offset(C)) + warp * plan::roles_memory::padded_experts(C);
}
__device__ __forceinline__ void mark_faulty(const Context& ctx) {
    *static_cast<volatile uint32_t*>(words_at(ctx, plan::roles_memory::kIsFaulty)) = 1;
}
// Meets the other dispatch warps; false, for all of them alike, when one gave up before. The barrier itself carries the
// verdict: a warp that gives up right after it must not change what a slower one reads.
__device__ __forceinline__ bool all_healthy(const Context& ctx) {
    __syncwarp();
    const bool is_healthy = *static_cast<volatile uint32_t*>(words_at(ctx, plan::roles_memory::kIsFaulty)) == 0;
    return ptx::barrier_all(ptx::NamedBarrier::kDispatch, kNumDispatchThreads, is_healthy);
}

// What this rank was told to publish to: checked, and noted, before any task that publishes can start. The ranges are
// the host's.
template <Config C>
__device__ __forceinline__ void check_publication(const Context& ctx) {
    const PublicationTarget& target = ctx.params.publication;
    const uint32_t generation = target.flags[0], stride = target.flags[2];
    const bool is_known = generation < static_cast<uint32_t>(target.num_generations);
    *static_cast<volatile uint32_t*>(words_at(ctx, plan::roles_memory::kGeneration)) = is_known ? generation : ~0u;
    if (!is_known) {
        sync::note_fault(ctx, sync::Fault::kGenerationOutOfRange, {sync::Role::kDispatch, sync::What::kInput, 0},
            target.num_generations, generation);
        mark_faulty(ctx);
    } else if (stride != target.generation_stride) {
        sync::note_fault(ctx, sync::Fault::kStrideMismatch, {sync::Role::kDispatch, sync::What::kInput, 2},
            static_cast<uint32_t>(target.generation_stride), stride);
        mark_faulty(ctx);
    }
}

// Waits for every other rank's header and notes what it tells. One warp.
template <Config C>
__device__ __forceinline__ void read_headers(const Context& ctx) {
    uint32_t num_earlier_words = 0;
#pragma unroll 1
    for (int base = 0; base < C.shape.num_ranks; base += 32) {
        const int rank = base + lane_index();
        uint32_t num_words = 0;
        if (rank < C.shape.num_ranks) {
            const uint8_t* address =
                sched::component<C>(ctx, plan::Component::kMetadata) + plan::metadata_offset(C.shape, ctx.parity, rank);
            ptx::Word16 header = own_header<C>(ctx);
            const bool arrived =
                C.shape.num_ranks == 1 || rank == ctx.params.rank ||
                sync::wait_until(ctx, {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)},
                    ctx.epoch, [&](uint32_t& seen) {
                        header = ptx::load_relaxed_sys_b128(address);
                        return (seen = header.w) == ctx.epoch;
                    });
            constexpr uint32_t kKind = plan::CallKind::of(C).packed();
            const uint32_t num_shared_tokens = ctx.params.shared.num_tokens;
            const uint32_t kind = (header.y & ~kLowLatencyBit) >> plan::kCallKindShift;
            if (!arrived) {
                mark_faulty(ctx);
                header.x = 0;
            } else if (kind != kKind) {
                sync::note_fault(ctx, sync::Fault::kCallsDiffer,
                    {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)}, kKind, kind);
                mark_faulty(ctx);
                header.x = 0;
            } else if (header.x > static_cast<uint32_t>(C.shape.num_max_tokens)) {
                sync::note_fault(ctx, sync::Fault::kTokensOutOfRange,
                    {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)}, C.shape.num_max_tokens,
                    header.x);
                mark_faulty(ctx);
                header.x = 0;
            } else if (C.is_published() && header.z != num_shared_tokens) {
                sync::note_fault(ctx, sync::Fault::kSharedTokensDiffer,
                    {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)}, num_shared_tokens,
                    header.z);
                mark_faulty(ctx);
            }
            words_at(ctx, plan::roles_memory::kRankTokens)[rank] = header.x | (header.y & kLowLatencyBit);
            words_at(ctx, plan::roles_memory::kRankCtas)[rank] = header.y & ((1u << plan::kCallKindShift) - 1);
            num_words = (header.x * C.shape.num_topk + 1) / 2;
        }
        uint32_t sum = num_words;
#pragma unroll 1
        for (int delta = 1; delta < 32; delta *= 2) {
            const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, delta);
            sum += lane_index() >= delta ? other : 0;
        }
        if (rank < C.shape.num_ranks)
            words_at(ctx, plan::roles_memory::kFirstWord)[rank + 1] = num_earlier_words + sum;
        num_earlier_words += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (lane_index() == 0)
        words_at(ctx, plan::roles_memory::kFirstWord)[0] = 0;
}

// Waits until every rank has begun this call, and acquires it: their earlier calls are over, so what they read in our
// slots and what we may now overwrite in theirs is settled. One warp. A rank may be one call ahead.
template <Config C>
__device__ __forceinline__ void wait_ranks_ready(const Context& ctx) {
#pragma unroll 1
    for (int rank = lane_index(); rank < C.shape.num_ranks; rank += 32) {
        const uint8_t* ready = ctx.buffer + plan::control::kReady + rank * plan::kControlLineBytes;
        const Where where = {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)};
        sync::wait_until(ctx, where, ctx.epoch, [&](uint32_t& seen) {
            seen = ptx::load_acquire_sys(ready);
            return static_cast<int32_t>(seen - ctx.epoch) >= 0;
        });
    }
    __syncwarp();
    if (lane_index() == 0)
        sync::tell_ranks_begun(ctx);
}

// Meets the dispatch warps of all CTAs of the rank, for the round-th time in this call: what they wrote before is
// visible after it. False when a dispatch warp of this CTA gave up.
__device__ __forceinline__ bool rank_barrier(const Context& ctx, const DispatchWarp& self, uint32_t round) {
    dispatch_barrier();
    if (self.thread() == 0) {
        uint8_t* arrivals = ctx.buffer + plan::control::kScanBarrier + ctx.parity * plan::kControlLineBytes;
        ptx::red_release_gpu_add(arrivals, 1);
        const uint32_t wanted = round * ctx.num_ctas;
        const Where where = {sync::Role::kDispatch, sync::What::kCounts, static_cast<uint32_t>(ctx.cta_idx)};
        if (!sync::wait_until(ctx, where, wanted, [&](uint32_t& seen) {
                seen = ptx::load_acquire_gpu(arrivals);
                return seen >= wanted; // a fast CTA may have arrived for the next round
            }))
            mark_faulty(ctx);
    }
    return all_healthy(ctx);
}

} // namespace deep_gemm_k3::roles
