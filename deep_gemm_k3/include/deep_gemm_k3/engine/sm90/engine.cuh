// The Hopper engine: everything of a CTA that multiplies, behind three calls.
//
//   initialize   thread 0, before the CTA's first barrier
//   produce      the producer warp: walks the task list, fills the ring of stages (produce.cuh)
//   consume      the math warpgroups: mainloops and sinks of whatever the producer sends (consume.cuh)
//
// The ring between the two, its barriers and their arrival counts: pipeline.cuh.
#pragma once
#include "consume.cuh"
#include "produce.cuh"
#include "stage_rows.cuh"

namespace deep_gemm_k3::engine {

template <Config C>
struct EngineSM90 {
    static_assert(C.arch == Architecture::kSM90);
    static_assert(plan::shared_memory_bytes(C) <= plan::shared_memory_budget(C.num_ctas_per_sm));

    static __device__ __forceinline__ void initialize(const Params& params, const uint8_t* shared) {
        if (threadIdx.x != 0)
            return;
        if constexpr (plan::has_exchange(C))
            epilogue::Exchange<C>(shared).initialize();
        init_pipeline<C>(shared);
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
    // For the dispatch warps, once they have nothing else to do.
    static __device__ __forceinline__ void assist(const sched::Context& ctx, uint32_t warp) {
        if constexpr (plan::has_exchange(C))
            epilogue::ExchangeReader<C>(ctx, warp).run();
    }
    static __device__ __forceinline__ void gather_into_stages(
        const sched::Context& ctx, const roles::DispatchWarp& self) {
        if constexpr (sched::can_gather_into_stages(C))
            engine::gather_into_stages<C>(ctx, self);
    }
    // Returns when all stores of the calling thread's tiles have been issued.
    static __device__ __forceinline__ void consume(const sched::Context& ctx) { engine::consume<C>(ctx); }
};

} // namespace deep_gemm_k3::engine
