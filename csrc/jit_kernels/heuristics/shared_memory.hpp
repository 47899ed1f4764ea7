// Bytes of shared memory per pipeline stage and outside the pipeline.
#pragma once

#include "deep_gemm_k3/config.cuh"
#include "deep_gemm_k3/types.cuh"

namespace deep_gemm_k3::heuristics {

constexpr int kWeightUnitBytes = 4352;      // 64 rows x 128 k of MXFP4: codes and scales
constexpr int kFixedSharedBytes = 6 * 1024; // barriers, the task list and per-row tables

constexpr int routed_stage_bytes(Architecture arch, const TileShape& tile) {
    if (arch == Architecture::kSM100) // FP4 rows unpacked to a byte each, E4M3 tokens, scales of both
        return (tile.num_rows + tile.num_tokens) * (tile.num_k + 4);
    return tile.num_rows / 64 * kWeightUnitBytes * (tile.num_k / 128) + tile.num_tokens * tile.num_k * 2;
}

constexpr int shared_stage_bytes(const TileShape& tile) {
    return (tile.num_rows + tile.num_tokens) * tile.num_k * 2;
}

// One finished tile on its way out, BF16.
constexpr int epilogue_bytes(const Config& config) {
    const int routed = config.routed_tile.num_rows * config.routed_tile.num_tokens * 2;
    const int shared = config.has_shared() ? config.shared_tile.num_rows * config.shared_tile.num_tokens * 2 : 0;
    return max_of(routed, shared);
}

constexpr int stage_bytes(const Config& config) {
    const int shared = config.has_shared() ? shared_stage_bytes(config.shared_tile) : 0;
    return align_up(max_of(routed_stage_bytes(config.arch, config.routed_tile), shared), 1024);
}

constexpr int total_shared_bytes(const Config& config) {
    return kFixedSharedBytes + epilogue_bytes(config) + config.num_stages * stage_bytes(config);
}

} // namespace deep_gemm_k3::heuristics
