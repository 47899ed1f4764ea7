// Products of single warps. One wrapper = one instruction.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

// d += a x b, 16x16 times 16x8, BF16 operands, FP32 sums. A lane's part: of a and d rows lane/4 and lane/4 + 8, of b
// column lane/4; pairs along k (along n in d) at 2*(lane%4), in a and b also 8 further on. Rows and pairs are those
// that wgmma's m64 fragments and accumulators give this warp.
__device__ __forceinline__ void multiply_m16n8k16(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

} // namespace deep_gemm_k3::ptx
