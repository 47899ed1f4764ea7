#include "matrix.hpp"

namespace deep_gemm_k3::emulator {

float matrix_element(u32 code, Type type) {
    switch (type) {
    case Type::F16:
        return f16_to_float(code & 0xffff);
    case Type::BF16:
        return bf16_to_float(code & 0xffff);
    case Type::TF32:
        return bits<float>(code & 0xffffe000u);
    case Type::E4M3:
        return e4m3_table()[code & 0xff];
    case Type::E5M2:
        return e5m2_table()[code & 0xff];
    default:
        return bits<float>(code);
    }
}

void widen(const u8* from, float* to, int count, Type type) {
    switch (type) {
    case Type::BF16:
        for (int i = 0; i < count; ++i) {
            u16 x;
            std::memcpy(&x, from + 2 * i, 2);
            to[i] = bf16_to_float(x);
        }
        return;
    case Type::F16:
        for (int i = 0; i < count; ++i) {
            u16 x;
            std::memcpy(&x, from + 2 * i, 2);
            to[i] = f16_to_float(x);
        }
        return;
    case Type::E4M3:
    case Type::E5M2: {
        const float* table = type == Type::E4M3 ? e4m3_table() : e5m2_table();
        for (int i = 0; i < count; ++i)
            to[i] = table[from[i]];
        return;
    }
    default:
        for (int i = 0; i < count; ++i) {
            u32 x;
            std::memcpy(&x, from + 4 * i, 4);
            to[i] = matrix_element(x, type);
        }
    }
}

void product_add(float* out, const float* a, const float* b, int m, int n, int k) {
    constexpr int kColumns = 8, kRows = 4, kMaxK = 64;
    alignas(64) double bd[kMaxK][kColumns], ad[kMaxK][kRows];
    for (int col = 0; col < n; col += kColumns) {
        for (int i = 0; i < k; ++i)
            for (int j = 0; j < kColumns; ++j)
                bd[i][j] = static_cast<double>(b[i * n + col + j]);
        for (int row = 0; row < m; row += kRows) {
            double sum[kRows][kColumns];
            for (int i = 0; i < k; ++i)
                for (int r = 0; r < kRows; ++r)
                    ad[i][r] = static_cast<double>(a[(row + r) * k + i]);
            for (int r = 0; r < kRows; ++r)
                for (int j = 0; j < kColumns; ++j)
                    sum[r][j] = static_cast<double>(out[(row + r) * n + col + j]);
            for (int i = 0; i < k; ++i)
                for (int r = 0; r < kRows; ++r)
                    for (int j = 0; j < kColumns; ++j)
                        sum[r][j] += ad[i][r] * bd[i][j];
            for (int r = 0; r < kRows; ++r)
                for (int j = 0; j < kColumns; ++j)
                    out[(row + r) * n + col + j] = static_cast<float>(sum[r][j]);
        }
    }
}

} // namespace deep_gemm_k3::emulator
