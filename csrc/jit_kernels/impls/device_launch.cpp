#include "launch.hpp"

#include <stdexcept>

namespace deep_gemm_k3::impls {

void prepare(Plan&, const runtime::Buffer&) {}

void refuse_first_call_in_capture(const checks::Call&) {}

void launch_on_device(runtime::Buffer&, const Plan&, const checks::Call& call) {
    throw std::runtime_error(std::string(checks::entry_name(call.entry)) + ": no kernel is available for this device");
}

} // namespace deep_gemm_k3::impls
