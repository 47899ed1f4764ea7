// How the rows of an expert fill its pool blocks. A block has room for a whole token tile. Where the tile has narrower
// instances of its mainloop, an expert's blocks share its rows evenly, in groups of as many as those widths differ by,
// so that little padding is multiplied; otherwise all blocks but the last are full.
#pragma once
#include "../config.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::plan {

// A tile has mainloops of three widths, more than which the assembler finds no registers for. The widest tiles take
// larger steps, and their narrowest one is for experts whose rows just do not fit one block: two share them then.
constexpr int kMinTileOfWidths = 40, kMaxTileOfWidths = 160, kMinWidestTile = 144;
DG_HOST_DEVICE constexpr int width_step(int tile) {
    return tile >= kMinWidestTile ? 16 : 8;
}
DG_HOST_DEVICE constexpr bool has_widths(const Config& c) {
    return c.arch == Architecture::kSM90 && c.num_ctas_per_sm == 1 && c.routed_tile.num_tokens >= kMinTileOfWidths &&
           c.routed_tile.num_tokens <= kMaxTileOfWidths &&
           c.routed_tile.num_tokens % width_step(c.routed_tile.num_tokens) == 0;
}
// The next narrower mainloop of a tile; 0 where there is none.
DG_HOST_DEVICE constexpr int narrower_width(int tile, int width) {
    const int middle = tile - width_step(tile), least = tile - (tile >= kMinWidestTile ? 48 : 16);
    if (width > middle)
        return middle;
    return width > least ? least : 0;
}
// The narrowest mainloop that has `num_tokens`.
DG_HOST_DEVICE constexpr int width_of(int tile, int num_tokens) {
    int width = tile;
    for (int next = narrower_width(tile, width); next >= num_tokens && next != 0; next = narrower_width(tile, next))
        width = next;
    return width;
}

// The blocks of one expert.
struct ExpertBlocks {
    int tile;
    int step;
    int num_rows;
    int num_blocks;
    int num_groups; // 0: rows fill one block after the other

    DG_HOST_DEVICE constexpr ExpertBlocks(const Config& c, int num_rows_of_expert, int num_blocks_of_expert)
        : tile(c.routed_tile.num_tokens), step(width_step(tile)), num_rows(num_rows_of_expert),
          num_blocks(num_blocks_of_expert), num_groups(has_widths(c) ? ceil_div(num_rows_of_expert, step) : 0) {}
    DG_HOST_DEVICE constexpr int first_row(int block) const {
        return num_groups == 0 ? block * tile : block * num_groups / num_blocks * step;
    }
    DG_HOST_DEVICE constexpr int num_rows_of(int block) const {
        return min_of(first_row(block + 1), num_rows) - first_row(block);
    }
    // The row's place among the expert's blocks, each of them as long as the tile.
    DG_HOST_DEVICE constexpr int place_of(int row) const {
        if (num_groups == 0)
            return row;
        const int block = ((row / step + 1) * num_blocks - 1) / num_groups;
        return block * tile + row - first_row(block);
    }
};

} // namespace deep_gemm_k3::plan
