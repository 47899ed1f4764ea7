// probe: the smallest kernel that goes the whole way (compile, cache, load, launch). It writes the layout numbers that
// the compiler computed from the Config, for comparison with the host's, and takes its input through shared memory and
// back with bulk copies and one mbarrier.
//
//   all threads of CTA 0   numbers -> output
//   thread 0 of each CTA   [hold] { expect + load -> full | wait | store -> wait until the chunk was read }
#pragma once
#include "../config.cuh"
#include "../plan/workspace.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/store.cuh"
#include "../sync/local_wait.cuh"
#include "../types.cuh"

namespace deep_gemm_k3::kernels {

constexpr int kProbeChunkBytes = 4096; // static shared memory of a CTA
// total bytes, then offset and size of each component, then the number of chunks that never arrived
constexpr int kNumProbeNumbers = 2 + 2 * plan::kNumComponents;

struct ProbeParams {
    uint64_t* numbers;     // [kNumProbeNumbers], zeroed
    const uint8_t* source; // [num_bytes], 16-byte aligned
    uint8_t* destination;  // [num_bytes], 16-byte aligned
    uint32_t num_bytes;    // a multiple of 16
    uint32_t hold_ns;      // every CTA holds its SM that long first
};

struct ProbeNumbers {
    uint64_t values[kNumProbeNumbers - 1];
};

DG_HOST_DEVICE constexpr ProbeNumbers probe_numbers(const BufferShape& shape) {
    ProbeNumbers numbers{};
    numbers.values[0] = plan::total_bytes(shape);
    for (int i = 0; i < plan::kNumComponents; ++i) {
        const auto component = static_cast<plan::Component>(i);
        numbers.values[1 + 2 * i] = plan::component_offset(shape, component);
        numbers.values[2 + 2 * i] = plan::component_bytes(shape, component);
    }
    return numbers;
}

// A table in the module, so that the numbers are the compiler's and can be read in the PTX.
template <Config C>
__device__ constexpr ProbeNumbers kProbeNumbers = probe_numbers(C.shape);

template <Config C>
__global__ void __launch_bounds__(C.num_threads, C.num_ctas_per_sm) probe(const __grid_constant__ ProbeParams params) {
    constexpr uint64_t kLimit = 1000000000;
    __shared__ alignas(128) uint8_t chunk[kProbeChunkBytes];
    __shared__ alignas(8) uint64_t full;
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < kNumProbeNumbers - 1; i += blockDim.x)
            params.numbers[i] = kProbeNumbers<C>.values[i];
    if (threadIdx.x != 0)
        return;

    if (params.hold_ns != 0)
        sync::hold(params.hold_ns);
    const uint32_t barrier = ptx::shared_address(&full), staged = ptx::shared_address(chunk);
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    uint32_t parity = 0;
    for (uint32_t begin = blockIdx.x * kProbeChunkBytes; begin < params.num_bytes;
        begin += gridDim.x * kProbeChunkBytes) {
        const uint32_t rest = params.num_bytes - begin;
        const uint32_t bytes = rest < kProbeChunkBytes ? rest : kProbeChunkBytes;
        ptx::mbarrier_arrive_expect_tx(barrier, bytes);
        ptx::bulk_load({staged, barrier}, params.source + begin, bytes, ptx::kPolicyEvictNormal);
        if (!sync::wait_local(barrier, parity, kLimit)) {
            atomicAdd(reinterpret_cast<unsigned long long*>(params.numbers + kNumProbeNumbers - 1), 1ull);
            return;
        }
        parity ^= 1;
        ptx::bulk_store(params.destination + begin, staged, bytes);
        ptx::bulk_commit_group();
        ptx::bulk_wait_all_read();
    }
    ptx::bulk_wait_all();
}

} // namespace deep_gemm_k3::kernels
