// SiTU and SwiGLU as scalar functions, for kernels and for g++.
//
//   SiTU(gate, up)   = beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)
//   SwiGLU(gate, up) = gate * sigmoid(gate) * up
//
// Exact mode: IEEE division, expf, tanhf. Fast mode: relative errors below 2^-20, near zero too. Betas may be
// subnormal: the fast division multiplies by a power of two and then by the reciprocal of a number in [1, 2), so that
// it neither overflows nor flushes where the quotient does not.
#pragma once
#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif
#include "../config.cuh"
#include "../types.cuh"
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "../ptx/convert.cuh"
#endif

namespace deep_gemm_k3::epilogue {

// ---- primitives
DG_HOST_DEVICE inline uint32_t float_bits(float x) {
    return __builtin_bit_cast(uint32_t, x);
}
DG_HOST_DEVICE inline float bits_float(uint32_t x) {
    return __builtin_bit_cast(float, x);
}
DG_HOST_DEVICE inline float exponential(float x) {
#if defined(__CUDA_ARCH__)
    return ::expf(x);
#else
    return std::exp(x);
#endif
}
DG_HOST_DEVICE inline float tanh_exact(float x) {
#if defined(__CUDA_ARCH__)
    return ::tanhf(x);
#else
    return std::tanh(x);
#endif
}
// 1/x and 2^x within 2^-22.
DG_HOST_DEVICE inline float reciprocal_fast(float x) {
#if defined(__CUDA_ARCH__)
    return ptx::reciprocal_approximate(x);
#else
    return 1.f / x;
#endif
}
DG_HOST_DEVICE inline float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
    return ptx::exp2_approximate(x);
#else
    return std::exp2(x);
#endif
}
DG_HOST_DEVICE inline float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return ::fmaf(a, b, c);
#else
    return std::fma(a, b, c);
#endif
}

DG_HOST_DEVICE inline float absolute(float x) {
#if defined(__CUDA_ARCH__)
    return ::fabsf(x); // a modifier of the instruction that reads it
#else
    return std::fabs(x);
#endif
}

// numerator / denominator, with a denominator in [1, 2]: a product of several takes one reciprocal.
struct Fraction {
    float numerator;
    float denominator;
};

// tanh: an odd polynomial near zero, where (1 - e^-2x) would cancel.
constexpr float kEndOfSeries = 0.55f;
DG_HOST_DEVICE inline float tanh_series(float x) {
    const float square = x * x;
    float series = fused_multiply_add(1.573944092e-2f, square, -5.230396241e-2f);
    series = fused_multiply_add(series, square, 1.331529766e-1f);
    series = fused_multiply_add(series, square, -3.333276808e-1f);
    return fused_multiply_add(series * square, x, x);
}
DG_HOST_DEVICE inline Fraction tanh_fast(float x) {
    const float magnitude = absolute(x), small = tanh_series(x);
    const float power = exp2_fast(magnitude * -2.885390082f); // e^(-2 |x|)
    const float large = bits_float(float_bits(1.f - power) | (float_bits(x) & 0x80000000u));
    const bool is_small = magnitude < kEndOfSeries;
    return {is_small ? small : large, is_small ? 1.f : 1.f + power};
}
// Of a BF16 number: its product with the upper 16 bits of log2(e) is exact, the lower bits correct the power.
DG_HOST_DEVICE inline Fraction sigmoid_fast(float x) {
    constexpr float kLog2eHigh = 1.44268798828125f, kRest = 4.8884952e-6f; // (log2(e) - kLog2eHigh) * ln(2)
    const float magnitude = absolute(x);
    const float bounded = magnitude < 126.f ? magnitude : 126.f; // e^-126 is zero; a NaN comes from tanh
    const float power = exp2_fast(bounded * -kLog2eHigh) * fused_multiply_add(bounded, -kRest, 1.f);
    return {x < 0.f ? power : 1.f, 1.f + power};
}

// ---- division by a positive number that may be subnormal
template <bool kFastMath>
struct Divisor {
    float value;
    float power;      // fast mode: value ~ 1 / (power * reciprocal)
    float reciprocal; // in (0.5, 2^24]

