// The CUDA driver, opened on first use: the library loads on machines that have none. The few types and constants
// needed here are declared in our own words, so that building needs no CUDA headers; a test compares them with cuda.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace deep_gemm_k3::jit::cu {

using Result = int;
using Device = int;
using DevicePtr = unsigned long long;
using Context = struct ContextOpaque*;
using Module = struct ModuleOpaque*;
using Function = struct FunctionOpaque*;
using Stream = struct StreamOpaque*;

constexpr Result kSuccess = 0;
constexpr Result kErrorInvalidContext = 201;
constexpr Result kErrorCooperativeLaunchTooLarge = 720;
constexpr Result kErrorStreamCaptureImplicit = 906;

constexpr int kAttributeMaxThreadsPerBlock = 0; // of a function
constexpr int kAttributeSharedBytes = 1;
constexpr int kAttributeLocalBytes = 3;
constexpr int kAttributeNumRegisters = 4;
constexpr int kAttributeMaxDynamicSharedBytes = 8;
constexpr int kAttributeNonPortableClusterSize = 14;

constexpr int kDeviceNumSms = 16; // of a device
constexpr int kDeviceComputeMajor = 75;
constexpr int kDeviceComputeMinor = 76;
constexpr int kDeviceMaxSharedBytesOptin = 97;

constexpr int kLaunchCooperative = 2;
constexpr int kLaunchClusterDimension = 4;
constexpr int kLaunchProgrammaticStreamSerialization = 6;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kHostAllocPortable = 1;
constexpr unsigned kHostAllocDeviceMap = 2;
constexpr int kCaptureModeRelaxed = 2;
constexpr int kCaptureStatusNone = 0;

struct LaunchAttribute {
    int id;
    char pad[4];
    union {
        char bytes[64];
        int cooperative;
        struct {
            unsigned x, y, z;
        } cluster;
        int programmatic_stream_serialization;
    };
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
    unsigned grid_x, grid_y, grid_z;
    unsigned block_x, block_y, block_z;
    unsigned shared_bytes;
    Stream stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56);

// Functions used, named as in the driver without their prefix.
struct Api {
    Result (*Init)(unsigned);
    Result (*DriverGetVersion)(int*);
    Result (*GetErrorName)(Result, const char**);
    Result (*GetErrorString)(Result, const char**);
    Result (*DeviceGetCount)(int*);
    Result (*DeviceGet)(Device*, int);
    Result (*DeviceGetName)(char*, int, Device);
    Result (*DeviceGetAttribute)(int*, int, Device);
    Result (*DevicePrimaryCtxRetain)(Context*, Device);
    Result (*CtxGetCurrent)(Context*);
    Result (*CtxPushCurrent)(Context);
    Result (*CtxPopCurrent)(Context*);
    Result (*ModuleLoadDataEx)(Module*, const void*, unsigned, int*, void**);
    Result (*ModuleUnload)(Module);
    Result (*ModuleGetFunction)(Function*, Module, const char*);
    Result (*FuncLoad)(Function);
    Result (*FuncGetAttribute)(int*, int, Function);
    Result (*FuncSetAttribute)(Function, int, int);
    Result (*FuncGetParamInfo)(Function, size_t, size_t*, size_t*);
    Result (*OccupancyMaxActiveBlocksPerMultiprocessor)(int*, Function, int, size_t);
    Result (*OccupancyMaxActiveClusters)(int*, Function, const LaunchConfig*);
    Result (*LaunchKernelEx)(const LaunchConfig*, Function, void**, void**);
    Result (*StreamCreate)(Stream*, unsigned);
    Result (*StreamSynchronize)(Stream);
    Result (*StreamIsCapturing)(Stream, int*);
    Result (*ThreadExchangeStreamCaptureMode)(int*);
    Result (*MemcpyHtoDAsync)(DevicePtr, const void*, size_t, Stream);
    Result (*MemcpyDtoHAsync)(void*, DevicePtr, size_t, Stream);
    Result (*MemHostAlloc)(void**, size_t, unsigned);
    Result (*MemFreeHost)(void*);
    Result (*TensorMapEncodeTiled)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*,
        const unsigned*, int, int, int, int);
};

// Raises with the reason when there is no usable driver.
const Api& api();

// Empty when the driver is usable, else the reason. Opens the library at most once and never creates a context.
const std::string& unavailable_reason();

// "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
std::string error_text(Result result);

// Raises "WHAT: the CUDA driver refused: NAME (code): text" unless `result` is success.
void check(Result result, const char* what);

// Makes the primary context of a device current for a scope (no call to the driver's stack when it is current already).
class ContextScope {
  public:
    explicit ContextScope(Context context);
    ~ContextScope();
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;

  private:
    bool pushed_ = false;
};

// Primary context of a device, retained once per process.
Context primary_context(int device);

struct DeviceFacts {
    std::string name;
    int compute_major = 0, compute_minor = 0;
    int num_sms = 0;
    int max_shared_bytes = 0;
};
const DeviceFacts& device_facts(int device);

} // namespace deep_gemm_k3::jit::cu
