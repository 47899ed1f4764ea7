#include "jit/launch.hpp"

#include "jit/driver.hpp"
#include "jit/module.hpp"

#include <algorithm>
#include <atomic>
#include <dlfcn.h>
#include <stdexcept>

namespace deep_gemm_k3::jit {
namespace {

constexpr uint32_t kLargestPortableCluster = 8;

std::string dims(const Dim3& d) {
    return std::to_string(d.x) + "x" + std::to_string(d.y) + "x" + std::to_string(d.z);
}

std::string describe(const LoadedKernel& kernel, const LaunchRequest& request) {
    return kernel.key.substr(0, kernel.key.find(' ')) + " (" + kernel.arch + ", grid " + dims(request.grid) +
           ", block " + dims(request.block) + ", cluster " + dims(request.cluster) + ", " +
           std::to_string(request.shared_bytes) + " bytes of dynamic shared memory)";
}

// Attributes of a function are its own: raised once, never lowered.
void allow_shared_memory(LoadedKernel& kernel, uint32_t bytes) {
    if (bytes <= kernel.dynamic_shared_limit.load(std::memory_order_relaxed))
        return;
    const int limit = cu::device_facts(kernel.device).max_shared_bytes - kernel.static_shared_bytes;
    if (bytes > static_cast<uint32_t>(limit))
        throw std::runtime_error("shared memory of kernel " + kernel.key.substr(0, kernel.key.find(' ')) +
                                 ": wanted at most " + std::to_string(limit) + " dynamic bytes (device " +
                                 std::to_string(kernel.device) + "), given " + std::to_string(bytes));
    const cu::Result result =
        cu::api().FuncSetAttribute(kernel.function, cu::kAttributeMaxDynamicSharedBytes, static_cast<int>(bytes));
    cu::check(result, "cuFuncSetAttribute(dynamic shared memory)");
    kernel.dynamic_shared_limit.store(bytes, std::memory_order_relaxed);
}

struct Prepared {
    cu::LaunchAttribute attributes[3];
    cu::LaunchConfig config;
};

void prepare(LoadedKernel& kernel, const LaunchRequest& request, Prepared& out) {
    allow_shared_memory(kernel, request.shared_bytes);
    unsigned count = 0;
    if (request.cluster.count() > 1) {
        if (request.cluster.count() > kLargestPortableCluster)
            cu::check(cu::api().FuncSetAttribute(kernel.function, cu::kAttributeNonPortableClusterSize, 1),
                "cuFuncSetAttribute(cluster size)");
        cu::LaunchAttribute& attribute = out.attributes[count++];
        attribute.id = cu::kLaunchClusterDimension;
        attribute.cluster = {request.cluster.x, request.cluster.y, request.cluster.z};
    }
    if (request.cooperative) {
        out.attributes[count].id = cu::kLaunchCooperative;
        out.attributes[count++].cooperative = 1;
    }
    if (request.dependent) {
        out.attributes[count].id = cu::kLaunchProgrammaticStreamSerialization;
        out.attributes[count++].programmatic_stream_serialization = 1;
    }
    out.config = {request.grid.x, request.grid.y, request.grid.z, request.block.x, request.block.y, request.block.z,
        request.shared_bytes, static_cast<cu::Stream>(request.stream), out.attributes, count};
}

void launch_cuda(LoadedKernel& kernel, const LaunchRequest& request) {
    const cu::ContextScope scope(kernel.context);
    Prepared prepared;
    prepare(kernel, request, prepared);
    void* arguments[] = {const_cast<void*>(request.params)};
    const cu::Result result = cu::api().LaunchKernelEx(&prepared.config, kernel.function, arguments, nullptr);
    if (result == cu::kErrorCooperativeLaunchTooLarge)
        throw std::runtime_error("launch of " + describe(kernel, request) +
                                 ": wanted a grid whose CTAs are all resident at once, given one that is too large");
    if (result != cu::kSuccess)
        throw std::runtime_error(
            "launch of " + describe(kernel, request) + ": the CUDA driver refused: " + cu::error_text(result));
}

using GetStream = int32_t (*)(int32_t device, void** stream);

// A CPU build of torch has no such function, and libraries that Python opened are not in the global scope.
GetStream find_get_stream() {
    constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
    void* found = dlsym(RTLD_DEFAULT, kName);
    for (const char* library : {"libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch.so"}) {
        if (found != nullptr)
            break;
        if (void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD))
            found = dlsym(handle, kName);
    }
    return reinterpret_cast<GetStream>(found);
}

} // namespace

