// In-kernel timeline: when each warp passed an event of a call. Nothing unless DG_TIMELINE is defined, which the traced
// kernels do.
//
// Params::timeline: [CTA][warp] tracks of kTimelineRecords records. The first record of a track holds in `argument` how
// many events followed; the events come after it, those beyond the track's end are only counted. Written by lane 0.
#pragma once
#include "../plan/roles_memory.cuh"
#include "../ptx/sync.cuh"
#include "../sched/context.cuh"

namespace deep_gemm_k3::debug {

enum class Event : uint32_t {
    kStart = 0,
    kPushed = 1,    // dispatch: metadata and rows are on their way
    kHeaders = 2,   // dispatch: every rank's header is in
    kListed = 3,    // dispatch: the expert list is published
    kGathered = 4,  // dispatch: this warp's rows lie in the pool
    kTasksDone = 5, // math: the last tile is finished
    kCombined = 6,  // math: this CTA's tokens are in y
    kEnd = 7,
    kTask = 8,       // math: the first stage of a task has arrived; argument: see task_argument
    kMultiplied = 9, // math: its mainloop is over
    kFinished = 10,  // math: its epilogue is over
    kAsked = 11,     // producer: weights of a task are on their way, its tokens are waited for; argument as kTask
    kReady = 12,     // producer: they are there
};
constexpr int kNumEvents = 13;
constexpr const char* kEventNames[kNumEvents] = {"start", "pushed", "headers", "listed", "gathered", "tasks done",
    "combined", "end", "task", "multiplied", "finished", "asked", "ready"};
constexpr int kTimelineWarps = 16;
constexpr int kTimelineRecords = 512;
static_assert(plan::roles_memory::kTimeline + kTimelineWarps * 4 <= plan::roles_memory::kExperts);

struct TimelineRecord {
    uint64_t nanoseconds; // of the device's global timer
    uint32_t event;
    uint32_t argument;
};

// Phase, row tile and block of a task in one word.
DG_HOST_DEVICE constexpr uint32_t task_argument(int phase, int row_tile, int block) {
    return static_cast<uint32_t>(phase) << 30 | static_cast<uint32_t>(row_tile & 0x3FF) << 20 | (block & 0xFFFFF);
}

__device__ __forceinline__ void mark(const sched::Context& ctx, Event event, uint32_t argument = 0) {
#ifdef DG_TIMELINE
    // Words that every kernel has: a traced kernel needs no more shared memory than the one it stands for, and fits
    // wherever that one does.
    auto* counts = reinterpret_cast<uint32_t*>(ctx.roles + plan::roles_memory::kTimeline);
    if (ctx.params.timeline == nullptr || ctx.lane_idx != 0)
        return;
    const uint32_t count = event == Event::kStart ? 1 : counts[ctx.warp_idx] + 1;
    counts[ctx.warp_idx] = count;
    auto* track = static_cast<TimelineRecord*>(ctx.params.timeline) +
                  (ctx.cta_idx * kTimelineWarps + ctx.warp_idx) * kTimelineRecords;
    track[0].argument = count;
    if (count < kTimelineRecords)
        track[count] = {ptx::global_timer(), static_cast<uint32_t>(event), argument};
#endif
}

} // namespace deep_gemm_k3::debug
