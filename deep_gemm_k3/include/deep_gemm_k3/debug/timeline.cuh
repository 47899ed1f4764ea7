// In-kernel timeline: when each warp passed an event of a call. Nothing unless DG_TIMELINE is defined.
//
// Params::timeline: u64 nanoseconds [CTA][warp][Event], written by lane 0.
#pragma once
#include "../ptx/sync.cuh"
#include "../sched/context.cuh"

namespace deep_gemm_k3::debug {

enum class Event : int {
    kStart = 0,
    kPushed = 1,    // dispatch: metadata and rows are on their way
    kHeaders = 2,   // dispatch: every rank's header is in
    kListed = 3,    // dispatch: the expert list is published
    kGathered = 4,  // dispatch: this warp's rows lie in the pool
    kTasksDone = 5, // math: the last tile is finished
    kCombined = 6,  // math: this CTA's tokens are in y
    kEnd = 7,
};
constexpr int kNumEvents = 8;
constexpr int kTimelineWarps = 16;
constexpr const char* kEventNames[kNumEvents] = {
    "start", "pushed", "headers", "listed", "gathered", "tasks done", "combined", "end"};

__device__ __forceinline__ void mark(const sched::Context& ctx, Event event) {
#ifdef DG_TIMELINE
    if (ctx.params.timeline != nullptr && ctx.lane_idx == 0)
        static_cast<uint64_t*>(
            ctx.params.timeline)[(ctx.cta_idx * kTimelineWarps + ctx.warp_idx) * kNumEvents + static_cast<int>(event)] =
            ptx::global_timer();
#endif
}

} // namespace deep_gemm_k3::debug
