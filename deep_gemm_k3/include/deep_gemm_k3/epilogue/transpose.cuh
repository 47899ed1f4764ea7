// Turns an m64 block of accumulators into rows of 64 BF16 values per token, in the warpgroup's staging memory.
//
// A token's 128 bytes are 8 chunks of 16 bytes (8 weight rows); chunk c lies at position c ^ (token & 7), so that
// neither the transposed stores nor the reads of whole rows collide in a bank. Up to kChunkTokens tokens at a time.
#pragma once
#include "math_thread.cuh"

namespace deep_gemm_k3::epilogue {

// Tokens per pass, for a tile of `num_tokens`.
DG_HOST_DEVICE constexpr int tokens_per_pass(const Config& c, int num_tokens) {
    return min_of(plan::staging_tokens(c), num_tokens);
}

__device__ __forceinline__ uint32_t staged_chunk(uint32_t staging, uint32_t token, uint32_t chunk) {
    return staging + token * 128 + ((chunk ^ (token & 7)) << 4);
}

// Stages tokens [first_group * 8, + kTokens) of accumulators d, rounded to BF16 and xored with `flip`.
template <int kTokens, int kNumAccumulators>
__device__ __forceinline__ void stage_transposed(
    const MathThread& me, uint32_t staging, const float (&d)[kNumAccumulators], int first_group, uint32_t flip) {
    constexpr int kPaired = kTokens > 8 ? 2 : 1;
#pragma unroll
    for (int j = 0; j < kTokens / 8; j += kPaired) {
        uint32_t matrix[4]; // 2 * i + h: group j + i, rows 8h..8h+7 of the warp's 16
#pragma unroll
        for (int i = 0; i < kPaired; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int group = min_of(first_group + j + i, kNumAccumulators / 4 - 1); // the last pass may be short
                const float* a = &d[4 * group + 2 * h];
                matrix[2 * i + h] = ptx::float_to_bf16x2(a[1], a[0]) ^ flip;
            }
        const uint32_t token = 8 * j + (me.lane >> 4) * 8 + (me.lane & 7), chunk = 2 * me.warp + ((me.lane >> 3) & 1);
        if constexpr (kPaired == 2)
            ptx::store_matrix_x4_transposed(staged_chunk(staging, token, chunk), matrix);
        else
            ptx::store_matrix_x2_transposed(staged_chunk(staging, token & 7, chunk), matrix[0], matrix[1]);
    }
}

// Hands every staged 16-byte chunk to visit(token, chunk, value); token counts from the first staged one.
template <int kTokens, class Visit>
__device__ __forceinline__ void for_each_staged(const MathThread& me, uint32_t staging, Visit visit) {
    constexpr int kPerPass = 16; // 128 threads, 8 chunks per token
#pragma unroll
    for (int first = 0; first < kTokens; first += kPerPass) {
        const uint32_t token = first + me.thread / 8, chunk = me.thread % 8;
        if (kTokens >= kPerPass || token < kTokens)
            visit(first, token, chunk, ptx::load_shared_16(staged_chunk(staging, token, chunk)));
    }
}

} // namespace deep_gemm_k3::epilogue
