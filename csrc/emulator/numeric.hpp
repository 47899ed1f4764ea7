// Number formats narrower than single precision, and conversions with every rounding mode.
#pragma once

#include <cmath>

#include "syntax.hpp"

namespace deep_gemm_k3::emulator {

enum class Round : u8 { Nearest, Zero, Down, Up, Away }; // Away: ties away from zero (.rna)

struct Format {
    int exponent_bits, mantissa_bits, bias;
    bool has_infinity; // exponent all ones is infinity or NaN, as in IEEE
    u32 max_code;      // largest finite magnitude
    u32 nan_code;      // 0: the format has none
};

constexpr Format kF16{5, 10, 15, true, 0x7bff, 0x7fff};
constexpr Format kBF16{8, 7, 127, true, 0x7f7f, 0x7fff};
constexpr Format kTF32{8, 10, 127, true, 0x3fbff, 0x3ffff};
constexpr Format kE5M2{5, 2, 15, true, 0x7b, 0x7f};
constexpr Format kE4M3{4, 3, 7, false, 0x7e, 0x7f};
constexpr Format kE2M1{2, 1, 1, false, 0x7, 0};
constexpr Format kE2M3{2, 3, 1, false, 0x1f, 0};
constexpr Format kE3M2{3, 2, 3, false, 0x1f, 0};

// `saturate`: overflow and infinity give the largest finite value (.satfinite)
u32 encode(double value, const Format& format, Round round, bool saturate);
double decode(u32 code, const Format& format);
u32 encode_ue8m0(double value, Round round, bool saturate);
double decode_ue8m0(u32 code);
double round_to_odd_sum(double product, double addend); // product + addend, inexact results made odd
float round_to_single(double value, Round round);

inline float bf16_to_float(u32 code) {
    return bits<float>(code << 16);
}
inline u32 float_to_bf16(float value) {
    u32 x = bits<u32>(value);
    u32 rounded = (x + 0x7fffu + ((x >> 16) & 1)) >> 16;
    return (x & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded;
}

inline float f16_to_float(u32 code) {
    u32 sign = (code & 0x8000u) << 16, magnitude = (code & 0x7fffu) << 13;
    float scaled = bits<float>(magnitude) * bits<float>(0x77800000u); // 2^112
    u32 out = bits<u32>(scaled);
    out = (code & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : out;
    return bits<float>(out | sign);
}

inline u32 float_to_f16(float value) {
    u32 x = bits<u32>(value), sign = (x >> 16) & 0x8000u, magnitude = x & 0x7fffffffu;
    // normal results: rebias and round by adding; small ones: let a float addition round them
    u32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
    u32 small = bits<u32>(bits<float>(magnitude) + 0.5f) - bits<u32>(0.5f);
    u32 out = magnitude < 0x38800000u ? small : normal;
    out = magnitude >= 0x477ff000u ? 0x7c00u : out;
    out = magnitude > 0x7f800000u ? 0x7fffu : out;
    return magnitude > 0x7f800000u ? 0x7fffu : (out | sign);
}

// tables of all 256 codes
const float* e4m3_table();
const float* e5m2_table();

} // namespace deep_gemm_k3::emulator
