// What the producer, the issuer and the math warps of an SM100 CTA share: three rings and their barriers.
//
// stages   full[s]         1 arrival (the producer's, with the bytes it expects) plus the bytes; the issuer waits
//          empty[s]        1 arrival, by the tensor core when it has read the stage; the producer waits
// sums     sums_full[a]    1 arrival, by the tensor core when a tile's sums are complete; the math warps wait
//          sums_empty[a]   one per math warp once it has loaded its part; the issuer waits
// records  record_full[r]  1 arrival (the producer's) when the task's tokens are ready; issuer and math warps wait
//          record_empty[r] one per math warp and the issuer's; the producer waits
//
//   producer --copies--> full --> issuer --multiply--> sums_full --> math
//       ^------ empty <-- tensor core    ^--- sums_empty <----------- math
//
// Only the producer walks the task list; a record without stages ends it. A record is published after its dependency
// was waited for, so that what the dependency orders (row information) is ordered for the math warps too, by barriers
// between threads alone. Neither side can wait for something the other never does; after an abort all carry on to the
// end.
#pragma once
#include "../../debug/timeline.cuh"
#include "../../plan/shared_memory.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/sync.cuh"
#include "../../ptx/tensor_core.cuh"
#include "../../ptx/tensor_memory.cuh"
#include "../../sched/task.cuh"
#include "../../sync/wait.cuh"

namespace deep_gemm_k3::engine {

DG_HOST_DEVICE constexpr uint32_t num_math_warps(const Config& c) {
    return c.num_math_warpgroups * plan::kWarpsPerWarpgroup;
}

// A task as the issuer and the math warps find it.
struct alignas(16) TaskRecord {
    sched::Task task;
    int num_stages; // 0: there are no more tasks
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
// Halves of the tile (128 weight rows each) that have rows.
DG_HOST_DEVICE constexpr int num_tile_halves(const Config& c, const sched::Task& task) {
    const int first = task.row_tile * (sched::is_shared(task.phase) ? c.shared_tile : c.routed_tile).num_rows;
    return min_of(plan::kNumHalves, (sched::num_weight_rows(c, task.phase) - first) / plan::kHalfRows);
}
// Tokens that one pass of an epilogue takes.
DG_HOST_DEVICE constexpr int tokens_per_pass(int num_tile_tokens) {
    return min_of(num_tile_tokens, 32);
}

// A place in a ring of kSize.
template <uint32_t kSize>
struct Place {
    uint32_t index = 0;
    uint32_t parity = 0; // of the phase of the full barrier that the next filling completes

    __device__ __forceinline__ void advance() {
        if (++index == kSize) {
            index = 0;
            parity ^= 1;
        }
    }
};

template <Config C>
struct Rings {
    static constexpr plan::SharedMemoryLayout kLayout = plan::shared_memory_layout(C);
    static constexpr plan::TensorMemoryLayout kTensorLayout = plan::tensor_memory_layout(C);
    static constexpr uint32_t kNumStages = C.num_stages, kNumSums = kTensorLayout.num_stages,
                              kNumRecords = plan::kNumTensorRecords;
    static constexpr uint32_t kStageBytes = plan::stage_bytes(C);
    using StagePlace = Place<kNumStages>;
    using SumsPlace = Place<kNumSums>;
    using RecordPlace = Place<kNumRecords>;

    uint32_t base; // start of shared memory

    __device__ __forceinline__ explicit Rings(const uint8_t* shared) : base(ptx::shared_address(shared)) {}

    __device__ __forceinline__ uint32_t stage(uint32_t s) const { return base + kLayout.stages + s * kStageBytes; }
    __device__ __forceinline__ uint32_t full(uint32_t s) const { return base + kLayout.barriers + s * 8; }
    __device__ __forceinline__ uint32_t empty(uint32_t s) const { return full(kNumStages + s); }
    __device__ __forceinline__ uint32_t sums_full(uint32_t a) const { return full(2 * kNumStages + a); }
    __device__ __forceinline__ uint32_t sums_empty(uint32_t a) const { return sums_full(kNumSums + a); }
    __device__ __forceinline__ uint32_t record_full(uint32_t r) const { return sums_full(2 * kNumSums + r); }
    __device__ __forceinline__ uint32_t record_empty(uint32_t r) const { return record_full(kNumRecords + r); }
    // Holds the address of the CTA's tensor memory.
    __device__ __forceinline__ uint32_t tensor_address() const { return record_full(2 * kNumRecords); }

    static __device__ __forceinline__ TaskRecord& record(const sched::Context& ctx, uint32_t r) {
        return reinterpret_cast<TaskRecord*>(ctx.shared + kLayout.tasks)[r];
    }
};

// Bounded by the limit of waits inside a CTA.
__device__ __forceinline__ void wait_barrier(
    const sched::Context& ctx, sync::Where where, uint32_t barrier, uint32_t parity) {
    sync::wait_local(ctx, where, [=] { return ptx::mbarrier_try_wait(barrier, parity); });
}

// Called by one thread in the prologue; the CTA synchronises afterwards.
template <Config C>
__device__ __forceinline__ void init_barriers(const Rings<C>& rings) {
    for (uint32_t s = 0; s < rings.kNumStages; ++s) {
        ptx::mbarrier_init(rings.full(s), 1);
        ptx::mbarrier_init(rings.empty(s), 1);
    }
    for (uint32_t a = 0; a < rings.kNumSums; ++a) {
        ptx::mbarrier_init(rings.sums_full(a), 1);
        ptx::mbarrier_init(rings.sums_empty(a), num_math_warps(C));
    }
    for (uint32_t r = 0; r < rings.kNumRecords; ++r) {
        ptx::mbarrier_init(rings.record_full(r), 1);
        ptx::mbarrier_init(rings.record_empty(r), num_math_warps(C) + 1);
    }
    ptx::fence_mbarrier_init();
}

} // namespace deep_gemm_k3::engine
