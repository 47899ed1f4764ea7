// Bulk copies from shared memory to device memory and the groups that tell when they are done. One wrapper = one
// instruction.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

// `shared` is a shared::cta address; both sides 16-byte aligned, num_bytes a multiple of 16.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t num_bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(num_bytes)
        : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until shared memory has been read: it may be written again.
__device__ __forceinline__ void bulk_wait_all_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Until the writes are complete.
__device__ __forceinline__ void bulk_wait_all() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

} // namespace deep_gemm_k3::ptx
