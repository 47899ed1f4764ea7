#include "numeric.hpp"

#include <array>

namespace deep_gemm_k3::emulator {

namespace {

double round_integral(double value, Round round, bool negative) { // value >= 0
    double low = std::floor(value), part = value - low;
    bool up = false;
    switch (round) {
    case Round::Nearest:
        up = part > 0.5 || (part == 0.5 && std::fmod(low, 2.0) == 1.0);
        break;
    case Round::Away:
        up = part >= 0.5;
        break;
    case Round::Zero:
        break;
    case Round::Down:
        up = negative && part > 0;
        break;
    case Round::Up:
        up = !negative && part > 0;
        break;
    }
    return low + (up ? 1.0 : 0.0);
}

u32 infinity_code(const Format& format) {
    return ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
}

} // namespace

u32 encode(double value, const Format& format, Round round, bool saturate) {
    u32 sign_bit = 1u << (format.exponent_bits + format.mantissa_bits);
    if (std::isnan(value))
        return format.nan_code ? format.nan_code : format.max_code;
    bool negative = std::signbit(value);
    u32 sign = negative ? sign_bit : 0;
    double magnitude = std::fabs(value);
    u32 overflow = saturate || !format.has_infinity ? format.max_code : infinity_code(format);
    if (!saturate && !format.has_infinity && format.nan_code)
        overflow = format.nan_code;
    if (std::isinf(magnitude))
        return sign | overflow;
    if (magnitude == 0)
        return sign;
    int exponent = std::ilogb(magnitude), least = 1 - format.bias;
    if (exponent < least)
        exponent = least;
    double scaled = std::ldexp(magnitude, format.mantissa_bits - exponent);
    double rounded = round_integral(scaled, round, negative);
    u64 mantissa = static_cast<u64>(rounded);
    u64 code = mantissa + (static_cast<u64>(exponent - least) << format.mantissa_bits); // carries run into the exponent
    if (code > format.max_code) {
        bool to_max =
            saturate || round == Round::Zero || (round == Round::Down && !negative) || (round == Round::Up && negative);
        return sign | (to_max ? format.max_code : overflow);
    }
    return sign | static_cast<u32>(code);
}

double decode(u32 code, const Format& format) {
    u32 sign_bit = 1u << (format.exponent_bits + format.mantissa_bits);
    double sign = code & sign_bit ? -1.0 : 1.0;
    u32 magnitude = code & (sign_bit - 1);
    u32 exponent = magnitude >> format.mantissa_bits, mantissa = magnitude & ((1u << format.mantissa_bits) - 1);
    if (format.has_infinity && exponent == (1u << format.exponent_bits) - 1)
        return mantissa ? std::nan("") : sign * HUGE_VAL;
    if (!format.has_infinity && format.nan_code && magnitude == format.nan_code)
        return std::nan("");
    double fraction = exponent ? mantissa + (1u << format.mantissa_bits) : mantissa;
    int scale = static_cast<int>(exponent ? exponent : 1) - format.bias - format.mantissa_bits;
    return sign * std::ldexp(fraction, scale);
}

u32 encode_ue8m0(double value, Round round, bool saturate) {
    if (std::isnan(value))
        return 0xff;
    double magnitude = std::fabs(value);
    if (std::isinf(magnitude))
        return saturate ? 0xfe : 0xff;
    if (magnitude <= std::ldexp(1.0, -127))
        return 0;
    int exponent = std::ilogb(magnitude);
    bool is_exact = std::ldexp(1.0, exponent) == magnitude;
    if (!is_exact && round == Round::Up)
        ++exponent;
    if (exponent > 127)
        return saturate || round == Round::Zero ? 0xfe : 0xff;
    return static_cast<u32>(exponent + 127);
}

double decode_ue8m0(u32 code) {
    return code == 0xff ? std::nan("") : std::ldexp(1.0, static_cast<int>(code) - 127);
}

double round_to_odd_sum(double product, double addend) {
    double sum = product + addend;
    if (!std::isfinite(sum))
        return sum;
    double back = sum - product;
    double error = (product - (sum - back)) + (addend - back);
    if (error == 0 || (bits<u64>(sum) & 1))
        return sum;
    bool away = (error > 0) == (sum > 0);
    if (sum == 0)
        return error;
    return bits<double>(bits<u64>(sum) + (away ? 1 : ~u64{0}));
}

float round_to_single(double value, Round round) {
    float nearest = static_cast<float>(value);
    if (std::isnan(value) || static_cast<double>(nearest) == value)
        return nearest;
    bool is_above = static_cast<double>(nearest) > value;
    float low = is_above ? std::nextafterf(nearest, -HUGE_VALF) : nearest,
          high = is_above ? nearest : std::nextafterf(nearest, HUGE_VALF);
    switch (round) {
    case Round::Zero:
        return value > 0 ? low : high;
    case Round::Down:
        return low;
    case Round::Up:
        return high;
    case Round::Away: {
        double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;
        return value == middle ? (value > 0 ? high : low) : nearest;
    }
    default:
        return nearest;
    }
}

namespace {

std::array<float, 256> table_of(const Format& format) {
    std::array<float, 256> table{};
    for (u32 code = 0; code < 256; ++code)
        table[code] = static_cast<float>(decode(code, format));
    return table;
}

} // namespace

const float* e4m3_table() {
    static const std::array<float, 256> table = table_of(kE4M3);
    return table.data();
}

const float* e5m2_table() {
    static const std::array<float, 256> table = table_of(kE5M2);
    return table.data();
}

} // namespace deep_gemm_k3::emulator
