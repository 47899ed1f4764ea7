// The two CTAs that multiply together on SM100: they start, walk their tasks and end together. Each is alone where a
// Config has no pairs; then all of this costs nothing.
#pragma once
#include "../plan/roles_memory.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../sched/context.cuh"

namespace deep_gemm_k3::sync {

// All threads of the CTA, or of both.
template <Config C>
__device__ __forceinline__ void synchronise() {
    if constexpr (C.num_cluster_ctas == 1) {
        __syncthreads();
    } else {
        __syncwarp(); // the barrier takes whole warps
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
}

// Whether either CTA found an abort when it started.
template <Config C>
__device__ __forceinline__ bool started_aborted(const uint8_t* roles) {
    const uint8_t* own = roles + plan::roles_memory::kAborted;
    bool aborted = *reinterpret_cast<const uint32_t*>(own) != 0;
    if constexpr (C.num_cluster_ctas > 1)
        aborted |= ptx::load_cluster_4(ptx::map_to_cta(ptx::shared_address(own), ptx::cluster_rank() ^ 1)) != 0;
    return aborted;
}

// True when this CTA's list is complete and so is the other's. One thread of each; the other one's verdict always
// comes, since what it waits for is bounded.
template <Config C>
__device__ __forceinline__ bool agree(const sched::Context& ctx, bool is_complete) {
    if constexpr (C.num_cluster_ctas == 1) {
        return is_complete;
    } else {
        constexpr uint32_t kComplete = 1, kGivenUp = 2;
        const uint32_t own = ptx::shared_address(ctx.roles + plan::roles_memory::kPeerVerdict);
        const uint32_t rank = ptx::cluster_rank();
        ptx::store_release_cluster(ptx::map_to_cta(own, rank ^ 1), is_complete ? kComplete : kGivenUp);
        uint32_t verdict = 0;
        while ((verdict = ptx::load_acquire_cluster(ptx::map_to_cta(own, rank))) == 0)
            ptx::nanosleep(20);
        return is_complete && verdict == kComplete;
    }
}

} // namespace deep_gemm_k3::sync
