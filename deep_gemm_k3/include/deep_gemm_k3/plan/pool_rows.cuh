// How the rows of an expert fill its pool blocks. A block has room for a whole token tile. Where the tile has narrower
// instances of its mainloop, an expert's blocks share its rows evenly, in groups of eight, so that little padding is
// multiplied; otherwise all blocks but the last are full.
#pragma once
#include "../config.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::plan {

// Widths of a tile's mainloops: the tile's tokens and less by one step after the other.
constexpr int kWidthStep = 8, kMinTileOfWidths = 40, kMaxTileOfWidths = 112, kNumNarrowWidths = 2;
DG_HOST_DEVICE constexpr bool has_widths(const Config& c) {
    return c.arch == Architecture::kSM90 && c.num_ctas_per_sm == 1 && c.routed_tile.num_tokens >= kMinTileOfWidths &&
           c.routed_tile.num_tokens <= kMaxTileOfWidths && c.routed_tile.num_tokens % kWidthStep == 0;
}
DG_HOST_DEVICE constexpr int least_width(const Config& c) {
    return c.routed_tile.num_tokens - (has_widths(c) ? kNumNarrowWidths * kWidthStep : 0);
}

// The blocks of one expert.
struct ExpertBlocks {
    int tile;
    int num_rows;
    int num_blocks;
    int num_groups; // 0: rows fill one block after the other

    DG_HOST_DEVICE constexpr ExpertBlocks(const Config& c, int num_rows_of_expert, int num_blocks_of_expert)
        : tile(c.routed_tile.num_tokens), num_rows(num_rows_of_expert), num_blocks(num_blocks_of_expert),
          num_groups(has_widths(c) ? ceil_div(num_rows_of_expert, kWidthStep) : 0) {}
    DG_HOST_DEVICE constexpr int first_row(int block) const {
        return num_groups == 0 ? block * tile : block * num_groups / num_blocks * kWidthStep;
    }
    DG_HOST_DEVICE constexpr int num_rows_of(int block) const {
        return min_of(first_row(block + 1), num_rows) - first_row(block);
    }
    // The row's place among the expert's blocks, each of them as long as the tile.
    DG_HOST_DEVICE constexpr int place_of(int row) const {
        if (num_groups == 0)
            return row;
        const int block = ((row / kWidthStep + 1) * num_blocks - 1) / num_groups;
        return block * tile + row - first_row(block);
    }
};

} // namespace deep_gemm_k3::plan
