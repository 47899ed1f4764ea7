#include "callbacks.hpp"

#include <atomic>
#include <stdexcept>
#include <torch/csrc/stable/library.h>
#include <vector>

namespace deep_gemm_k3::callbacks {

namespace {

// int f(handle, text, error, error_size): 0, or 1 with a null-terminated text in `error`.
using Function = int (*)(int64_t handle, const char* text, char* error, int64_t error_size);
constexpr size_t kErrorBytes = 8192;

std::atomic<Function> execute_function{nullptr};
std::atomic<Function> first_call_function{nullptr};
std::atomic<Function> load_kernel_function{nullptr};

std::string call(const std::atomic<Function>& slot, const char* name, int64_t handle, const std::string& text) {
    const Function function = slot.load(std::memory_order_acquire);
    if (!function)
        throw std::runtime_error(
            std::string("deep_gemm_k3: the callback '") + name + "' is not set; import deep_gemm_k3.ops");
    std::vector<char> error(kErrorBytes, '\0');
    if (function(handle, text.c_str(), error.data(), static_cast<int64_t>(kErrorBytes)) == 0)
        return {};
    return error[0] ? std::string(error.data()) : std::string(name) + " failed without a reason";
}

void set_callback(std::string name, int64_t address) {
    const auto function = reinterpret_cast<Function>(address);
    if (name == "execute")
        execute_function.store(function, std::memory_order_release);
    else if (name == "first_call")
        first_call_function.store(function, std::memory_order_release);
    else if (name == "load_kernel")
        load_kernel_function.store(function, std::memory_order_release);
    else
        throw std::runtime_error("set_callback: wanted 'execute', 'first_call' or 'load_kernel', given '" + name + "'");
}

} // namespace

std::string execute(const std::string& record) {
    return call(execute_function, "execute", 0, record);
}

std::string first_call(int64_t handle, const std::string& description) {
    return call(first_call_function, "first_call", handle, description);
}

std::string load_kernel(const std::string& wanted) {
    return call(load_kernel_function, "load_kernel", 0, wanted);
}

} // namespace deep_gemm_k3::callbacks

STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm_k3, m) {
    m.def("set_callback(str name, int address) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CompositeImplicitAutograd, m) {
    m.impl("set_callback", TORCH_BOX(&deep_gemm_k3::callbacks::set_callback));
}
