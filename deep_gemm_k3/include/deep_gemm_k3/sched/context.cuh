// What every role of a CTA knows: the parameters, who it is, and where its memory lies. Built once per thread in the
// kernel's prologue; a handful of registers, passed by reference.
#pragma once
#include "../config.cuh"
#include "../params.cuh"
#include "../plan/workspace.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::sched {

struct Context {
    const Params& params;
    uint8_t* buffer; // this rank's symmetric buffer
    uint8_t* shared; // dynamic shared memory, 1024-byte aligned; plan/shared_memory.cuh divides it
    uint8_t* roles;  // the roles' part of it, see plan/roles_memory.cuh
    uint32_t epoch;  // number of this call, never 0 for the first one
    uint32_t parity; // epoch & 1
    int num_ranks;
    int cta_idx;
    int num_ctas;
    int thread_idx;
    int warp_idx;
    int lane_idx;
};

// Start of a component of this rank's buffer, or of another rank's.
template <Config C>
__device__ __forceinline__ uint8_t* component(const Context& ctx, plan::Component which) {
    return ctx.buffer + plan::component_offset(C.shape, which);
}
template <Config C>
__device__ __forceinline__ uint8_t* peer_component(const Context& ctx, int rank, plan::Component which) {
    return ctx.params.buffers[rank] + plan::component_offset(C.shape, which);
}

// Of a row of this rank's pool. The sum of 32 bits cannot be taken apart: a loop keeps no address of the component in
// registers beside the buffer's.
template <Config C>
__device__ __forceinline__ plan::RowInfo* row_info(const Context& ctx, uint32_t row) {
    constexpr uint64_t first = plan::component_offset(C.shape, plan::Component::kPoolRowInfo) / sizeof(plan::RowInfo);
    constexpr bool is_short = first + plan::num_max_pool_rows(C.shape) <= 0xFFFFFFFFull;
    return reinterpret_cast<plan::RowInfo*>(ctx.buffer) + (is_short ? static_cast<uint32_t>(first) + row : first + row);
}

} // namespace deep_gemm_k3::sched
