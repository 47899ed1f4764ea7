#include "matrix.hpp"

#include <cmath>

#include "hopper_sum.hpp"

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
        if (count == 8)
            return widen_bf16x8(from, to);
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

namespace {

void add_in_double(float* out, const float* a, const float* b, int m, int n, int k) {
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

SumRule rule_of(Type type) {
    switch (type) {
    case Type::E4M3:
        return {13, 13, -6};
    case Type::E5M2:
        return {13, 13, -14};
    case Type::F16:
        return {25, 23, -14};
    default:
        return {25, 23, -126};
    }
}

// mma.sync on 8-bit floats runs as two products of halves, the first of the elements 0 and 1 of every register, the
// second of 2 and 3; their sum, from zero, is added to the accumulator in singles.
void add_eight_bit_halves(float* out, const float* a, const float* b, const SumShape& s) {
    alignas(64) float sum[16 * 8] = {}, half_a[16 * 32], half_b[32 * 8];
    SumRule rule = rule_of(Type::F16);
    for (int part = 0; part < 2; ++part) {
        int half = s.k / 2;
        auto at = [&](int i) { return i / 2 * 4 + part * 2 + i % 2; };
        for (int i = 0; i < half; ++i) {
            for (int row = 0; row < s.m; ++row)
                half_a[row * half + i] = a[row * s.k + at(i)];
            std::memcpy(half_b + i * s.n, b + at(i) * s.n, sizeof(float) * static_cast<size_t>(s.n));
        }
        rule.lowest = -126;
        hopper_sum(sum, half_a, half_b, {s.m, s.n, half}, rule);
    }
    for (int i = 0; i < s.m * s.n; ++i) {
        out[i] += sum[i];
        if (std::isnan(out[i]))
            out[i] = bits<float>(kTensorCoreNan);
    }
}

} // namespace

void product_add(Warp& w, float* out, const float* a, const float* b, const SumShape& s) {
    if (w.program->syntax->target.rfind("sm_90", 0) != 0)
        return add_in_double(out, a, b, s.m, s.n, s.k);
    if (s.sync && (s.type == Type::E4M3 || s.type == Type::E5M2))
        return add_eight_bit_halves(out, a, b, s);
    hopper_sum(out, a, b, {s.m, s.n, s.k}, rule_of(s.type));
}

} // namespace deep_gemm_k3::emulator
