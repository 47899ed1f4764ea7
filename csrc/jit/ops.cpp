// Operators of the launch layer. All arguments are plain values or CPU tensors of bytes.
#include "jit/abort.hpp"
#include "jit/driver.hpp"
#include "jit/launch.hpp"
#include "jit/module.hpp"
#include "jit/tensor_map.hpp"
#include "utils/json.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <vector>

namespace deep_gemm_k3::jit {
namespace {

using StableTensor = torch::stable::Tensor;

struct Place {
    Target target;
    int device;
};

// "cuda:0", "emulator" or "null".
Place place_of(const std::string& where) {
    if (where == "emulator")
        return {Target::kEmulator, kEmulatorDevice};
    if (where == "null")
        return {Target::kNull, kNoDevice};
    if (where.starts_with("cuda:") && where.size() > 5 &&
        std::all_of(where.begin() + 5, where.end(), [](char c) { return c >= '0' && c <= '9'; }))
        return {Target::kCuda, std::stoi(where.substr(5))};
    throw std::runtime_error("where: wanted cuda:INDEX, emulator or null, given '" + where + "'");
}

int64_t op_register_kernel(
    std::string where, std::string key, std::string entry, std::string arch, StableTensor image, int64_t params_bytes) {
    const Place place = place_of(where);
    KernelSpec spec{.target = place.target,
        .key = std::move(key),
        .entry = std::move(entry),
        .arch = std::move(arch),
        .device = place.device,
        .image = image.const_data_ptr(),
        .image_bytes = static_cast<size_t>(image.numel()),
        .params_bytes = static_cast<size_t>(params_bytes)};
    return register_kernel(spec);
}

int64_t op_find_kernel(std::string key, int64_t device) {
    return find_kernel(key, static_cast<int>(device));
}

std::string op_kernel_info(int64_t handle) {
    const LoadedKernel& k = kernel(handle);
    return json::Value(
        json::Object{{"key", k.key}, {"entry", k.entry}, {"arch", k.arch}, {"device", k.device},
            {"target", static_cast<int>(k.target)}, {"params_bytes", static_cast<uint64_t>(k.params_bytes)},
            {"registers", k.num_registers}, {"static_shared_bytes", k.static_shared_bytes},
            {"local_bytes", k.local_bytes}, {"max_threads", k.max_threads}})
        .dump();
}

// {grid x y z, block x y z, cluster x y z, dynamic shared bytes}
LaunchRequest request_of(int64_t handle, const std::vector<int64_t>& shape) {
    if (shape.size() != 10)
        throw std::runtime_error(
            "shape: wanted 10 numbers (grid, block, cluster, shared bytes), given " + std::to_string(shape.size()));
    const auto dim = [&](int at) {
        return Dim3{static_cast<uint32_t>(shape[at]), static_cast<uint32_t>(shape[at + 1]),
            static_cast<uint32_t>(shape[at + 2])};
    };
    LaunchRequest request;
    request.kernel = handle;
    request.grid = dim(0);
    request.block = dim(3);
    request.cluster = dim(6);
    request.shared_bytes = static_cast<uint32_t>(shape[9]);
    return request;
}

void* stream_of(const LoadedKernel& kernel) {
    return kernel.target == Target::kCuda ? current_stream(kernel.device) : nullptr;
}

void op_launch_kernel(
    int64_t handle, std::vector<int64_t> shape, StableTensor params, bool cooperative, bool dependent) {
    LaunchRequest request = request_of(handle, shape);
    request.params = params.const_data_ptr();
    request.params_bytes = static_cast<size_t>(params.numel());
    request.cooperative = cooperative;
    request.dependent = dependent;
    request.stream = stream_of(kernel(handle));
    launch(request);
}

void op_check_co_resident(int64_t handle, std::vector<int64_t> shape, int64_t num_sms) {
    check_co_resident(request_of(handle, shape), static_cast<int>(num_sms));
}

bool op_is_capturing(int64_t device) {
    return is_capturing(current_stream(static_cast<int>(device)));
}

void op_refuse_while_capturing(int64_t device, std::string what, std::string advice) {
    refuse_while_capturing(current_stream(static_cast<int>(device)), what, advice);
}

std::string op_driver_info() {
    json::Object info = {{"unavailable", cu::unavailable_reason()}};
    if (!cu::unavailable_reason().empty())
        return json::Value(info).dump();
    int version = 0, count = 0;
    cu::check(cu::api().DriverGetVersion(&version), "cuDriverGetVersion");
    cu::check(cu::api().DeviceGetCount(&count), "cuDeviceGetCount");
    json::Array devices;
    for (int i = 0; i < count; ++i) {
        const cu::DeviceFacts& facts = cu::device_facts(i);
        devices.push_back(json::Object{{"name", facts.name}, {"major", facts.compute_major},
            {"minor", facts.compute_minor}, {"num_sms", facts.num_sms}, {"shared_bytes", facts.max_shared_bytes}});
    }
    info["version"] = version;
    info["devices"] = std::move(devices);
    return json::Value(info).dump();
}

int64_t op_buffer_error_record(int64_t handle) {
    return reinterpret_cast<int64_t>(error_record(runtime::find_buffer(handle)));
}

template <class Number>
void fill(Number* out, const json::Value& given, const char* name, size_t most) {
    const json::Array& values = given.at(name).as_array();
    if (values.size() > most)
        throw std::runtime_error(std::string(name) + ": wanted at most " + std::to_string(most) + " numbers, given " +
                                 std::to_string(values.size()));
    for (size_t i = 0; i < values.size(); ++i)
        out[i] = static_cast<Number>(values[i].as_int());
}

// The 128 bytes in hexadecimal. For tests and for callers that launch by hand.
std::string op_encode_tensor_map(std::string where, std::string spec_json) {
    const json::Value given = json::parse(spec_json);
    TensorMapSpec spec;
    spec.type = static_cast<TensorMapType>(given.int_or("type", static_cast<int>(spec.type)));
    spec.rank = static_cast<uint32_t>(given.at("dims").as_array().size());
    spec.address = reinterpret_cast<const void*>(given.at("address").as_int());
    fill(spec.dims, given, "dims", kMaxTensorMapRank);
    fill(spec.strides, given, "strides", kMaxTensorMapRank - 1);
    fill(spec.box, given, "box", kMaxTensorMapRank);
    if (given.find("element_strides"))
        fill(spec.element_strides, given, "element_strides", kMaxTensorMapRank);
    spec.interleave = static_cast<TensorMapInterleave>(given.int_or("interleave", 0));
    spec.swizzle = static_cast<TensorMapSwizzle>(given.int_or("swizzle", static_cast<int>(spec.swizzle)));
    spec.l2_promotion = static_cast<TensorMapL2Promotion>(given.int_or("l2_promotion", 3));
    spec.fill = static_cast<TensorMapFill>(given.int_or("fill", 0));
    const TensorMap map = encode_tensor_map(spec, place_of(where).target, given.string_or("name", "unnamed"));
    constexpr char kDigits[] = "0123456789abcdef";
    std::string out;
    for (const uint8_t byte : map.bytes) {
        out += kDigits[byte >> 4];
        out += kDigits[byte & 15];
    }
    return out;
}

} // namespace
} // namespace deep_gemm_k3::jit

STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm_k3, m) {
    m.def("register_kernel(str where, str key, str entry, str arch, Tensor image, int params_bytes) -> int");
    m.def("find_kernel(str key, int device) -> int");
    m.def("kernel_info(int handle) -> str");
    m.def("launch_kernel(int handle, int[] shape, Tensor params, bool cooperative, bool dependent) -> ()");
    m.def("check_co_resident(int handle, int[] shape, int num_sms) -> ()");
    m.def("is_capturing(int device) -> bool");
    m.def("refuse_while_capturing(int device, str what, str advice) -> ()");
    m.def("driver_info() -> str");
    m.def("buffer_error_record(int handle) -> int");
    m.def("encode_tensor_map(str where, str spec) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CompositeImplicitAutograd, m) {
    m.impl("register_kernel", TORCH_BOX(&deep_gemm_k3::jit::op_register_kernel));
    m.impl("find_kernel", TORCH_BOX(&deep_gemm_k3::jit::op_find_kernel));
    m.impl("kernel_info", TORCH_BOX(&deep_gemm_k3::jit::op_kernel_info));
    m.impl("launch_kernel", TORCH_BOX(&deep_gemm_k3::jit::op_launch_kernel));
    m.impl("check_co_resident", TORCH_BOX(&deep_gemm_k3::jit::op_check_co_resident));
    m.impl("is_capturing", TORCH_BOX(&deep_gemm_k3::jit::op_is_capturing));
    m.impl("refuse_while_capturing", TORCH_BOX(&deep_gemm_k3::jit::op_refuse_while_capturing));
    m.impl("buffer_error_record", TORCH_BOX(&deep_gemm_k3::jit::op_buffer_error_record));
    m.impl("driver_info", TORCH_BOX(&deep_gemm_k3::jit::op_driver_info));
    m.impl("encode_tensor_map", TORCH_BOX(&deep_gemm_k3::jit::op_encode_tensor_map));
}
