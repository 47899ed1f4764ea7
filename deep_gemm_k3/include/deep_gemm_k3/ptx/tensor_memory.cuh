// Tensor memory of SM100: allocation, copies from shared memory, loads into registers, fences. One wrapper = one
// instruction. Addresses are lane << 16 | column.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

// ---- called by a whole warp (of each CTA of a pair); the same warp gives back what it took. kNumCtas: of those that
// multiply together, here and below; a kernel uses one number throughout
// Writes the address of the columns to shared memory.
template <int kNumCtas>
__device__ __forceinline__ void tensor_memory_allocate(uint32_t to_shared, uint32_t num_columns) {
    if constexpr (kNumCtas == 1)
        asm volatile(
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to_shared), "r"(num_columns)
            : "memory");
    else
        asm volatile(
            "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to_shared), "r"(num_columns)
            : "memory");
}
// This CTA will not allocate again.
template <int kNumCtas>
__device__ __forceinline__ void tensor_memory_relinquish() {
    if constexpr (kNumCtas == 1)
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
    else
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}
template <int kNumCtas>
__device__ __forceinline__ void tensor_memory_free(uint32_t address, uint32_t num_columns) {
    if constexpr (kNumCtas == 1)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(num_columns)
            : "memory");
    else
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(num_columns)
            : "memory");
}

// ---- order between tensor-core work and synchronisation of threads
__device__ __forceinline__ void tensor_fence_before_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tensor_fence_after_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// Copies 32 rows of 16 bytes to four columns of lanes 0..31, and the same to the other three groups of 32 lanes; in a
// pair each CTA does so from its own shared memory, at the same offset. Issued by one thread; executes in the order of
// its tcgen05.cp and tcgen05.mma.
template <int kNumCtas>
__device__ __forceinline__ void tensor_copy_scales(uint32_t to_columns, uint64_t from_descriptor) {
    if constexpr (kNumCtas == 1)
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to_columns), "l"(from_descriptor)
            : "memory");
    else
        asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(to_columns), "l"(from_descriptor)
            : "memory");
}

// Loads 16 lanes x 8 columns per 8 tokens, in the order of a wgmma accumulator: d[4 * j], d[4 * j + 1] are columns
// 8 * j + 2 * (lane % 4) and the next of row lane / 4; d[4 * j + 2], d[4 * j + 3] the same of row lane / 4 + 8. By a
// whole warp, in its own quarter of the lanes; the registers are valid after tensor_wait_loads.
template <int kTokens>
struct TensorLoad;
template <>
struct TensorLoad<16> {
    static __device__ __forceinline__ void run(uint32_t address, float (&d)[8]) {
        asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
            : "r"(address)
            : "memory");
    }
};
template <>
struct TensorLoad<32> {
    static __device__ __forceinline__ void run(uint32_t address, float (&d)[16]) {
        asm volatile("tcgen05.ld.sync.aligned.16x256b.x4.b32 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
            "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
            : "r"(address)
            : "memory");
    }
};
// Waits for this warp's loads. No use of `d` moves before it.
template <int kCount>
__device__ __forceinline__ void tensor_wait_loads(float (&first)[kCount], float (&second)[kCount]) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        asm volatile("" : "+f"(first[i]), "+f"(second[i]));
}

} // namespace deep_gemm_k3::ptx
