// mbarrier objects in shared memory. One wrapper = one instruction. Addresses are 32-bit shared::cta addresses.
// Waiting (a loop around try_wait) lives in sync/.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// True in one lane of a converged warp. The compiler knows that what it guards runs in one lane only.
__device__ __forceinline__ bool elect_one() {
    uint32_t is_elected;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xFFFFFFFF;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(is_elected));
    return is_elected != 0;
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}

// Adds to the bytes that the current phase waits for, without arriving.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}

// True when the phase of the given parity has completed; may suspend the thread for a short, bounded time.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// The same, at once.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Waits for the phase of the given parity, for as many units of 2^20 ns as the word at `limit` in shared memory says.
// True: that long has passed; the word is zero from then on, so that further waits are over at once. A failing try
// suspends the thread for some microseconds, and only then are clock and limit read.
//
// The one wrapper that holds a loop: between wgmma instructions the compiler must see no branch that could divide the
// warp, or it serialises them and gives up uniform registers. For the same reason the limit is no argument: from
// parameters it counts as different in every lane, and from a shuffle it takes a register too many.
__device__ __forceinline__ bool mbarrier_wait_fails(uint32_t barrier, uint32_t parity, uint32_t limit) {
    uint32_t failed;
    asm volatile("{\n\t.reg .pred done, more;\n\t.reg .u64 now;\n\t.reg .u32 start, units, most;\n\t"
                 "mov.u32 start, 0xFFFFFFFF;\n"
                 "AGAIN:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                 "@done bra OUT;\n\t"
                 "mov.u64 now, %globaltimer;\n\t"
                 "ld.relaxed.cta.shared.u32 most, [%3];\n\t"
                 "shr.u64 now, now, 20;\n\t"
                 "cvt.u32.u64 units, now;\n\t"
                 "min.u32 start, start, units;\n\t"
                 "sub.u32 units, units, start;\n\t"
                 "setp.lt.u32 more, units, most;\n\t"
                 "@more bra AGAIN;\n\t"
                 "st.relaxed.cta.shared.u32 [%3], 0;\n"
                 "OUT:\n\t"
                 "selp.u32 %0, 0, 1, done;\n\t}"
        : "=r"(failed)
        : "r"(barrier), "r"(parity), "r"(limit)
        : "memory");
    return failed != 0;
}

} // namespace deep_gemm_k3::ptx
