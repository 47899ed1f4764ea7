// What lies between the machine and its callers: loaded modules, launches prepared from plain arguments, reports.
#pragma once

#include <mutex>

#include "decode.hpp"
#include "machine.hpp"

namespace deep_gemm_k3::jit {
struct LaunchRequest;
}

namespace deep_gemm_k3::emulator {

class Module {
  public:
    explicit Module(const std::string& text);
    const Syntax& syntax() const { return *syntax_; }
    std::shared_ptr<const Program> program(const std::string& kernel); // decoded once
    std::shared_ptr<ModuleInstance> instantiate() const;               // fresh module variables
    std::string describe() const;                                      // JSON
    const ModuleLayout& layout() const { return layout_; }

  private:
    std::unique_ptr<Syntax> syntax_;
    ModuleLayout layout_;
    std::vector<std::unique_ptr<Function>> lowered_; // what the programs were made of
    std::map<std::string, std::shared_ptr<const Program>> programs_;
    std::mutex mutex_;
};

struct LaunchArguments {
    Module* module = nullptr;
    std::shared_ptr<ModuleInstance> instance;
    std::string kernel;
    u32 grid[3], block[3], cluster[3];
    u32 dynamic_shared = 0, num_sms = 4, rank = 0;
    const u8* params = nullptr;
    u64 param_bytes = 0;
};

constexpr u32 kSharedPerSm = 228 * 1024, kSharedPerCta = 227 * 1024, kThreadsPerSm = 2048, kCtasPerSm = 32;

// CTAs of a kernel that fit on one SM; registers are not counted, PTX does not say how many there are.
u32 ctas_per_sm(u32 shared_bytes, u32 threads);
// Checks everything a driver would refuse; throws std::invalid_argument.
std::unique_ptr<Launch> prepare(const LaunchArguments& arguments);
std::string report_json(const Machine& machine);
std::string json_text(const std::string& text);
std::string record_text(s64 kernel, const std::string& entry, const jit::LaunchRequest& request);

} // namespace deep_gemm_k3::emulator
