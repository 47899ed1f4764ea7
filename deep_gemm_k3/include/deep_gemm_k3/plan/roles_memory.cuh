// Shared memory of the roles outside the engine: the expert list that every role of a CTA reads, the dispatch warps'
// cursors and a few words of scratch. Per-expert and per-rank arrays only, so that its size never depends on the number
// of routes. plan/shared_memory.cuh places it; offsets below are from its start.
#pragma once
#include "../config.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::plan {

constexpr int kNumDispatchWarps = 3;

namespace roles_memory {
// Written before the CTA's first barrier.
constexpr int kEpoch = 0;      // u32: number of this call
constexpr int kAborted = 4;    // u32: code of an abort that was there before the call
constexpr int kStageLimit = 8; // u32: how long math warps wait for a stage (sync::stage_limit); 0: one did so long
constexpr int kRank = 12;      // u32: this rank, on SM90 (kernels::own_buffer)
// Zeroed from here on. Words that exist once.
constexpr int kZeroed = 16;
constexpr int kListState = 16;  // u32 sync::ListState
constexpr int kNumBlocks = 20;  // u32: pool blocks of this rank
constexpr int kRowParts = 24;   // u32: arrivals that one gathered row makes
constexpr int kIsFaulty = 28;   // u32: a dispatch warp gave up while it built the list
constexpr int kLocalFault = 32; // sync::LocalFault: the CTA's first failure
constexpr int kLocalFaultBytes = 32;
constexpr int kPeerVerdict = 64;    // u32: what the other CTA of a pair says about its list, 0 while it says nothing
constexpr int kFirstTask = 68;      // u32 sched::FirstTask: whether the CTA gathers the rows of its first task itself
constexpr int kStagesGathered = 72; // u32: stages of that task whose rows are written
constexpr int kOrderOfEnd = 76;     // u32: 1 + how many CTAs had found no more tasks before this one; 0: unknown
constexpr int kPublishes = 80;      // u32 sched::Publishes
constexpr int kGeneration = 84;     // i32: generation that this call publishes; negative: nothing may be written
constexpr int kRanksBegun = 88;     // u32: every rank has begun this call, as far as this CTA waits for them
constexpr int kPairClaims = 96; // u32 [8]: tasks that the first CTA of a pair has claimed for both, in the second one
constexpr int kNumPairClaims = 8;
constexpr int kReduction = 128; // float [2][16]: RMSNorm sums of the math warps
// Per rank, from the headers.
constexpr int kRankTokens = 256; // u32 [64]: tokens; bit 31: its rows come as low-latency words
constexpr int kRankCtas = 512;   // u32 [64]: CTAs
constexpr int kFirstWord = 768;  // u32 [65]: route words of all earlier ranks
constexpr int kTimeline = 1088;  // u32 [16]: events of each warp so far, in traced kernels
// Rows of the first task's block, where the CTA gathers them itself.
constexpr int kMaxStageRows = 16;
constexpr int kStagePlaces = 1152;  // u32 [16]: plan::row_place
constexpr int kStageWeights = 1216; // float [16]
constexpr int kExperts = 1280;
// Per local expert.
DG_HOST_DEVICE constexpr int padded_experts(const Config& c) {
    return align_up(c.shape.num_local_experts(), 8);
}
DG_HOST_DEVICE constexpr int num_rows_offset(const Config&) {
    return kExperts;
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
