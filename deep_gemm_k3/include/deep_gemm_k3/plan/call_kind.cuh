// What the calls of all ranks have in common, beside their buffers' shape and their token counts. Each of several
// entries may be ready on all ranks; a rank's header tells which one it calls, so that ranks that differ stop and say
// so instead of mixing their results. What a rank's plan chooses is no part of it.
#pragma once
#include "../config.cuh"

namespace deep_gemm_k3::plan {

// The header's word has room for as many bits between the number of CTAs and the row format.
constexpr int kCallKindShift = 13, kCallKindBits = 18;

struct CallKind {
    SharedOutput shared_output; // which entry
    Activation activation;
    bool has_clamp, fast_math, has_rms_norm;
    int shared_hidden; // a multiple of 128 below 128 << 11

    DG_HOST_DEVICE static constexpr CallKind of(const Config& c) {
        return {c.shared_output, c.activation, c.has_clamp, c.fast_math, c.has_rms_norm, c.shared_hidden};
    }
    DG_HOST_DEVICE static constexpr CallKind unpacked(uint32_t bits) {
        return {static_cast<SharedOutput>(bits & 3), static_cast<Activation>(bits >> 2 & 1), (bits >> 3 & 1) != 0,
            (bits >> 4 & 1) != 0, (bits >> 5 & 1) != 0, static_cast<int>(bits >> 6 & 0x7FF) * 128};
    }
    DG_HOST_DEVICE constexpr uint32_t packed() const {
        return static_cast<uint32_t>(shared_output) | static_cast<uint32_t>(activation) << 2 |
               static_cast<uint32_t>(has_clamp) << 3 | static_cast<uint32_t>(fast_math) << 4 |
               static_cast<uint32_t>(has_rms_norm) << 5 | static_cast<uint32_t>(shared_hidden / 128 & 0x7FF) << 6;
    }
};
static_assert(
    CallKind{static_cast<SharedOutput>(3), static_cast<Activation>(1), true, true, true, 0x7FF * 128}.packed() <
    1u << kCallKindBits);

} // namespace deep_gemm_k3::plan
