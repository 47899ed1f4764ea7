// What a buffer's shape and a problem must obey before anything is sized or planned from them.
#pragma once

#include "jit_kernels/heuristics/problem.hpp"

#include <string>
#include <string_view>

namespace deep_gemm_k3::checks {

// The one message form of all host checks.
std::string message(std::string_view name, std::string_view wanted, std::string_view given);

// Both throw std::runtime_error in the message form.
void require_shape(const BufferShape& shape);
void require_problem(const heuristics::Problem& problem);

} // namespace deep_gemm_k3::checks
