// Registry of loaded kernels: filled after compilation (from Python), looked up by key when a plan is made and by
// handle on the hot path.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "driver.hpp"
#include "launch.hpp"

namespace deep_gemm_k3::jit {

enum class Target : int { kCuda = 0, kEmulator = 1, kNull = 2 };

// Device index of kernels that run on no GPU.
constexpr int kNoDevice = -1;
// Index that stands for the emulator: one key may be registered there, on devices and nowhere.
constexpr int kEmulatorDevice = -2;

struct KernelSpec {
    Target target = Target::kCuda;
    std::string key;   // "NAME ARCH {config literal}", as kernel_key() writes it
    std::string entry; // mangled name inside the image
    std::string arch;  // what the image was compiled for: sm_90a, sm_100a, sm_100f
    int device = kNoDevice;
    const void* image = nullptr; // cubin (CUDA) or PTX text (emulator); copied by whoever keeps it
    size_t image_bytes = 0;
    size_t params_bytes = 0; // size of the kernel's one argument
};

struct LoadedKernel {
    Target target;
    std::string key, entry, arch;
    int device;
    size_t params_bytes;
    // CUDA
    cu::Context context = nullptr;
    cu::Module module = nullptr;
    cu::Function function = nullptr;
    int num_registers = 0;
    int static_shared_bytes = 0;
    int local_bytes = 0; // spills and stack of one thread
    int max_threads = 0;
    std::atomic<uint32_t> dynamic_shared_limit{0};
    // emulator
    int64_t emulator_kernel = 0;
};

// "mega sm_90a {.arch = ...}": equal on both sides of the language border.
std::string kernel_key(std::string_view name, std::string_view arch, std::string_view config_literal);

// Loads the image into the device (eagerly: nothing is loaded at the first launch) and returns a handle > 0.
// Registering a key twice for one device returns the first handle.
int64_t register_kernel(const KernelSpec& spec);

// 0 when no kernel of that key is registered for the device.
int64_t find_kernel(std::string_view key, int device);

// Valid for the life of the process.
LoadedKernel& kernel(int64_t handle);

// The emulator announces itself here; until it does, kernels of Target::kEmulator are refused.
struct EmulatorHooks {
    int64_t (*load)(const KernelSpec& spec) = nullptr;
    void (*launch)(int64_t emulator_kernel, const LaunchRequest& request) = nullptr;
};
void set_emulator(const EmulatorHooks& hooks);
const EmulatorHooks& emulator();

} // namespace deep_gemm_k3::jit
