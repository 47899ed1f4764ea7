// The one operator behind the four public entries: arguments -> checks -> first call of a signature -> plan -> launch.
#include "callbacks.hpp"
#include "checks/call.hpp"
#include "checks/shape.hpp"
#include "jit_kernels/heuristics/describe.hpp"
#include "jit_kernels/impls/launch.hpp"
#include "jit_kernels/impls/plan_store.hpp"
#include "runtime/registry.hpp"

#include "deep_gemm_k3/params.cuh"
#include "deep_gemm_k3/plan/workspace.cuh"

#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <vector>

namespace deep_gemm_k3 {
namespace {

using checks::Call;
using checks::Dtype;
using checks::TensorView;
using StableTensor = torch::stable::Tensor;
using OptionalTensor = std::optional<StableTensor>;

Dtype dtype_of(int32_t code) {
    static const struct {
        int32_t code;
        Dtype dtype;
    } kTable[] = {{aoti_torch_dtype_bfloat16(), Dtype::kBFloat16}, {aoti_torch_dtype_uint8(), Dtype::kUint8},
        {aoti_torch_dtype_int8(), Dtype::kInt8}, {aoti_torch_dtype_int32(), Dtype::kInt32},
        {aoti_torch_dtype_int64(), Dtype::kInt64}, {aoti_torch_dtype_float32(), Dtype::kFloat32},
        {aoti_torch_dtype_float8_e4m3fn(), Dtype::kFloat8E4M3}, {aoti_torch_dtype_float16(), Dtype::kFloat16},
        {aoti_torch_dtype_float64(), Dtype::kFloat64}, {aoti_torch_dtype_bool(), Dtype::kBool},
        {aoti_torch_dtype_int16(), Dtype::kInt16}, {aoti_torch_dtype_uint16(), Dtype::kUint16},
        {aoti_torch_dtype_uint32(), Dtype::kUint32}, {aoti_torch_dtype_uint64(), Dtype::kUint64},
        {aoti_torch_dtype_complex64(), Dtype::kComplex64}, {aoti_torch_dtype_complex128(), Dtype::kComplex128},
        {aoti_torch_dtype_float8_e5m2(), Dtype::kFloat8E5M2}};
    for (const auto& entry : kTable)
        if (entry.code == code)
            return entry.dtype;
    return Dtype::kOther;
}

TensorView view_of(const StableTensor& tensor) {
    TensorView view;
    const AtenTensorHandle handle = tensor.get();
    int32_t dtype = 0, device_type = 0, device_index = 0;
    int64_t rank = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_index));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &rank));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle, &view.contiguous));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
    view.present = true;
    view.on_cpu = device_type == aoti_torch_device_type_cpu();
    view.dtype = dtype_of(dtype);
    view.device_index = device_index;
    view.rank = static_cast<int>(rank);
    for (int i = 0; i < checks::kMaxRank && i < rank; ++i)
        view.sizes[i] = sizes[i];
    view.stride0 = rank > 0 ? strides[0] : 0;
    view.address = reinterpret_cast<uint64_t>(data);
    return view;
}

TensorView view_of(const OptionalTensor& tensor) {
    return tensor ? view_of(*tensor) : TensorView{};
}

// Host copies of device-resident values, kept alive while they are looked at.
struct HostValues {
    StableTensor buffer, flags, peer_ptrs;
};

void read_values(Call& call, HostValues& copies, const StableTensor& buffer, const OptionalTensor& flags,
    const OptionalTensor& peer_ptrs) {
    const BufferShape& shape = call.shape();
    const uint64_t offset = plan::component_offset(shape, plan::Component::kInputTopkIdx);
    if (call.buffer->on_cpu()) {
        call.values.topk_idx = reinterpret_cast<const int64_t*>(call.buffer->base() + offset);
        if (flags)
            call.values.flags = reinterpret_cast<const int32_t*>(call.tensor(checks::Tensor::kFlags).address);
        if (peer_ptrs)
            call.values.peer_ptrs = reinterpret_cast<const int64_t*>(call.tensor(checks::Tensor::kPeerPtrs).address);
        return;
    }
    const torch::stable::Device host(torch::headeronly::DeviceType::CPU, -1);
    const int64_t num_bytes = call.num_tokens() * shape.num_topk * 8;
    StableTensor part = buffer;
    part = torch::stable::narrow(part, 0, static_cast<int64_t>(offset), num_bytes);
    copies.buffer = torch::stable::to(part, host);
    call.values.topk_idx = static_cast<const int64_t*>(copies.buffer.const_data_ptr());
    if (flags) {
        copies.flags = torch::stable::to(*flags, host);
        call.values.flags = static_cast<const int32_t*>(copies.flags.const_data_ptr());
    }
    if (peer_ptrs) {
        copies.peer_ptrs = torch::stable::to(*peer_ptrs, host);
        call.values.peer_ptrs = static_cast<const int64_t*>(copies.peer_ptrs.const_data_ptr());
    }
}

