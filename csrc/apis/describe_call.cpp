// The checks over a call that is only described: no tensors, so any device, size or stride can be asked about.
#include "checks/call.hpp"
#include "runtime/registry.hpp"
#include "utils/json.hpp"

#include <stdexcept>
#include <string>
#include <torch/csrc/stable/library.h>

namespace deep_gemm_k3 {
namespace {

using checks::Call;
using checks::Dtype;
using checks::TensorView;

Dtype dtype_named(const std::string& name) {
    for (int i = 0; i < static_cast<int>(Dtype::kNumDtypes); ++i)
        if (name == checks::dtype_name(static_cast<Dtype>(i)))
            return static_cast<Dtype>(i);
    return Dtype::kOther;
}

// {"dtype", "shape", "stride0"?, "contiguous"?, "device"? ("cpu" or "cuda:N"), "address"?}
TensorView view_described(const json::Value& given) {
    TensorView view;
    view.present = true;
    view.dtype = dtype_named(given.string_or("dtype", "bfloat16"));
    const json::Array& shape = given.at("shape").as_array();
    view.rank = static_cast<int>(shape.size());
    int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
        const int64_t size = shape[i].as_int();
        if (i < checks::kMaxRank)
            view.sizes[i] = size;
        if (i == 0)
            view.stride0 = stride;
        stride *= size;
    }
    if (const json::Value* stride0 = given.find("stride0"))
        view.stride0 = stride0->as_int();
    view.contiguous = given.bool_or("contiguous", true);
    const std::string device = given.string_or("device", "cpu");
    view.on_cpu = device == "cpu";
    view.device_index = view.on_cpu ? 0 : std::stoi(device.substr(device.find(':') + 1));
    if (const json::Value* address = given.find("address"))
        view.address = static_cast<uint64_t>(address->as_int());
    return view;
}

std::optional<double> number(const json::Value& given, const char* name) {
    const json::Value* value = given.find(name);
    return value && !value->is_null() ? std::optional<double>(value->as_double()) : std::nullopt;
}

// "" or the error text. The buffer stays as it is, whatever is found.
std::string check_call(int64_t handle, std::string description) {
    const json::Value given = json::parse(description);
    Call call;
    call.buffer = &runtime::find_buffer(handle);
    call.entry = static_cast<checks::Entry>(given.int_at("entry") & 3);
    const json::Value& tensors = given.at("tensors");
    for (int i = 0; i < checks::kNumTensors; ++i)
        if (const json::Value* tensor = tensors.find(checks::tensor_name(static_cast<checks::Tensor>(i))))
            call.tensors[i] = view_described(*tensor);
    for (const json::Value& item : given.at("recipe").as_array())
        call.recipe.push_back(item.as_int());
    call.activation = given.string_or("activation", "situ");
    call.validate = given.string_or("validate", "host");
    call.activation_clamp = number(given, "activation_clamp");
    call.situ_beta = number(given, "situ_beta");
    call.situ_linear_beta = number(given, "situ_linear_beta");
    call.rms_epsilon = number(given, "rms_epsilon");
    try {
        checks::check_call(call);
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

} // namespace
} // namespace deep_gemm_k3

STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm_k3, m) {
    m.def("check_call(int handle, str description) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CompositeImplicitAutograd, m) {
    m.impl("check_call", TORCH_BOX(&deep_gemm_k3::check_call));
}
