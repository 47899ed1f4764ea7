// Indices, fences, named barriers and clocks. One wrapper = one instruction.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

// The thread's index in its CTA, the CTA's in the grid and the lane's in its warp, read where they stand: the compiler
// neither hoists nor keeps them.
__device__ __forceinline__ uint32_t thread_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ uint32_t cta_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ uint32_t cta_count() {
    uint32_t count;
    asm volatile("mov.u32 %0, %nctaid.x;" : "=r"(count));
    return count;
}
__device__ __forceinline__ uint32_t lane_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %laneid;" : "=r"(index));
    return index;
}
// One bit for each lane below this one.
__device__ __forceinline__ uint32_t lower_lanes() {
    uint32_t mask;
    asm volatile("mov.u32 %0, %lanemask_lt;" : "=r"(mask));
    return mask;
}

// Named barriers of a CTA. 0 is __syncthreads.
enum class NamedBarrier : int {
    kMath = 1,       // all math warpgroups
    kMathGroup0 = 2, // warpgroup 0; 3: warpgroup 1, ...
    kMathGroup1 = 3,
    kEngine0 = 4, // free for the engine and its epilogue
    kEngine1 = 5,
    kEngine2 = 6,
    kEngine3 = 7,
    kDispatch = 8,  // the dispatch warps
    kTasksDone = 9, // math warpgroups arrive, the publishing warp waits
};

__device__ __forceinline__ void barrier_sync(NamedBarrier barrier, int num_threads) {
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(num_threads) : "memory");
}
// As barrier_sync; true for all threads when `condition` is true in all of them.
__device__ __forceinline__ bool barrier_all(NamedBarrier barrier, int num_threads, bool condition) {
    uint32_t all;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.red.and.pred.aligned q, %1, %2, p;\n"
                 "selp.u32 %0, 1, 0, q;\n}"
        : "=r"(all)
        : "r"(static_cast<int>(barrier)), "r"(num_threads), "r"(static_cast<uint32_t>(condition))
        : "memory");
    return all != 0;
}
__device__ __forceinline__ void barrier_arrive(NamedBarrier barrier, int num_threads) {
    asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(num_threads) : "memory");
}
// Registers of a warpgroup, all of its warps together. Released ones become free for warpgroups that ask for more.
template <int kNumRegisters>
__device__ __forceinline__ void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kNumRegisters));
}
template <int kNumRegisters>
__device__ __forceinline__ void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kNumRegisters));
}
// Orders generic accesses to global memory before (after) later (earlier) bulk and tensor copies.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
// The same for the CTA's shared memory.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ uint64_t global_timer() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
    return t;
}
__device__ __forceinline__ void nanosleep(uint32_t ns) {
    asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory");
}

} // namespace deep_gemm_k3::ptx
