// Functions that Python lends to the host library: addresses of C functions, set once when the package is loaded.
#pragma once

#include <cstdint>
#include <string>

namespace deep_gemm_k3::callbacks {

// All return an empty string, or the text of what went wrong.

// Runs one call on the CPU; `record` describes it (deep_gemm_k3/testing/executor.py).
std::string execute(const std::string& record);
// The collective first call of a signature on a buffer.
std::string first_call(int64_t handle, const std::string& description);
// Compiles one kernel and registers it; `wanted` is {"place", "target", "literal"}.
std::string load_kernel(const std::string& wanted);

} // namespace deep_gemm_k3::callbacks
