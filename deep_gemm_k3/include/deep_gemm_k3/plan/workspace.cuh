// The only home of offsets inside a symmetric buffer. Host allocation, kernels, tests and documents all call these
// functions. Every rank uses the same BufferShape, so an offset is valid in every rank's buffer; nothing here depends
// on a rank's own launch configuration.
//
// Components that peers touch come first (control, inputs, metadata, rows, partials); the rest is local scratch that
// happens to live in the same allocation. All protocol state, epochs included, is inside and zero is a valid start.
#pragma once
#include "../config.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::plan {

enum class Component : int {
    kControl = 0,
    kInputX,
    kInputScales,
    kInputTopkIdx,
    kInputTopkWeights,
    kMetadata,         // [parity][source rank][header + route words] of 16 bytes
    kLowLatencyRows,   // [parity][source rank][low-latency token] rows of 16-byte words {12 bytes of data, epoch};
                       // three words per 32 columns: codes 0..11 | 12..23 | 24..31 and the scale byte
    kRows,             // [parity][source rank][token] rows of E4M3 codes followed by their scales
    kRowFlags,         // [parity][source rank][token] epoch of the row
    kPartials,         // BF16 [token][top-k slot][hidden], stored complemented; zero means empty
    kPoolX,            // BF16 operand tiles of routed L1, [pool block][k128][tile]
    kPoolRowInfo,      // [pool row] RowInfo
    kPoolIntermediate, // BF16 operand tiles of routed L2
    kBlockCounters,    // [parity][2][pool block]: rows gathered; L1 tiles done
    kSharedIntermediate,
    kSharedCounters, // [parity][shared token block]
    kSplitPartials,  // FP32 [split task][tile rows x tile tokens]
    kSplitCounters,  // [parity][split task]
    kRouteCounts,    // [CTA][local expert, padded to 8]: routes in the CTA's share of the metadata
    kNumComponents,
};
constexpr int kNumComponents = static_cast<int>(Component::kNumComponents);

// ---- constants of the protocol
constexpr uint64_t kComponentAlignment = 1024;
constexpr int kNumParities = 2;
constexpr int kMinTokenTile = 8;
constexpr int kMaxTokenTile = 192;
constexpr int kMinSharedTokenTile = 8;
constexpr int kLowLatencyTokenBudget = 512; // ranks x tokens up to which low-latency rows are reserved
constexpr int kMaxSplitTasks = 1024;
constexpr int kMaxSplitTileElements = 8192;
constexpr int kControlLineBytes = 128;
constexpr int kMaxNumCtas = 512; // of one rank

// ---- the control block: one 128-byte line per word that is polled or added to
namespace control {
constexpr uint64_t kEpoch = 0;               // u32: calls completed
constexpr uint64_t kExitCount = 128;         // u32: CTAs that left the current call
constexpr uint64_t kGridBarrier = 256;       // u32: monotonic arrivals of this rank's CTAs
constexpr uint64_t kAbort = 384;             // AbortCell: written by any rank, read by every waiter
constexpr uint64_t kTaskClaim = 512;         // u32 [parity], 128 bytes apart
constexpr uint64_t kCallCount = 768;         // u32: host-side count of calls begun (CPU targets)
constexpr uint64_t kPublicationCount = 1024; // u32 [source rank], a line each
constexpr uint64_t kHostBarrier = kPublicationCount + kMaxNumRanks * 128; // u32 [source rank], a line each
constexpr uint64_t kAbortText = kHostBarrier + kMaxNumRanks * 128;        // AbortText: what a host reports
constexpr uint64_t kExecutorHeader = 32768; // 128 bytes that the CPU executor shows to its peers
constexpr uint64_t kReady =
    49152; // u32 [source rank], a line each: calls that the rank has begun, so all before are over
// Private to the rank:
constexpr uint64_t kPublicationExpected = 40960; // u32 [source rank]: value that kPublicationCount had to reach so far
constexpr uint64_t kUsedBlocks = 41472;          // u32 [parity]: pool blocks whose counters that call used
constexpr uint64_t kScanBarrier = 41984; // u32 [parity], 128 bytes apart: CTAs that published their route counts
constexpr uint64_t kBytes = 65536;
} // namespace control

// First failure of a call, 16-byte aligned, in every rank's control block. `code` is written last.
struct AbortCell {
    uint32_t code;  // 0: none; else 1 + sync::Fault
    uint32_t rank;  // rank that reports
    uint32_t where; // role << 16 | what
    uint32_t index; // task, block, token or peer, as `what` tells
    uint32_t wanted;
    uint32_t seen;
    uint32_t epoch;
    uint32_t reserved; // 0: unclaimed; only the one who sets it writes the other fields
};
static_assert(sizeof(AbortCell) == 32);
constexpr uint32_t kHostFault = 0x10000; // an AbortCell code of a host, explained by the text beside it

// Why a host aborted its peers. Written by whoever claimed the cell, before the cell's code.
struct AbortText {
    uint32_t length;
    char text[1020];
};
static_assert(sizeof(AbortText) == 1024);
static_assert(control::kAbortText + sizeof(AbortText) <= control::kBytes);

// Who owns one row of the pool: where its partial goes and the weight that scales it.
struct alignas(16) RowInfo {
    uint32_t token_slot; // token * num_topk + slot on the source rank
    uint32_t source_rank;
    float weight;
    uint32_t place; // both of the above in one word, see row_place
};
static_assert(sizeof(RowInfo) == 16);

// A buffer never holds 2^26 slots: their partials alone would take more memory than a device has.
DG_HOST_DEVICE constexpr uint32_t row_place(uint32_t token_slot, uint32_t source_rank) {
    return token_slot * kMaxNumRanks + source_rank;
}