// Collective on the host the first time, free afterwards.
void make_ready(int64_t handle, runtime::Buffer& buffer, const Call& call) {
    impls::PlanStore& store = impls::store_of(buffer);
    const impls::SignatureBits signature = impls::signature_of(call);
    if (store.is_ready(signature))
        return;
    if (store.route() == impls::Route::kCuda)
        impls::prepare_buffer(buffer, call);
    const std::string error = callbacks::first_call(handle, impls::describe_signature(call, store).dump());
    if (!error.empty())
        throw std::runtime_error(std::string(checks::entry_name(call.entry)) + ": " + error);
    store.set_ready(signature);
}

void launch(int64_t handle, runtime::Buffer& buffer, const Call& call) {
    impls::PlanStore& store = impls::store_of(buffer);
    const std::shared_ptr<const impls::Plan> plan = store.plan(impls::signature_of(call), call);
    switch (store.route()) {
    case impls::Route::kNone:
        break;
    case impls::Route::kOracle:
        impls::launch_on_cpu(handle, buffer, *plan, call);
        break;
    default:
        impls::launch_kernel(buffer, *plan, call);
    }
}

// Runs what may fail on this rank alone. Its peers may be inside the call already: they are told.
template <class Action>
void telling_peers(runtime::Buffer& buffer, Action action) {
    try {
        action();
    } catch (const std::exception& error) {
        if (buffer.spec.shape.num_ranks > 1)
            runtime::abort_peers(buffer, error.what());
        throw;
    }
}

void mega_moe(StableTensor y, StableTensor l1_weights, StableTensor l1_weights_sf, StableTensor l2_weights,
    StableTensor l2_weights_sf, StableTensor buffer_tensor, int64_t handle, int64_t entry, OptionalTensor shared_x,
    OptionalTensor shared_l1_weights, OptionalTensor shared_l2_weights, OptionalTensor rms_weight,
    std::optional<double> rms_epsilon, OptionalTensor shared_y, OptionalTensor workspace, OptionalTensor flags,
    OptionalTensor peer_ptrs, OptionalTensor statistics, std::vector<int64_t> recipe, std::string activation,
    std::optional<double> activation_clamp, bool fast_math, std::optional<double> situ_beta,
    std::optional<double> situ_linear_beta, bool batch_invariant, std::string validate) {
    if (entry < 0 || entry >= checks::kNumEntries)
        throw std::runtime_error(checks::message("entry", "0..3", std::to_string(entry)) + " [type]");
    const runtime::InUse in_use(handle);
    runtime::Buffer& buffer = runtime::use_buffer(handle);
    const runtime::OnlyCall only_call(buffer);
    Call call;
    call.entry = static_cast<checks::Entry>(entry);
    call.buffer = &buffer;
    call.tensors = {view_of(y), view_of(shared_x), view_of(l1_weights), view_of(l1_weights_sf), view_of(l2_weights),
        view_of(l2_weights_sf), view_of(shared_l1_weights), view_of(shared_l2_weights), view_of(rms_weight),
        view_of(statistics), view_of(buffer_tensor), view_of(shared_y), view_of(workspace), view_of(flags),
        view_of(peer_ptrs)};
    call.recipe = std::move(recipe);
    call.activation = std::move(activation);
    call.validate = std::move(validate);
    call.activation_clamp = activation_clamp;
    call.situ_beta = situ_beta;
    call.situ_linear_beta = situ_linear_beta;
    call.rms_epsilon = rms_epsilon;
    call.fast_math = fast_math;
    call.batch_invariant = batch_invariant;
    telling_peers(buffer, [&] {
        checks::check_call(call);
        HostValues copies;
        if (buffer.on_cpu() || call.validate == "device") {
            read_values(call, copies, buffer_tensor, flags, peer_ptrs);
            checks::check_values(call);
            call.values = {};
        }
    });
    make_ready(handle, buffer, call);
    telling_peers(buffer, [&] { launch(handle, buffer, call); });
}

