// How the rows of an expert fill its pool blocks. A block has room for a whole token tile. Where the tile has two
// narrower instances of its mainloop, as many of an expert's blocks take fewer rows as its last block would have places
// to spare, so that little padding is multiplied; otherwise all blocks but the last are full.
#pragma once
#include "../config.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::plan {

// A tile has mainloops of up to three widths, more than which the assembler finds no registers for.
DG_HOST_DEVICE constexpr bool has_widths(const Config& c) {
    return c.narrow_widths.least != 0;
}
// With one narrower width only, an expert's last block takes it if it can. Of half a tile or less no other block could.
DG_HOST_DEVICE constexpr bool spreads_rows(const Config& c) {
    return c.narrow_widths.least != c.narrow_widths.middle;
}
// The next narrower mainloop of a routed tile; 0 where there is none.
DG_HOST_DEVICE constexpr int narrower_width(const Config& c, int width) {
    if (width > c.narrow_widths.middle)
        return c.narrow_widths.middle;
    return width > c.narrow_widths.least ? c.narrow_widths.least : 0;
}
// The narrowest mainloop that has `num_tokens`.
DG_HOST_DEVICE constexpr int width_of(const Config& c, int num_tokens) {
    int width = c.routed_tile.num_tokens;
    for (int next = narrower_width(c, width); next >= num_tokens && next != 0; next = narrower_width(c, width))
        width = next;
    return width;
}

// The blocks of one expert: those of the least width first, then those of the middle one, then whole ones.
struct ExpertBlocks {
    int tile, middle, least;
    int num_rows;
    int num_blocks;
    int num_least, num_middle; // blocks

    DG_HOST_DEVICE constexpr ExpertBlocks(const Config& c, int num_rows_of_expert, int num_blocks_of_expert)
        : tile(c.routed_tile.num_tokens), middle(c.narrow_widths.middle), least(c.narrow_widths.least),
          num_rows(num_rows_of_expert), num_blocks(num_blocks_of_expert), num_least(0), num_middle(0) {
        if (!spreads_rows(c))
            return;
        const int spare = num_blocks * tile - num_rows;
        num_least = min_of(num_blocks, spare / (tile - least));
        num_middle = min_of(num_blocks - num_least, (spare - num_least * (tile - least)) / (tile - middle));
    }
    DG_HOST_DEVICE constexpr int first_row(int block) const {
        return block * tile - min_of(block, num_least) * (tile - least) -
               max_of(min_of(block - num_least, num_middle), 0) * (tile - middle);
    }
    // Tokens that are multiplied, where rows are spread.
    DG_HOST_DEVICE constexpr int num_places() const { return first_row(num_blocks); }
    DG_HOST_DEVICE constexpr int num_rows_of(int block) const {
        return min_of(first_row(block + 1), num_rows) - first_row(block);
    }
    // The row's place among the expert's blocks, each of them as long as the tile.
    DG_HOST_DEVICE constexpr int place_of(int row) const {
        if (num_least != 0 && row < num_least * least)
            return row / least * (tile - least) + row;
        const int behind_least = row - num_least * least;
        if (num_middle != 0 && behind_least < num_middle * middle)
            return num_least * tile + behind_least / middle * (tile - middle) + behind_least;
        return row + num_least * (tile - least) + num_middle * (tile - middle);
    }
};

} // namespace deep_gemm_k3::plan
