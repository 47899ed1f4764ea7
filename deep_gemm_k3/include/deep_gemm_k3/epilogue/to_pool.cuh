// Sink of a finished routed L1 tile: 256 rows = 128 intermediate columns, one k128 unit of the block's L2 operand.
//
// In every m64 block the 16 rows of a warp are 8 gates and the 8 ups of the same columns, so a thread holds both of a
// (column, token). A warp owns 16 columns (8 of each of its two blocks); warps w and w ^ 1 share a group of 32 and
// exchange its scale codes through shared memory. The values are rounded to E4M3 and expanded again to the BF16 operand
// value * 2^(s + 8), which is exact.
//
//   per 32 tokens: activate -> codes to shared memory -> barrier -> quantise, transpose (stmatrix), 16-byte stores
//   at the end: proxy fence -> barrier -> one arrival on the block's L1 counter
#pragma once
#include "../plan/operand_tile.cuh"
#include "../plan/workspace.cuh"
#include "../sync/dependencies.cuh"
#include "../sync/stage_rows.cuh"
#include "activation.cuh"
#include "expand.cuh"
#include "math_thread.cuh"

namespace deep_gemm_k3::epilogue {

// The activation that a Config names, with its constants at hand.
template <Config C>
struct RoutedActivation {
    using Function = ActivationFunction<C.activation, C.fast_math>;
    // Two ways for ups: worth it where tiles of many tokens are finished.
    static constexpr bool kLooksForSmallUps = Function::kHasSmallUps && plan::has_exchange(C);
    static_assert(!kLooksForSmallUps || !C.has_clamp);

    Function function;
    float limit;

    __device__ __forceinline__ explicit RoutedActivation(const Scalars& s)
        : function(s.situ_beta, s.situ_linear_beta), limit(C.has_clamp ? nearest_bf16(s.activation_clamp) : 0.f) {}
    __device__ __forceinline__ float operator()(float gate, float up) const {
        if constexpr (C.has_clamp)
            return function(clamp_gate(gate, limit), clamp_up(up, limit));
        else
            return function(gate, up);
    }
    // Replaces gates by activations, by whole warps: mostly all ups of a warp are small.
    template <int kNum>
    __device__ __forceinline__ void replace(float (&gate)[kNum], const float (&up)[kNum]) const {
        if constexpr (kLooksForSmallUps) {
            Fraction tanh_of_up[kNum];
            float largest = 0.f;
#pragma unroll
            for (int i = 0; i < kNum; ++i) {
                largest = fmaxf(largest, fabsf(up[i]));
                tanh_of_up[i] = function.tanh_of_small_up(up[i]);
            }
            if (!__all_sync(0xFFFFFFFFu, largest < function.max_small_up()))
#pragma unroll
                for (int i = 0; i < kNum; ++i)
                    tanh_of_up[i] = function.tanh_of_up(up[i]);
#pragma unroll
            for (int i = 0; i < kNum; ++i)
                gate[i] = function.with_up(gate[i], tanh_of_up[i]);
        } else {
#pragma unroll
            for (int i = 0; i < kNum; ++i)
                gate[i] = (*this)(gate[i], up[i]);
        }
    }
};

template <Config C>
struct ToPool {
    static constexpr int kTokens = C.routed_tile.num_tokens;
    // Tokens per turn of the loop: one copy of its code serves them all. Groups of a turn share one stream of
    // instructions; those beyond the tile compute what nobody reads.
    static constexpr int kPass = min_of(kTokens, 32);
    static constexpr int kNumGroups = kPass / 8;
    static constexpr bool kSharesTiles = plan::shares_tiles(C);
    using Rows = TokenRows<kTokens>;
    using Accumulators = float[2][kTokens / 2];
    using Activate = RoutedActivation<C>;

    const sched::Context& ctx;
    MathThread me;

    __device__ __forceinline__ explicit ToPool(const sched::Context& context) : ctx(context) {}

    // Routing weights of the block's tokens from `first` on.
    __device__ __forceinline__ void load_rows(const sched::Task& task, Rows& rows, int first = 0) const {
        const auto weight_of = [&](uint32_t token) {
            return &sched::row_info<C>(ctx, task.block * kTokens + (first + token) % kTokens)->weight;
        };
        if constexpr (sched::can_gather_into_stages(C)) {
            // From this CTA's shared memory where it gathered the rows itself: the others' words may not be there yet.
            const bool is_ours = sync::has_gathered_rows(ctx);
            const void* weight = is_ours ? ctx.roles + plan::roles_memory::kStageWeights + me.lane % kTokens * 4
                                         : reinterpret_cast<const uint8_t*>(weight_of(me.lane));
            rows.first[0] = *static_cast<const volatile uint32_t*>(weight);
            return;
        }
#pragma unroll
        for (int i = 0; i < Rows::kPerLane; ++i)
            rows.first[i] = ptx::load_relaxed_sys(weight_of(me.lane + 32 * i));
    }

    // Where the codes of a warp's tokens lie; this lane's pair of tokens of a group.
    __device__ __forceinline__ uint32_t codes_address(uint32_t warp) const {
        constexpr plan::SharedMemoryLayout kLayout = plan::shared_memory_layout(C);
        return ptx::shared_address(ctx.shared) + kLayout.scale_codes +
               (me.warpgroup * 4 + warp) * plan::scale_code_stride(C) + me.pair * 4;
    }

