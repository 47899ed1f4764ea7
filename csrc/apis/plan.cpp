// Operators over the plan: no tensors, no device.
#include "checks/shape.hpp"
#include "jit_kernels/heuristics/describe.hpp"

#include <torch/csrc/stable/library.h>

#include <array>
#include <string>
#include <string_view>

namespace deep_gemm_k3 {
namespace {

using heuristics::DeviceFacts;
using heuristics::Problem;

struct Planned {
    json::Value given;
    Problem problem;
    DeviceFacts device;
};

Planned planned_from(const std::string& text) {
    static constexpr std::string_view kNames[] = {"num_ranks", "num_experts", "num_topk", "num_max_tokens_per_rank",
        "num_max_shared_tokens", "hidden", "intermediate_hidden", "shared_intermediate_hidden", "shared_hidden",
        "shared_output", "num_tokens", "num_shared_tokens", "max_tokens", "max_shared_tokens", "activation",
        "has_clamp", "fast_math", "has_rms_norm", "has_statistics", "batch_invariant", "target", "num_sms",
        "whole_device", "overrides", "literal", "traced"}; // read by those who compile what is planned
    Planned planned{.given = json::parse(text), .problem = {}, .device = {}};
    heuristics::require_names(planned.given, "problem", kNames);
    planned.problem = heuristics::problem_from_json(planned.given);
    planned.device = heuristics::device_from_json(planned.given);
    checks::require_shape(planned.problem.shape);
    checks::require_problem(planned.problem);
    return planned;
}

std::string plan_explain(std::string text) {
    const Planned planned = planned_from(text);
    return heuristics::explain(planned.problem, planned.device).dump();
}

std::string config_literal(std::string text) {
    const Planned planned = planned_from(text);
    return heuristics::config_literal(heuristics::choose_config(planned.problem, planned.device));
}

std::string workspace_bytes(std::string text) {
    const BufferShape shape = heuristics::shape_from_json(json::parse(text));
    checks::require_shape(shape);
    return heuristics::byte_table(shape).dump();
}

std::string all_configs(std::string text) {
    const Planned planned = planned_from(text);
    const BufferShape& shape = planned.problem.shape;
    const int max_tokens = planned.given.int_or("max_tokens", shape.num_max_tokens);
    const int max_shared_tokens = planned.given.int_or("max_shared_tokens", shape.num_max_shared_tokens);
    json::Array out;
    for (const Config& config :
        heuristics::all_configs(planned.problem, planned.device, max_tokens, max_shared_tokens)) {
        const char* fault = heuristics::config_fault(config);
        out.push_back(
            json::Object{{"config", heuristics::config_json(config)}, {"literal", heuristics::config_literal(config)},
                {"launch", heuristics::launch_shape(config, planned.device)},
                {"tensor_memory", heuristics::tensor_memory(config)},
                {"fault", fault ? json::Value(fault) : json::Value()}});
    }
    return json::Value(std::move(out)).dump();
}

// Plans every combination of three ranges {first, last, step}; gives how many there were and the first that cannot run.
std::string plan_sweep(std::string text) {
    const json::Value given = json::parse(text);
    Problem problem = heuristics::problem_from_json(given);
    const DeviceFacts device = heuristics::device_from_json(given);
    const auto range = [&](const char* name) {
        const json::Array& values = given.at(name).as_array();
        return std::array<int, 3>{static_cast<int>(values.at(0).as_int()), static_cast<int>(values.at(1).as_int()),
            static_cast<int>(values.at(2).as_int())};
    };
    const auto [first_tokens, last_tokens, token_step] = range("tokens");
    const auto [first_experts, last_experts, expert_step] = range("experts");
    const auto [first_ranks, last_ranks, rank_step] = range("ranks");
    int64_t count = 0;
    for (int ranks = first_ranks; ranks <= last_ranks; ranks += rank_step)
        for (int experts = first_experts; experts <= last_experts; experts += expert_step)
            for (int tokens = first_tokens; tokens <= last_tokens; tokens += token_step) {
                problem.shape.num_ranks = ranks;
                problem.shape.num_experts = experts;
                problem.num_tokens = tokens;
                problem.num_shared_tokens = problem.shared_output == SharedOutput::kNone ? 0 : last_tokens - tokens;
                ++count;
                const char* fault = heuristics::config_fault(heuristics::choose_config(problem, device));
                if (fault)
                    return json::Value(json::Object{{"count", count}, {"fault", fault}, {"tokens", tokens},
                                           {"experts", experts}, {"ranks", ranks}})
                        .dump();
            }
    return json::Value(json::Object{{"count", count}, {"fault", json::Value()}}).dump();
}

} // namespace
} // namespace deep_gemm_k3

STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm_k3, m) {
    m.def("plan_explain(str problem) -> str");
    m.def("config_literal(str problem) -> str");
    m.def("workspace_bytes(str shape) -> str");
    m.def("all_configs(str problem) -> str");
    m.def("plan_sweep(str ranges) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CompositeImplicitAutograd, m) {
    m.impl("plan_explain", TORCH_BOX(&deep_gemm_k3::plan_explain));
    m.impl("config_literal", TORCH_BOX(&deep_gemm_k3::config_literal));
    m.impl("workspace_bytes", TORCH_BOX(&deep_gemm_k3::workspace_bytes));
    m.impl("all_configs", TORCH_BOX(&deep_gemm_k3::all_configs));
    m.impl("plan_sweep", TORCH_BOX(&deep_gemm_k3::plan_sweep));
}
