// What every engine's producer tells the warps of its CTA about a task, through shared memory.
#pragma once
#include "../debug/timeline.cuh"
#include "../plan/shared_memory.cuh"
#include "../sched/task.cuh"

namespace deep_gemm_k3::engine {

DG_HOST_DEVICE constexpr uint32_t num_math_warps(const Config& c) {
    return c.num_math_warpgroups * plan::kWarpsPerWarpgroup;
}

// A task as those who work on it find it.
struct alignas(16) TaskRecord {
    sched::Task task;
    int num_stages;      // 0: there are no more tasks
    int num_handed_over; // of a routed L1 tile that is shared: tokens that the dispatch warps finish
};
static_assert(sizeof(TaskRecord) == plan::kTaskRecordBytes);

// A task's name in the timeline.
__device__ __forceinline__ uint32_t debug_argument(const sched::Task& task) {
    return debug::task_argument(static_cast<int>(task.phase), task.row_tile, task.block);
}

// K stages of a task.
DG_HOST_DEVICE constexpr sched::StageRange task_stages(const Config& c, const sched::Task& task) {
    const int stage_k = sched::is_shared(task.phase) ? c.shared_tile.num_k : c.routed_tile.num_k;
    return sched::split_stages(sched::num_k_columns(c, task.phase) / stage_k, task.split, task.num_splits);
}

} // namespace deep_gemm_k3::engine