    // Replaces acc[b][4j], acc[b][4j + 1] by the weighted activations of two tokens; returns the scale codes of the
    // warp's 16 columns for both.
    template <int kNumAccumulators>
    __device__ __forceinline__ uint32_t activate_group(
        int j, const Activate& activate, const Rows& rows, float (&acc)[2][kNumAccumulators]) const {
        float amax[2] = {0.f, 0.f};
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            weight[i] = __uint_as_float(__shfl_sync(0xFFFFFFFFu, rows.first[0], (8 * j + 2 * me.pair + i) & 31));
        float gate[4], up[4];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            float* a = &acc[b][4 * j];
            round_to_bf16(a[0], a[1]);
            round_to_bf16(a[2], a[3]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                gate[2 * b + i] = a[i];
                up[2 * b + i] = a[2 + i];
            }
        }
        activate.replace(gate, up);
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                acc[b][4 * j + i] = gate[2 * b + i] * weight[i];
                amax[i] = fmaxf(amax[i], fabsf(acc[b][4 * j + i]));
            }
        uint32_t codes = scale_code(amax[0]) | scale_code(amax[1]) << 16;
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
            codes = ptx::max_u16x2(codes, __shfl_xor_sync(0xFFFFFFFFu, codes, distance));
        return codes;
    }

    // Two values of adjacent tokens to E4M3 and on to a pair of BF16 operands.
    static __device__ __forceinline__ uint32_t requantise(float first, float second, uint32_t codes) {
        const uint32_t code[2] = {codes & 0xFFFFu, codes >> 16};
        return expand_pair(ptx::float_to_e4m3x2(second * inverse_scale(code[1]), first * inverse_scale(code[0])),
            operand_scale(code[1]), operand_scale(code[0]));
    }

    // Groups j and j + 1 (or the only one): 16 columns of up to 16 tokens, the first of them `token`, through the
    // warp's own 512 bytes of scratch.
    __device__ __forceinline__ void store_groups(
        int j, int first_token, const uint32_t* codes, const Accumulators& acc, uint8_t* tile) const {
        constexpr int kPaired = kNumGroups > 1 ? 2 : 1;
        const uint32_t scratch = staging_address<C>(ctx, me) + me.warp * 512;
        uint32_t matrix[4];
#pragma unroll
        for (int i = 0; i < kPaired; ++i)
#pragma unroll
            for (int b = 0; b < 2; ++b)
                matrix[2 * i + b] = requantise(acc[b][4 * (j + i)], acc[b][4 * (j + i) + 1], codes[i]);
        // Lane 8 * (2 * i + b) + r addresses token 8 * i + r, block b; odd groups of four tokens swap their two chunks.
        const uint32_t to_token = (me.lane >> 4) * 8 + (me.lane & 7), to_block = (me.lane >> 3) & 1;
        const uint32_t to = scratch + to_token * 32 + ((to_block ^ ((to_token >> 2) & 1)) << 4);
        if constexpr (kPaired == 2)
            ptx::store_matrix_x4_transposed(to, matrix);
        else
            ptx::store_matrix_x2_transposed(to, matrix[0], matrix[1]);
        __syncwarp();
        const uint32_t token = me.lane >> 1, block = (me.lane & 1) ^ ((token >> 2) & 1);
        const bool exists =
            (kTokens % kPass == 0 && !kSharesTiles) || first_token + 8 * j + static_cast<int>(token) < kTokens;
        if ((kPaired == 2 || me.lane < 16) && exists) {
            const ptx::Vector4 chunk = ptx::load_shared_16(scratch + me.lane * 16);
            *reinterpret_cast<ptx::Vector4*>(tile + plan::operand_chunk_offset(first_token + 8 * j + token,
                                                        8 * me.warpgroup + 2 * me.warp + block)) = chunk;
        }
        __syncwarp();
    }

    // The tokens from `begin` on, which is 0 or, of a tile that is shared, the number of those handed over.
    __device__ __forceinline__ void finish(const sched::Task& task, int begin, Rows& rows, Accumulators& acc) const {
        const Activate activate(ctx.params.scalars);
        uint8_t* tile = sched::component<C>(ctx, plan::Component::kPoolIntermediate) +
                        plan::operand_tile_offset(kTokens, C.shape.intermediate, task.block, task.row_tile);
        const int num_tokens = task.num_valid_tokens;
        if (kSharesTiles && begin != 0) {
            shift_accumulators<plan::exchange_tokens(C) / 2>(acc[0]);
            shift_accumulators<plan::exchange_tokens(C) / 2>(acc[1]);
        }
#pragma unroll 1
        for (int first = begin; first < num_tokens; first += kPass) {
            uint32_t codes[kNumGroups];
#pragma unroll
            for (int j = 0; j < kNumGroups; ++j) {
                codes[j] = activate_group(j, activate, rows, acc);
                if (me.row == 0)
                    ptx::store_shared_4(codes_address(me.warp) + (first - begin) * 2 + j * 16, codes[j]);
            }
            me.sync();
#pragma unroll
            for (int j = 0; j < kNumGroups; ++j)
                codes[j] = ptx::max_u16x2(
                    codes[j], ptx::load_shared_4(codes_address(me.warp ^ 1) + (first - begin) * 2 + j * 16));
#pragma unroll
            for (int j = 0; j < kNumGroups; j += 2)
                store_groups(j, first, &codes[j], acc, tile);
            if (kSharesTiles && first + kPass >= num_tokens) // there are many to move for nothing
                break;
            rows.advance();
            shift_accumulators<kPass / 2>(acc[0]);
            shift_accumulators<kPass / 2>(acc[1]);
        }
        ptx::fence_proxy_async_global();
        me.sync();
        if (me.thread == 0)
            sync::arrive_block_l1_done<C>(ctx, task.block, kSharesTiles && begin == 0 ? 2 : 1);
    }
};

} // namespace deep_gemm_k3::epilogue
