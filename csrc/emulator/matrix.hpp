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
inline void transpose_four(const float* from, int from_step, float* to, int to_step) {
    typedef float Four __attribute__((vector_size(16)));
    typedef s32 Order __attribute__((vector_size(16)));
    constexpr Order kLow{0, 4, 1, 5}, kHigh{2, 6, 3, 7}, kFirst{0, 1, 4, 5}, kSecond{2, 3, 6, 7};
    Four row[4];
    for (int i = 0; i < 4; ++i)
        std::memcpy(&row[i], from + i * from_step, sizeof(Four));
    Four a = __builtin_shuffle(row[0], row[1], kLow), b = __builtin_shuffle(row[2], row[3], kLow),
         c = __builtin_shuffle(row[0], row[1], kHigh), d = __builtin_shuffle(row[2], row[3], kHigh);
    Four column[4] = {__builtin_shuffle(a, b, kFirst), __builtin_shuffle(a, b, kSecond),
        __builtin_shuffle(c, d, kFirst), __builtin_shuffle(c, d, kSecond)};
    for (int i = 0; i < 4; ++i)
        std::memcpy(to + i * to_step, &column[i], sizeof(Four));
}

// A matrix element type of the tensor cores, as singles.
float matrix_element(u32 code, Type type);
void widen(const u8* from, float* to, int count, Type type); // `count` consecutive elements of a 1-, 2- or 4-byte type

// The same for eight of BF16, inline: what most kernels multiply.
inline void widen_bf16x8(const u8* from, float* to) {
    typedef u16 Halves __attribute__((vector_size(16)));
    typedef u32 Words __attribute__((vector_size(32)));
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(to, &words, sizeof(words));
}

} // namespace deep_gemm_k3::emulator