    DG_HOST_DEVICE explicit Divisor(float divisor) : value(divisor), power(1.f), reciprocal(1.f) {
        if constexpr (kFastMath) {
            const bool is_subnormal = divisor < 1.17549435e-38f;
            const float scaled = is_subnormal ? divisor * 16777216.f : divisor; // 2^24
            const int exponent = static_cast<int>(float_bits(scaled) >> 23) - 127 - (is_subnormal ? 24 : 0);
            const int first = exponent < -127 ? 127 : (exponent > 126 ? -126 : -exponent);
            const float mantissa = bits_float((float_bits(scaled) & 0x007FFFFFu) | 0x3F800000u);
            power = bits_float(static_cast<uint32_t>(first + 127) << 23);
            reciprocal = bits_float(static_cast<uint32_t>(-exponent - first + 127) << 23) * reciprocal_fast(mantissa);
        }
    }
    DG_HOST_DEVICE float divide(float x) const {
        if constexpr (kFastMath)
            return (x * power) * reciprocal;
        else
            return x / value;
    }
};

DG_HOST_DEVICE inline float sigmoid_exact(float x) {
    return 1.f / (1.f + exponential(-x));
}

// ---- the activations, on gates and ups that are already rounded to BF16
template <bool kFastMath>
struct SiTU {
    // Whether there is a shorter way to the same bits where ups are small.
    static constexpr bool kHasSmallUps = kFastMath;

    Divisor<kFastMath> beta, linear_beta;

    DG_HOST_DEVICE SiTU(float beta_value, float linear_beta_value) : beta(beta_value), linear_beta(linear_beta_value) {}
    DG_HOST_DEVICE float operator()(float gate, float up) const {
        if constexpr (kFastMath) {
            return with_up(gate, tanh_of_up(up));
        } else {
            const float gated = beta.value * tanh_exact(beta.divide(gate)) * sigmoid_exact(gate);
            return gated * (linear_beta.value * tanh_exact(linear_beta.divide(up)));
        }
    }
    // Fast mode in two steps, the first of them without a power for |up| < max_small_up().
    DG_HOST_DEVICE float max_small_up() const { return 0.5f * linear_beta.value; }
    DG_HOST_DEVICE Fraction tanh_of_small_up(float up) const { return {tanh_series(linear_beta.divide(up)), 1.f}; }
    DG_HOST_DEVICE Fraction tanh_of_up(float up) const { return tanh_fast(linear_beta.divide(up)); }
    DG_HOST_DEVICE float with_up(float gate, const Fraction& up) const {
        const Fraction a = tanh_fast(beta.divide(gate)), b = sigmoid_fast(gate);
        const float scale = b.numerator * reciprocal_fast(a.denominator * b.denominator * up.denominator);
        return beta.value * a.numerator * scale * (linear_beta.value * up.numerator);
    }
};

template <bool kFastMath>
struct SwiGLU {
    static constexpr bool kHasSmallUps = false;

    DG_HOST_DEVICE SwiGLU(float, float) {} // takes SiTU's constants and needs none
    DG_HOST_DEVICE float operator()(float gate, float up) const {
        if constexpr (kFastMath) {
            const Fraction share = sigmoid_fast(gate);
            return gate * (share.numerator * reciprocal_fast(share.denominator)) * up;
        } else {
            return gate * sigmoid_exact(gate) * up;
        }
    }
};

template <Activation kActivation, bool kFastMath>
struct SelectActivation {
    using Type = SiTU<kFastMath>;
};
template <bool kFastMath>
struct SelectActivation<Activation::kSwiGLU, kFastMath> {
    using Type = SwiGLU<kFastMath>;
};
template <Activation kActivation, bool kFastMath>
using ActivationFunction = typename SelectActivation<kActivation, kFastMath>::Type;

// Nearest BF16 value of a finite number.
DG_HOST_DEVICE inline float nearest_bf16(float x) {
    const uint32_t bits = float_bits(x);
    return bits_float((bits + 0x7FFFu + ((bits >> 16) & 1)) & 0xFFFF0000u);
}
// The gate is clamped above, the up value on both sides, at a limit that is a BF16 number. A NaN stays NaN.
DG_HOST_DEVICE inline float clamp_gate(float gate, float limit) {
    return gate > limit ? limit : gate;
}
DG_HOST_DEVICE inline float clamp_up(float up, float limit) {
    return up > limit ? limit : (up < -limit ? -limit : up);
}

} // namespace deep_gemm_k3::epilogue
