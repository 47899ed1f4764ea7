// Small matrix products shared by mma.sync and wgmma: operands as singles or integers.
#pragma once

#include "ops.hpp"

namespace deep_gemm_k3::emulator {

struct SumShape {
    int m, n, k;
    Type type; // of the operands
    bool sync; // mma.sync
};
// out[m][n] += sum_k a[m][k] * b[k][n], as the target's tensor cores add where that is known (sm_90); elsewhere summed
// in double and rounded once to single
void product_add(Warp& w, float* out, const float* a, const float* b, const SumShape& shape);

// to[j][i] = from[i][j] for four rows and columns, rows `from_step` and `to_step` apart
void transpose_four(const float* from, int from_step, float* to, int to_step);

// A matrix element type of the tensor cores, as singles.
float matrix_element(u32 code, Type type);
void widen(const u8* from, float* to, int count, Type type); // `count` consecutive elements of a 1-, 2- or 4-byte type

} // namespace deep_gemm_k3::emulator
