#include "apis/callbacks.hpp"
#include "deep_gemm_k3/plan/workspace.cuh"
#include "launch.hpp"

#include <stdexcept>

namespace deep_gemm_k3::impls {

namespace {

using checks::Call;
using checks::Tensor;
using checks::TensorView;

// Names of the launch record; tensors the executor has no use for are left out.
const char* record_name(Tensor tensor) {
    switch (tensor) {
    case Tensor::kY:
        return "y";
    case Tensor::kSharedX:
        return "shared_x";
    case Tensor::kL1Weights:
        return "l1_weights";
    case Tensor::kL1WeightsSf:
        return "l1_weights_sf";
    case Tensor::kL2Weights:
        return "l2_weights";
    case Tensor::kL2WeightsSf:
        return "l2_weights_sf";
    case Tensor::kSharedL1Weights:
        return "shared_l1_weights";
    case Tensor::kSharedL2Weights:
        return "shared_l2_weights";
    case Tensor::kRmsWeight:
        return "rms_weight";
    case Tensor::kStatistics:
        return "cumulative_local_expert_recv_stats";
    case Tensor::kSharedY:
        return "shared_y";
    case Tensor::kWorkspace:
        return "shared_rs_workspace";
    case Tensor::kFlags:
        return "shared_rs_flags";
    case Tensor::kPeerPtrs:
        return "shared_rs_peer_ptrs";
    default:
        return nullptr;
    }
}

json::Value optional_number(const std::optional<double>& value) {
    return value ? json::Value(*value) : json::Value();
}

json::Value tensors_json(const Call& call) {
    json::Object tensors;
    for (int i = 0; i < checks::kNumTensors; ++i) {
        const TensorView& view = call.tensors[i];
        const char* name = record_name(static_cast<Tensor>(i));
        if (!name || !view.present)
            continue;
        const json::Array shape(view.sizes.begin(), view.sizes.begin() + view.rank);
        tensors[name] = json::Array{view.address, checks::dtype_name(view.dtype), shape};
    }
    return tensors;
}

json::Value scalars_json(const Call& call) {
    return json::Object{{"num_tokens", call.num_tokens()}, {"num_shared_tokens", call.num_shared_tokens()},
        {"activation", call.activation}, {"activation_clamp", optional_number(call.activation_clamp)},
        {"situ_beta", optional_number(call.situ_beta)}, {"situ_linear_beta", optional_number(call.situ_linear_beta)},
        {"rms_epsilon", optional_number(call.rms_epsilon)}, {"fast_math", call.fast_math},
        {"batch_invariant", call.batch_invariant}};
}

json::Value layout_json(const BufferShape& shape) {
    using plan::Component;
    const auto offset = [&](Component component) { return json::Value(plan::component_offset(shape, component)); };
    return json::Object{{"x", offset(Component::kInputX)}, {"x_sf", offset(Component::kInputScales)},
        {"topk_idx", offset(Component::kInputTopkIdx)}, {"topk_weights", offset(Component::kInputTopkWeights)},
        {"combine", offset(Component::kPartials)},
        {"header", plan::component_offset(shape, Component::kControl) + plan::control::kExecutorHeader}};
}

std::string launch_record(int64_t handle, const runtime::Buffer& buffer, const Plan& plan, const Call& call) {
    const BufferShape& shape = call.shape();
    json::Array peers;
    for (const uint8_t* base : buffer.bases)
        peers.push_back(reinterpret_cast<uint64_t>(base));
    const json::Object record = {{"version", 1}, {"entry", checks::entry_name(call.entry)}, {"handle", handle},
        {"rank", buffer.spec.rank}, {"num_ranks", shape.num_ranks},
        {"problem", json::Object{{"num_experts", shape.num_experts}, {"num_topk", shape.num_topk},
                        {"num_max_tokens_per_rank", shape.num_max_tokens}, {"hidden", shape.hidden},
                        {"intermediate_hidden", shape.intermediate}}},
        {"tensors", tensors_json(call)}, {"scalars", scalars_json(call)}, {"peers", std::move(peers)},
        {"layout", layout_json(shape)}};
    std::string text = json::Value(record).dump();
    text.back() = ','; // the plan is text already
    return text + " \"plan\": " + plan.json + "}";
}

} // namespace

void launch_on_cpu(int64_t handle, runtime::Buffer& buffer, const Plan& plan, const Call& call) {
    const std::string error = callbacks::execute(launch_record(handle, buffer, plan, call));
    if (error.empty())
        return;
    const std::string text = std::string(checks::entry_name(call.entry)) + ": " + error;
    runtime::abort_peers(buffer, text);
    throw std::runtime_error(text);
}

} // namespace deep_gemm_k3::impls
