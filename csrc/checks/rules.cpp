#include "tables.hpp"

#include "deep_gemm_k3/plan/workspace.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace deep_gemm_k3::checks {

namespace {

using Broken = std::optional<std::string>;
constexpr Broken kFine = std::nullopt;

Broken unless(bool condition, int64_t given) {
    return condition ? kFine : Broken(std::to_string(given));
}

// With what it is measured against, since `wanted` is the same text for every call.
Broken unless(bool condition, int64_t given, const char* what, int64_t against) {
    return condition ? kFine : Broken(std::to_string(given) + " (" + what + ": " + std::to_string(against) + ")");
}

std::string number_text(const std::optional<double>& value) {
    if (!value)
        return "None";
    char text[40];
    std::snprintf(text, sizeof text, "%.9g", *value);
    return text;
}

// The kernel computes with FP32: what is positive as a Python number may be zero there.
Broken unless_positive(const std::optional<double>& value) {
    const float single = value ? static_cast<float>(*value) : 0.0f;
    return std::isfinite(single) && single > 0 ? kFine : Broken(number_text(value));
}

bool is_situ(const Call& call) {
    return call.activation == "situ";
}

Broken recipe(const Call& call) {
    static const std::vector<int64_t> wanted = {1, 1, 32};
    if (call.recipe == wanted)
        return kFine;
    std::string given = "(";
    for (size_t i = 0; i < call.recipe.size(); ++i)
        given += (i ? ", " : "") + std::to_string(call.recipe[i]);
    return given + ")";
}

Broken activation(const Call& call) {
    return is_situ(call) || call.activation == "swiglu" ? kFine : Broken("'" + call.activation + "'");
}
Broken activation_of_shared(const Call& call) {
    return is_situ(call) ? kFine : Broken("'" + call.activation + "'");
}
Broken clamp_with_situ(const Call& call) {
    return is_situ(call) && call.activation_clamp ? Broken(number_text(call.activation_clamp)) : kFine;
}
Broken clamp_range(const Call& call) {
    return !call.activation_clamp || static_cast<float>(*call.activation_clamp) >= 0
               ? kFine
               : Broken(number_text(call.activation_clamp));
}
Broken beta(const Call& call) {
    return is_situ(call) ? unless_positive(call.situ_beta) : kFine;
}
Broken linear_beta(const Call& call) {
    return is_situ(call) ? unless_positive(call.situ_linear_beta) : kFine;
}
Broken beta_without_situ(const Call& call) {
    return !is_situ(call) && call.situ_beta ? Broken(number_text(call.situ_beta)) : kFine;
}
Broken linear_beta_without_situ(const Call& call) {
    return !is_situ(call) && call.situ_linear_beta ? Broken(number_text(call.situ_linear_beta)) : kFine;
}
Broken epsilon(const Call& call) {
    return unless_positive(call.rms_epsilon);
}
Broken epsilon_without_norm(const Call& call) {
    return call.rms_epsilon ? Broken(number_text(call.rms_epsilon)) : kFine;
}
Broken validate(const Call& call) {
    return call.validate == "host" || call.validate == "device" ? kFine : Broken("'" + call.validate + "'");
}

Broken buffer_memory(const Call& call) {
    return call.tensor(Tensor::kBuffer).address == reinterpret_cast<uint64_t>(call.buffer->base())
               ? kFine
               : Broken("other memory, a copy perhaps");
}
Broken num_tokens(const Call& call) {
    const int64_t limit = call.shape().num_max_tokens;
    return unless(call.num_tokens() <= limit, call.num_tokens(), "num_max_tokens_per_rank", limit);
}
Broken num_shared_tokens(const Call& call) {
    const int64_t limit = call.shape().num_max_shared_tokens;
    return unless(call.num_shared_tokens() <= limit, call.num_shared_tokens(), "num_max_shared_tokens", limit);
}
Broken shared_buffer(const Call& call) {
    return unless(call.shape().shared_intermediate > 0, call.shape().shared_intermediate);
}
Broken shared_hidden(const Call& call) {
    const int64_t width = call.shared_hidden();
    return unless(width > 0 && width % 128 == 0 && width <= 1 << 17, width);
}
Broken shard_divides(const Call& call) {
    const int64_t ranks = call.shape().num_ranks;
    return unless(call.shared_hidden() % ranks == 0, call.shared_hidden(), "ranks", ranks);
}
Broken shard_vectors(const Call& call) {
    const int64_t shard = call.shared_hidden() / call.shape().num_ranks;
    return unless(shard % 8 == 0, shard, "ranks", call.shape().num_ranks);
}
Broken owned_tokens(const Call& call) {
    const int64_t ranks = call.shape().num_ranks;
    return unless(call.num_shared_tokens() % ranks == 0, call.num_shared_tokens(), "ranks", ranks);
}
Broken generation_stride(const Call& call) {
    const int64_t stride = call.generation_stride();
    return unless(stride % 16 == 0 && stride < int64_t(1) << 31, stride);
}

Broken overlap(const Call& call) {
    constexpr Tensor kWritten[] = {
        Tensor::kY, Tensor::kSharedY, Tensor::kStatistics, Tensor::kWorkspace, Tensor::kBuffer};
    for (const Tensor output : kWritten) {
        const TensorView& a = call.tensor(output);
        if (!a.present || a.numel() == 0)
            continue;
        for (int i = 0; i < kNumTensors; ++i) {
            const TensorView& b = call.tensors[i];
            if (i == static_cast<int>(output) || !b.present || b.numel() == 0)
                continue;
            if (a.address < b.address + b.num_bytes() && b.address < a.address + a.num_bytes())
                return std::string(tensor_name(output)) + " sharing memory with " + tensor_name(static_cast<Tensor>(i));
        }
    }
    return kFine;
}

Broken expert_ids(const Call& call) {
    if (!call.values.topk_idx)
        return kFine;
    const int64_t count = call.num_tokens() * call.shape().num_topk, experts = call.shape().num_experts;
    const int64_t* begin = call.values.topk_idx;
    const int64_t* bad = std::find_if(begin, begin + count, [&](int64_t id) { return id < -1 || id >= experts; });
    if (bad == begin + count)
        return kFine;
    return std::to_string(*bad) + " for token " + std::to_string((bad - begin) / call.shape().num_topk) +
           " (experts: " + std::to_string(experts) + ")";
}
Broken generation(const Call& call) {
    if (!call.values.flags)
        return kFine;
    const int64_t given = call.values.flags[0];
    const int64_t generations = call.tensor(Tensor::kWorkspace).sizes[0];
    return unless(given >= 0 && given < generations, given, "generations", generations);
}
Broken flags_stride(const Call& call) {
    if (!call.values.flags)
        return kFine;
    const int64_t given = call.values.flags[2], stride = call.generation_stride();
    return unless(given == stride, given, "the workspace's", stride);
}
// What ranks `i` and `j` have in common of their workspaces. Of a peer's only what this call needs of it is known: it
// reaches to the end of the call's generation.
Broken shared_memory(const Call& call, int i, int j) {
    const int64_t* pointers = call.values.peer_ptrs;
    const std::string ranks = "ranks " + std::to_string(j) + " and " + std::to_string(i);
    if (pointers[i] == pointers[j])
        return "one address for " + ranks;
    const auto [low, high] = pointers[i] < pointers[j] ? std::pair(i, j) : std::pair(j, i);
    const uint64_t distance = static_cast<uint64_t>(pointers[high]) - static_cast<uint64_t>(pointers[low]);
    const int64_t generations = low == call.buffer->spec.rank ? call.tensor(Tensor::kWorkspace).sizes[0]
                                : call.values.flags           ? call.values.flags[0] + 1
                                                              : 1;
    return distance < static_cast<uint64_t>(generations * call.generation_stride())
               ? Broken("overlapping workspaces for " + ranks)
               : kFine;
}
Broken peer_pointers(const Call& call) {
    const int64_t* pointers = call.values.peer_ptrs;
    if (!pointers)
        return kFine;
    const int num_ranks = call.shape().num_ranks, own = call.buffer->spec.rank;
    for (int i = 0; i < num_ranks; ++i) {
        if (pointers[i] == 0)
            return "null for rank " + std::to_string(i);
        if (pointers[i] % 16 != 0)
            return "an unaligned address for rank " + std::to_string(i);
        for (int j = 0; j < i; ++j)
            if (const Broken overlap = shared_memory(call, i, j))
                return overlap;
    }
    if (static_cast<uint64_t>(pointers[own]) != call.tensor(Tensor::kWorkspace).address)
        return "another address than shared_rs_workspace for its own rank " + std::to_string(own);
    return kFine;
}

// clang-format off
constexpr Rule kRules[] = {
    // id                          name                   wanted                                                                     entries              stage             in_kernel
    {"recipe",                     "recipe",              "(1, 1, 32)",                                                              kEntriesAll,         Stage::kArguments, false, recipe},
    {"activation",                 "activation",          "'swiglu' or 'situ'",                                                      kEntryRouted,        Stage::kArguments, false, activation},
    {"activation.shared",          "activation",          "'situ' with a BF16 shared expert",                                        kEntriesShared,      Stage::kArguments, false, activation_of_shared},
    {"activation_clamp.situ",      "activation_clamp",    "None with activation 'situ'",                                             kEntriesAll,         Stage::kArguments, false, clamp_with_situ},
    {"activation_clamp",           "activation_clamp",    "None or a number >= 0",                                                   kEntriesAll,         Stage::kArguments, false, clamp_range},
    {"situ_beta",                  "situ_beta",           "a finite number > 0 in FP32 with activation 'situ'",                      kEntriesAll,         Stage::kArguments, false, beta},
    {"situ_beta.swiglu",           "situ_beta",           "None with activation 'swiglu'",                                           kEntryRouted,        Stage::kArguments, false, beta_without_situ},
    {"situ_linear_beta",           "situ_linear_beta",    "a finite number > 0 in FP32 with activation 'situ'",                      kEntriesAll,         Stage::kArguments, false, linear_beta},
    {"situ_linear_beta.swiglu",    "situ_linear_beta",    "None with activation 'swiglu'",                                           kEntryRouted,        Stage::kArguments, false, linear_beta_without_situ},
    {"rms_epsilon",                "rms_epsilon",         "a finite number > 0 in FP32",                                             kEntriesShared,      Stage::kArguments, false, epsilon},
    {"rms_epsilon.routed",         "rms_epsilon",         "None without a norm",                                                     kEntryRouted,        Stage::kArguments, false, epsilon_without_norm},
    {"validate",                   "validate",            "'host' or 'device'",                                                      kEntriesAll,         Stage::kArguments, false, validate},
    {"sym_buffer.shared",          "sym_buffer",          "bf16_shared_intermediate_hidden > 0 for a BF16 shared expert",            kEntriesShared,      Stage::kArguments, false, shared_buffer},
    {"sym_buffer.memory",          "sym_buffer.buffer",   "the memory of the buffer's handle",                                       kEntriesAll,         Stage::kWidths,    false, buffer_memory},
    {"num_tokens",                 "y",                   "at most num_max_tokens_per_rank rows",                                    kEntriesAll,         Stage::kWidths,    false, num_tokens},
    {"num_shared_tokens",          "shared_x",            "at most num_max_shared_tokens rows",                                      kEntriesShared,      Stage::kWidths,    false, num_shared_tokens},
    {"shared_hidden",              "shared_x",            "a width that is a multiple of 128, up to 131072",                         kEntriesShared,      Stage::kWidths,    false, shared_hidden},
    {"shard.divides",              "shared_x",            "a width that the number of ranks divides",                                kEntryHiddenSharded, Stage::kWidths,    false, shard_divides},
    {"shard.vectors",              "shared_x",            "a width that gives every rank a multiple of 8 columns",                   kEntryHiddenSharded, Stage::kWidths,    false, shard_vectors},
    {"owned_tokens",               "shared_x",            "a number of rows that the number of ranks divides",                       kEntryTokenOwner,    Stage::kWidths,    false, owned_tokens},
    {"generation_stride",          "shared_rs_workspace", "a multiple of 16 below 2^31 as bytes per generation",                     kEntriesPublished,   Stage::kWhole,     false, generation_stride},
    {"overlap",                    "outputs",             "memory of their own",                                                     kEntriesAll,         Stage::kWhole,     false, overlap},
    {"topk_idx.values",            "sym_buffer.topk_idx", "-1 or an expert id",                                                      kEntriesAll,         Stage::kValues,    true,  expert_ids},
    {"shared_rs_flags.generation", "shared_rs_flags[0]",  "a generation of shared_rs_workspace",                                     kEntriesPublished,   Stage::kValues,    true,  generation},
    {"shared_rs_flags.stride",     "shared_rs_flags[2]",  "the bytes per generation of shared_rs_workspace",                         kEntriesPublished,   Stage::kValues,    true,  flags_stride},
    {"shared_rs_peer_ptrs.values", "shared_rs_peer_ptrs", "16-byte aligned addresses of workspaces apart, none of them null, and shared_rs_workspace's for this rank", kEntriesPublished, Stage::kValues, false, peer_pointers},
};

constexpr OtherCheck kOthers[] = {
    {"type",                    "every argument",              "the documented type",                                             "python"},
    {"sym_buffer.alive",        "sym_buffer",                  "a live buffer, not a destroyed one",                              "registry"},
    {"sym_buffer.aborted",      "sym_buffer",                  "one without an abort",                                            "registry"},
    {"sym_buffer.busy",         "sym_buffer",                  "no call of another thread inside it",                             "registry"},
    {"sym_buffer.thread",       "thread",                      "the one that owns the rank of the local world",                   "registry"},
    {"buffer.num_ranks",        "group size",                  "1..64",                                                           "creation"},
    {"buffer.num_experts",      "num_experts",                 "a multiple of the ranks, up to 65535",                            "creation"},
    {"buffer.num_topk",         "num_topk",                    "1..32",                                                           "creation"},
    {"buffer.num_max_tokens",   "num_max_tokens_per_rank",     "1..1048320, rounded up to a multiple of 384",                     "creation"},
    {"buffer.hidden",           "hidden",                      "a multiple of 128",                                               "creation"},
    {"buffer.intermediate",     "intermediate_hidden",         "a multiple of 128",                                               "creation"},
    {"buffer.shared",           "bf16_shared_intermediate_hidden", "0 or a multiple of 128",                                      "creation"},
    {"buffer.shared_experts",   "num_shared_experts",          "0",                                                               "creation"},
    {"shared_x.equal",          "shared_x",                    "equally many rows on all ranks of a publishing call",             "kernel"},
    {"signature",               "signature",                   "equal entry, widths, dtypes, options and target on all ranks",    "first call"},
};
// clang-format on

} // namespace

std::span<const Rule> rules() {
    return kRules;
}

std::span<const OtherCheck> other_checks() {
    return kOthers;
}

} // namespace deep_gemm_k3::checks
