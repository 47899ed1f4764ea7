// What the producers, the issuer and the math warps share: three rings and their barriers. One CTA, or two that
// multiply together: then each has its own rows and one half of the tokens in shared memory and its own rows' sums in
// tensor memory, and the issuer of the first one, the leader, works for both.
//
// stages   full[s]         one arrival per producer plus the bytes, which the leader's expects; the issuer waits. In a
// pair
//                          the leader's barrier counts for both
//          empty[s]        1 arrival, by the tensor core when it has read the stage, in each CTA; the producer waits
// sums     sums_full[a]    1 arrival, by the tensor core when a tile's sums are complete, in each CTA; the math warps
// wait
//          sums_empty[a]   one per math warp (of both CTAs, at the leader's) once it has loaded its part; the issuer
//          waits
// records  record_full[r]  1 arrival (the producer's) when the task's tokens are ready; issuer and math warps wait
//          record_empty[r] one per math warp and the issuer's; the producer waits. Each CTA has its own
//
//   producers --copies--> full --> issuer --multiply--> sums_full --> math
//       ^------ empty <-- tensor core    ^--- sums_empty <----------- math
//
// Only the producer walks the task list; a record without stages ends it. A record is published after its dependency
// was waited for, so that what the dependency orders (row information) is ordered for the math warps too, by barriers
// between threads alone. Neither side can wait for something the other never does; after an abort all carry on to the
// end.
#pragma once
#include "../../ptx/cluster.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/sync.cuh"
#include "../../ptx/tensor_core.cuh"
#include "../../ptx/tensor_memory.cuh"
#include "../../sync/wait.cuh"
#include "../task_record.cuh"

namespace deep_gemm_k3::engine {

// Halves of a CTA's row tile (128 weight rows each) that have rows.
DG_HOST_DEVICE constexpr int num_tile_halves(const Config& c, sched::Phase phase, int row_tile) {
    const int num_left = sched::num_weight_rows(c, phase) - row_tile * plan::kTensorTileRows;
    return max_of(0, min_of(plan::kNumHalves, num_left / plan::kHalfRows));
}
// Halves that are multiplied: those of the leader, which has as many as the other CTA or more.
DG_HOST_DEVICE constexpr int num_product_halves(const Config& c, const sched::Task& task) {
    return num_tile_halves(c, task.phase, task.row_tile / c.num_cluster_ctas * c.num_cluster_ctas);
}
// Tokens that one pass of an epilogue takes.
DG_HOST_DEVICE constexpr int tokens_per_pass(int num_tile_tokens) {
    return min_of(num_tile_tokens, 32);
}
// Tokens that are multiplied: what the task has, in whole passes.
DG_HOST_DEVICE constexpr int num_product_tokens(const Config& c, const sched::Task& task) {
    const int pass = tokens_per_pass((sched::is_shared(task.phase) ? c.shared_tile : c.routed_tile).num_tokens);
    return ceil_div(task.num_valid_tokens, pass) * pass;
}
template <Config C>
__device__ __forceinline__ uint32_t rank_in_pair() {
    return C.num_cluster_ctas == 1 ? 0 : ptx::cluster_rank();
}
// A barrier of the leader, by the address of this CTA's.
template <Config C>
__device__ __forceinline__ uint32_t at_leader(uint32_t barrier) {
    return C.num_cluster_ctas == 1 ? barrier : ptx::map_to_cta(barrier, 0);
}
template <int kNumCtas>
__device__ __forceinline__ void arrive_at_leader(uint32_t mapped_barrier) {
    if constexpr (kNumCtas == 1)
        ptx::mbarrier_arrive(mapped_barrier);
    else
        ptx::mbarrier_arrive_cluster(mapped_barrier);
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

// Bounded by the limit of waits inside a CTA; false: it has passed, and the role leaves its tasks. Called by one
// thread, or by whole warps, which come out together.
__device__ __forceinline__ bool wait_barrier(
    const sched::Context& ctx, sync::Where where, uint32_t barrier, uint32_t parity) {
    return sync::wait_local(ctx, where, [=] { return ptx::mbarrier_try_wait(barrier, parity); });
}
// A barrier at which the other CTA arrives too.
template <Config C>
__device__ __forceinline__ bool wait_leader_barrier(
    const sched::Context& ctx, sync::Where where, uint32_t barrier, uint32_t parity) {
    if constexpr (C.num_cluster_ctas == 1)
        return wait_barrier(ctx, where, barrier, parity);
    else
        return sync::wait_local(ctx, where, [=] { return ptx::mbarrier_try_wait_cluster(barrier, parity); });
}

// Called by one thread in the prologue; the CTA synchronises afterwards.
template <Config C>
__device__ __forceinline__ void init_barriers(const Rings<C>& rings) {
    for (uint32_t s = 0; s < rings.kNumStages; ++s) {
        ptx::mbarrier_init(rings.full(s), C.num_cluster_ctas);
        ptx::mbarrier_init(rings.empty(s), 1);
    }
    for (uint32_t a = 0; a < rings.kNumSums; ++a) {
        ptx::mbarrier_init(rings.sums_full(a), 1);
        ptx::mbarrier_init(rings.sums_empty(a), num_math_warps(C) * C.num_cluster_ctas);
    }
    for (uint32_t r = 0; r < rings.kNumRecords; ++r) {
        ptx::mbarrier_init(rings.record_full(r), 1);
        ptx::mbarrier_init(rings.record_empty(r), num_math_warps(C) + (rank_in_pair<C>() == 0));
    }
    ptx::fence_mbarrier_init();
}

} // namespace deep_gemm_k3::engine
