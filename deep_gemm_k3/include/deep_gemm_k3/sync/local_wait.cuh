// Bounded waits of kernels that have neither peers nor a call: nothing to abort, only a limit.
#pragma once
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::sync {

// False when the phase of the given parity has not completed after `limit_ns`.
__device__ __forceinline__ bool wait_local(uint32_t barrier, uint32_t parity, uint64_t limit_ns) {
    const uint64_t start = ptx::global_timer();
    while (!ptx::mbarrier_try_wait(barrier, parity))
        if (ptx::global_timer() - start > limit_ns)
            return false;
    return true;
}

// Keeps the thread for a time.
__device__ __forceinline__ void hold(uint64_t duration_ns) {
    const uint64_t start = ptx::global_timer();
    while (ptx::global_timer() - start < duration_ns) {
    }
}

} // namespace deep_gemm_k3::sync
