// Power-of-two scales of 32 columns, as scalar functions for kernels and for g++.
//
// The scale is the smallest 2^s >= amax / 448, with amax * FP32(1 / 448) rounded to FP32 first and s kept in [-127,
// 127]; its code is s + 127 (UE8M0). Zero has code 0. The code grows with amax, so the largest code of a group of
// values is the code of the largest value: warps may exchange codes instead of values.
#pragma once
#include "activation.cuh"

namespace deep_gemm_k3::epilogue {

constexpr uint32_t kTokenBias = 8; // tokens carry 2^8 in their BF16 form, weights 2^-8

// One instruction, which the compiler does not find in a comparison.
DG_HOST_DEVICE inline uint32_t smaller(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    return ::min(a, b);
#else
    return a < b ? a : b;
#endif
}
DG_HOST_DEVICE inline uint32_t scale_code(float amax) {
    const uint32_t bits = float_bits(amax * (1.f / 448.f));
    const uint32_t code = bits <= 0x00400000u ? 0u : (bits + 0x007FFFFFu) >> 23; // exponent rounded up
    return code < 254u ? code : 254u;
}
// 2^-s: what values are multiplied by before they are rounded to E4M3.
DG_HOST_DEVICE inline float inverse_scale(uint32_t code) {
    return bits_float(code == 254u ? 0x00400000u : (254u - code) << 23);
}
// 2^(s + 8): what E4M3 values are multiplied by on the way to BF16 operands; infinity where that leaves FP32, so that
// no smaller number passes for it.
DG_HOST_DEVICE inline float operand_scale(uint32_t code) {
    return bits_float(smaller(code + kTokenBias, 255u) << 23);
}

} // namespace deep_gemm_k3::epilogue
