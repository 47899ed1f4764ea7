#include "tables.hpp"

#include "deep_gemm_k3/plan/workspace.cuh"

namespace deep_gemm_k3::checks {

namespace {

constexpr ForTarget kAnyTarget = ForTarget::kAny, kSM90 = ForTarget::kSM90, kSM100 = ForTarget::kSM100;
using D = Dim;
using T = Tensor;

// clang-format off
constexpr TensorSpec kSpecs[] = {
    // tensor              entries               target      dtype             rank dims                                                                     align  optional early
    {T::kY,                kEntriesAll,          kAnyTarget, Dtype::kBFloat16, 2, {D::kNumTokens, D::kHidden},                                                 16, false, true},
    {T::kSharedX,          kEntriesShared,       kAnyTarget, Dtype::kBFloat16, 2, {D::kNumSharedTokens, D::kSharedHidden},                                     16, false, true},
    {T::kL1Weights,        kEntriesAll,          kSM90,      Dtype::kUint8,    4, {D::kLocalExperts, D::kL1Blocks, D::kHiddenUnits, D::kUnitBytes},            16, false, true},
    {T::kL1Weights,        kEntriesAll,          kSM100,     Dtype::kInt8,     3, {D::kLocalExperts, D::kL1Rows, D::kHalfHidden},                              32, false, true},
    {T::kL1WeightsSf,      kEntriesAll,          kSM90,      Dtype::kUint8,    2, {D::kLocalExperts, D::kZero},                                                 1, false, true},
    {T::kL1WeightsSf,      kEntriesAll,          kSM100,     Dtype::kInt32,    3, {D::kLocalExperts, D::kHiddenUnits, D::kL1Rows},                             16, false, true},
    {T::kL2Weights,        kEntriesAll,          kSM90,      Dtype::kUint8,    4, {D::kLocalExperts, D::kL2Blocks, D::kIntermediateUnits, D::kUnitBytes},      16, false, true},
    {T::kL2Weights,        kEntriesAll,          kSM100,     Dtype::kInt8,     3, {D::kLocalExperts, D::kHidden, D::kHalfIntermediate},                        32, false, true},
    {T::kL2WeightsSf,      kEntriesAll,          kSM90,      Dtype::kUint8,    2, {D::kLocalExperts, D::kZero},                                                 1, false, true},
    {T::kL2WeightsSf,      kEntriesAll,          kSM100,     Dtype::kInt32,    3, {D::kLocalExperts, D::kIntermediateUnits, D::kHidden},                       16, false, true},
    {T::kRmsWeight,        kEntriesShared,       kAnyTarget, Dtype::kBFloat16, 1, {D::kHidden},                                                                16, false, true},
    {T::kStatistics,       kEntriesAll,          kAnyTarget, Dtype::kInt32,    1, {D::kLocalExperts},                                                           4, true,  true},
    {T::kBuffer,           kEntriesAll,          kAnyTarget, Dtype::kInt8,     1, {D::kBufferBytes},                                                           16, false, true},
    {T::kSharedL1Weights,  kEntriesShared,       kAnyTarget, Dtype::kBFloat16, 2, {D::kSharedL1Rows, D::kSharedHidden},                                        16, false, false},
    {T::kSharedL2Weights,  kEntriesShared,       kAnyTarget, Dtype::kBFloat16, 2, {D::kSharedHidden, D::kSharedIntermediate},                                  16, false, false},
    {T::kSharedY,          kEntryDense,          kAnyTarget, Dtype::kBFloat16, 2, {D::kNumSharedTokens, D::kSharedHidden},                                     16, false, false},
    {T::kWorkspace,        kEntryHiddenSharded,  kAnyTarget, Dtype::kBFloat16, 4, {D::kMinThreeGenerations, D::kMinSharedTokens, D::kRanks, D::kShard},        16, false, false},
    {T::kWorkspace,        kEntryTokenOwner,     kAnyTarget, Dtype::kBFloat16, 4, {D::kMinOneGeneration, D::kMinLocalTokens, D::kRanks, D::kSharedHidden},     16, false, false},
    {T::kFlags,            kEntriesPublished,    kAnyTarget, Dtype::kInt32,    1, {D::kMinFlags},                                                               4, false, false},
    {T::kPeerPtrs,         kEntriesPublished,    kAnyTarget, Dtype::kInt64,    1, {D::kRanks},                                                                  8, false, false},
};

constexpr DimText kDimTexts[] = {
    {"", false}, {"num_tokens", false}, {"hidden", false}, {"experts per rank", false}, {"2*intermediate/64", false},
    {"hidden/64", false}, {"hidden/128", false}, {"intermediate/128", false}, {"unit bytes", false}, {"", false},
    {"2*intermediate", false}, {"hidden/2", false}, {"intermediate/2", false}, {"num_shared_tokens", false},
    {"shared hidden", false}, {"2*shared intermediate", false}, {"shared intermediate", false}, {"ranks", false},
    {"shared hidden/ranks", false}, {"generations", true}, {"generations", true}, {"num_shared_tokens", true},
    {"num_shared_tokens/ranks", true}, {"", true}, {"bytes", false}, {"", false},
};
// clang-format on
static_assert(std::size(kDimTexts) == static_cast<int>(Dim::kAny) + 1);

constexpr const char* kTensorNames[] = {"y", "shared_x", "l1_weights", "l1_weights_sf", "l2_weights", "l2_weights_sf",
    "shared_l1_weights", "shared_l2_weights", "rms_weight", "cumulative_local_expert_recv_stats", "sym_buffer.buffer",
    "shared_y", "shared_rs_workspace", "shared_rs_flags", "shared_rs_peer_ptrs"};
static_assert(std::size(kTensorNames) == kNumTensors);

constexpr int kUnitBytes = 4352;
constexpr int kMinFlags = 9;

} // namespace

std::span<const TensorSpec> tensor_specs() {
    return kSpecs;
}

const char* tensor_name(Tensor tensor) {
    return kTensorNames[static_cast<int>(tensor)];
}

const char* forbidden_hint(Tensor tensor) {
    switch (tensor) {
    case Tensor::kSharedL1Weights:
    case Tensor::kSharedL2Weights:
        return " (FP8-scaled shared experts are not served; BF16 ones go through fp8_fp4_mega_moe_bf16_shared)";
    case Tensor::kSharedY:
        return " (the shared output is published here, not dense)";
    case Tensor::kWorkspace:
    case Tensor::kFlags:
    case Tensor::kPeerPtrs:
        return " (the shared output is dense here, not published)";
    default:
        return "";
    }
}

bool has_free_shape(const TensorSpec& spec) {
    for (int i = 0; i < spec.rank; ++i) {
        const bool own = (spec.tensor == Tensor::kY && spec.dims[i] == Dim::kNumTokens) ||
                         (spec.tensor == Tensor::kSharedX &&
                             (spec.dims[i] == Dim::kNumSharedTokens || spec.dims[i] == Dim::kSharedHidden));
        if (!own)
            return false;
    }
    return true;
}

DimText dim_text(Dim dim) {
    return kDimTexts[static_cast<int>(dim)];
}

int64_t dim_value(Dim dim, const Call& call) {
    const BufferShape& s = call.shape();
    switch (dim) {
    case Dim::kNone:
    case Dim::kZero:
        return 0;
    case Dim::kNumTokens:
        return call.num_tokens();
    case Dim::kHidden:
        return s.hidden;
    case Dim::kLocalExperts:
        return s.num_local_experts();
    case Dim::kL1Blocks:
        return s.intermediate / 32;
    case Dim::kL2Blocks:
        return s.hidden / 64;
    case Dim::kHiddenUnits:
        return s.hidden / 128;
    case Dim::kIntermediateUnits:
        return s.intermediate / 128;
    case Dim::kUnitBytes:
        return kUnitBytes;
    case Dim::kL1Rows:
        return 2 * s.intermediate;
    case Dim::kHalfHidden:
        return s.hidden / 2;
    case Dim::kHalfIntermediate:
        return s.intermediate / 2;
    case Dim::kNumSharedTokens:
    case Dim::kMinSharedTokens:
        return call.num_shared_tokens();
    case Dim::kSharedHidden:
        return call.shared_hidden();
    case Dim::kSharedL1Rows:
        return 2 * s.shared_intermediate;
    case Dim::kSharedIntermediate:
        return s.shared_intermediate;
    case Dim::kRanks:
        return s.num_ranks;
    case Dim::kShard:
        return call.shared_hidden() / s.num_ranks;
    case Dim::kMinThreeGenerations:
        return 3;
    case Dim::kMinOneGeneration:
        return 1;
    case Dim::kMinLocalTokens:
        return call.num_shared_tokens() / s.num_ranks;
    case Dim::kMinFlags:
        return kMinFlags;
    case Dim::kBufferBytes:
        return static_cast<int64_t>(plan::total_bytes(s));
    case Dim::kAny:
        return 0;
    }
    return 0;
}

} // namespace deep_gemm_k3::checks