// ---- derived sizes
DG_HOST_DEVICE constexpr uint64_t num_max_routes(const BufferShape& s) {
    return uint64_t(s.num_ranks) * s.num_max_tokens * s.num_topk;
}
DG_HOST_DEVICE constexpr uint64_t num_metadata_words(const BufferShape& s) {
    return 1 + ceil_div(uint64_t(s.num_max_tokens) * s.num_topk, uint64_t(2));
}
DG_HOST_DEVICE constexpr int row_bytes(const BufferShape& s) {
    return align_up(s.hidden + s.hidden / 32, 16);
}
DG_HOST_DEVICE constexpr int num_low_latency_words(const BufferShape& s) {
    return s.hidden / 32 * 3;
}
// A rank that sends no more tokens sends them as low-latency rows.
DG_HOST_DEVICE constexpr int num_low_latency_tokens(const BufferShape& s) {
    return min_of(s.num_max_tokens, kLowLatencyTokenBudget / s.num_ranks);
}
// A pool block is one token tile of one expert. Worst case: every route of every rank, each expert's last block padded.
DG_HOST_DEVICE constexpr uint64_t num_max_pool_blocks(const BufferShape& s) {
    return num_max_routes(s) / kMinTokenTile + s.num_local_experts();
}
DG_HOST_DEVICE constexpr uint64_t num_max_pool_rows(const BufferShape& s) {
    return align_up(num_max_routes(s) + uint64_t(s.num_local_experts()) * kMaxTokenTile, uint64_t(kMaxTokenTile));
}
DG_HOST_DEVICE constexpr uint64_t num_shared_rows(const BufferShape& s) {
    return s.shared_intermediate == 0 ? 0 : align_up(uint64_t(s.num_max_shared_tokens), uint64_t(kMaxTokenTile));
}

DG_HOST_DEVICE constexpr uint64_t component_bytes(const BufferShape& s, Component component) {
    const uint64_t tokens = s.num_max_tokens, ranks = s.num_ranks, topk = s.num_topk, hidden = s.hidden;
    switch (component) {
    case Component::kControl:
        return control::kBytes;
    case Component::kInputX:
        return tokens * hidden;
    case Component::kInputScales:
        return tokens * (hidden / 32);
    case Component::kInputTopkIdx:
        return tokens * topk * 8;
    case Component::kInputTopkWeights:
        return tokens * topk * 4;
    case Component::kMetadata:
        return kNumParities * ranks * num_metadata_words(s) * 16;
    case Component::kLowLatencyRows:
        return kNumParities * ranks * num_low_latency_tokens(s) * uint64_t(num_low_latency_words(s)) * 16;
    case Component::kRows:
        return kNumParities * ranks * tokens * row_bytes(s);
    case Component::kRowFlags:
        return kNumParities * ranks * tokens * 4;
    case Component::kPartials:
        return tokens * topk * hidden * 2;
    case Component::kPoolX:
        return num_max_pool_rows(s) * hidden * 2;
    case Component::kPoolRowInfo:
        return num_max_pool_rows(s) * sizeof(RowInfo);
    case Component::kPoolIntermediate:
        return num_max_pool_rows(s) * uint64_t(s.intermediate) * 2;
    case Component::kBlockCounters:
        return kNumParities * 2 * num_max_pool_blocks(s) * 4;
    case Component::kSharedIntermediate:
        return num_shared_rows(s) * uint64_t(s.shared_intermediate) * 2;
    case Component::kSharedCounters:
        return kNumParities * ceil_div(num_shared_rows(s), uint64_t(kMinSharedTokenTile)) * 4;
    case Component::kSplitPartials:
        return uint64_t(kMaxSplitTasks) * kMaxSplitTileElements * 4;
    case Component::kSplitCounters:
        return kNumParities * uint64_t(kMaxSplitTasks) * 4;
    case Component::kRouteCounts:
        return uint64_t(kMaxNumCtas) * align_up(s.num_local_experts(), 8) * 4;
    default:
        return 0;
    }
}

// Byte offset of a component from the start of the buffer.
DG_HOST_DEVICE constexpr uint64_t component_offset(const BufferShape& s, Component component) {
    uint64_t offset = 0;
    for (int i = 0; i < static_cast<int>(component); ++i)
        offset += align_up(component_bytes(s, static_cast<Component>(i)), kComponentAlignment);
    return offset;
}
DG_HOST_DEVICE constexpr uint64_t total_bytes(const BufferShape& s) {
    return component_offset(s, Component::kNumComponents);
}

// ---- addresses inside components, in bytes from the start of the component
DG_HOST_DEVICE constexpr uint64_t metadata_offset(const BufferShape& s, int parity, int source_rank) {
    return (uint64_t(parity) * s.num_ranks + source_rank) * num_metadata_words(s) * 16;
}
DG_HOST_DEVICE constexpr uint64_t row_index(const BufferShape& s, int parity, int source_rank, int token) {
    return (uint64_t(parity) * s.num_ranks + source_rank) * s.num_max_tokens + token;
}
DG_HOST_DEVICE constexpr uint64_t low_latency_row_offset(const BufferShape& s, int parity, int source_rank, int token) {
    return ((uint64_t(parity) * s.num_ranks + source_rank) * num_low_latency_tokens(s) + token) *
           num_low_latency_words(s) * 16;
}
DG_HOST_DEVICE constexpr uint64_t partial_offset(const BufferShape& s, uint64_t token_slot) {
    return token_slot * s.hidden * 2;
}

} // namespace deep_gemm_k3::plan
