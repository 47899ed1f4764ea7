// What a buffer remembers between calls: which signatures are ready, and the plan of every pair of token counts seen.
#pragma once

#include "checks/call.hpp"
#include "jit/tensor_map.hpp"
#include "jit_kernels/heuristics/problem.hpp"
#include "runtime/registry.hpp"
#include "utils/json.hpp"

#include "deep_gemm_k3/plan/workspace.cuh"

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace deep_gemm_k3::impls {

struct Plan {
    heuristics::Problem problem;
    Config config;
    std::string literal; // source form of the config
    std::string json;    // for launch records and logs
    int num_ctas;
    int64_t kernel = 0; // of the launch layer; 0 on targets without one
};

// Where calls of a buffer end. Kernels go to the launch layer: on a device, in the emulator, or nowhere with everything
// prepared (kNullKernel); kNone stops before that.
enum class Route : int { kOracle = 0, kCuda, kEmulator, kNullKernel, kNone };
// "oracle", "cuda:N", "emulator", "null" and "none".
std::string place_name(Route route, const runtime::Buffer& buffer);
Route route_named(std::string_view name);
// What CPU buffers use unless told otherwise.
void set_cpu_route(Route route);

// Everything that ranks compare and kernels are compiled from, in one word. Token counts are no part of it.
using SignatureBits = uint64_t;
SignatureBits signature_of(const checks::Call& call);
heuristics::Problem problem_of(const checks::Call& call);
heuristics::DeviceFacts device_of(const runtime::Buffer& buffer);

// Encoded tensor maps by what they describe: a serving process meets each layer's weights in every step.
class MapCache {
  public:
    TensorMap get(const jit::TensorMapSpec& spec, jit::Target target, const char* name);

  private:
    struct Key {
        const void* address;
        uint64_t dims;
        uint64_t box;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        size_t operator()(const Key& key) const {
            return (reinterpret_cast<uint64_t>(key.address) * 0x9E3779B97F4A7C15u) ^ key.dims * 31 ^ key.box;
        }
    };
    std::mutex mutex_;
    std::unordered_map<Key, TensorMap, KeyHash> maps_;
};

class PlanStore {
  public:
    bool is_ready(SignatureBits signature);
    void set_ready(SignatureBits signature);
    // Made on first use; lives as long as someone holds it.
    std::shared_ptr<const Plan> plan(SignatureBits signature, const checks::Call& call);

    explicit PlanStore(Route route) : route_(route) {}
    void set_route(Route route);
    // For measurements: what the planner has to take; device memory for the timeline, which another kernel writes.
    void set_overrides(const heuristics::Overrides& overrides);
    const heuristics::Overrides& overrides() const { return overrides_; }
    void set_timeline(void* memory);
    void* timeline() const { return timeline_; }
    Route route() const { return route_; }

    MapCache maps;
    uint32_t debug_delay_ns = 0; // for tests: how late this rank takes part
    // Where kernels that run on the CPU report.
    plan::AbortCell error_record{};

  private:
    struct Key {
        SignatureBits signature;
        uint64_t counts;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        size_t operator()(const Key& key) const { return (key.signature * 0x9E3779B97F4A7C15u) ^ key.counts; }
    };

    void forget(); // plans made, and made ready, for something else

    std::mutex mutex_;
    Route route_;
    void* timeline_ = nullptr;
    heuristics::Overrides overrides_{};
    std::unordered_set<SignatureBits> ready_;
    std::unordered_map<Key, std::shared_ptr<const Plan>, KeyHash> plans_;
};

// {"signature": what ranks compare, "problem": what all_configs takes, "place": where kernels go}
json::Value describe_signature(const checks::Call& call, const PlanStore& store);

// The store of a buffer, made on first use and freed with it.
PlanStore& store_of(runtime::Buffer& buffer);

} // namespace deep_gemm_k3::impls
