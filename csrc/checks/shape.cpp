#include "shape.hpp"

#include "deep_gemm_k3/plan/workspace.cuh"
#include "jit_kernels/heuristics/describe.hpp"

#include <stdexcept>

namespace deep_gemm_k3::checks {

namespace {

constexpr int kMaxExperts = 65535; // ids travel as 16 bits, one code means none
constexpr int kMaxSharedTokens = 1 << 20;
constexpr uint64_t kMaxBytes = uint64_t(1) << 40;
constexpr int kMaxWidth = 1 << 17;

void require(bool condition, std::string_view name, const std::string& wanted, int64_t given) {
    if (!condition)
        throw std::runtime_error(message(name, wanted, std::to_string(given)));
}

std::string range(int64_t first, int64_t last) {
    return std::to_string(first) + ".." + std::to_string(last);
}

void require_width(std::string_view name, int value) {
    require(value > 0 && value % 128 == 0 && value <= kMaxWidth, name, "a multiple of 128 in " + range(128, kMaxWidth),
        value);
}

} // namespace

std::string message(std::string_view name, std::string_view wanted, std::string_view given) {
    std::string text;
    text.reserve(name.size() + wanted.size() + given.size() + 20);
    text.append(name).append(": wanted ").append(wanted).append(", given ").append(given);
    return text;
}

void require_shape(const BufferShape& shape) {
    require(
        shape.num_ranks >= 1 && shape.num_ranks <= kMaxNumRanks, "num_ranks", range(1, kMaxNumRanks), shape.num_ranks);
    require(shape.num_experts >= 1 && shape.num_experts <= kMaxExperts, "num_experts", range(1, kMaxExperts),
        shape.num_experts);
    require(shape.num_experts % shape.num_ranks == 0, "num_experts",
        "a multiple of the " + std::to_string(shape.num_ranks) + " ranks", shape.num_experts);
    require(shape.num_topk >= 1 && shape.num_topk <= kMaxNumTopk, "num_topk", range(1, kMaxNumTopk), shape.num_topk);
    require(shape.num_max_tokens >= 1 && shape.num_max_tokens <= heuristics::kMaxTokensPerRank,
        "num_max_tokens_per_rank", range(1, heuristics::kMaxTokensPerRank), shape.num_max_tokens);
    require_width("hidden", shape.hidden);
    require_width("intermediate_hidden", shape.intermediate);
    require(shape.shared_intermediate >= 0 && shape.shared_intermediate % 128 == 0 &&
                shape.shared_intermediate <= kMaxWidth,
        "bf16_shared_intermediate_hidden", "0 or a multiple of 128 up to " + std::to_string(kMaxWidth),
        shape.shared_intermediate);
    require(shape.num_max_shared_tokens >= 0 && shape.num_max_shared_tokens <= kMaxSharedTokens,
        "num_max_shared_tokens", range(0, kMaxSharedTokens), shape.num_max_shared_tokens);
    // Row numbers inside a buffer are 32-bit in the kernel.
    require(plan::num_max_pool_rows(shape) < (uint64_t(1) << 31), "num_max_tokens_per_rank",
        "ranks x tokens x top-k below 2^31", static_cast<int64_t>(plan::num_max_routes(shape)));
    require(plan::total_bytes(shape) <= kMaxBytes, "buffer",
        "at most " + std::to_string(kMaxBytes) + " bytes per rank, which num_max_tokens_per_rank decides first",
        static_cast<int64_t>(plan::total_bytes(shape)));
}

void require_problem(const heuristics::Problem& problem) {
    const BufferShape& shape = problem.shape;
    require(problem.num_tokens >= 0 && problem.num_tokens <= shape.num_max_tokens, "num_tokens",
        range(0, shape.num_max_tokens), problem.num_tokens);
    if (problem.has_clamp && problem.activation == Activation::kSiTU)
        throw std::runtime_error(message("has_clamp", "false with activation 'situ'", "true"));
    if (problem.shared_output == SharedOutput::kNone)
        return;
    require(shape.shared_intermediate > 0, "bf16_shared_intermediate_hidden", "a buffer made for a shared expert",
        shape.shared_intermediate);
    if (problem.activation != Activation::kSiTU)
        throw std::runtime_error(message("activation", "'situ' with a BF16 shared expert", "'swiglu'"));
    require_width("shared_hidden", problem.shared_hidden);
    if (problem.shared_output == SharedOutput::kHiddenSharded)
        require(problem.shared_hidden % (8 * shape.num_ranks) == 0, "shared_hidden",
            "a multiple of 8 columns for each of the " + std::to_string(shape.num_ranks) + " ranks",
            problem.shared_hidden);
    require(problem.num_shared_tokens >= 0 && problem.num_shared_tokens <= shape.num_max_shared_tokens,
        "num_shared_tokens", range(0, shape.num_max_shared_tokens), problem.num_shared_tokens);
}

} // namespace deep_gemm_k3::checks
