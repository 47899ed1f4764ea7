// Why a call was given up, and where. The device writes the numbers into an AbortCell; the host turns them into words
// with the tables here. Values are part of the buffer's protocol: append, never renumber.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::sync {

enum class Fault : uint32_t {
    kTimeout = 0,              // a wait passed its limit
    kExpertOutOfRange = 1,     // wanted = number of experts, seen = the id, index = token * top-k + slot
    kGenerationOutOfRange = 2, // flags[0]; wanted = number of generations
    kStrideMismatch = 3,       // flags[2]; wanted = the workspace's stride
    kSharedTokensDiffer = 4,   // index = the other rank; wanted = ours, seen = theirs
    kRefusedByHost = 5,        // a rank's host refused its call
    kTokensOutOfRange = 6,     // index = the other rank; a header names more tokens than the buffer holds
    kCallsDiffer = 7,          // index = the other rank; wanted = our plan::CallKind, seen = theirs
};

enum class Role : uint32_t {
    kKernel = 0,
    kDispatch = 1,
    kProducer = 2,
    kMath = 3,
    kCombine = 4,
    kPublication = 5,
    kHost = 6
};

enum class What : uint32_t {
    kNone = 0,
    kHeader = 1,           // index = rank whose header is missing; wanted/seen = epoch
    kRouteWords = 2,       // index = source rank
    kCounts = 3,           // all CTAs' route counts; index = CTA that waits
    kRow = 4,              // index = source rank << 24 | token
    kList = 5,             // the CTA's own expert list
    kBlockGathered = 6,    // index = pool block; wanted/seen = rows
    kBlockL1 = 7,          // index = pool block; wanted/seen = row tiles
    kSharedL1 = 8,         // index = shared token block; wanted/seen = row tiles
    kPartial = 9,          // index = token
    kPublicationDone = 10, // index = source rank; wanted/seen = CTAs, cumulative
    kStage = 11,           // index = pipeline stage
    kGridBarrier = 12,
    kInput = 13, // device-side check of an argument
    kTask = 14,  // index = number of the task among those of the pair
};

struct Where {
    Role role;
    What what;
    uint32_t index;
};

DG_HOST_DEVICE constexpr uint32_t pack_where(Role role, What what) {
    return static_cast<uint32_t>(role) << 16 | static_cast<uint32_t>(what);
}

constexpr const char* kFaultNames[] = {"time-out", "expert id out of range", "publication generation out of range",
    "publication stride mismatch", "num_shared_tokens differs between ranks", "call refused by a rank's host",
    "token count out of range", "entry or options differ between ranks"};
constexpr const char* kRoleNames[] = {"kernel", "dispatch", "producer", "math", "combine", "publication", "host"};
constexpr const char* kWhatNames[] = {"-", "header of rank", "route words of rank", "route counts", "row",
    "expert list", "gathered rows of block", "L1 tiles of block", "shared L1 tiles of block", "partials of token",
    "publication of rank", "pipeline stage", "grid barrier", "input", "task of the pair"};

} // namespace deep_gemm_k3::sync
