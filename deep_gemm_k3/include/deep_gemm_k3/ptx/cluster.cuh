// CTAs of one cluster: barriers, addresses of each other's shared memory, copies that report to another CTA. One
// wrapper = one instruction.
#pragma once
#include "../types.cuh"
#include "copy.cuh"

namespace deep_gemm_k3::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all CTAs of the cluster.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What lies at the same offset in another CTA's shared memory.
__device__ __forceinline__ uint32_t map_to_cta(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// ---- by mapped addresses
__device__ __forceinline__ uint32_t load_cluster_4(uint32_t address) {
    uint32_t v;
    asm volatile("ld.relaxed.cluster.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_acquire_cluster(uint32_t address) {
    uint32_t v;
    asm volatile("ld.acquire.cluster.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void store_cluster_4(uint32_t address, uint32_t v) {
    asm volatile("st.relaxed.cluster.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_release_cluster(uint32_t address, uint32_t v) {
    asm volatile("st.release.cluster.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As mbarrier_try_wait, for arrivals of other CTAs.
__device__ __forceinline__ bool mbarrier_try_wait_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// As tensor_load_2d and tensor_load_4d, into this CTA's shared memory, but the barrier may be the other one's of the
// pair.
__device__ __forceinline__ void tensor_load_2d_pair(CopyTarget to, const void* map, int x, int y, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to.shared),
        "l"(map), "r"(x), "r"(y), "r"(to.barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void tensor_load_4d_pair(CopyTarget to, const void* map, int x, int w, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to.shared),
        "l"(map), "r"(x), "r"(0), "r"(w), "r"(to.barrier), "l"(policy)
        : "memory");
}

} // namespace deep_gemm_k3::ptx
