// Pairs of E4M3 values as the BF16 operands that multiply: value * scale, exact for the scales of quantise.cuh.
#pragma once
#include "../ptx/convert.cuh"
#include "quantise.cuh"

namespace deep_gemm_k3::epilogue {

// Two codes, each with the scale of its half, the upper one first as in ptx/convert.cuh.
__device__ __forceinline__ uint32_t expand_pair(uint32_t codes, float high_scale, float low_scale) {
    const uint32_t halves = ptx::e4m3x2_to_half2(static_cast<uint16_t>(codes));
    return ptx::float_to_bf16x2(ptx::half_to_float(static_cast<uint16_t>(halves >> 16)) * high_scale,
        ptx::half_to_float(static_cast<uint16_t>(halves)) * low_scale);
}

} // namespace deep_gemm_k3::epilogue
