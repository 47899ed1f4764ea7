// Shared-memory accesses of whole 8x8 matrices and of 16-byte vectors. One wrapper = one instruction.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

// Stores 8x8 BF16 matrices transposed: a lane's register holds row lane/4, columns 2*(lane%4) and +1 of a matrix; lane
// 8*i + r gives the address that receives column r (16 bytes, 8 rows) of matrix i.
__device__ __forceinline__ void store_matrix_x2_transposed(uint32_t address, uint32_t m0, uint32_t m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(m0), "r"(m1)
        : "memory");
}
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, const uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
        "r"(m[1]), "r"(m[2]), "r"(m[3])
        : "memory");
}

// Loads four 8x8 BF16 matrices: lane 8*i + r gives the address of row r (16 bytes) of matrix i; a lane gets of every
// matrix row lane/4, columns 2*(lane%4) and +1.
__device__ __forceinline__ void load_matrix_x4(uint32_t address, uint32_t (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
        : "r"(address)
        : "memory");
}

// Four words as they lie in memory.
struct alignas(16) Vector4 {
    uint32_t word[4];
};
struct alignas(8) Vector2 {
    uint32_t word[2];
};

__device__ __forceinline__ Vector4 load_shared_16(uint32_t address) {
    Vector4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
        : "r"(address)
        : "memory");
    return v;
}
__device__ __forceinline__ Vector2 load_shared_8(uint32_t address) {
    Vector2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_1(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

} // namespace deep_gemm_k3::ptx
