// Loads, stores and atomics with an explicit order and scope. One wrapper = one instruction.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

struct alignas(16) Word16 {
    uint32_t x, y, z, w;
};

__device__ __forceinline__ uint32_t load_relaxed_sys(const void* p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_acquire_sys(const void* p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_acquire_gpu(const void* p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// 16 bytes that arrive together: single-copy atomic, so a word may carry data and its own epoch. Volatile, which orders
// like relaxed.sys: ptxas 13.0 narrows an ld.relaxed.b128 to the components that are used, as separate loads, and then
// the data may be older than the epoch that vouches for it.
__device__ __forceinline__ Word16 load_relaxed_sys_b128(const void* p) {
    uint64_t low, high;
    asm volatile("{\n.reg .b128 t;\nld.volatile.global.b128 t, [%2];\nmov.b128 {%0, %1}, t;\n}"
        : "=l"(low), "=l"(high)
        : "l"(p)
        : "memory");
    return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}
// Asks for the 128-byte line of an address; no register waits for it.
__device__ __forceinline__ void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ __forceinline__ void store_relaxed_sys_b128(void* p, Word16 v) {
    const uint64_t low = v.x | uint64_t(v.y) << 32, high = v.z | uint64_t(v.w) << 32;
    asm volatile(
        "{\n.reg .b128 t;\nmov.b128 t, {%1, %2};\nst.relaxed.sys.global.b128 [%0], t;\n}" ::"l"(p), "l"(low), "l"(high)
        : "memory");
}
// Four words in one transaction, each atomic on its own.
__device__ __forceinline__ Word16 load_relaxed_sys_v4(const void* p) {
    Word16 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p)
        : "memory");
    return v;
}
__device__ __forceinline__ void store_relaxed_sys_v4(void* p, Word16 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
__device__ __forceinline__ void store_relaxed_sys(void* p, uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_release_sys(void* p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void red_release_gpu_add(void* p, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void red_release_sys_add(void* p, uint32_t v) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t atom_relaxed_gpu_add(void* p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
__device__ __forceinline__ uint32_t atom_acq_rel_gpu_add(void* p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
__device__ __forceinline__ uint32_t atom_relaxed_sys_cas(void* p, uint32_t compare, uint32_t v) {
    uint32_t old;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
        : "=r"(old)
        : "l"(p), "r"(compare), "r"(v)
        : "memory");
    return old;
}
__device__ __forceinline__ uint32_t load_acquire_cta_shared(uint32_t address) {
    uint32_t v;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void store_release_cta_shared(uint32_t address, uint32_t v) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

} // namespace deep_gemm_k3::ptx
