// BF16 operand tiles of the pool (kPoolX, kPoolIntermediate): one tile per pool block and 128-wide K unit, laid out as
// a 128-byte-swizzled K-major wgmma operand, so that one bulk copy brings a pipeline stage.
//
// Tile of NT tokens = NT * 256 bytes: NT/8 groups of 8 tokens; a group is its two k64 halves of 8 x 128 bytes; the
// 16-byte chunk c of a token lies at chunk position c ^ (token & 7). So the first groups lie together, whatever NT.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::plan {

constexpr int kOperandGroupBytes = 8 * 256, kOperandHalfBytes = 8 * 128; // of 8 tokens

DG_HOST_DEVICE constexpr int operand_tile_bytes(int num_tile_tokens) {
    return num_tile_tokens * 256;
}

DG_HOST_DEVICE constexpr uint64_t operand_tile_offset(int num_tile_tokens, int num_columns, int block, int k_unit) {
    return (uint64_t(block) * (num_columns / 128) + k_unit) * operand_tile_bytes(num_tile_tokens);
}

// Offset inside a tile of the 16-byte chunk that holds columns [8 * chunk, 8 * chunk + 8) of the unit, chunk in 0..15.
DG_HOST_DEVICE constexpr int operand_chunk_offset(int token, int chunk) {
    return (token >> 3) * kOperandGroupBytes + (chunk >> 3) * kOperandHalfBytes + (token & 7) * 128 +
           (((chunk & 7) ^ (token & 7)) << 4);
}

} // namespace deep_gemm_k3::plan
