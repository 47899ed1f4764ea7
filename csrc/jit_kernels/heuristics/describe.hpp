// Configs and plans as text: the JIT's source literal, JSON for tools, lines for people.
#pragma once

#include "config.hpp"
#include "utils/json.hpp"

#include <span>
#include <string>
#include <string_view>

namespace deep_gemm_k3::heuristics {

// A designated initialiser in one line, for code inside the namespace deep_gemm_k3.
std::string config_literal(const Config& config);
json::Value config_json(const Config& config);

// Refuses an object with another key: a name that nothing reads would be a wish that nobody hears.
void require_names(const json::Value& given, const char* what, std::span<const std::string_view> names);
// Problem and device from the description that Python passes; unknown values are errors that name what is wanted.
Problem problem_from_json(const json::Value& given);
Overrides overrides_from_json(const json::Value& given);
json::Value overrides_json(const Overrides& overrides);
DeviceFacts device_from_json(const json::Value& given);
BufferShape shape_from_json(const json::Value& given);

constexpr int kTokenAlignment = 384; // num_max_tokens_per_rank is rounded up to a multiple
constexpr int kMaxTokensPerRank = (1 << 20) / kTokenAlignment * kTokenAlignment;

const char* target_name(Architecture arch); // "sm_90a"
Architecture architecture_of(std::string_view target);
const char* activation_name(Activation activation);
const char* shared_output_name(SharedOutput output);

// Grid, block and cluster (three numbers each), then bytes of dynamic shared memory: as the launch layer takes them.
json::Value launch_shape(const Config& config, const DeviceFacts& device);
// Columns that a CTA allocates, sums of how many tiles lie there at once, and the limit; zeros without tensor memory.
json::Value tensor_memory(const Config& config);
// One row per component of the symmetric buffer: name, offset, bytes.
json::Value byte_table(const BufferShape& shape);
// The whole plan of one call: config, shared memory, grid, expected work, byte table.
json::Value explain(const Problem& problem, const DeviceFacts& device);

} // namespace deep_gemm_k3::heuristics
