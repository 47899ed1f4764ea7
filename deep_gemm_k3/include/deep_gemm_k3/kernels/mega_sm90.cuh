// The fused kernel with the Hopper engine: what is compiled for sm_90a.
#pragma once
#include "../engine/sm90/engine.cuh"
#include "mega.cuh"

namespace deep_gemm_k3::kernels {

template <Config C>
__global__ void __launch_bounds__(C.num_threads, C.num_ctas_per_sm) mega_sm90(const __grid_constant__ Params params) {
    static_assert(C.arch == Architecture::kSM90);
    extern __shared__ __align__(1024) uint8_t shared[];
    run<C, engine::EngineSM90<C>>(params, shared);
}

} // namespace deep_gemm_k3::kernels
