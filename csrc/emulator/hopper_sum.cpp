#include "hopper_sum.hpp"

#include <algorithm>
#include <cmath>

namespace deep_gemm_k3::emulator {

namespace {

constexpr int kWidth = 8, kRows = 4;
// Exponents for which neither products nor their scales leave the range of singles.
constexpr int kFastOperand = 45, kFastAccumulator = 90;
constexpr u32 kExponentBits = 0x7f800000;

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef s32 Ints __attribute__((vector_size(4 * kWidth)));
typedef double Doubles __attribute__((vector_size(8 * kWidth)));
typedef s64 Longs __attribute__((vector_size(8 * kWidth)));
typedef s64 Longs4 __attribute__((vector_size(4 * kWidth)));

template <class V>
V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

u32 exponent_bits(int exponent) {
    return static_cast<u32>(exponent + 127) << 23;
}

// 2^exponent of an operand as a single, 0 for 0; says in `bad` whether the fast path may use it.
float power_of(float value, u32 lowest, u32& bad) {
    u32 magnitude = bits<u32>(value) & 0x7fffffffu;
    if (!magnitude)
        return 0;
    u32 power = std::max(magnitude & kExponentBits, lowest);
    bad |= power < exponent_bits(-kFastOperand) || power > exponent_bits(kFastOperand);
    return bits<float>(power);
}

int exponent_of(float value, int lowest) {
    return std::max(std::ilogb(value), lowest);
}

// A sum, exact in double, cut to a single with `kept` bits of mantissa.
float cut(double sum, int kept) {
    if (std::fabs(sum) < 0x1p-126) {
        int shift = 126 + kept;
        return static_cast<float>(std::ldexp(std::trunc(std::ldexp(sum, shift)), -shift));
    }
    u64 mask = ~((u64{1} << (52 - kept)) - 1);
    return static_cast<float>(bits<double>(bits<u64>(sum) & mask));
}

// One element, whatever its operands are.
float slow_sum(float c, const float* a, const float* b, int stride, int k, SumRule rule) {
    int largest = INT32_MIN;
    float special = 0; // sum of infinities and NaN
    for (int i = 0; i < k; ++i) {
        float x = a[i], y = b[i * stride];
        if (!std::isfinite(x) || !std::isfinite(y))
            special += x * y;
        else if (x != 0 && y != 0)
            largest = std::max(largest, exponent_of(x, rule.lowest) + exponent_of(y, rule.lowest));
    }
    if (!std::isfinite(c))
        special += c;
    if (special != 0)
        return std::isnan(special) ? bits<float>(kTensorCoreNan) : special;
    if (c != 0)
        largest = std::max(largest, exponent_of(c, -126));
    if (largest == INT32_MIN)
        return 0;
    int scale = rule.fraction - largest;
    double sum = std::trunc(std::ldexp(static_cast<double>(c), scale));
    for (int i = 0; i < k; ++i)
        sum += std::trunc(std::ldexp(static_cast<double>(a[i]) * static_cast<double>(b[i * stride]), scale));
    return cut(std::ldexp(sum, -scale), rule.kept);
}

// Powers of two of eight operands, as power_of finds them.
Floats powers_of(Floats value, u32 lowest, Ints& bad) {
    Ints magnitude = reinterpret_cast<Ints>(value) & 0x7fffffff, power = magnitude & static_cast<s32>(kExponentBits);
    Ints floor = Ints{} + static_cast<s32>(lowest), is_zero = magnitude == 0;
    power = power > floor ? power : floor;
    bad |= ~is_zero & ((power < static_cast<s32>(exponent_bits(-kFastOperand))) |
                          (power > static_cast<s32>(exponent_bits(kFastOperand))));
    return reinterpret_cast<Floats>(power & ~is_zero);
}

bool any(Ints flags) {
    auto parts = reinterpret_cast<Longs4>(flags);
    return (parts[0] | parts[1] | parts[2] | parts[3]) != 0;
}

Ints out_of_range(Floats accumulator) {
    Ints magnitude = reinterpret_cast<Ints>(accumulator) & 0x7fffffff;
    return (magnitude != 0) & ((magnitude < static_cast<s32>(exponent_bits(-kFastAccumulator))) |
                                  (magnitude > static_cast<s32>(exponent_bits(kFastAccumulator))));
}

// What the sums of one block of columns need of B.
template <int kK>
struct Columns {
    Floats value[kK], power[kK];
    bool bad;
    Columns(const float* b, int n, u32 lowest) {
        Ints flags = {};
        for (int i = 0; i < kK; ++i) {
            value[i] = load<Floats>(b + i * n);
            power[i] = powers_of(value[i], lowest, flags);
        }
        bad = any(flags);
    }
};

struct Rows {
    const float *a, *power;
};

// Eight sums of each of kRows rows; false, with nothing done, when an accumulator is out of range.
template <int kRows, int kK>
bool fast_sums(float* out, Rows rows, const Columns<kK>& b, int n, SumRule rule) {
    const auto [a, power_a] = rows;
    Floats c[kRows], largest[kRows];
    Ints flags = {};
    for (int r = 0; r < kRows; ++r) {
        c[r] = load<Floats>(out + r * n);
        flags |= out_of_range(c[r]);
        largest[r] = reinterpret_cast<Floats>(reinterpret_cast<Ints>(c[r]) & static_cast<s32>(kExponentBits));
    }
    if (any(flags))
        return false;
    for (int i = 0; i < kK; ++i)
        for (int r = 0; r < kRows; ++r) {
            Floats power = power_a[r * kK + i] * b.power[i];
            largest[r] = power > largest[r] ? power : largest[r];
        }
    Ints top[kRows], low[kRows] = {}, high[kRows] = {}; // half of the products each: all could exceed 32 bits
    Floats scale[kRows];
    for (int r = 0; r < kRows; ++r) {
        top[r] = reinterpret_cast<Ints>(largest[r]);
        top[r] = top[r] == 0 ? Ints{} + static_cast<s32>(exponent_bits(0)) : top[r];
        // as exponents: fraction - largest
        scale[r] = reinterpret_cast<Floats>(static_cast<s32>(rule.fraction + 254) * (1 << 23) - top[r]);
    }
    constexpr int kHalf = (kK + 1) / 2;
    for (int i = 0; i < kHalf; ++i)
        for (int r = 0; r < kRows; ++r)
            low[r] += __builtin_convertvector(a[r * kK + i] * b.value[i] * scale[r], Ints);
    for (int i = kHalf; i < kK; ++i)
        for (int r = 0; r < kRows; ++r)
            high[r] += __builtin_convertvector(a[r * kK + i] * b.value[i] * scale[r], Ints);
    for (int r = 0; r < kRows; ++r) {
        Ints own = __builtin_convertvector(c[r] * scale[r], Ints);
        Doubles sum = __builtin_convertvector(low[r], Doubles) + __builtin_convertvector(high[r], Doubles) +
                      __builtin_convertvector(own, Doubles);
        Longs cut_bits = reinterpret_cast<Longs>(sum) & ~((s64{1} << (52 - rule.kept)) - 1);
        Floats result = __builtin_convertvector(reinterpret_cast<Doubles>(cut_bits), Floats);
        result *= reinterpret_cast<Floats>(top[r] - rule.fraction * (1 << 23)); // a power of two
        std::memcpy(out + r * n, &result, sizeof(result));
    }
    return true;
}

template <int kK>
void sum_of(float* out, const float* a, const float* b, Extent extent, SumRule rule) {
    const int m = extent.m, n = extent.n;
    alignas(64) float power_a[64 * kK];
    u32 bad_row[64 + kRows] = {}, lowest = exponent_bits(std::max(rule.lowest, -126));
    for (int row = 0; row < m; ++row) {
        const float* from = a + row * kK;
        int i = 0;
        Ints flags = {};
        for (; i + kWidth <= kK; i += kWidth) {
            Floats power = powers_of(load<Floats>(from + i), lowest, flags);
            std::memcpy(power_a + row * kK + i, &power, sizeof(power));
        }
        bad_row[row] = any(flags);
        for (; i < kK; ++i)
            power_a[row * kK + i] = power_of(from[i], lowest, bad_row[row]);
    }
    for (int column = 0; column < n; column += kWidth) {
        Columns<kK> block(b + column, n, lowest);
        for (int row = 0; row < m; row += kRows) {
            float* to = out + row * n + column;
            const float *from = a + row * kK, *power = power_a + row * kK;
            bool bad = block.bad || (bad_row[row] | bad_row[row + 1] | bad_row[row + 2] | bad_row[row + 3]);
            if (!bad && fast_sums<kRows, kK>(to, {from, power}, block, n, rule))
                continue;
            for (int r = 0; r < kRows; ++r, to += n, from += kK, power += kK) {
                if (!block.bad && !bad_row[row + r] && fast_sums<1, kK>(to, {from, power}, block, n, rule))
                    continue;
                for (int j = 0; j < kWidth; ++j)
                    to[j] = slow_sum(to[j], from, b + column + j, n, kK, rule);
            }
        }
    }
}

} // namespace

void hopper_sum(float* out, const float* a, const float* b, Extent extent, SumRule rule) {
    switch (extent.k) {
    case 4:
        return sum_of<4>(out, a, b, extent, rule);
    case 8:
        return sum_of<8>(out, a, b, extent, rule);
    case 16:
        return sum_of<16>(out, a, b, extent, rule);
    default:
        return sum_of<32>(out, a, b, extent, rule);
    }
}

} // namespace deep_gemm_k3::emulator
