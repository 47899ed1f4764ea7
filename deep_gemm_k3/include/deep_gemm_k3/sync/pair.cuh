// The two CTAs that multiply together on SM100: they start, walk their tasks and end together. Each is alone where a
// Config has no pairs; then all of this costs nothing.
#pragma once
#include "../plan/shared_memory.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "wait.cuh"

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

// True when this CTA's list is complete and so is the other's. One thread of each. A CTA that has given up ends the
// other one's waits by saying so: its own note reaches the ranks only when both CTAs have ended.
template <Config C>
__device__ __forceinline__ bool agree(const sched::Context& ctx, bool is_complete) {
    if constexpr (C.num_cluster_ctas == 1) {
        return is_complete;
    } else {
        constexpr auto kComplete = static_cast<uint32_t>(Verdict::kComplete);
        constexpr auto kGivenUp = static_cast<uint32_t>(Verdict::kGivenUp);
        const uint32_t own = ptx::shared_address(ctx.roles + plan::roles_memory::kPeerVerdict);
        const uint32_t rank = ptx::cluster_rank();
        ptx::store_release_cluster(ptx::map_to_cta(own, rank ^ 1), is_complete ? kComplete : kGivenUp);
        uint32_t verdict = 0;
        wait_local(ctx, {Role::kProducer, What::kList, rank ^ 1}, [&] {
            verdict = ptx::load_acquire_cluster(ptx::map_to_cta(own, rank));
            if (verdict == 0)
                ptx::nanosleep(20);
            return verdict != 0;
        });
        return is_complete && verdict == kComplete;
    }
}

// Tasks of a pair: the first CTA claims, the second is told. A claim is never 0 and greater than the pair's earlier
// ones, so its word needs no other mark. The first CTA is ahead of the second by less than the words there are: it
// begins task n only after its math warps have let go of the record of task n - kNumTensorRecords, whose sums both CTAs
// have copied for.
static_assert(plan::roles_memory::kNumPairClaims >= plan::kNumTensorRecords + 2);
__device__ __forceinline__ uint32_t pair_claim(const sched::Context& ctx, uint32_t number, uint32_t rank) {
    const uint8_t* word = ctx.roles + plan::roles_memory::kPairClaims + number % plan::roles_memory::kNumPairClaims * 4;
    return ptx::map_to_cta(ptx::shared_address(word), rank);
}
__device__ __forceinline__ void hand_over_claim(const sched::Context& ctx, uint32_t number, uint32_t claim) {
    ptx::store_cluster_4(pair_claim(ctx, number, 1), claim);
}
// 0: it did not come.
__device__ __forceinline__ uint32_t wait_claim(const sched::Context& ctx, uint32_t number, uint32_t previous) {
    const uint32_t word = pair_claim(ctx, number, 1);
    uint32_t claim = 0;
    const bool came = wait_local(ctx, {Role::kProducer, What::kTask, number}, [&] {
        claim = ptx::load_cluster_4(word);
        return claim > previous;
    });
    return came ? claim : 0;
}

} // namespace deep_gemm_k3::sync
