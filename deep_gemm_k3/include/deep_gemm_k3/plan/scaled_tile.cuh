// E4M3 operand tiles of the pool with their scales (kPoolX, kPoolIntermediate on SM100): one tile per pool block and
// 128-wide K unit, so that one bulk copy brings a pipeline stage.
//
// Tile of NT tokens: NT * 128 bytes of codes, 8 tokens x 128 bytes at a time, the 16-byte chunk c of a token at chunk
// position c ^ (token & 7): a 128-byte-swizzled K-major operand. Then one block of 512 bytes per 128 tokens with a word
// of four UE8M0 bytes (along K) for every token; the word of token 32 * i + j stands at 4 * j + i, as the copy to
// tensor memory spreads it. Never larger than the BF16 tile of plan/operand_tile.cuh, which decides the pool's size.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::plan {

constexpr int kScaleBlockBytes = 512; // scale words of 128 rows or tokens, 128 columns of K
constexpr int kScaleBlockRows = 128;

DG_HOST_DEVICE constexpr int num_scale_blocks(int num_rows) {
    return ceil_div(num_rows, kScaleBlockRows);
}
DG_HOST_DEVICE constexpr int scaled_tile_bytes(int num_tile_tokens) {
    return num_tile_tokens * 128 + num_scale_blocks(num_tile_tokens) * kScaleBlockBytes;
}
// Offset inside a tile of the 16-byte chunk that holds columns [16 * chunk, 16 * chunk + 16) of the unit, chunk in
// 0..7.
DG_HOST_DEVICE constexpr int scaled_chunk_offset(int token, int chunk) {
    return token * 128 + ((chunk ^ (token & 7)) << 4);
}
// Offset inside a tile of a token's scale word; byte i belongs to columns [32 * i, 32 * i + 32) of the unit.
DG_HOST_DEVICE constexpr int scale_word_offset(int num_tile_tokens, int token) {
    return num_tile_tokens * 128 + token / kScaleBlockRows * kScaleBlockBytes + token % 32 * 16 +
           token % kScaleBlockRows / 32 * 4;
}

} // namespace deep_gemm_k3::plan