// The first call's work without a call: options by name, as deep_gemm_k3.mega.plan.warmup passes them.
void warm_up(int64_t handle, std::string options) {
    const json::Value given = json::parse(options);
    const runtime::InUse in_use(handle);
    runtime::Buffer& buffer = runtime::use_buffer(handle);
    const runtime::OnlyCall only_call(buffer);
    Call call;
    call.buffer = &buffer;
    telling_peers(buffer, [&] {
        call.entry = static_cast<checks::Entry>(given.int_at("entry") & 3);
        call.activation = given.string_or("activation", "swiglu");
        checks::check_activation(call);
        call.fast_math = given.bool_or("fast_math", true);
        call.batch_invariant = given.bool_or("batch_invariant", false);
        if (given.bool_or("has_clamp", false))
            call.activation_clamp = 0.0;
        call.tensors[static_cast<int>(checks::Tensor::kStatistics)].present = given.bool_or("has_statistics", false);
        call.tensors[static_cast<int>(checks::Tensor::kSharedX)].sizes[1] = given.int_or("shared_hidden", 0);
        checks::require_problem(impls::problem_of(call));
    });
    make_ready(handle, buffer, call);
}

// For tests and measurements: where this buffer's calls end. "none" shows what the host alone costs.
void set_route(int64_t handle, std::string route) {
    impls::store_of(runtime::find_buffer(handle)).set_route(impls::route_named(route));
}

std::string route_of(int64_t handle) {
    runtime::Buffer& buffer = runtime::find_buffer(handle);
    return impls::place_name(impls::store_of(buffer).route(), buffer);
}

void set_cpu_route(std::string route) {
    impls::set_cpu_route(impls::route_named(route));
}

void set_debug(int64_t handle, int64_t delay_ns, int64_t timeline) {
    impls::PlanStore& store = impls::store_of(runtime::find_buffer(handle));
    store.debug_delay_ns = static_cast<uint32_t>(delay_ns);
    if (store.timeline() != reinterpret_cast<void*>(timeline))
        store.set_timeline(reinterpret_cast<void*>(timeline));
}

// For measurements: what plans of this buffer have to take, by the names that explain() shows; the next call is a first
// call again.
void set_overrides(int64_t handle, std::string overrides) {
    impls::store_of(runtime::find_buffer(handle))
        .set_overrides(heuristics::overrides_from_json(json::parse(overrides)));
}

int64_t params_bytes() {
    return sizeof(Params);
}

} // namespace
} // namespace deep_gemm_k3

STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm_k3, m) {
    m.def("mega_moe(Tensor(a!) y, Tensor l1_weights, Tensor l1_weights_sf, Tensor l2_weights, Tensor l2_weights_sf, "
          "Tensor(b!) buffer, int handle, int entry, Tensor? shared_x, Tensor? shared_l1_weights, "
          "Tensor? shared_l2_weights, Tensor? rms_weight, float? rms_epsilon, Tensor(c!)? shared_y, "
          "Tensor(d!)? shared_rs_workspace, Tensor? shared_rs_flags, Tensor? shared_rs_peer_ptrs, "
          "Tensor(e!)? cumulative_local_expert_recv_stats, int[] recipe, str activation, float? activation_clamp, "
          "bool fast_math, float? situ_beta, float? situ_linear_beta, bool batch_invariant, str validate) -> ()");
    m.def("warm_up(int handle, str options) -> ()");
    m.def("params_bytes() -> int");
    m.def("list_checks() -> str");
    m.def("set_debug(int handle, int delay_ns, int timeline) -> ()");
    m.def("set_overrides(int handle, str overrides) -> ()");
    m.def("set_route(int handle, str route) -> ()");
    m.def("route_of(int handle) -> str");
    m.def("set_cpu_route(str route) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CPU, m) {
    m.impl("mega_moe", TORCH_BOX(&deep_gemm_k3::mega_moe));
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CUDA, m) {
    m.impl("mega_moe", TORCH_BOX(&deep_gemm_k3::mega_moe));
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CompositeImplicitAutograd, m) {
    m.impl("warm_up", TORCH_BOX(&deep_gemm_k3::warm_up));
    m.impl("params_bytes", TORCH_BOX(&deep_gemm_k3::params_bytes));
    m.impl("list_checks", TORCH_BOX(&deep_gemm_k3::checks::list_checks));
    m.impl("set_debug", TORCH_BOX(&deep_gemm_k3::set_debug));
    m.impl("set_overrides", TORCH_BOX(&deep_gemm_k3::set_overrides));
    m.impl("set_route", TORCH_BOX(&deep_gemm_k3::set_route));
    m.impl("route_of", TORCH_BOX(&deep_gemm_k3::route_of));
    m.impl("set_cpu_route", TORCH_BOX(&deep_gemm_k3::set_cpu_route));
}
