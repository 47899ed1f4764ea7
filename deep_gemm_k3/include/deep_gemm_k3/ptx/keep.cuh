// No instruction: ties a register to this point of the program. The compiler moves no use of it across, and forgets
// what it knows of the value, so that nothing else derived from it stays in registers beside it.
#pragma once
#include "../types.cuh"

namespace deep_gemm_k3::ptx {

__device__ __forceinline__ void keep(uint32_t& value) {
    asm volatile("" : "+r"(value));
}
__device__ __forceinline__ void keep(uint64_t& value) {
    asm volatile("" : "+l"(value));
}
__device__ __forceinline__ void keep(float& value) {
    asm volatile("" : "+f"(value));
}

} // namespace deep_gemm_k3::ptx
