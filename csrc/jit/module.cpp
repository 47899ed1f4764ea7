#include "jit/module.hpp"

#include <cstring>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace deep_gemm_k3::jit {
namespace {

constexpr int64_t kMaxKernels = 1 << 14;

std::atomic<LoadedKernel*> kernels[kMaxKernels];
std::atomic<int64_t> num_kernels{0};
std::mutex registry_mutex;
EmulatorHooks emulator_hooks;

std::unordered_map<std::string, int64_t>& handles() {
    static std::unordered_map<std::string, int64_t> map;
    return map;
}

std::string slot(std::string_view key, int device) {
    return std::to_string(device) + " " + std::string(key);
}

std::string first_word(const std::string& key) {
    return key.substr(0, key.find(' '));
}

// Compute capabilities that run an artefact: exact for "a", the major version for "f".
bool runs_on(const std::string& arch, const cu::DeviceFacts& facts) {
    const std::string exact = "sm_" + std::to_string(facts.compute_major * 10 + facts.compute_minor);
    if (arch == exact + "a" || arch == exact)
        return true;
    return arch.back() == 'f' && arch == "sm_" + std::to_string(facts.compute_major * 10) + "f";
}

// What a cubin says about itself: 90 for sm_90a; 0 when the bytes are no cubin.
int image_architecture(const void* image, size_t bytes) {
    constexpr size_t kFlagsOffset = 48, kHeaderBytes = 64;
    const auto* data = static_cast<const unsigned char*>(image);
    if (bytes < kHeaderBytes || std::memcmp(data, "\177ELF", 4) != 0)
        return 0;
    uint32_t flags = 0;
    std::memcpy(&flags, data + kFlagsOffset, sizeof(flags));
    return data[8] >= 8 ? (flags >> 8) & 0xff : flags & 0xff;
}

void check_image(const KernelSpec& spec, const cu::DeviceFacts& facts) {
    const std::string device = "device " + std::to_string(spec.device) + ", " + facts.name + ", compute capability " +
                               std::to_string(facts.compute_major) + "." + std::to_string(facts.compute_minor);
    const std::string wanted =
        "sm_" + std::to_string(facts.compute_major * 10 + facts.compute_minor) + "a (" + device + ")";
    if (!runs_on(spec.arch, facts))
        throw std::runtime_error(
            "kernel " + first_word(spec.key) + ": wanted an artefact for " + wanted + ", given one for " + spec.arch);
    const int found = image_architecture(spec.image, spec.image_bytes);
    if (found == 0)
        throw std::runtime_error("kernel " + first_word(spec.key) + ": wanted a cubin for " + wanted + ", given " +
                                 std::to_string(spec.image_bytes) + " bytes that are none");
    if (std::to_string(found) != spec.arch.substr(3, spec.arch.size() - 4))
        throw std::runtime_error("kernel " + first_word(spec.key) + ": wanted a cubin for " + wanted +
                                 ", given one for sm_" + std::to_string(found) + " that is named " + spec.arch);
}

int function_attribute(const LoadedKernel& kernel, int which) {
    int value = 0;
    cu::check(cu::api().FuncGetAttribute(&value, which, kernel.function), "cuFuncGetAttribute");
    return value;
}

void check_params(const LoadedKernel& kernel) {
    size_t offset = 0, size = 0;
    if (cu::api().FuncGetParamInfo == nullptr || kernel.params_bytes == 0)
        return;
    if (cu::api().FuncGetParamInfo(kernel.function, 0, &offset, &size) != cu::kSuccess)
        size = 0;
    if (size != kernel.params_bytes)
        throw std::runtime_error("kernel " + first_word(kernel.key) + ": wanted an argument of " +
                                 std::to_string(size) + " bytes, given one of " + std::to_string(kernel.params_bytes) +
                                 " bytes (host library and headers are of different versions)");
}

void load_cuda(const KernelSpec& spec, LoadedKernel& kernel) {
    check_image(spec, cu::device_facts(spec.device));
    const cu::Api& api = cu::api();
    kernel.context = cu::primary_context(spec.device);
    const cu::ContextScope scope(kernel.context);
    cu::check(api.ModuleLoadDataEx(&kernel.module, spec.image, 0, nullptr, nullptr), "cuModuleLoadDataEx");
    cu::check(api.ModuleGetFunction(&kernel.function, kernel.module, spec.entry.c_str()), "cuModuleGetFunction");
    if (api.FuncLoad != nullptr)
        cu::check(api.FuncLoad(kernel.function), "cuFuncLoad");
    kernel.num_registers = function_attribute(kernel, cu::kAttributeNumRegisters);
    kernel.static_shared_bytes = function_attribute(kernel, cu::kAttributeSharedBytes);
    kernel.local_bytes = function_attribute(kernel, cu::kAttributeLocalBytes);
    kernel.max_threads = function_attribute(kernel, cu::kAttributeMaxThreadsPerBlock);
    check_params(kernel);
}

} // namespace

std::string kernel_key(std::string_view name, std::string_view arch, std::string_view config_literal) {
    return std::string(name) + " " + std::string(arch) + " " + std::string(config_literal);
}

int64_t find_kernel(std::string_view key, int device) {
    const std::lock_guard lock(registry_mutex);
    const auto found = handles().find(slot(key, device));
    return found == handles().end() ? 0 : found->second;
}

int64_t register_kernel(const KernelSpec& spec) {
    const std::lock_guard lock(registry_mutex);
    const std::string name = slot(spec.key, spec.device);
    if (const auto found = handles().find(name); found != handles().end())
        return found->second;
    const int64_t index = num_kernels.load();
    if (index + 1 >= kMaxKernels)
        throw std::runtime_error(
            "kernels: wanted fewer than " + std::to_string(kMaxKernels) + " loaded in one process");
    auto* kernel = new LoadedKernel{};
    try {
        kernel->target = spec.target;
        kernel->key = spec.key;
        kernel->entry = spec.entry;
        kernel->arch = spec.arch;
        kernel->device = spec.device;
        kernel->params_bytes = spec.params_bytes;
        if (spec.target == Target::kCuda) {
            load_cuda(spec, *kernel);
        } else if (spec.target == Target::kEmulator) {
            if (emulator_hooks.load == nullptr)
                throw std::runtime_error(
                    "kernel " + first_word(spec.key) + ": wanted the emulator, given a library without it");
            kernel->emulator_kernel = emulator_hooks.load(spec);
        }
    } catch (...) {
        if (kernel->module != nullptr)
            cu::api().ModuleUnload(kernel->module);
        delete kernel;
        throw;
    }
    kernels[index + 1].store(kernel, std::memory_order_release);
    num_kernels.store(index + 1);
    handles().emplace(name, index + 1);
    return index + 1;
}

LoadedKernel& kernel(int64_t handle) {
    LoadedKernel* found =
        handle > 0 && handle < kMaxKernels ? kernels[handle].load(std::memory_order_acquire) : nullptr;
    if (found == nullptr)
        throw std::runtime_error("kernel: wanted the handle of a registered kernel, given " + std::to_string(handle));
    return *found;
}

void set_emulator(const EmulatorHooks& hooks) {
    const std::lock_guard lock(registry_mutex);
    emulator_hooks = hooks;
}

const EmulatorHooks& emulator() {
    return emulator_hooks;
}

} // namespace deep_gemm_k3::jit
