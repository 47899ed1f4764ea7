// How Hopper's tensor cores add: the rule behind wgmma and mma.sync on sm_90, found by comparing bits with a GPU
// (tests/agreement). All products of one instruction's K and the accumulator are aligned to the largest exponent among
// them and cut to `fraction` bits below it; the sum of those is exact, and is cut, not rounded, to the result.
#pragma once

#include "base.hpp"

namespace deep_gemm_k3::emulator {

struct SumRule {
    int fraction; // bits that are kept below the largest exponent
    int kept;     // of the result's mantissa
    int lowest;   // exponent of the operands' smallest normal number: subnormal operands count as that
};

constexpr u32 kTensorCoreNan = 0x7fffffff;

struct Extent {
    int m, n, k; // m a multiple of 4 up to 64, n of 8, k 4, 8, 16 or 32
};

// out[m][n] += sum over k of a[m][k] * b[k][n]
void hopper_sum(float* out, const float* a, const float* b, Extent extent, SumRule rule);

} // namespace deep_gemm_k3::emulator
