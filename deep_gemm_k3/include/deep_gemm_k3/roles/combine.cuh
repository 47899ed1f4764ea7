// Combine and RMSNorm: the math warps, once their tasks are done. A CTA takes one token at a time; each thread owns
// vectors of 8 columns.
//
// A partial is stored by the rank that owns the expert as the bitwise complement of its BF16 values, straight into slot
// [token][k] of the token's rank. Zero means "not yet": a value whose complement is zero would be the NaN 0xFFFF, and
// the writers canonicalise NaN to 0x7FFF. So a slot validates itself, 16 bits at a time, and needs neither flag nor
// fence. The combiner stores the zeros back; the next writer comes after the next call's header, which is released
// after this kernel.
//
// Sum in FP32 in ascending k, -1 slots skipped, one rounding to BF16; the norm reads the rounded values from registers.
// Every order is fixed by (columns, k) alone.
#pragma once
#include "../ptx/convert.cuh"
#include "push.cuh"

namespace deep_gemm_k3::roles {

__device__ __forceinline__ bool has_zero_half(uint32_t word) {
    return ((word - 0x00010001u) & ~word & 0x80008000u) != 0;
}
__device__ __forceinline__ bool is_complete(const ptx::Word16& v) {
    return !(has_zero_half(v.x) | has_zero_half(v.y) | has_zero_half(v.z) | has_zero_half(v.w));
}
__device__ __forceinline__ float low_to_float(uint32_t pair) {
    return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_to_float(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
}

template <Config C>
struct CombineShape {
    static constexpr int kNumThreads = C.num_math_warpgroups * 128;
    static constexpr int kNumVectors = C.shape.hidden / 8;
    static constexpr int kVectorsPerThread = ceil_div(kNumVectors, kNumThreads);
    // Vectors in flight take four registers each; a CTA that has the SM to itself has them to spare.
    static constexpr int kSlotsInFlight = max_of(1, (C.num_ctas_per_sm == 1 ? 16 : 8) / kVectorsPerThread);
};

// Calls f(word, sums of its columns, address) for every word in flight that this thread owns, its first at `partials`.
// A function, not a generic lambda: those have no execution space under NVRTC.
template <Config C, class Function>
__device__ __forceinline__ void for_each_word(const Context& ctx, uint32_t slots, uint8_t* partials,
    ptx::Word16 (&words)[CombineShape<C>::kSlotsInFlight][CombineShape<C>::kVectorsPerThread],
    float (&sums)[CombineShape<C>::kVectorsPerThread][8], Function f) {
    using S = CombineShape<C>;
#pragma unroll
    for (int i = 0; i < S::kSlotsInFlight; ++i)
#pragma unroll
        for (int j = 0; j < S::kVectorsPerThread; ++j) {
            const int vector = j * S::kNumThreads + ctx.thread_idx;
            if ((slots >> i & 1) != 0 && vector < S::kNumVectors)
                f(words[i][j], sums[j], partials + (i * S::kNumVectors + j * S::kNumThreads) * 16);
        }
}

// Adds slots [first, first + kSlotsInFlight) of one token. All loads are in flight together and retried together.
template <Config C>
__device__ __forceinline__ void add_slots(const Context& ctx, int token, int first, uint32_t valid_slots,
    float (&sums)[CombineShape<C>::kVectorsPerThread][8]) {
    using S = CombineShape<C>;
    uint8_t* partials = sched::component<C>(ctx, plan::Component::kPartials) +
                        plan::partial_offset(C.shape, uint64_t(token) * C.shape.num_topk + first) +
                        static_cast<uint32_t>(ctx.thread_idx) * 16;
    const uint32_t slots = valid_slots >> first;
    ptx::Word16 words[S::kSlotsInFlight][S::kVectorsPerThread];
    sync::wait_until(
        ctx, {sync::Role::kCombine, sync::What::kPartial, static_cast<uint32_t>(token)}, first, [&](uint32_t& seen) {
            for_each_word<C>(ctx, slots, partials, words, sums,
                [](ptx::Word16& word, float*, const uint8_t* at) { word = ptx::load_relaxed_sys_v4(at); });
            bool complete = true;
            for_each_word<C>(ctx, slots, partials, words, sums,
                [&](ptx::Word16& word, float*, const uint8_t*) { complete &= is_complete(word); });
            seen = first;
            return complete;
        });
    for_each_word<C>(ctx, slots, partials, words, sums, [](ptx::Word16& word, float* sum, uint8_t* at) {
        ptx::store_relaxed_sys_v4(at, {0, 0, 0, 0});
        const uint32_t pairs[4] = {~word.x, ~word.y, ~word.z, ~word.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            sum[2 * c] += low_to_float(pairs[c]);
            sum[2 * c + 1] += high_to_float(pairs[c]);
        }
    });
}

// 1 / sqrt(mean square + epsilon) over the row, from each thread's sum of squares.
template <Config C>
__device__ __forceinline__ float row_scale(const Context& ctx, float squares, int buffer) {
    constexpr int num_warps = C.num_math_warpgroups * 4;
    float* sums = reinterpret_cast<float*>(ctx.roles + plan::roles_memory::kReduction) + buffer * 16;
    for (int delta = 16; delta > 0; delta /= 2)
        squares += __shfl_xor_sync(0xFFFFFFFFu, squares, delta);
    if (ctx.lane_idx == 0)
        sums[ctx.warp_idx] = squares;
    __syncwarp();
    // One barrier a token: the sums have two buffers, and nobody reaches the second token from here before all read
    // this.
    ptx::barrier_sync(ptx::NamedBarrier::kMath, CombineShape<C>::kNumThreads);
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < num_warps; ++warp)
        total += sums[warp];
    const float mean = __fdiv_rn(total, static_cast<float>(C.shape.hidden)) + ctx.params.scalars.rms_epsilon;
    return C.fast_math ? rsqrtf(mean) : __fdiv_rn(1.0f, __fsqrt_rn(mean));
}

template <Config C>
__device__ __forceinline__ void combine_token(const Context& ctx, int token, int buffer) {
    using S = CombineShape<C>;
    const auto* ids = reinterpret_cast<const int64_t*>(sched::component<C>(ctx, plan::Component::kInputTopkIdx));
    const bool valid = ctx.lane_idx < C.shape.num_topk && ids[int64_t(token) * C.shape.num_topk + ctx.lane_idx] >= 0;
    const uint32_t valid_slots = __ballot_sync(0xFFFFFFFFu, valid);
    // Asked for before the wait for partials.
    uint4 gammas[S::kVectorsPerThread];
#pragma unroll
    for (int j = 0; j < S::kVectorsPerThread; ++j) {
        const int vector = j * S::kNumThreads + ctx.thread_idx;
        if (C.has_rms_norm && vector < S::kNumVectors)
            gammas[j] = reinterpret_cast<const uint4*>(ctx.params.rms_weight)[vector];
    }
    float sums[S::kVectorsPerThread][8] = {};
    for (int first = 0; first < C.shape.num_topk; first += S::kSlotsInFlight)
        add_slots<C>(ctx, token, first, valid_slots, sums);

    uint32_t pairs[S::kVectorsPerThread][4];
    float squares = 0;
#pragma unroll
    for (int j = 0; j < S::kVectorsPerThread; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            pairs[j][c] = ptx::float_to_bf16x2(sums[j][2 * c + 1], sums[j][2 * c]);
            squares += low_to_float(pairs[j][c]) * low_to_float(pairs[j][c]);
            squares += high_to_float(pairs[j][c]) * high_to_float(pairs[j][c]);
        }
    float scale = 1;
    if constexpr (C.has_rms_norm)
        scale = row_scale<C>(ctx, squares, buffer);
    auto* y = reinterpret_cast<uint4*>(ctx.params.y) + int64_t(token) * S::kNumVectors;
#pragma unroll
    for (int j = 0; j < S::kVectorsPerThread; ++j) {
        const int vector = j * S::kNumThreads + ctx.thread_idx;
        if (vector >= S::kNumVectors)
            continue;
        if constexpr (C.has_rms_norm) {
            const uint32_t gamma[4] = {gammas[j].x, gammas[j].y, gammas[j].z, gammas[j].w};
#pragma unroll
            for (int c = 0; c < 4; ++c)
                pairs[j][c] = ptx::float_to_bf16x2(high_to_float(pairs[j][c]) * high_to_float(gamma[c]) * scale,
                    low_to_float(pairs[j][c]) * low_to_float(gamma[c]) * scale);
        }
        y[vector] = {pairs[j][0], pairs[j][1], pairs[j][2], pairs[j][3]};
    }
}

template <Config C>
__device__ __forceinline__ void combine(const Context& ctx) {
    Context here = ctx;
    int buffer = 0;
    // Whoever is first without tasks begins, and waits in place while the others finish. Where that is not known: the
    // last CTAs have the fewest tasks.
    const uint32_t order = *reinterpret_cast<const volatile uint32_t*>(ctx.roles + plan::roles_memory::kOrderOfEnd);
    for (int token = order != 0 ? order - 1 : ctx.num_ctas - 1 - ctx.cta_idx; token < ctx.params.num_tokens;
        token += ctx.num_ctas, buffer ^= 1) {
        // Anew for every token: addresses that derive from it take no registers beside the slots in flight.
        here.thread_idx = static_cast<int>(ptx::thread_index());
        here.warp_idx = here.thread_idx / 32;
        here.lane_idx = here.thread_idx % 32;
        combine_token<C>(here, token, buffer);
    }
}

} // namespace deep_gemm_k3::roles
