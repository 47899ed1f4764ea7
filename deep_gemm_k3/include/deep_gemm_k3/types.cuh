// Fixed-width integers and qualifiers that mean the same under NVRTC, nvcc and g++.
#pragma once

#if defined(__CUDACC_RTC__)
#include <cuda/std/cstdint>
namespace deep_gemm_k3 {
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::int8_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;
} // namespace deep_gemm_k3
#else
#include <cstdint>
namespace deep_gemm_k3 {
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
} // namespace deep_gemm_k3
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define DG_HOST_DEVICE __host__ __device__
#else
#define DG_HOST_DEVICE
#endif

namespace deep_gemm_k3 {

DG_HOST_DEVICE constexpr int ceil_div(int value, int divisor) {
    return (value + divisor - 1) / divisor;
}
DG_HOST_DEVICE constexpr uint64_t ceil_div(uint64_t value, uint64_t divisor) {
    return (value + divisor - 1) / divisor;
}
DG_HOST_DEVICE constexpr int align_up(int value, int alignment) {
    return ceil_div(value, alignment) * alignment;
}
DG_HOST_DEVICE constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
    return ceil_div(value, alignment) * alignment;
}
DG_HOST_DEVICE constexpr int max_of(int a, int b) {
    return a > b ? a : b;
}
DG_HOST_DEVICE constexpr int min_of(int a, int b) {
    return a < b ? a : b;
}

} // namespace deep_gemm_k3
