// Between the producer and the dispatch warps of a CTA that gathers rows straight into stages (sched/stage_rows.cuh).
// Both sides always say what the other waits for: their own waits are bounded.
#pragma once
#include "../sched/stage_rows.cuh"
#include "wait.cuh"

namespace deep_gemm_k3::sync {

// The producer: what its first task is. Only the first time counts.
__device__ __forceinline__ void publish_first_task(const sched::Context& ctx, sched::FirstTask what) {
    const uint32_t address = role_word(ctx, plan::roles_memory::kFirstTask);
    if (ptx::load_acquire_cta_shared(address) == static_cast<uint32_t>(sched::FirstTask::kUnknown))
        ptx::store_release_cta_shared(address, static_cast<uint32_t>(what));
}
__device__ __forceinline__ sched::FirstTask wait_first_task(const sched::Context& ctx) {
    const uint32_t address = role_word(ctx, plan::roles_memory::kFirstTask);
    uint32_t what = 0;
    wait_local(ctx, {Role::kDispatch, What::kStage, 0}, [&] {
        what = ptx::load_acquire_cta_shared(address);
        if (what != static_cast<uint32_t>(sched::FirstTask::kUnknown))
            return true;
        ptx::nanosleep(20);
        return false;
    });
    return sched::FirstTask(what);
}

// The math warps, in a task of routed L1.
__device__ __forceinline__ bool has_gathered_rows(const sched::Context& ctx) {
    return ptx::load_acquire_cta_shared(role_word(ctx, plan::roles_memory::kFirstTask)) ==
           static_cast<uint32_t>(sched::FirstTask::kGathered);
}

// The dispatch warps: so many stages hold their rows.
__device__ __forceinline__ void publish_stages_gathered(const sched::Context& ctx, int num_stages) {
    ptx::store_release_cta_shared(role_word(ctx, plan::roles_memory::kStagesGathered), num_stages);
}
__device__ __forceinline__ int stages_gathered(const sched::Context& ctx) {
    return static_cast<int>(ptx::load_acquire_cta_shared(role_word(ctx, plan::roles_memory::kStagesGathered)));
}

} // namespace deep_gemm_k3::sync
