// The Blackwell engine: everything of a CTA that multiplies, behind five calls.
//
//   initialize   all threads, before the CTA's first barrier
//   produce      the producer warp: walks the task list, fills the ring of stages (produce.cuh)
//   issue        one warp of its own: hands stages to the tensor core (issue.cuh)
//   consume      the math warpgroups: sums from tensor memory to the sinks (consume.cuh)
//   finalize     all threads, after the CTA's last barrier
//
// The rings between them, their barriers and arrival counts: pipeline.cuh. The issuing warp, the CTA's last, owns the
// tensor memory.
#pragma once
#include "consume.cuh"
#include "issue.cuh"
#include "produce.cuh"

namespace deep_gemm_k3::engine {

template <Config C>
struct EngineSM100 {
    static constexpr int kNumCtas = C.num_cluster_ctas;
    static_assert(C.arch == Architecture::kSM100 && C.num_ctas_per_sm == 1 && (kNumCtas == 1 || kNumCtas == 2));
    static_assert(C.num_math_warpgroups == plan::kNumHalves);
    static_assert(plan::shared_memory_bytes(C) <= plan::shared_memory_budget(C.num_ctas_per_sm));
    static_assert(plan::tensor_memory_layout(C).num_allocated <= plan::kTensorMemoryColumns);
    static constexpr int kIssuingWarp = C.num_threads / 32 - 1;

    static __device__ __forceinline__ bool is_issuing_warp() {
        return __shfl_sync(0xFFFFFFFFu, static_cast<int>(ptx::thread_index()) / 32, 0) == kIssuingWarp;
    }
    static __device__ __forceinline__ uint32_t tensor_memory(const uint8_t* shared) {
        ptx::tensor_fence_after_sync();
        return ptx::load_shared_4(Rings<C>(shared).tensor_address());
    }

    static __device__ __forceinline__ void prefetch_maps(const RoutedMaps& maps) {
        ptx::prefetch_tensor_map(&maps.weights);
        ptx::prefetch_tensor_map(&maps.weight_scales);
        ptx::prefetch_tensor_map(&maps.tokens);
        ptx::prefetch_tensor_map(&maps.token_scales);
    }

    static __device__ __forceinline__ void initialize(const Params& params, const uint8_t* shared) {
        const Rings<C> rings(shared);
        if (is_issuing_warp()) {
            ptx::tensor_memory_allocate<kNumCtas>(rings.tensor_address(), rings.kTensorLayout.num_allocated);
            ptx::tensor_memory_relinquish<kNumCtas>();
            ptx::tensor_fence_before_sync();
        }
        if (threadIdx.x != 0)
            return;
        init_barriers<C>(rings);
        prefetch_maps(params.routed_l1);
        prefetch_maps(params.routed_l2);
        if constexpr (C.has_shared()) {
            ptx::prefetch_tensor_map(&params.maps.x);
            ptx::prefetch_tensor_map(&params.maps.l1);
            ptx::prefetch_tensor_map(&params.maps.intermediate);
            ptx::prefetch_tensor_map(&params.maps.l2);
        }
    }
    static __device__ __forceinline__ void produce(const sched::Context& ctx, sched::TaskIterator<C>& tasks) {
        engine::produce<C>(ctx, tasks);
    }
    static __device__ __forceinline__ void issue(const sched::Context& ctx) {
        if (rank_in_pair<C>() == 0)
            engine::issue<C>(ctx, tensor_memory(ctx.shared));
    }
    // Returns when all stores of the calling thread's tiles have been issued.
    static __device__ __forceinline__ void consume(const sched::Context& ctx) {
        engine::consume<C>(ctx, tensor_memory(ctx.shared));
        ptx::tensor_fence_before_sync();
    }
    static __device__ __forceinline__ void finalize(const uint8_t* shared) {
        if (is_issuing_warp())
            ptx::tensor_memory_free<kNumCtas>(tensor_memory(shared), plan::tensor_memory_layout(C).num_allocated);
    }
};

} // namespace deep_gemm_k3::engine
