#include "describe.hpp"

#include "deep_gemm_k3/plan/shared_memory.cuh"
#include "deep_gemm_k3/plan/workspace.cuh"

#include <algorithm>
#include <array>
#include <iterator>
#include <stdexcept>

namespace deep_gemm_k3::heuristics {

namespace {

using json::Object;
using json::Value;

struct Named {
    const char* name;
    int value;
};
constexpr Named kTargets[] = {{"sm_90a", 90}, {"sm_100a", 100}, {"sm_100f", 100}};
constexpr Named kActivations[] = {{"swiglu", 0}, {"situ", 1}};
constexpr Named kSharedOutputs[] = {{"none", 0}, {"dense", 1}, {"hidden_sharded", 2}, {"token_owner", 3}};

template <size_t N>
int value_of(const Named (&table)[N], const char* what, std::string_view name) {
    std::string wanted;
    for (const Named& entry : table) {
        if (entry.name == name)
            return entry.value;
        wanted += (wanted.empty() ? "" : " or ") + std::string(entry.name);
    }
    throw std::runtime_error(std::string(what) + ": wanted " + wanted + ", given " + std::string(name));
}

template <size_t N>
const char* name_of(const Named (&table)[N], int value) {
    for (const Named& entry : table)
        if (entry.value == value)
            return entry.name;
    return "?";
}

constexpr const char* kComponentNames[] = {"control", "x", "x_sf", "topk_idx", "topk_weights", "metadata",
    "low_latency_rows", "rows", "row_flags", "partials", "pool_x", "pool_row_info", "pool_intermediate",
    "block_counters", "shared_intermediate", "shared_counters", "split_partials", "split_counters", "route_counts"};
static_assert(std::size(kComponentNames) == plan::kNumComponents);

const char* boolean(bool value) {
    return value ? "true" : "false";
}

// Collects `.name = value` pairs.
class Literal {
  public:
    Literal& field(const char* name, const std::string& value) {
        text_ += (text_.empty() ? "{." : ", .") + std::string(name) + " = " + value;
        return *this;
    }
    Literal& field(const char* name, int value) { return field(name, std::to_string(value)); }
    Literal& field(const char* name, bool value) { return field(name, std::string(boolean(value))); }
    std::string text() const { return text_ + "}"; }

