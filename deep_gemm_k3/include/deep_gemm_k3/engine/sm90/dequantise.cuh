// E2M1 x 2^s -> BF16 x 2^-8, exactly, in registers. A code is moved to bits {15; 8, 7; 6} of a BF16 half, which then
// reads as the code's value x 2^-126 (E2M1 subnormals included); one packed multiply by 2^(118 + s) gives value x 2^(s
// - 8). Tokens carry 2^8, so that products are exact. The scale byte is 245 + s with s in [-124, 9]: the multiplier's
// exponent.
//
// A thread's 16 weights lie in two words: row g in `x`, row g + 8 in `y`, four pairs of k each. Pairs 0..2 need a mask
// and a shift of 0, 4 and 10; pair 3 of both rows shares the bits that are left.
#pragma once
#include "../../ptx/convert.cuh"

namespace deep_gemm_k3::engine {

constexpr uint32_t kWeightBias = 8; // weights carry 2^-8, tokens 2^8

// Scale bytes of k32 block `index` (0..3) of one row, as a BF16 pair.
template <int kIndex>
__device__ __forceinline__ uint32_t scale_pair(uint32_t scales) {
    const uint32_t exponents = (kIndex & 1) ? (scales >> 1) & 0x7F807F80u : (scales & 0x00FF00FFu) << 7;
    return kIndex < 2 ? ptx::broadcast_low_half(exponents) : ptx::broadcast_high_half(exponents);
}

// Writes the A fragments of two m64k16 steps: a[0..3] and a[4..7].
__device__ __forceinline__ void dequantise(uint32_t x, uint32_t y, uint32_t scale_x, uint32_t scale_y, uint32_t* a) {
    constexpr uint32_t kCodeBits = 0x81C081C0u, kPair3FromX = 0x06030603u;
    const uint32_t z = ptx::select_bits(kPair3FromX, x, y << 2);
    a[0] = ptx::multiply_bf16x2(x & kCodeBits, scale_x);
    a[1] = ptx::multiply_bf16x2(y & kCodeBits, scale_y);
    a[2] = ptx::multiply_bf16x2((x << 4) & kCodeBits, scale_x);
    a[3] = ptx::multiply_bf16x2((y << 4) & kCodeBits, scale_y);
    a[4] = ptx::multiply_bf16x2(__funnelshift_l(x, x, 10) & kCodeBits, scale_x);
    a[5] = ptx::multiply_bf16x2(__funnelshift_l(y, y, 10) & kCodeBits, scale_y);
    a[6] = ptx::multiply_bf16x2((z << 6) & kCodeBits, scale_x);
    a[7] = ptx::multiply_bf16x2(__funnelshift_l(z, z, 12) & kCodeBits, scale_y);
}

} // namespace deep_gemm_k3::engine
