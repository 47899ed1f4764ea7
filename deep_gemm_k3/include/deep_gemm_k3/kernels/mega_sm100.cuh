// The fused kernel with the Blackwell engine: what is compiled for sm_100a and its family.
#pragma once
#include "../engine/sm100/engine.cuh"
#include "mega.cuh"

namespace deep_gemm_k3::kernels {

template <Config C>
__global__ void __launch_bounds__(C.num_threads, C.num_ctas_per_sm) mega_sm100(const __grid_constant__ Params params) {
    static_assert(C.arch == Architecture::kSM100);
    extern __shared__ __align__(1024) uint8_t shared[];
    run<C, engine::EngineSM100<C>>(params, shared);
}

} // namespace deep_gemm_k3::kernels
