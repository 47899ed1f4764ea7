// Shared memory of the roles outside the engine: the expert list that every role of a CTA reads, the dispatch warps'
// cursors and a few words of scratch. Per-expert arrays only, so that its size depends on the experts and never on the
// number of routes. plan/shared_memory.cuh places it; offsets below are from its start.
#pragma once
#include "../config.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::plan {

constexpr int kNumDispatchWarps = 3;
constexpr int kRolesHeaderBytes = 256;

namespace roles_memory {
// Header: words that exist once.
constexpr int kListState = 0;        // u32 ListState
constexpr int kNumBlocks = 4;        // u32 pool blocks of this rank
constexpr int kRowParts = 8;         // u32 arrivals per gathered row
constexpr int kIsFaulty = 12;        // u32: a dispatch warp met an abort while it built the list
constexpr int kLocalFault = 16;      // u32: a wait inside the CTA timed out; 1 << 31 | where
constexpr int kLocalFaultIndex = 20; // u32
constexpr int kReduction = 128;      // float [2][8]: RMSNorm sums of the math warps

DG_HOST_DEVICE constexpr int padded_experts(const Config& c) {
    return align_up(c.shape.num_local_experts(), 4);
}
DG_HOST_DEVICE constexpr int num_rows_offset(const Config&) {
    return kRolesHeaderBytes;
}
DG_HOST_DEVICE constexpr int first_block_offset(const Config& c) {
    return num_rows_offset(c) + padded_experts(c) * 4;
}
DG_HOST_DEVICE constexpr int cursors_offset(const Config& c) {
    return first_block_offset(c) + (padded_experts(c) + 4) * 4;
}
} // namespace roles_memory

DG_HOST_DEVICE constexpr int roles_memory_bytes(const Config& c) {
    return align_up(roles_memory::cursors_offset(c) + kNumDispatchWarps * roles_memory::padded_experts(c) * 4, 128);
}

} // namespace deep_gemm_k3::plan
