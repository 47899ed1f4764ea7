// A stand-in for libcuda.so.1 on machines without a GPU: it answers the calls of the launch layer from a few settings
// and keeps a journal of what it was asked to do. Preloaded into a child process of test_jit_launch.py, which also
// needs torch's stream, so that is here too.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "jit/driver.hpp"

using namespace deep_gemm_k3::jit::cu;

namespace {
std::map<std::string, int> settings;
int setting(const char* name, int otherwise) {
    const auto found = settings.find(name);
    return found == settings.end() ? otherwise : found->second;
}
template <class... Values>
Result note(const char* format, Values... values) {
    std::printf(format, values...);
    std::printf("\n");
    std::fflush(stdout);
    return kSuccess;
}
int current_context = 0;
int context_object, module_object, function_object, stream_object;
} // namespace

extern "C" {
void fake_driver_set(const char* name, int value) {
    settings[name] = value;
}
Result cuInit(unsigned) {
    return setting("init", 0);
}
Result cuDriverGetVersion(int* version) {
    return *version = 13000, kSuccess;
}
Result cuGetErrorName(Result result, const char** name) {
    return *name = result == 720 ? "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE" : "CUDA_ERROR_INVALID_VALUE", kSuccess;
}
Result cuGetErrorString(Result, const char** text) {
    return *text = "as told", kSuccess;
}
Result cuDeviceGetCount(int* count) {
    return *count = 1, kSuccess;
}
Result cuDeviceGet(Device* device, int index) {
    return *device = index, index == 0 ? kSuccess : 101;
}
Result cuDeviceGetName(char* name, int bytes, Device) {
    return std::snprintf(name, bytes, "Fake GPU"), kSuccess;
}
Result cuDeviceGetAttribute(int* value, int which, Device) {
    *value = which == kDeviceNumSms         ? 132
             : which == kDeviceComputeMajor ? setting("major", 9)
             : which == kDeviceComputeMinor ? setting("minor", 0)
                                            : 232448;
    return kSuccess;
}
Result cuDevicePrimaryCtxRetain(Context* context, Device) {
    return *context = reinterpret_cast<Context>(&context_object), note("retain");
}
Result cuCtxGetCurrent(Context* context) {
    return *context = current_context ? reinterpret_cast<Context>(&context_object) : nullptr, kSuccess;
}
Result cuCtxPushCurrent_v2(Context) {
    return current_context = 1, kSuccess;
}
Result cuCtxPopCurrent_v2(Context*) {
    return current_context = 0, kSuccess;
}
Result cuModuleLoadDataEx(Module* module, const void*, unsigned, int*, void**) {
    return *module = reinterpret_cast<Module>(&module_object), note("module in context %d", current_context);
}
Result cuModuleUnload(Module) {
    return note("unload");
}
Result cuModuleGetFunction(Function* function, Module, const char* name) {
    return *function = reinterpret_cast<Function>(&function_object), note("function %s", name);
}
Result cuFuncLoad(Function) {
    return note("load now");
}
Result cuFuncGetAttribute(int* value, int which, Function) {
    *value = which == kAttributeNumRegisters ? 64 : which == kAttributeSharedBytes ? 1024 : 0;
    return kSuccess;
}
Result cuFuncSetAttribute(Function, int which, int value) {
    return note("attribute %d = %d", which, value);
}
Result cuFuncGetParamInfo(Function, size_t, size_t* offset, size_t* size) {
    return *offset = 0, *size = 32, kSuccess;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Function, int, size_t) {
    return *count = 2, kSuccess;
}
Result cuOccupancyMaxActiveClusters(int* count, Function, const LaunchConfig* config) {
    return *count = 100, note("clusters of %u", config->attributes[0].cluster.x);
}
Result cuLaunchKernelEx(const LaunchConfig* c, Function, void** arguments, void**) {
    note("launch grid %u %u %u block %u shared %u stream %d context %d first byte %d", c->grid_x, c->grid_y, c->grid_z,
        c->block_x, c->shared_bytes, static_cast<int>(reinterpret_cast<intptr_t>(c->stream)), current_context,
        *static_cast<unsigned char*>(arguments[0]));
    for (unsigned i = 0; i < c->num_attributes; ++i)
        note("  attribute %d: %u", c->attributes[i].id, c->attributes[i].cluster.x);
    return setting("launch", 0);
}
Result cuStreamCreate(Stream* stream, unsigned flags) {
    return *stream = reinterpret_cast<Stream>(&stream_object), note("stream %u", flags);
}
Result cuStreamSynchronize(Stream) {
    return note("synchronise");
}
Result cuStreamIsCapturing(Stream, int* status) {
    return *status = setting("capture", 0), kSuccess;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
    return *mode = 2, kSuccess;
}
Result cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, size_t bytes, Stream) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return note("copy %zu bytes in", bytes);
}
Result cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, size_t bytes, Stream) {
    std::memcpy(to, reinterpret_cast<void*>(from), bytes);
    return note("copy %zu bytes out", bytes);
}
Result cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
    return *memory = std::calloc(1, bytes), note("pinned %zu flags %u", bytes, flags);
}
Result cuMemFreeHost(void* memory) {
    return std::free(memory), note("free pinned");
}
Result cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void*, const uint64_t*, const uint64_t*,
    const unsigned*, const unsigned*, int, int, int, int) {
    std::memset(map, 0xab, 128);
    return note("encode type %d rank %u", type, rank);
}
int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
    return *stream = reinterpret_cast<void*>(intptr_t(1000 + device)), 0;
}
}
