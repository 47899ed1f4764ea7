#include "jit/driver.hpp"

#include <dlfcn.h>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace deep_gemm_k3::jit::cu {
namespace {

struct Opened {
    Api api{};
    std::string reason;
};

template <class Function>
bool resolve(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

const char* resolve_all(void* library, Api& api) {
#define DG_RESOLVE(member, symbol)                                                                                     \
    if (!resolve(library, api.member, symbol))                                                                         \
    return symbol
    DG_RESOLVE(Init, "cuInit");
    DG_RESOLVE(DriverGetVersion, "cuDriverGetVersion");
    DG_RESOLVE(GetErrorName, "cuGetErrorName");
    DG_RESOLVE(GetErrorString, "cuGetErrorString");
    DG_RESOLVE(DeviceGetCount, "cuDeviceGetCount");
    DG_RESOLVE(DeviceGet, "cuDeviceGet");
    DG_RESOLVE(DeviceGetName, "cuDeviceGetName");
    DG_RESOLVE(DeviceGetAttribute, "cuDeviceGetAttribute");
    DG_RESOLVE(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    DG_RESOLVE(CtxGetCurrent, "cuCtxGetCurrent");
    DG_RESOLVE(CtxPushCurrent, "cuCtxPushCurrent_v2");
    DG_RESOLVE(CtxPopCurrent, "cuCtxPopCurrent_v2");
    DG_RESOLVE(ModuleLoadDataEx, "cuModuleLoadDataEx");
    DG_RESOLVE(ModuleUnload, "cuModuleUnload");
    DG_RESOLVE(ModuleGetFunction, "cuModuleGetFunction");
    DG_RESOLVE(FuncGetAttribute, "cuFuncGetAttribute");
    DG_RESOLVE(FuncSetAttribute, "cuFuncSetAttribute");
    DG_RESOLVE(OccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    DG_RESOLVE(OccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters");
    DG_RESOLVE(LaunchKernelEx, "cuLaunchKernelEx");
    DG_RESOLVE(StreamCreate, "cuStreamCreate");
    DG_RESOLVE(StreamSynchronize, "cuStreamSynchronize");
    DG_RESOLVE(StreamIsCapturing, "cuStreamIsCapturing");
    DG_RESOLVE(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    DG_RESOLVE(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    DG_RESOLVE(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
    DG_RESOLVE(MemHostAlloc, "cuMemHostAlloc");
    DG_RESOLVE(MemFreeHost, "cuMemFreeHost");
    DG_RESOLVE(TensorMapEncodeTiled, "cuTensorMapEncodeTiled");
#undef DG_RESOLVE
    resolve(library, api.FuncLoad, "cuFuncLoad"); // 12.4 and later; without it a first launch loads the code
    resolve(library, api.FuncGetParamInfo, "cuFuncGetParamInfo");
    return nullptr;
}

Opened open() {
    Opened opened;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* text = dlerror();
        opened.reason = std::string("libcuda.so.1: wanted the CUDA driver, given none (") + (text ? text : "") + ")";
        return opened;
    }
    if (const char* missing = resolve_all(library, opened.api)) {
        opened.reason =
            std::string("libcuda.so.1: wanted a driver for CUDA 12.3 or later, given one without ") + missing;
        return opened;
    }
    if (const Result result = opened.api.Init(0); result != kSuccess) {
        const char* name = nullptr;
        opened.api.GetErrorName(result, &name);
        opened.reason = std::string("cuInit: wanted a usable device, given ") + (name ? name : "an unknown error");
    }
    return opened;
}

const Opened& opened() {
    static const Opened instance = open();
    return instance;
}

int attribute(int which, Device device) {
    int value = 0;
    check(api().DeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
}

struct DeviceState {
    DeviceFacts facts;
    Context context = nullptr;
};

// Per device, made on first use.
template <class Make>
const DeviceState& device_state(int device, Make make) {
    static std::mutex mutex;
    static std::vector<DeviceState*> states;
    const std::lock_guard lock(mutex);
    if (device < 0)
        throw std::runtime_error("device: wanted a CUDA device index, given " + std::to_string(device));
    if (states.size() <= static_cast<size_t>(device))
        states.resize(device + 1, nullptr);
    if (states[device] == nullptr)
        states[device] = new DeviceState;
    make(*states[device]);
    return *states[device];
}

Device device_handle(int device) {
    Device handle = 0;
    check(api().DeviceGet(&handle, device), "cuDeviceGet");
    return handle;
}

} // namespace

const Api& api() {
    if (!opened().reason.empty())
        throw std::runtime_error(opened().reason);
    return opened().api;
}

const std::string& unavailable_reason() {
    return opened().reason;
}

std::string error_text(Result result) {
    const char* name = nullptr;
    const char* text = nullptr;
    opened().api.GetErrorName(result, &name);
    opened().api.GetErrorString(result, &text);
    return std::string(name ? name : "unknown error") + " (" + std::to_string(result) + ")" +
           (text ? std::string(": ") + text : std::string());
}

void check(Result result, const char* what) {
    if (result != kSuccess)
        throw std::runtime_error(std::string(what) + ": the CUDA driver refused: " + error_text(result));
}

ContextScope::ContextScope(Context context) {
    Context current = nullptr;
    check(api().CtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current == context)
        return;
    check(api().CtxPushCurrent(context), "cuCtxPushCurrent");
    pushed_ = true;
}

ContextScope::~ContextScope() {
    Context popped = nullptr;
    if (pushed_)
        opened().api.CtxPopCurrent(&popped);
}

Context primary_context(int device) {
    return device_state(device, [&](DeviceState& state) {
        if (state.context == nullptr)
            check(api().DevicePrimaryCtxRetain(&state.context, device_handle(device)), "cuDevicePrimaryCtxRetain");
    }).context;
}

const DeviceFacts& device_facts(int device) {
    return device_state(device, [&](DeviceState& state) {
        DeviceFacts& facts = state.facts;
        if (facts.num_sms != 0)
            return;
        const Device handle = device_handle(device);
        char name[256] = {};
        check(api().DeviceGetName(name, sizeof(name) - 1, handle), "cuDeviceGetName");
        facts.name = name;
        facts.compute_major = attribute(kDeviceComputeMajor, handle);
        facts.compute_minor = attribute(kDeviceComputeMinor, handle);
        facts.max_shared_bytes = attribute(kDeviceMaxSharedBytesOptin, handle);
        facts.num_sms = attribute(kDeviceNumSms, handle);
    }).facts;
}

} // namespace deep_gemm_k3::jit::cu