void launch(const LaunchRequest& request) {
    LoadedKernel& found = kernel(request.kernel);
    if (found.params_bytes != 0 && found.params_bytes != request.params_bytes)
        throw std::runtime_error("launch of " + describe(found, request) + ": wanted an argument of " +
                                 std::to_string(found.params_bytes) + " bytes, given one of " +
                                 std::to_string(request.params_bytes));
    switch (found.target) {
    case Target::kCuda:
        launch_cuda(found, request);
        break;
    case Target::kEmulator:
        emulator().launch(found.emulator_kernel, request);
        break;
    case Target::kNull:
        break;
    }
}

int max_ctas_per_sm(int64_t handle, uint32_t num_threads, uint32_t shared_bytes) {
    LoadedKernel& found = kernel(handle);
    if (found.target != Target::kCuda)
        return 1;
    const cu::ContextScope scope(found.context);
    allow_shared_memory(found, shared_bytes);
    int count = 0;
    const cu::Result result = cu::api().OccupancyMaxActiveBlocksPerMultiprocessor(
        &count, found.function, static_cast<int>(num_threads), shared_bytes);
    cu::check(result, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    return count;
}

void check_co_resident(const LaunchRequest& request, int num_sms) {
    LoadedKernel& found = kernel(request.kernel);
    if (found.target != Target::kCuda)
        return;
    const int device_sms = cu::device_facts(found.device).num_sms;
    const int sms = num_sms == 0 ? device_sms : num_sms;
    if (sms < 0 || sms > device_sms)
        throw std::runtime_error("num_sms: wanted at most " + std::to_string(device_sms) + " (device " +
                                 std::to_string(found.device) + "), given " + std::to_string(num_sms));
    const uint32_t num_threads = static_cast<uint32_t>(request.block.count());
    uint64_t resident = uint64_t(sms) * max_ctas_per_sm(request.kernel, num_threads, request.shared_bytes);
    if (request.cluster.count() > 1) {
        const cu::ContextScope scope(found.context);
        Prepared prepared;
        prepare(found, request, prepared);
        int clusters = 0;
        const cu::Result result = cu::api().OccupancyMaxActiveClusters(&clusters, found.function, &prepared.config);
        cu::check(result, "cuOccupancyMaxActiveClusters");
        resident = std::min<uint64_t>(resident, clusters * request.cluster.count() * sms / device_sms);
    }
    if (request.grid.count() > resident)
        throw std::runtime_error(describe(found, request) + ": wanted at most " + std::to_string(resident) +
                                 " CTAs, which " + std::to_string(sms) + " SMs hold at once, given " +
                                 std::to_string(request.grid.count()));
}

void* current_stream(int device) {
    static const GetStream get_stream = find_get_stream();
    if (get_stream == nullptr)
        throw std::runtime_error("torch: wanted a build with CUDA, given one that has no CUDA streams");
    void* stream = nullptr;
    if (get_stream(device, &stream) != 0)
        throw std::runtime_error("torch: has no current stream of CUDA device " + std::to_string(device));
    return stream;
}

bool is_capturing(void* stream) {
    int status = cu::kCaptureStatusNone;
    const cu::Result result = cu::api().StreamIsCapturing(static_cast<cu::Stream>(stream), &status);
    // The legacy stream cannot capture, but asking for it while another stream does is refused like using it.
    if (result == cu::kErrorStreamCaptureImplicit)
        return true;
    if (stream == nullptr && result == cu::kErrorInvalidContext)
        return false;
    cu::check(result, "cuStreamIsCapturing");
    return status != cu::kCaptureStatusNone;
}

void refuse_while_capturing(void* stream, const std::string& what, const std::string& advice) {
    if (is_capturing(stream))
        throw std::runtime_error(
            what + ": wanted before the capture of a CUDA graph, given a stream that is capturing; call " + advice +
            " before the capture");
}

} // namespace deep_gemm_k3::jit
