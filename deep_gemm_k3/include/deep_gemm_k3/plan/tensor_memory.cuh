// The only home of columns inside a CTA's tensor memory (128 lanes x 512 columns of 32 bits), SM100 only.
//
// [accumulators: stages x 2 halves x widest token tile][scales of weights: 2 halves x 4][scales of tokens: 4 per 128]
// A tile of 256 weight rows is two halves of 128 rows, one accumulator each: rows are lanes, tokens are columns.
#pragma once
#include "../config.cuh"
#include "../types.cuh"
#include "scaled_tile.cuh"

namespace deep_gemm_k3::plan {

constexpr int kTensorMemoryColumns = 512;
constexpr int kMinTensorMemoryColumns = 32; // of an allocation, which is a power of two
constexpr int kHalfRows = 128;              // weight rows of one multiplication
constexpr int kNumHalves = 2;
constexpr int kTensorTileRows = kNumHalves * kHalfRows; // of one CTA
constexpr int kScaleColumns = 4;                        // of 128 rows or tokens and 128 columns of K

struct TensorMemoryLayout {
    int num_stages;    // of accumulators; 2 where they fit, so that a tile's epilogue overlaps the next one's mainloop
    int half_columns;  // between the two halves of a stage
    int stage_columns; // between stages
    int weight_scales; // first column
    int token_scales;  // first column
    int num_allocated; // columns
};

DG_HOST_DEVICE constexpr TensorMemoryLayout tensor_memory_layout(const Config& c) {
    TensorMemoryLayout layout{};
    layout.half_columns = max_of(c.routed_tile.num_tokens, c.has_shared() ? c.shared_tile.num_tokens : 0);
    layout.stage_columns = kNumHalves * layout.half_columns;
    const int scales = kNumHalves * kScaleColumns + num_scale_blocks(c.routed_tile.num_tokens) * kScaleColumns;
    layout.num_stages = 2 * layout.stage_columns + scales <= kTensorMemoryColumns ? 2 : 1;
    layout.weight_scales = layout.num_stages * layout.stage_columns;
    layout.token_scales = layout.weight_scales + kNumHalves * kScaleColumns;
    layout.num_allocated = kMinTensorMemoryColumns;
    while (layout.num_allocated < layout.weight_scales + scales)
        layout.num_allocated *= 2;
    return layout;
}

} // namespace deep_gemm_k3::plan
