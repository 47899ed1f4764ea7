// The two tables that the checker walks: what each tensor must look like, and the rules that are not about one tensor's
// form. `list_checks` prints the same tables.
#pragma once

#include "call.hpp"

#include <span>

namespace deep_gemm_k3::checks {

enum class Dim : int {
    kNone = 0,
    kNumTokens,
    kHidden,
    kLocalExperts,
    kL1Blocks,
    kL2Blocks,
    kHiddenUnits,
    kIntermediateUnits,
    kUnitBytes,
    kZero,
    kL1Rows,
    kHalfHidden,
    kHalfIntermediate,
    kNumSharedTokens,
    kSharedHidden,
    kSharedL1Rows,
    kSharedIntermediate,
    kRanks,
    kShard,
    kMinThreeGenerations,
    kMinOneGeneration,
    kMinSharedTokens,
    kMinLocalTokens,
    kMinFlags,
    kBufferBytes,
    kAny,
};
struct DimText {
    const char* text;
    bool is_minimum;
};
DimText dim_text(Dim dim);
int64_t dim_value(Dim dim, const Call& call);

// Bit i stands for Entry i.
using EntryMask = unsigned;
constexpr EntryMask kEntryRouted = 1, kEntryDense = 2, kEntryHiddenSharded = 4, kEntryTokenOwner = 8;
constexpr EntryMask kEntriesPublished = kEntryHiddenSharded | kEntryTokenOwner;
constexpr EntryMask kEntriesShared = kEntryDense | kEntriesPublished;
constexpr EntryMask kEntriesAll = kEntryRouted | kEntriesShared;
constexpr EntryMask mask_of(Entry entry) {
    return 1u << static_cast<int>(entry);
}

enum class ForTarget : int { kAny, kSM90, kSM100 };

// The form of one tensor in some entries and for some targets. Entries without a row for a tensor refuse it.
struct TensorSpec {
    Tensor tensor;
    EntryMask entries;
    ForTarget target;
    Dtype dtype;
    int rank;
    std::array<Dim, kMaxRank> dims;
    int alignment; // of the address, in bytes
    bool optional;
    bool early; // checked before the rules about widths; the rest may rely on these
};
std::span<const TensorSpec> tensor_specs();
// All sizes are read from this very tensor, so none can be wrong.
bool has_free_shape(const TensorSpec& spec);

const char* forbidden_hint(Tensor tensor); // what to do instead, appended to "wanted None"

enum class Stage : int { kArguments, kWidths, kWhole, kValues };
struct Rule {
    const char* id;
    const char* name;
    const char* wanted;
    EntryMask entries;
    Stage stage;
    bool in_kernel; // the kernel checks it too
    // What was given, if that breaks the rule.
    std::optional<std::string> (*broken)(const Call& call);
};
std::span<const Rule> rules();

// Checks that something else makes, so that the list is complete.
struct OtherCheck {
    const char* id;
    const char* name;
    const char* wanted;
    const char* where;
};
std::span<const OtherCheck> other_checks();

} // namespace deep_gemm_k3::checks
