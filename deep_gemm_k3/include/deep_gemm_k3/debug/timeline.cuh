// In-kernel timeline: a hook per event, nothing unless DG_TIMELINE is defined.
#pragma once
#include "../sched/context.cuh"
#include "../sync/fault.cuh"

namespace deep_gemm_k3::debug {

// Events carry the same names as waits do in time-out messages.
__device__ __forceinline__ void mark(const sched::Context& ctx, sync::Where where) {
#ifdef DG_TIMELINE
    // One slot of 16 bytes per warp and event: [CTA][warp][What].
    constexpr int num_events = 16, num_warps = 32;
    if (ctx.params.timeline != nullptr && ctx.lane_idx == 0) {
        auto* slots = static_cast<uint64_t*>(ctx.params.timeline);
        const int slot = (ctx.cta_idx * num_warps + ctx.warp_idx) * num_events + static_cast<int>(where.what);
        slots[2 * slot] = ptx::global_timer();
        slots[2 * slot + 1] = where.index;
    }
#else
    (void)ctx, (void)where;
#endif
}

} // namespace deep_gemm_k3::debug
