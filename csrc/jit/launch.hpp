// The one place that launches kernels. A caller fills a LaunchRequest; where it runs (CUDA driver, emulator, nowhere)
// was decided when the kernel was registered.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace deep_gemm_k3::jit {

struct Dim3 {
    uint32_t x = 1, y = 1, z = 1;

    uint64_t count() const { return uint64_t(x) * y * z; }
};

struct LaunchRequest {
    int64_t kernel = 0; // handle of register_kernel (module.hpp)
    Dim3 grid;
    Dim3 block;
    Dim3 cluster;                 // {1, 1, 1}: no cluster
    uint32_t shared_bytes = 0;    // dynamic shared memory of one CTA
    const void* params = nullptr; // the kernel's one argument, copied before launch() returns
    size_t params_bytes = 0;
    void* stream = nullptr; // CUstream; ignored by the other targets
    // Emulator only: which group of ranks launches (any number that they share), whose kernel this is, and how many
    // ranks there are if all of them launch from this process; else 0.
    uint64_t world = 0;
    uint32_t rank = 0, num_ranks_here = 0;
    uint64_t timeout_ns = 0;  // emulator only: the longest that a wait of the kernel lasts; 0: it has no limit
    bool cooperative = false; // all CTAs start together, or the driver refuses
    bool dependent = false;   // programmatic dependent launch: the kernel itself waits for its predecessor
};

// Queues the kernel. Raises before anything has started: unknown handle, arguments that do not fit the kernel, a
// refusal by the driver. Thread-safe; costs a few microseconds and no allocation.
void launch(const LaunchRequest& request);

// Raises when the CTAs of one launch cannot all be resident at once on `num_sms` SMs (0: all SMs of the device), which
// a kernel with grid-wide waits needs. Call it when a plan is made, not per launch. What other kernels hold is not
// known.
void check_co_resident(const LaunchRequest& request, int num_sms);

// Number of CTAs of this kernel that one SM holds; 0 when not even one fits.
int max_ctas_per_sm(int64_t kernel, uint32_t num_threads, uint32_t shared_bytes);

// torch's current stream of a CUDA device (a CUstream).
void* current_stream(int device);

// Whether the stream is recording a CUDA graph.
bool is_capturing(void* stream);

// Raises when the stream is recording a graph: `what` cannot be done then, `advice` is the call to make before the
// capture.
void refuse_while_capturing(void* stream, const std::string& what, const std::string& advice);

} // namespace deep_gemm_k3::jit
