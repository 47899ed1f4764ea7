// Number formats and bit arithmetic. One wrapper = one instruction.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

// Packed conversions take (high, low) as the instruction does: `low` lands in the lower half.
__device__ __forceinline__ uint32_t float_to_bf16x2(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint16_t float_to_e4m3x2(float high, float low) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint32_t e4m3x2_to_half2(uint16_t packed) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
    return halves;
}

__device__ __forceinline__ float half_to_float(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// 2^x and 1/x within 2^-22; subnormal arguments and results count as zero.
__device__ __forceinline__ float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
__device__ __forceinline__ float reciprocal_approximate(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Bits of `a` where `mask` is one, of `b` elsewhere.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// The lower (upper) half of a word in both halves.
__device__ __forceinline__ uint32_t broadcast_low_half(uint32_t word) {
    uint32_t result;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tmov.b32 %0, {l, l};\n\t}" : "=r"(result) : "r"(word));
    return result;
}
__device__ __forceinline__ uint32_t broadcast_high_half(uint32_t word) {
    uint32_t result;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tmov.b32 %0, {h, h};\n\t}" : "=r"(result) : "r"(word));
    return result;
}

} // namespace deep_gemm_k3::ptx
