#include "plan_store.hpp"

#include "jit/driver.hpp"
#include "jit_kernels/heuristics/config.hpp"
#include "jit_kernels/heuristics/describe.hpp"
#include "launch.hpp"

#include <atomic>
#include <stdexcept>

namespace deep_gemm_k3::impls {

namespace {

constexpr size_t kMaxPlans = 4096; // a serving process sees a few hundred pairs of counts

std::mutex store_mutex;
std::atomic<Route> cpu_route{Route::kEmulator};

constexpr const char* kRouteNames[] = {"oracle", "cuda", "emulator", "null", "none"};

SharedOutput output_of(checks::Entry entry) {
    return static_cast<SharedOutput>(static_cast<int>(entry));
}

} // namespace

std::string place_name(Route route, const runtime::Buffer& buffer) {
    const std::string name = kRouteNames[static_cast<int>(route)];
    return route == Route::kCuda ? name + ":" + std::to_string(buffer.spec.device_index) : name;
}

Route route_named(std::string_view name) {
    for (size_t i = 0; i < std::size(kRouteNames); ++i)
        if (name == kRouteNames[i])
            return static_cast<Route>(i);
    throw std::runtime_error("route: wanted oracle, cuda, emulator, null or none, given " + std::string(name));
}

void set_cpu_route(Route route) {
    cpu_route.store(route);
}

SignatureBits signature_of(const checks::Call& call) {
    SignatureBits bits = static_cast<SignatureBits>(call.shared_hidden());
    const auto append = [&](uint64_t value, int width) { bits = bits << width | value; };
    append(static_cast<uint64_t>(call.entry), 2);
    append(call.activation_kind() == Activation::kSiTU, 1);
    append(call.activation_clamp.has_value(), 1);
    append(call.fast_math, 1);
    append(call.tensor(checks::Tensor::kStatistics).present, 1);
    append(call.batch_invariant, 1);
    return bits;
}

heuristics::Problem problem_of(const checks::Call& call) {
    return {.shape = call.shape(),
        .num_tokens = static_cast<int>(call.num_tokens()),
        .num_shared_tokens = static_cast<int>(call.num_shared_tokens()),
        .shared_hidden = static_cast<int>(call.shared_hidden()),
        .activation = call.activation_kind(),
        .shared_output = output_of(call.entry),
        .has_clamp = call.activation_clamp.has_value(),
        .fast_math = call.fast_math,
        .has_rms_norm = call.has_shared(),
        .has_statistics = call.tensor(checks::Tensor::kStatistics).present,
        .batch_invariant = call.batch_invariant};
}

heuristics::DeviceFacts device_of(const runtime::Buffer& buffer) {
    heuristics::DeviceFacts device = heuristics::default_device(heuristics::architecture_of(buffer.spec.target));
    if (buffer.spec.num_sms > 0)
        device.num_sms = buffer.spec.num_sms;
    device.is_whole = buffer.on_cpu() || device.num_sms >= jit::cu::device_facts(buffer.spec.device_index).num_sms;
    return device;
}

json::Value describe_signature(const checks::Call& call, const PlanStore& store) {
    const Route route = store.route();
    const heuristics::Problem problem = problem_of(call);
    const BufferShape& s = problem.shape;
    const json::Object common = {{"activation", heuristics::activation_name(problem.activation)},
        {"has_clamp", problem.has_clamp}, {"fast_math", problem.fast_math}, {"has_rms_norm", problem.has_rms_norm},
        {"has_statistics", problem.has_statistics}, {"batch_invariant", problem.batch_invariant},
        {"shared_hidden", problem.shared_hidden}, {"target", call.buffer->spec.target}, {"num_ranks", s.num_ranks},
        {"num_experts", s.num_experts}, {"num_topk", s.num_topk}, {"hidden", s.hidden},
        {"intermediate_hidden", s.intermediate}, {"shared_intermediate_hidden", s.shared_intermediate},
        {"num_max_tokens_per_rank", s.num_max_tokens}, {"num_max_shared_tokens", s.num_max_shared_tokens}};
    json::Object signature = common, description = common;
    signature["entry"] = checks::entry_name(call.entry);
    signature["executor"] = route == Route::kCuda ? "cuda" : place_name(route, *call.buffer);
    description["shared_output"] = heuristics::shared_output_name(problem.shared_output);
    const heuristics::DeviceFacts device = device_of(*call.buffer);
    description["num_sms"] = device.num_sms;
    description["whole_device"] = device.is_whole;
    description["overrides"] = heuristics::overrides_json(store.overrides());
    description["traced"] = store.timeline() != nullptr;
    heuristics::Problem now = problem;
    now.overrides = store.overrides();
    description["literal"] = heuristics::config_literal(heuristics::choose_config(now, device));
    return json::Object{{"signature", std::move(signature)}, {"problem", std::move(description)},
        {"place", place_name(route, *call.buffer)}};
}

bool PlanStore::is_ready(SignatureBits signature) {
    const std::lock_guard lock(mutex_);
    return ready_.contains(signature);
}

void PlanStore::set_ready(SignatureBits signature) {
    const std::lock_guard lock(mutex_);
    ready_.insert(signature);
}

std::shared_ptr<const Plan> PlanStore::plan(SignatureBits signature, const checks::Call& call) {
    const Key key{
        signature, static_cast<uint64_t>(call.num_tokens()) << 32 | static_cast<uint64_t>(call.num_shared_tokens())};
    const std::lock_guard lock(mutex_);
    if (const auto found = plans_.find(key); found != plans_.end())
        return found->second;
    const heuristics::DeviceFacts device = device_of(*call.buffer);
    auto plan = std::make_shared<Plan>();
    plan->problem = problem_of(call);
    plan->problem.overrides = overrides_;
    plan->config = heuristics::choose_config(plan->problem, device);
    plan->literal = heuristics::config_literal(plan->config);
    plan->json = heuristics::config_json(plan->config).dump();
    plan->num_ctas = device.num_sms * plan->config.num_ctas_per_sm;
    if (route_ == Route::kCuda || route_ == Route::kEmulator || route_ == Route::kNullKernel)
        prepare(*plan, *call.buffer, *this);
    if (plans_.size() >= kMaxPlans)
        plans_.clear();
    plans_.emplace(key, plan);
    return plan;
}

void PlanStore::set_route(Route route) {
    const std::lock_guard lock(mutex_);
    route_ = route;
    forget();
}

void PlanStore::set_overrides(const heuristics::Overrides& overrides) {
    const std::lock_guard lock(mutex_);
    overrides_ = overrides;
    forget();
}

void PlanStore::set_timeline(void* memory) {
    const std::lock_guard lock(mutex_);
    timeline_ = memory;
    forget();
}

void PlanStore::forget() {
    plans_.clear();
    ready_.clear();
}

PlanStore& store_of(runtime::Buffer& buffer) {
    const std::lock_guard lock(store_mutex);
    if (!buffer.launch_state) {
        buffer.launch_state = new PlanStore(buffer.on_cpu() ? cpu_route.load() : Route::kCuda);
        buffer.free_launch_state = [](void* state) { delete static_cast<PlanStore*>(state); };
    }
    return *static_cast<PlanStore*>(buffer.launch_state);
}

} // namespace deep_gemm_k3::impls
