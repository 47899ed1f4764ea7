// Operand tiles of the pool in the form that a Config's engine reads: BF16 on SM90, E4M3 with scales on SM100.
#pragma once
#include "../config.cuh"
#include "operand_tile.cuh"
#include "scaled_tile.cuh"

namespace deep_gemm_k3::plan {

DG_HOST_DEVICE constexpr int pool_tile_bytes(const Config& c) {
    const int tokens = c.routed_tile.num_tokens;
    return c.arch == Architecture::kSM100 ? scaled_tile_bytes(tokens) : operand_tile_bytes(tokens);
}
DG_HOST_DEVICE constexpr uint64_t pool_tile_offset(const Config& c, int num_columns, int block, int k_unit) {
    return (uint64_t(block) * (num_columns / 128) + k_unit) * pool_tile_bytes(c);
}

} // namespace deep_gemm_k3::plan
