// (Problem, DeviceFacts) -> Config. Pure and total: every legal problem has a plan, and nothing here reads the
// environment, the clock or a device.
#pragma once

#include "problem.hpp"

#include <vector>

namespace deep_gemm_k3::heuristics {

DeviceFacts default_device(Architecture arch);

Config choose_config(const Problem& problem, const DeviceFacts& device);

// Every config that `problem` can get as its two token counts run over 0..max, without repeats. In the order of
// rising token counts, so that the first ones are those a decode step meets.
std::vector<Config> all_configs(
    const Problem& problem, const DeviceFacts& device, int max_tokens, int max_shared_tokens);

// Expected rows per expert when every rank has as many tokens as this one.
double expected_tokens_per_expert(const Problem& problem);

// Why this config cannot be launched, or null.
const char* config_fault(const Config& config);

} // namespace deep_gemm_k3::heuristics
