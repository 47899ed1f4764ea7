// Operators over the buffer registry. Arguments are plain values, so one implementation serves every dispatch key.
#include "runtime/control.hpp"
#include "runtime/registry.hpp"

#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

namespace deep_gemm_k3::runtime {
namespace {

int64_t op_buffer_create(std::string spec_json, std::vector<int64_t> base_ptrs) {
    return create_buffer(spec_json, base_ptrs);
}
void op_buffer_destroy(int64_t handle) {
    destroy_buffer(handle);
}
void op_buffer_check(int64_t handle) {
    check_buffer(handle);
}
void op_buffer_abort(int64_t handle, std::string message) {
    abort_peers(find_buffer(handle), message);
}
int64_t op_buffer_calls(int64_t handle) {
    return find_buffer(handle).num_calls();
}
void op_cpu_barrier(int64_t handle, int64_t phase) {
    const InUse in_use(handle);
    cpu_barrier(find_buffer(handle), static_cast<int>(phase));
}

} // namespace
} // namespace deep_gemm_k3::runtime

STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm_k3, m) {
    m.def("buffer_create(str spec_json, int[] base_ptrs) -> int");
    m.def("buffer_destroy(int handle) -> ()");
    m.def("buffer_check(int handle) -> ()");
    m.def("buffer_abort(int handle, str message) -> ()");
    m.def("buffer_calls(int handle) -> int");
    m.def("cpu_barrier(int handle, int phase) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CompositeImplicitAutograd, m) {
    m.impl("buffer_create", TORCH_BOX(&deep_gemm_k3::runtime::op_buffer_create));
    m.impl("buffer_destroy", TORCH_BOX(&deep_gemm_k3::runtime::op_buffer_destroy));
    m.impl("buffer_check", TORCH_BOX(&deep_gemm_k3::runtime::op_buffer_check));
    m.impl("buffer_abort", TORCH_BOX(&deep_gemm_k3::runtime::op_buffer_abort));
    m.impl("buffer_calls", TORCH_BOX(&deep_gemm_k3::runtime::op_buffer_calls));
    m.impl("cpu_barrier", TORCH_BOX(&deep_gemm_k3::runtime::op_cpu_barrier));
}
