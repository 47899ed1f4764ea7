// The ring of shared-memory stages between the producer lane and the math warps of a CTA.
//
// full[s]   1 arrival (the producer lane's, with the bytes it expects) plus the bytes themselves; math warps wait.
// empty[s]  one arrival per math warp once its reads of the stage are done; the producer waits.
//
//   producer  --copies + expect_tx-->  full[s]   --wait-->  math warps
//   producer  <--wait--                empty[s]  <--arrive (per warp)--
//
// Only the producer walks the task list. It writes each task into a small ring of records before it completes the
// task's first stage; the math warps read it there, so that nothing about a task lives in their registers during a
// mainloop. A record is free again when a stage of a later task is released by all math warps: at most num_stages tasks
// are in the ring of stages and one more in its epilogue, hence num_stages + 1 records. A record without stages ends
// the list.
//
// Neither side can wait for something the other never does; after an abort both carry on to the end of the list. Where
// hardware fails and a wait inside the CTA passes its limit, either side leaves the list.
#pragma once
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/sync.cuh"
#include "../../sync/wait.cuh"
#include "../task_record.cuh"

namespace deep_gemm_k3::engine {

constexpr uint32_t kNumFullArrivals = 1;

// Position in the ring: 32-bit shared addresses only, so that a lean producer warp can keep it.
template <Config C>
struct Pipeline {
    static constexpr plan::SharedMemoryLayout kLayout = plan::shared_memory_layout(C);
    static constexpr uint32_t kStageBytes = plan::stage_bytes(C);
    static constexpr uint32_t kNumStages = C.num_stages;

    uint32_t base;   // start of shared memory
    uint32_t stage;  // next stage
    uint32_t parity; // of the phase of full[stage] that the next fill completes
    uint32_t record; // next task record
    bool has_failed; // a wait passed its limit

    __device__ __forceinline__ explicit Pipeline(const uint8_t* shared)
        : base(ptx::shared_address(shared)), stage(0), parity(0), record(0), has_failed(false) {}

    __device__ __forceinline__ uint32_t address() const { return base + kLayout.stages + stage * kStageBytes; }
    __device__ __forceinline__ uint32_t full(uint32_t s) const { return base + kLayout.barriers + s * 8; }
    __device__ __forceinline__ uint32_t empty(uint32_t s) const { return full(s) + kNumStages * 8; }

    __device__ __forceinline__ void advance() {
        if (++stage == kNumStages) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ TaskRecord& next_record(const sched::Context& ctx) {
        TaskRecord* records = reinterpret_cast<TaskRecord*>(ctx.shared + kLayout.tasks);
        TaskRecord& next = records[record];
        record = record == kNumStages ? 0 : record + 1;
        return next;
    }
    __device__ __forceinline__ uint32_t previous() const { return stage == 0 ? kNumStages - 1 : stage - 1; }

    // Waits for the next stage. What it waits for always comes, since the producer never stops; the limit is there for
    // hardware that fails. Then the thread goes on to the end of the task and reports (see consume).
    __device__ __forceinline__ void wait_full() {
        const uint32_t limit = base + kLayout.scheduler + plan::roles_memory::kStageLimit;
        has_failed |= ptx::mbarrier_wait_fails(full(stage), parity, limit);
    }
    // The first pass over the ring finds every stage empty. False: the limit has passed.
    __device__ __forceinline__ bool wait_empty(const sched::Context& ctx) const {
        const uint32_t barrier = empty(stage), wanted = parity ^ 1;
        return sync::wait_local(ctx, {sync::Role::kProducer, sync::What::kStage, stage},
            [=] { return ptx::mbarrier_try_wait(barrier, wanted); });
    }
    __device__ __forceinline__ bool is_empty() const { return ptx::mbarrier_try_wait(empty(stage), parity ^ 1); }

    __device__ __forceinline__ bool is_empty_now() const { return ptx::mbarrier_test_wait(empty(stage), parity ^ 1); }

    // Called by all lanes of a math warp whose reads of stage `s` are done.
    __device__ __forceinline__ void release(bool is_first_lane, uint32_t s) const {
        if (is_first_lane)
            ptx::mbarrier_arrive(empty(s));
    }
};

// Called by one thread in the prologue; the CTA synchronises afterwards.
template <Config C>
__device__ __forceinline__ void init_pipeline(const uint8_t* shared) {
    const Pipeline<C> pipeline(shared);
    for (uint32_t s = 0; s < pipeline.kNumStages; ++s) {
        ptx::mbarrier_init(pipeline.full(s), kNumFullArrivals);
        ptx::mbarrier_init(pipeline.empty(s), num_math_warps(C));
    }
    ptx::fence_mbarrier_init();
}

} // namespace deep_gemm_k3::engine
