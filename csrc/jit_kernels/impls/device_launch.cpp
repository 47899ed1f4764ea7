// Params and tensor maps of one call, and its launch through the launch layer.
#include "apis/callbacks.hpp"
#include "deep_gemm_k3/params.cuh"
#include "deep_gemm_k3/plan/shared_memory.cuh"
#include "deep_gemm_k3/plan/workspace.cuh"
#include "jit/abort.hpp"
#include "jit/launch.hpp"
#include "jit/module.hpp"
#include "jit/tensor_map.hpp"
#include "jit_kernels/heuristics/describe.hpp"
#include "launch.hpp"

#include <stdexcept>

namespace deep_gemm_k3::impls {

namespace {

using checks::Call;
using checks::Tensor;
using checks::TensorView;

template <class T>
T* pointer(const Call& call, Tensor tensor) {
    const TensorView& view = call.tensor(tensor);
    return view.present ? reinterpret_cast<T*>(view.address) : nullptr;
}

float single(const std::optional<double>& value) {
    return value ? static_cast<float>(*value) : 0.0f;
}

std::string kernel_name(Architecture arch, bool is_traced) {
    return std::string(arch == Architecture::kSM90 ? "mega_sm90" : "mega_sm100") + (is_traced ? "_traced" : "");
}

jit::LaunchRequest request_for(const Plan& plan) {
    return {.kernel = plan.kernel,
        .grid = {.x = static_cast<uint32_t>(plan.num_ctas)},
        .block = {.x = static_cast<uint32_t>(plan.config.num_threads)},
        .cluster = {.x = static_cast<uint32_t>(plan.config.num_cluster_ctas)},
        .shared_bytes = static_cast<uint32_t>(plan::shared_memory_bytes(plan.config))};
}

// A row-major BF16 matrix read in boxes of one swizzled row.
jit::TensorMapSpec matrix_map(const void* address, int64_t rows, int columns, int box_rows) {
    jit::TensorMapSpec spec;
    spec.address = address;
    spec.dims[0] = static_cast<uint64_t>(columns);
    spec.dims[1] = static_cast<uint64_t>(rows);
    spec.strides[0] = static_cast<uint64_t>(columns) * 2;
    spec.box[0] = plan::kSharedK;
    spec.box[1] = static_cast<uint32_t>(box_rows);
    return spec;
}

// [gate; up] rows of L1, so that a box lands as groups of 8 gate rows and the 8 up rows of the same columns.
jit::TensorMapSpec gate_up_map(const void* address, int intermediate, int hidden, int box_rows) {
    const uint64_t row = static_cast<uint64_t>(hidden) * 2;
    jit::TensorMapSpec spec;
    spec.rank = 4;
    spec.address = address;
    const uint64_t dims[] = {static_cast<uint64_t>(hidden), 8, 2, static_cast<uint64_t>(intermediate) / 8};
    const uint64_t strides[] = {row, row * intermediate, row * 8};
    const uint32_t box[] = {plan::kSharedK, 8, 2, static_cast<uint32_t>(box_rows) / 16};
    std::copy(std::begin(dims), std::end(dims), spec.dims);
    std::copy(std::begin(strides), std::end(strides), spec.strides);
    std::copy(std::begin(box), std::end(box), spec.box);
    return spec;
}

// Packed E2M1 rows of all local experts, spread to a byte per code on their way to shared memory.
jit::TensorMapSpec code_map(const void* address, int64_t rows, int columns) {
    jit::TensorMapSpec spec;
    spec.type = jit::TensorMapType::k16U4Align16B;
    spec.address = address;
    spec.dims[0] = static_cast<uint64_t>(columns);
    spec.dims[1] = static_cast<uint64_t>(rows);
    spec.strides[0] = static_cast<uint64_t>(columns) / 2;
    spec.box[0] = plan::kUnitK;
    spec.box[1] = plan::kHalfRows;
    return spec;
}

// Scale words of a CTA's weight rows, one 128-column unit of one expert at a time.
jit::TensorMapSpec scale_map(const void* address, int64_t units, int rows) {
    jit::TensorMapSpec spec;
    spec.type = jit::TensorMapType::kInt32;
    spec.address = address;
    spec.dims[0] = static_cast<uint64_t>(rows);
    spec.dims[1] = static_cast<uint64_t>(units);
    spec.strides[0] = static_cast<uint64_t>(rows) * 4;
    spec.box[0] = plan::kTensorTileRows;
    spec.box[1] = 1;
    spec.swizzle = jit::TensorMapSwizzle::kNone;
    return spec;
}

// The pool's tiles as lines of 128 bytes, which are in the order of shared memory already.
jit::TensorMapSpec line_map(const void* address, uint64_t bytes, int box_lines) {
    constexpr uint32_t kLineBytes = 128;
    jit::TensorMapSpec spec;
    spec.type = jit::TensorMapType::kUint8;
    spec.address = address;
    spec.dims[0] = kLineBytes;
    spec.dims[1] = bytes / kLineBytes;
    spec.strides[0] = kLineBytes;
    spec.box[0] = kLineBytes;
    spec.box[1] = static_cast<uint32_t>(box_lines);
    spec.swizzle = jit::TensorMapSwizzle::kNone;
    return spec;
}

struct RoutedTensors {
    const char* name;
    Tensor weights, scales;
    plan::Component tokens;
    int rows, columns;
};

void fill_routed_maps(RoutedMaps& maps, MapCache& cache, jit::Target target, const Plan& plan, const Call& call,
    const RoutedTensors& of) {
    const Config& c = plan.config;
    const int64_t num_experts = c.shape.num_local_experts();
    const int tokens = c.routed_tile.num_tokens;
    const auto get = [&](const char* what, const jit::TensorMapSpec& spec) {
        return cache.get(spec, target, (std::string(of.name) + " " + what).c_str());
    };
    maps.weights = get("weights", code_map(pointer<const void>(call, of.weights), num_experts * of.rows, of.columns));
    maps.weight_scales = get("weight scales",
        scale_map(pointer<const void>(call, of.scales), num_experts * (of.columns / plan::kUnitK), of.rows));
    const uint8_t* pool = call.buffer->base() + plan::component_offset(c.shape, of.tokens);
    const uint64_t bytes = plan::component_bytes(c.shape, of.tokens);
    maps.tokens = get("tokens", line_map(pool, bytes, tokens / c.num_cluster_ctas));
    maps.token_scales =
        get("token scales", line_map(pool, bytes, plan::num_scale_blocks(tokens) * plan::kScaleBlockBytes / 128));
}

void fill_maps(SharedMaps& maps, MapCache& cache, jit::Target target, const Plan& plan, const Call& call) {
    const Config& c = plan.config;
    const TileShape tile = plan::cta_operands(c, c.shared_tile);
    const BufferShape& shape = c.shape;
    const uint8_t* base = call.buffer->base();
    const int64_t num_tokens = call.num_shared_tokens();
    // Without shared tokens no box is ever read; the map still has to be a valid one.
    const void* x = num_tokens > 0 ? pointer<const void>(call, Tensor::kSharedX) : base;
    const void* intermediate = base + plan::component_offset(shape, plan::Component::kSharedIntermediate);
    const int64_t num_rows = static_cast<int64_t>(plan::num_shared_rows(shape));
    const auto get = [&](const char* name, const jit::TensorMapSpec& spec) { return cache.get(spec, target, name); };
    maps.x = get("shared x", matrix_map(x, std::max<int64_t>(num_tokens, 1), c.shared_hidden, tile.num_tokens));
    maps.l1 = get("shared L1", gate_up_map(pointer<const void>(call, Tensor::kSharedL1Weights),
                                   shape.shared_intermediate, c.shared_hidden, tile.num_rows));
    maps.intermediate =
        get("shared intermediate", matrix_map(intermediate, num_rows, shape.shared_intermediate, tile.num_tokens));
    maps.l2 = get("shared L2", matrix_map(pointer<const void>(call, Tensor::kSharedL2Weights), c.shared_hidden,
                                   shape.shared_intermediate, tile.num_rows));
}

Scalars scalars_for(const runtime::Buffer& buffer, const PlanStore& store, const Call& call) {
    return {.activation_clamp = single(call.activation_clamp),
        .situ_beta = single(call.situ_beta),
        .situ_linear_beta = single(call.situ_linear_beta),
        .rms_epsilon = single(call.rms_epsilon),
        .timeout_ns = buffer.spec.timeout_ns,
        .debug_delay_ns = store.debug_delay_ns};
}

Params params_for(runtime::Buffer& buffer, PlanStore& store, const Plan& plan, const Call& call) {
    Params params{};
    std::copy(buffer.bases.begin(), buffer.bases.end(), params.buffers);
    params.rank = buffer.spec.rank;
    params.num_tokens = static_cast<int>(call.num_tokens());
    params.routed.l1_weight = pointer<const uint8_t>(call, Tensor::kL1Weights);
    params.routed.l2_weight = pointer<const uint8_t>(call, Tensor::kL2Weights);
    if (plan.config.arch == Architecture::kSM100) {
        params.routed.l1_scale = pointer<const uint8_t>(call, Tensor::kL1WeightsSf);
        params.routed.l2_scale = pointer<const uint8_t>(call, Tensor::kL2WeightsSf);
    }
    params.y = pointer<void>(call, Tensor::kY);
    params.rms_weight = pointer<const void>(call, Tensor::kRmsWeight);
    params.statistics = pointer<int32_t>(call, Tensor::kStatistics);
    params.shared = {.x = pointer<const void>(call, Tensor::kSharedX),
        .l1 = pointer<const void>(call, Tensor::kSharedL1Weights),
        .l2 = pointer<const void>(call, Tensor::kSharedL2Weights),
        .output = pointer<void>(call, Tensor::kSharedY),
        .num_tokens = static_cast<int>(call.num_shared_tokens())};
    if (call.is_published())
        params.publication = {.flags = pointer<const int32_t>(call, Tensor::kFlags),
            .peer_ptrs = pointer<const int64_t>(call, Tensor::kPeerPtrs),
            .generation_stride = static_cast<uint64_t>(call.generation_stride()),
            .num_generations = static_cast<int>(call.tensor(Tensor::kWorkspace).sizes[0])};
    params.scalars = scalars_for(buffer, store, call);
    params.error_record = buffer.on_cpu() ? &store.error_record : jit::error_record(buffer);
    params.timeline = store.timeline();
    return params;
}

} // namespace

TensorMap MapCache::get(const jit::TensorMapSpec& spec, jit::Target target, const char* name) {
    constexpr size_t kMaxMaps = 4096;
    const Key key{spec.address, spec.dims[1] << 32 | spec.dims[0],
        static_cast<uint64_t>(spec.box[1]) << 32 | static_cast<uint64_t>(spec.type) << 24 | spec.box[3] << 8 |
            spec.rank};
    const std::lock_guard lock(mutex_);
    if (const auto found = maps_.find(key); found != maps_.end())
        return found->second;
    const TensorMap map = jit::encode_tensor_map(spec, target, name);
    if (maps_.size() >= kMaxMaps)
        maps_.clear();
    maps_.emplace(key, map);
    return map;
}

void prepare(Plan& plan, const runtime::Buffer& buffer, const PlanStore& store) {
    const Route route = store.route();
    const bool is_traced = store.timeline() != nullptr;
    const char* arch = heuristics::target_name(plan.config.arch);
    const std::string key = jit::kernel_key(kernel_name(plan.config.arch, is_traced), arch, plan.literal);
    const int device = route == Route::kCuda       ? buffer.spec.device_index
                       : route == Route::kEmulator ? jit::kEmulatorDevice
                                                   : jit::kNoDevice;
    const std::string place = place_name(route, buffer);
    plan.kernel = jit::find_kernel(key, device);
    if (plan.kernel == 0 && route != Route::kCuda) {
        const json::Object wanted = {
            {"place", place}, {"target", arch}, {"literal", plan.literal}, {"traced", is_traced}};
        const std::string error = callbacks::load_kernel(json::Value(wanted).dump());
        if (!error.empty())
            throw std::runtime_error(error);
        plan.kernel = jit::find_kernel(key, device);
    }
    if (plan.kernel == 0)
        throw std::runtime_error("kernel: wanted one loaded into " + place + " for " + plan.literal +
                                 ", given none; deep_gemm_k3.warmup() loads it");
    jit::check_co_resident(request_for(plan), buffer.spec.num_sms);
}

void prepare_buffer(runtime::Buffer& buffer, const Call& call) {
    jit::refuse_while_capturing(jit::current_stream(buffer.spec.device_index),
        std::string("the first ") + checks::entry_name(call.entry) + " of its kind on this buffer",
        "deep_gemm_k3.warmup(sym_buffer, ...) with the same options, on every rank");
    jit::error_record(buffer);
}

void launch_kernel(runtime::Buffer& buffer, const Plan& plan, const Call& call) {
    PlanStore& store = store_of(buffer);
    Params params = params_for(buffer, store, plan, call);
    const jit::Target target = jit::kernel(plan.kernel).target;
    if (call.has_shared())
        fill_maps(params.maps, store.maps, target, plan, call);
    if (plan.config.arch == Architecture::kSM100) {
        const BufferShape& shape = plan.config.shape;
        fill_routed_maps(params.routed_l1, store.maps, target, plan, call,
            {"routed L1", Tensor::kL1Weights, Tensor::kL1WeightsSf, plan::Component::kPoolX, 2 * shape.intermediate,
                shape.hidden});
        fill_routed_maps(params.routed_l2, store.maps, target, plan, call,
            {"routed L2", Tensor::kL2Weights, Tensor::kL2WeightsSf, plan::Component::kPoolIntermediate, shape.hidden,
                shape.intermediate});
    }
    jit::LaunchRequest request = request_for(plan);
    request.params = &params;
    request.params_bytes = sizeof params;
    if (!buffer.on_cpu()) {
        request.stream = jit::current_stream(buffer.spec.device_index);
    } else {
        request.world = reinterpret_cast<uint64_t>(buffer.bases[0]);
        request.rank = static_cast<uint32_t>(buffer.spec.rank);
        request.timeout_ns = buffer.spec.timeout_ns;
        const uint32_t num_ranks = static_cast<uint32_t>(buffer.spec.shape.num_ranks);
        request.num_ranks_here = runtime::num_local_ranks(buffer) == num_ranks ? num_ranks : 0;
    }
    jit::launch(request);
    if (!buffer.on_cpu())
        return;
    const std::string report = runtime::abort_report(buffer);
    if (report.empty())
        return;
    buffer.poison(report);
    throw std::runtime_error(std::string(checks::entry_name(call.entry)) + ": " + report);
}

} // namespace deep_gemm_k3::impls
