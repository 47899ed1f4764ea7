// Bulk and tensor copies from global to shared memory, cache policies. One wrapper = one instruction.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

// ---- L2 eviction policies as createpolicy.fractional with fraction 1.0 encodes them; constants cost no registers
constexpr uint64_t kPolicyEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kPolicyEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kPolicyEvictLast = 0x14F0000000000000ull;

// ---- copies that complete on an mbarrier; sizes and addresses are multiples of 16 bytes
struct CopyTarget {
    uint32_t shared;  // destination
    uint32_t barrier; // receives complete_tx
};

__device__ __forceinline__ void bulk_load(CopyTarget to, const void* global, uint32_t num_bytes, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to.shared),
        "l"(global), "r"(num_bytes), "r"(to.barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void tensor_load_2d(CopyTarget to, const void* map, int x, int y, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to.shared),
        "l"(map), "r"(x), "r"(y), "r"(to.barrier), "l"(policy)
        : "memory");
}

// Coordinates (x, 0, 0, w).
__device__ __forceinline__ void tensor_load_4d(CopyTarget to, const void* map, int x, int w, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to.shared),
        "l"(map), "r"(x), "r"(0), "r"(w), "r"(to.barrier), "l"(policy)
        : "memory");
}

// Asks for a box into the L2 cache.
__device__ __forceinline__ void tensor_prefetch_2d(const void* map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y)
        : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

} // namespace deep_gemm_k3::ptx