  private:
    std::string text_;
};

std::string tile_literal(const TileShape& tile) {
    return Literal()
        .field("num_rows", tile.num_rows)
        .field("num_tokens", tile.num_tokens)
        .field("num_k", tile.num_k)
        .text();
}

Value tile_json(const TileShape& tile) {
    return Object{{"num_rows", tile.num_rows}, {"num_tokens", tile.num_tokens}, {"num_k", tile.num_k}};
}

Value shape_json(const BufferShape& s) {
    return Object{{"num_ranks", s.num_ranks}, {"num_experts", s.num_experts}, {"num_topk", s.num_topk},
        {"num_max_tokens", s.num_max_tokens}, {"num_max_shared_tokens", s.num_max_shared_tokens}, {"hidden", s.hidden},
        {"intermediate", s.intermediate}, {"shared_intermediate", s.shared_intermediate}};
}

constexpr const char* kArchitectureLiterals[] = {"Architecture::kSM90", "Architecture::kSM100"};
constexpr const char* kActivationLiterals[] = {"Activation::kSwiGLU", "Activation::kSiTU"};
constexpr const char* kSharedOutputLiterals[] = {
    "SharedOutput::kNone", "SharedOutput::kDense", "SharedOutput::kHiddenSharded", "SharedOutput::kTokenOwner"};

} // namespace

const char* target_name(Architecture arch) {
    return name_of(kTargets, static_cast<int>(arch));
}
Architecture architecture_of(std::string_view target) {
    return static_cast<Architecture>(value_of(kTargets, "target", target));
}
const char* activation_name(Activation activation) {
    return name_of(kActivations, static_cast<int>(activation));
}
const char* shared_output_name(SharedOutput output) {
    return name_of(kSharedOutputs, static_cast<int>(output));
}

std::string config_literal(const Config& c) {
    const BufferShape& s = c.shape;
    Literal shape;
    shape.field("num_ranks", s.num_ranks)
        .field("num_experts", s.num_experts)
        .field("num_topk", s.num_topk)
        .field("num_max_tokens", s.num_max_tokens)
        .field("num_max_shared_tokens", s.num_max_shared_tokens)
        .field("hidden", s.hidden)
        .field("intermediate", s.intermediate)
        .field("shared_intermediate", s.shared_intermediate);
    Literal splits;
    splits.field("routed_l1", c.splits.routed_l1)
        .field("routed_l2", c.splits.routed_l2)
        .field("shared_l1", c.splits.shared_l1)
        .field("shared_l2", c.splits.shared_l2);
    Literal config;
    config.field("arch", std::string(kArchitectureLiterals[c.arch == Architecture::kSM100]))
        .field("shape", shape.text())
        .field("shared_hidden", c.shared_hidden)
        .field("activation", std::string(kActivationLiterals[static_cast<int>(c.activation)]))
        .field("shared_output", std::string(kSharedOutputLiterals[static_cast<int>(c.shared_output)]))
        .field("has_clamp", c.has_clamp)
        .field("fast_math", c.fast_math)
        .field("has_rms_norm", c.has_rms_norm)
        .field("has_statistics", c.has_statistics)
        .field("routed_tile", tile_literal(c.routed_tile))
        .field("shared_tile", tile_literal(c.shared_tile))
        .field("splits", splits.text())
        .field("num_stages", c.num_stages)
        .field("num_math_warpgroups", c.num_math_warpgroups)
        .field("num_threads", c.num_threads)
        .field("num_ctas_per_sm", c.num_ctas_per_sm)
        .field("num_cluster_ctas", c.num_cluster_ctas)
        .field("narrow_widths",
            Literal().field("middle", c.narrow_widths.middle).field("least", c.narrow_widths.least).text());
    return config.text();
}

json::Value config_json(const Config& c) {
    return Object{{"arch", target_name(c.arch)}, {"shape", shape_json(c.shape)}, {"shared_hidden", c.shared_hidden},
        {"activation", activation_name(c.activation)}, {"shared_output", shared_output_name(c.shared_output)},
        {"has_clamp", c.has_clamp}, {"fast_math", c.fast_math}, {"has_rms_norm", c.has_rms_norm},
        {"has_statistics", c.has_statistics}, {"routed_tile", tile_json(c.routed_tile)},
        {"shared_tile", tile_json(c.shared_tile)},
        {"splits", Object{{"routed_l1", c.splits.routed_l1}, {"routed_l2", c.splits.routed_l2},
                       {"shared_l1", c.splits.shared_l1}, {"shared_l2", c.splits.shared_l2}}},
        {"num_stages", c.num_stages}, {"num_math_warpgroups", c.num_math_warpgroups}, {"num_threads", c.num_threads},
        {"num_ctas_per_sm", c.num_ctas_per_sm}, {"num_cluster_ctas", c.num_cluster_ctas},
        {"narrow_widths", Object{{"middle", c.narrow_widths.middle}, {"least", c.narrow_widths.least}}}};
}

BufferShape shape_from_json(const json::Value& given) {
    const int wanted_tokens = given.int_at("num_max_tokens_per_rank");
    // What is out of range stays as it was given: the check to come names it.
    const bool is_legal = wanted_tokens >= 1 && wanted_tokens <= kMaxTokensPerRank;
    const int max_tokens = is_legal ? align_up(wanted_tokens, kTokenAlignment) : wanted_tokens;
    const int shared_intermediate = given.int_or("shared_intermediate_hidden", 0);
    return {.num_ranks = given.int_at("num_ranks"),
        .num_experts = given.int_at("num_experts"),
        .num_topk = given.int_at("num_topk"),
        .num_max_tokens = max_tokens,
        .num_max_shared_tokens = given.int_or("num_max_shared_tokens", shared_intermediate > 0 ? max_tokens : 0),
        .hidden = given.int_at("hidden"),
        .intermediate = given.int_at("intermediate_hidden"),
        .shared_intermediate = shared_intermediate};
}

json::Value overrides_json(const Overrides& o) {
    return Object{{"routed_tokens", o.routed_tokens}, {"shared_tokens", o.shared_tokens},
        {"shared_rows", o.shared_rows}, {"num_ctas_per_sm", o.num_ctas_per_sm},
        {"num_cluster_ctas", o.num_cluster_ctas}, {"num_stages", o.num_stages},
        {"splits", Object{{"routed_l1", o.splits.routed_l1}, {"routed_l2", o.splits.routed_l2},
                       {"shared_l1", o.splits.shared_l1}, {"shared_l2", o.splits.shared_l2}}},
        {"narrow_widths", Object{{"middle", o.narrow_widths.middle}, {"least", o.narrow_widths.least}}}};
}

void require_names(const json::Value& given, const char* what, std::span<const std::string_view> names) {
    for (const auto& [name, value] : given.as_object())
        if (std::ranges::find(names, name) == names.end()) {
            std::string wanted;
            for (const std::string_view known : names)
                wanted.append(wanted.empty() ? "" : ", ").append(known);
            throw std::runtime_error(std::string(what) + ": wanted names among " + wanted + ", given " + name);
        }
}

Overrides overrides_from_json(const json::Value& given) {
    static constexpr std::string_view kNames[] = {"routed_tokens", "shared_tokens", "shared_rows", "num_ctas_per_sm",
        "num_cluster_ctas", "num_stages", "splits", "narrow_widths"};
    require_names(given, "overrides", kNames);
    Overrides overrides{.routed_tokens = given.int_or("routed_tokens", 0),
        .shared_tokens = given.int_or("shared_tokens", 0),
        .shared_rows = given.int_or("shared_rows", 0),
        .num_ctas_per_sm = given.int_or("num_ctas_per_sm", 0),
        .num_cluster_ctas = given.int_or("num_cluster_ctas", 0),
        .num_stages = given.int_or("num_stages", 0),
        .splits = {},
        .narrow_widths = {}};
    if (const json::Value* splits = given.find("splits")) {
        static constexpr std::string_view kPhases[] = {"routed_l1", "routed_l2", "shared_l1", "shared_l2"};
        require_names(*splits, "splits", kPhases);
        overrides.splits = {.routed_l1 = splits->int_or("routed_l1", 0),
            .routed_l2 = splits->int_or("routed_l2", 0),
            .shared_l1 = splits->int_or("shared_l1", 0),
            .shared_l2 = splits->int_or("shared_l2", 0)};
    }
    if (const json::Value* widths = given.find("narrow_widths")) {
        static constexpr std::string_view kWidths[] = {"middle", "least"};
        require_names(*widths, "narrow_widths", kWidths);
        overrides.narrow_widths = {.middle = widths->int_or("middle", 0), .least = widths->int_or("least", 0)};
    }
    return overrides;
}

Problem problem_from_json(const json::Value& given) {
    const json::Value* overrides = given.find("overrides");
    const auto output =
        static_cast<SharedOutput>(value_of(kSharedOutputs, "shared_output", given.string_or("shared_output", "none")));
    const bool has_shared = output != SharedOutput::kNone;
    return {.shape = shape_from_json(given),
        .num_tokens = given.int_or("num_tokens", 0),
        .num_shared_tokens = has_shared ? given.int_or("num_shared_tokens", given.int_or("num_tokens", 0)) : 0,
        .shared_hidden = has_shared ? given.int_at("shared_hidden") : 0,
        .activation = static_cast<Activation>(
            value_of(kActivations, "activation", given.string_or("activation", has_shared ? "situ" : "swiglu"))),
        .shared_output = output,
        .has_clamp = given.bool_or("has_clamp", false),
        .fast_math = given.bool_or("fast_math", true),
        .has_rms_norm = given.bool_or("has_rms_norm", has_shared),
        .has_statistics = given.bool_or("has_statistics", false),
        .batch_invariant = given.bool_or("batch_invariant", false),
        .overrides = overrides ? overrides_from_json(*overrides) : Overrides{}};
}

DeviceFacts device_from_json(const json::Value& given) {
    DeviceFacts device = default_device(architecture_of(given.string_or("target", "sm_90a")));
    device.num_sms = given.int_or("num_sms", device.num_sms);
    if (device.num_sms < 1)
        throw std::runtime_error("num_sms: wanted at least 1, given " + std::to_string(device.num_sms));
    device.is_whole = given.bool_or("whole_device", true);
    return device;
}

json::Value launch_shape(const Config& config, const DeviceFacts& device) {
    return json::Array{device.num_sms * config.num_ctas_per_sm, 1, 1, config.num_threads, 1, 1, config.num_cluster_ctas,
        1, 1, plan::shared_memory_bytes(config)};
}

json::Value tensor_memory(const Config& config) {
    if (config.arch != Architecture::kSM100)
        return Object{{"columns", 0}, {"accumulators", 0}, {"limit", 0}};
    const plan::TensorMemoryLayout layout = plan::tensor_memory_layout(config);
    return Object{
        {"columns", layout.num_allocated}, {"accumulators", layout.num_stages}, {"limit", plan::kTensorMemoryColumns}};
}

json::Value byte_table(const BufferShape& shape) {
    json::Array rows;
    for (int i = 0; i < plan::kNumComponents; ++i) {
        const auto component = static_cast<plan::Component>(i);
        rows.push_back(Object{{"name", kComponentNames[i]}, {"offset", plan::component_offset(shape, component)},
            {"bytes", plan::component_bytes(shape, component)}});
    }
    return Object{
        {"shape", shape_json(shape)}, {"components", std::move(rows)}, {"total_bytes", plan::total_bytes(shape)}};
}

json::Value explain(const Problem& problem, const DeviceFacts& device) {
    const Config config = choose_config(problem, device);
    const char* fault = config_fault(config);
    return Object{{"config", config_json(config)}, {"literal", config_literal(config)},
        {"target", target_name(config.arch)}, {"num_sms", device.num_sms},
        {"grid", device.num_sms * config.num_ctas_per_sm}, {"num_tokens", problem.num_tokens},
        {"num_shared_tokens", problem.num_shared_tokens}, {"batch_invariant", problem.batch_invariant},
        {"expected_tokens_per_expert", expected_tokens_per_expert(problem)},
        {"shared_memory",
            Object{{"bytes_per_stage", plan::stage_bytes(config)}, {"bytes_per_cta", plan::shared_memory_bytes(config)},
                {"limit", plan::shared_memory_budget(config.num_ctas_per_sm)}}},
        {"tensor_memory", tensor_memory(config)}, {"fault", fault ? Value(fault) : Value()},
        {"buffer", byte_table(config.shape)}};
}

} // namespace deep_gemm_k3::heuristics
