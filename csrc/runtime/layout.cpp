#include "runtime/layout.hpp"

#include "deep_gemm_k3/plan/workspace.cuh"

#include <array>
#include <stdexcept>

namespace deep_gemm_k3::runtime {
namespace {

constexpr std::array<const char*, plan::kNumComponents> kNames = {"control", "x", "x_sf", "topk_idx", "topk_weights",
    "metadata", "low_latency_rows", "rows", "row_flags", "partials", "pool_x", "pool_row_info", "pool_intermediate",
    "block_counters", "shared_intermediate", "shared_counters", "split_partials", "split_counters",
    "route_counts"};

} // namespace

const char* component_name(int component) {
    return kNames[component];
}

std::string buffer_layout(const BufferShape& shape) {
    std::string out = "{\"total\": " + std::to_string(plan::total_bytes(shape)) + ", \"components\": {";
    for (int i = 0; i < plan::kNumComponents; ++i) {
        const auto component = static_cast<plan::Component>(i);
        out += std::string(i == 0 ? "" : ", ") + "\"" + kNames[i] + "\": [" +
               std::to_string(plan::component_offset(shape, component)) + ", " +
               std::to_string(plan::component_bytes(shape, component)) + "]";
    }
    return out + "}}";
}

} // namespace deep_gemm_k3::runtime
