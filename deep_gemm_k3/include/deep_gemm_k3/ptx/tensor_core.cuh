// Multiplications of SM100's tensor cores: both operands in shared memory, sums in tensor memory. One wrapper = one
// instruction. All are issued by one thread and complete asynchronously, in the order of issue.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

// ---- operands in shared memory: address / 16 | stride between groups of 8 rows / 16 | version | swizzle
constexpr uint64_t kDescriptorVersion = 1ull << 46;
constexpr uint64_t kDescriptorSwizzle128B = 2ull << 61;
// K-major rows of 128 bytes, 128-byte swizzled; `address` may point at a multiple of 32 bytes inside the first row.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address) {
    return kDescriptorSwizzle128B | kDescriptorVersion | uint64_t(1024 / 16) << 32 | (address >> 4);
}
// Rows of 16 bytes one after the other, as tensor_copy_scales reads them.
__device__ __forceinline__ uint64_t scale_descriptor(uint32_t address) {
    return kDescriptorVersion | uint64_t(128 / 16) << 32 | (address >> 4);
}

// ---- what to multiply: 128 rows (operand A) by `num_tokens` (operand B), both K-major, FP32 sums
constexpr uint32_t kRowsOf128 = 8u << 24;
// BF16 by BF16.
__device__ __forceinline__ uint32_t bf16_instruction(uint32_t num_tokens) {
    return 1u << 4 | 1u << 7 | 1u << 10 | num_tokens / 8 << 17 | kRowsOf128;
}
// E2M1 rows, in 16-byte groups of 16 codes and a gap, by E4M3 tokens; one UE8M0 scale per 32 columns of either. `block`
// tells which byte of the scale words belongs to these 32 columns.
__device__ __forceinline__ uint32_t scaled_instruction(uint32_t num_tokens, uint32_t block) {
    return block << 4 | 5u << 7 | 0u << 10 | num_tokens / 8 << 17 | 1u << 23 | kRowsOf128 | block << 29;
}

// ---- 32 bytes of K per row. `accumulate` false: the sums start from zero
__device__ __forceinline__ void tensor_multiply_bf16(
    uint32_t sums, uint64_t rows, uint64_t tokens, uint32_t instruction, bool accumulate) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
                 "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n\t}" ::"r"(sums),
        "l"(rows), "l"(tokens), "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}
struct ScaleColumns {
    uint32_t rows, tokens; // in tensor memory
};
__device__ __forceinline__ void tensor_multiply_scaled(
    uint32_t sums, uint64_t rows, uint64_t tokens, uint32_t instruction, ScaleColumns scales, bool accumulate) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %6, 0;\n\t"
                 "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%0], %1, %2, %3, [%4], [%5], "
                 "p;\n\t}" ::"r"(sums),
        "l"(rows), "l"(tokens), "r"(instruction), "r"(scales.rows), "r"(scales.tokens),
        "r"(static_cast<uint32_t>(accumulate))
        : "memory");
}

// One arrival on a barrier once everything that this thread has issued so far is complete.
__device__ __forceinline__ void tensor_commit(uint32_t barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
        : "memory");
}

} // namespace deep_gemm_k3::ptx
