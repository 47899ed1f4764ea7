// The only home of offsets inside a CTA's dynamic shared memory, for the kernel, the host planner and the tests.
//
// [stages: num_stages x stage_bytes][staging: one slice per math warpgroup][scale codes][tasks][barriers][roles]
// or, where the dispatch warps finish the routed L1 tiles,
// [stages][tasks][barriers][roles: all but the dispatch warps' cursors][exchange: a tile's sums, the cursors at first]
// with each warpgroup's staging at the end of its half of the exchange; or, where they finish a part of each,
// [stages][staging][scale codes][tasks][barriers][roles][exchange].
// A stage holds, for a routed tile, tokens then one weight unit per 64 rows (SM90), or weights, tokens with their
// scales, scales of the weights (SM100); for a shared-expert tile, weights then tokens.
#pragma once
#include "../config.cuh"
#include "../types.cuh"
#include "roles_memory.cuh"
#include "scaled_tile.cuh"
#include "tensor_memory.cuh"

namespace deep_gemm_k3::plan {

// ---- SM90 routed weights: a unit is 64 rows x 128 k, packed codes then scale bytes
constexpr int kUnitRows = 64;
constexpr int kUnitK = 128;
constexpr int kUnitCodeBytes = kUnitRows * kUnitK / 2;
constexpr int kUnitScaleBytes = kUnitRows * kUnitK / 32;
constexpr int kUnitBytes = kUnitCodeBytes + kUnitScaleBytes;
static_assert(kUnitBytes == 4352);

// ---- device limits
constexpr int kSharedMemoryPerSm = 228 * 1024;
constexpr int kSharedMemoryReservedPerCta = 1024;
constexpr int kMaxSharedMemoryPerCta = 227 * 1024;

constexpr int kStageAlignment = 1024; // a 128-byte swizzle repeats after 8 rows
constexpr int kSharedK = 64;          // one 128-byte swizzled row of BF16
constexpr int kWarpsPerWarpgroup = 4;
constexpr int kMaxStages = 16;

// ---- pieces of a stage
DG_HOST_DEVICE constexpr int routed_token_bytes(const TileShape& t) {
    return t.num_tokens * t.num_k * 2;
}
DG_HOST_DEVICE constexpr int routed_weight_bytes(const TileShape& t) {
    return t.num_rows / kUnitRows * (t.num_k / kUnitK) * kUnitBytes;
}
// SM100: a CTA's part of a tile's operands, its own rows and, in a pair, one half of the tokens.
DG_HOST_DEVICE constexpr TileShape cta_operands(const Config& c, const TileShape& t) {
    return {t.num_rows / c.num_cluster_ctas, t.num_tokens / c.num_cluster_ctas, t.num_k};
}
// Where a routed stage holds what: weights from 0 on, a byte per E2M1 code (16 codes in 8 bytes, then a gap of 8);
// tokens; scales of all the tile's tokens; scales of the CTA's rows.
struct ScaledStage {
    int tokens;
    int token_scales;
    int weight_scales;
    int total;
};
DG_HOST_DEVICE constexpr ScaledStage scaled_stage(const Config& c) {
    const TileShape mine = cta_operands(c, c.routed_tile);
    ScaledStage stage{};
    stage.tokens = mine.num_rows * mine.num_k;
    stage.token_scales = stage.tokens + mine.num_tokens * mine.num_k;
    stage.weight_scales = stage.token_scales + num_scale_blocks(c.routed_tile.num_tokens) * kScaleBlockBytes;
    stage.total = stage.weight_scales + num_scale_blocks(mine.num_rows) * kScaleBlockBytes;
    return stage;
}
DG_HOST_DEVICE constexpr int shared_weight_bytes(const TileShape& t) {
    return t.num_rows * t.num_k * 2;
}
DG_HOST_DEVICE constexpr int shared_token_bytes(const TileShape& t) {
    return t.num_tokens * t.num_k * 2;
}
DG_HOST_DEVICE constexpr int stage_bytes(const Config& c) {
    const int routed = c.arch == Architecture::kSM100
                           ? scaled_stage(c).total
                           : routed_token_bytes(c.routed_tile) + routed_weight_bytes(c.routed_tile);
    const TileShape of_shared = cta_operands(c, c.shared_tile);
    const int shared = c.has_shared() ? shared_weight_bytes(of_shared) + shared_token_bytes(of_shared) : 0;
    return align_up(max_of(routed, shared), kStageAlignment);
}

// ---- epilogue scratch
// Tokens that one warpgroup transposes at a time: 128 bytes (64 rows of BF16) for each.
DG_HOST_DEVICE constexpr int staging_tokens(const Config& c) {
    return c.arch == Architecture::kSM100 ? 32 : min_of(max_of(c.routed_tile.num_tokens, 16), 32);
}
DG_HOST_DEVICE constexpr int staging_bytes_per_warpgroup(const Config& c) {
    return staging_tokens(c) * kUnitRows * 2;
}
// Scale codes that warps exchange before they quantise: two bytes per token and warp, for whole passes of 32 tokens.
DG_HOST_DEVICE constexpr int scale_code_stride(const Config& c) {
    return align_up(c.routed_tile.num_tokens, 32) * 2;
}
DG_HOST_DEVICE constexpr int scale_code_bytes(const Config& c) {
    return c.num_math_warpgroups * kWarpsPerWarpgroup * scale_code_stride(c);
}
// Task records between the producer and the math warps. SM90: one per stage and one for the tile in its epilogue.
// SM100: a ring of its own.
constexpr int kTaskRecordBytes = 48;
constexpr int kNumTensorRecords = 4;
DG_HOST_DEVICE constexpr int num_task_records(const Config& c) {
    return c.arch == Architecture::kSM100 ? kNumTensorRecords : c.num_stages + 1;
}
DG_HOST_DEVICE constexpr int task_bytes(const Config& c) {
    return num_task_records(c) * kTaskRecordBytes;
}
// Full and empty barrier of every stage; on SM100 of every accumulator and record too, then the word that names the
// tensor memory.
DG_HOST_DEVICE constexpr int num_barriers(const Config& c) {
    const int of_tensors = c.arch == Architecture::kSM100 ? tensor_memory_layout(c).num_stages + kNumTensorRecords : 0;
    return 2 * (c.num_stages + of_tensors);
}
DG_HOST_DEVICE constexpr int barrier_bytes(const Config& c) {
    return num_barriers(c) * 8 + (c.arch == Architecture::kSM100 ? 8 : 0);
}

// ---- routed L1 tiles that the dispatch warps finish: gates and ups of a tile in BF16. One half for each math
// warpgroup, which has 64 of the columns; in a half a token's columns lie together, gate and up of each.
constexpr int kExchangeTokenBytes = kUnitK / 2 * 4; // in a half
constexpr int kMinExchangeTokens = 40, kMaxExchangeTokens = 112;
// Wider tiles leave memory for some of their tokens; the math warps finish the others themselves.
constexpr int kExchangedOfWide = 80;
DG_HOST_DEVICE constexpr bool is_wide(const Config& c) {
    return c.routed_tile.num_tokens > kMaxExchangeTokens;
}
DG_HOST_DEVICE constexpr int exchange_tokens(const Config& c) {
    return is_wide(c) ? kExchangedOfWide : c.routed_tile.num_tokens;
}
DG_HOST_DEVICE constexpr int exchange_half_bytes(const Config& c) {
    return exchange_tokens(c) * kExchangeTokenBytes;
}
// With more local experts than this allows the widest tile would lose a stage.
constexpr int kMaxRolesBesideWide = 4096;
// The dispatch warps' cursors lie where the tile will, beside what a math warpgroup stages: with hundreds of local
// experts a narrow tile has no room for both.
DG_HOST_DEVICE constexpr bool has_exchange(const Config& c) {
    return c.arch == Architecture::kSM90 && c.num_ctas_per_sm == 1 && c.routed_tile.num_tokens >= kMinExchangeTokens &&
           c.splits.routed_l1 == 1 &&
           (is_wide(c) ? roles_memory_bytes(c) <= kMaxRolesBesideWide
                       : roles_memory_bytes(c) - roles_memory::cursors_offset(c) <=
                             exchange_half_bytes(c) - staging_bytes_per_warpgroup(c));
}
// Whether math and dispatch warps share the tokens of a tile.
DG_HOST_DEVICE constexpr bool shares_tiles(const Config& c) {
    return has_exchange(c) && is_wide(c);
}
// Whether the math warps stage in the memory of the exchange, and the dispatch warps' cursors lie there.
DG_HOST_DEVICE constexpr bool overlays_exchange(const Config& c) {
    return has_exchange(c) && !is_wide(c);
}
DG_HOST_DEVICE constexpr int staging_stride(const Config& c) {
    return overlays_exchange(c) ? exchange_half_bytes(c) : staging_bytes_per_warpgroup(c);
}
// What the tile is, then the barriers: it is full, it is empty.
constexpr int kExchangeRecordBytes = 16;
constexpr int kExchangeControlBytes = kExchangeRecordBytes + 16;

struct SharedMemoryLayout {
    int stages;
    int staging;
    int scale_codes;
    int tasks;
    int barriers;
    int exchange_control;
    int scheduler; // Context::roles
    int exchange;
    int total;
};

DG_HOST_DEVICE constexpr SharedMemoryLayout shared_memory_layout(const Config& c) {
    SharedMemoryLayout layout{};
    layout.stages = 0;
    const int behind_stages = layout.stages + c.num_stages * stage_bytes(c);
    layout.staging = behind_stages;
    layout.scale_codes = layout.staging + c.num_math_warpgroups * staging_bytes_per_warpgroup(c);
    layout.tasks = overlays_exchange(c) ? behind_stages : align_up(layout.scale_codes + scale_code_bytes(c), 16);
    layout.barriers = layout.tasks + task_bytes(c);
    layout.exchange_control = align_up(layout.barriers + barrier_bytes(c), 16);
    layout.scheduler = align_up(layout.exchange_control + (has_exchange(c) ? kExchangeControlBytes : 0), 128);
    layout.total = layout.scheduler + roles_memory_bytes(c);
    if (has_exchange(c)) {
        layout.exchange = layout.total;
        if (overlays_exchange(c)) {
            layout.exchange = layout.scheduler + align_up(roles_memory::cursors_offset(c), 128);
            layout.staging = layout.exchange + exchange_half_bytes(c) - staging_bytes_per_warpgroup(c);
        }
        layout.total = max_of(layout.total, layout.exchange + 2 * exchange_half_bytes(c));
    }
    return layout;
}

// ---- what the planner asks
DG_HOST_DEVICE constexpr int shared_memory_bytes(const Config& c) {
    return shared_memory_layout(c).total;
}
DG_HOST_DEVICE constexpr int shared_memory_budget(int num_ctas_per_sm) {
    return min_of(kMaxSharedMemoryPerCta, kSharedMemoryPerSm / num_ctas_per_sm - kSharedMemoryReservedPerCta);
}
// The most stages that fit beside everything else; 0 when not even one does.
DG_HOST_DEVICE constexpr int max_num_stages(Config c) {
    for (c.num_stages = kMaxStages; c.num_stages > 0; --c.num_stages)
        if (shared_memory_bytes(c) <= shared_memory_budget(c.num_ctas_per_sm))
            return c.num_stages;
    return 0;
}
// Where every CTA has one split of an L1, sums of splits are what L2 waits for, and memory answers in turn: what is on
// its way for further stages delays them. Measured on SM90, while a ring holds a split's stages of routed L1 twice
// (sched/stage_rows.cuh).
constexpr int kStagesOfSplits = 3;
DG_HOST_DEVICE constexpr bool has_few_stages(const Config& c) {
    return c.arch == Architecture::kSM90 && c.splits.routed_l1 > 1 &&
           c.routed_tile.num_tokens <= roles_memory::kMaxStageRows &&
           ceil_div(c.shape.hidden / c.routed_tile.num_k, c.splits.routed_l1) <= 2 * kStagesOfSplits;
}

} // namespace deep_gemm_k3::plan
