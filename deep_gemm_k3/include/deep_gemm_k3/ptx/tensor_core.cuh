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

// ---- what to multiply: 128 rows of every CTA (operand A) by `num_tokens` (operand B, divided among the CTAs), both
// K-major, FP32 sums. kNumCtas: of those that multiply together
template <int kNumCtas>
constexpr uint32_t kInstructionRows = kNumCtas * 128u / 16 << 24;
// BF16 by BF16.
template <int kNumCtas>
__device__ __forceinline__ uint32_t bf16_instruction(uint32_t num_tokens) {
    return 1u << 4 | 1u << 7 | 1u << 10 | num_tokens / 8 << 17 | kInstructionRows<kNumCtas>;
}
// E2M1 rows, in 16-byte groups of 16 codes and a gap, by E4M3 tokens; one UE8M0 scale per 32 columns of either. `block`
// tells which byte of the scale words belongs to these 32 columns.
template <int kNumCtas>
__device__ __forceinline__ uint32_t scaled_instruction(uint32_t num_tokens, uint32_t block) {
    return block << 4 | 5u << 7 | 0u << 10 | num_tokens / 8 << 17 | 1u << 23 | kInstructionRows<kNumCtas> | block << 29;
}

// One multiplication: 32 bytes of K of every row and token, at the same offsets in every CTA.
struct Product {
    uint32_t sums; // in tensor memory
    uint64_t rows, tokens;
    uint32_t instruction;
    bool accumulate; // false: the sums start from zero
};
template <int kNumCtas>
__device__ __forceinline__ void tensor_multiply_bf16(const Product& p) {
    if constexpr (kNumCtas == 1)
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
                     "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n\t}" ::"r"(p.sums),
            "l"(p.rows), "l"(p.tokens), "r"(p.instruction), "r"(static_cast<uint32_t>(p.accumulate))
            : "memory");
    else
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
                     "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n\t}" ::"r"(p.sums),
            "l"(p.rows), "l"(p.tokens), "r"(p.instruction), "r"(static_cast<uint32_t>(p.accumulate))
            : "memory");
}
struct ScaleColumns {
    uint32_t rows, tokens; // in tensor memory
};
template <int kNumCtas>
__device__ __forceinline__ void tensor_multiply_scaled(const Product& p, ScaleColumns scales) {
    if constexpr (kNumCtas == 1)
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %6, 0;\n\t"
                     "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], "
                     "p;\n\t}" ::"r"(p.sums),
            "l"(p.rows), "l"(p.tokens), "r"(p.instruction), "r"(scales.rows), "r"(scales.tokens),
            "r"(static_cast<uint32_t>(p.accumulate))
            : "memory");
    else
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %6, 0;\n\t"
                     "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], "
                     "p;\n\t}" ::"r"(p.sums),
            "l"(p.rows), "l"(p.tokens), "r"(p.instruction), "r"(scales.rows), "r"(scales.tokens),
            "r"(static_cast<uint32_t>(p.accumulate))
            : "memory");
}

// One arrival on a barrier (in a pair on the barrier at that offset in either CTA) once everything that this thread has
// issued so far is complete.
template <int kNumCtas>
__device__ __forceinline__ void tensor_commit(uint32_t barrier) {
    if constexpr (kNumCtas == 1)
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
            : "memory");
    else
        asm volatile(
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
                barrier),
            "h"(static_cast<uint16_t>(3))
            : "memory");
}

} // namespace deep_gemm_k3::ptx
