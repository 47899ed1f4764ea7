// The byte table of a symmetric buffer as Python reads it.
#pragma once

#include "deep_gemm_k3/config.cuh"

#include <string>

namespace deep_gemm_k3::runtime {

// The name of a plan::Component.
const char* component_name(int component);
// {"total": bytes, "components": {name: [offset, bytes], ...}} in the order of plan::Component.
std::string buffer_layout(const BufferShape& shape);

} // namespace deep_gemm_k3::runtime
