// Sink of a finished routed L1 tile on SM100: 256 rows = 128 intermediate columns, one k128 unit of the block's L2
// operand, in E4M3 with its scales.
//
// In every group of 16 rows 8 are gates and 8 the ups of the same columns, so a thread holds both of a (column, token).
// A warp owns 32 rows, so 16 columns; warps w and w ^ 1 share a group of 32 and exchange its scale codes (to_pool.cuh).
//
//   per 32 tokens: load -> activate -> codes to shared memory -> barrier -> quantise -> 16-byte stores, scale bytes
//   at the end: proxy fence -> barrier -> one arrival on the block's L1 counter
#pragma once
#include "../../engine/sm100/tile_sums.cuh"
#include "../../plan/pool_tile.cuh"
#include "../to_pool.cuh"

namespace deep_gemm_k3::epilogue {

template <Config C>
struct ToScaledPool : ToPool<C> {
    using Base = ToPool<C>;
    using Sums = engine::TileSums<C.routed_tile.num_tokens, C.num_cluster_ctas>;
    using Base::ctx;
    using Base::kNumGroups;
    using Base::kPass;
    using Base::kTokens;
    using Base::me;
    static_assert(Sums::kPass == kPass);

    __device__ __forceinline__ explicit ToScaledPool(const sched::Context& context) : Base(context) {}

    // The warp's 16 columns of a pass, token by token, through the warp's own 512 bytes of scratch.
    __device__ __forceinline__ void store_codes(
        int first_token, const uint32_t (&codes)[kNumGroups], const Sums& sums, uint8_t* tile) const {
        const uint32_t scratch = staging_address<C>(ctx, me) + me.warp * 512;
#pragma unroll
        for (int j = 0; j < kNumGroups; ++j) {
            const float low = inverse_scale(codes[j] & 0xFFFFu), high = inverse_scale(codes[j] >> 16);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const uint32_t pair = ptx::float_to_e4m3x2(sums.d[b][4 * j + 1] * high, sums.d[b][4 * j] * low);
                const uint32_t to = scratch + (8 * j + 2 * me.pair) * 16 + 8 * b + me.row;
                ptx::store_shared_1(to, pair & 0xFF);
                ptx::store_shared_1(to + 16, pair >> 8);
            }
        }
        __syncwarp();
        if (static_cast<int>(me.lane) < kPass) {
            const ptx::Vector4 chunk = ptx::load_shared_16(scratch + me.lane * 16);
            *reinterpret_cast<ptx::Vector4*>(
                tile + plan::scaled_chunk_offset(first_token + me.lane, 4 * me.warpgroup + me.warp)) = chunk;
        }
        __syncwarp();
    }

    // Scale bytes of the 32 columns that this warp and the next one share.
    __device__ __forceinline__ void store_scales(
        int first_token, const uint32_t (&codes)[kNumGroups], uint8_t* tile) const {
        if ((me.warp & 1) != 0)
            return;
        const uint32_t group = 2 * me.warpgroup + me.warp / 2;
#pragma unroll
        for (int j = 0; j < kNumGroups; ++j)
            if (static_cast<int>(me.row) == j) {
                const int token = first_token + 8 * j + 2 * me.pair;
                tile[plan::scale_word_offset(kTokens, token) + group] = static_cast<uint8_t>(codes[j]);
                tile[plan::scale_word_offset(kTokens, token + 1) + group] = static_cast<uint8_t>(codes[j] >> 16);
            }
    }

    __device__ __forceinline__ void finish(const sched::Task& task, TokenRows<kTokens>& rows, Sums& sums) const {
        const typename Base::Activate activate(ctx.params.scalars);
        uint8_t* tile = sched::component<C>(ctx, plan::Component::kPoolIntermediate) +
                        plan::pool_tile_offset(C, C.shape.intermediate, task.block, task.row_tile);
        const int num_tokens = task.num_valid_tokens;
#pragma unroll 1
        for (int first = 0; first < num_tokens; first += kPass) {
            uint32_t codes[kNumGroups];
            sums.load(first);
#pragma unroll
            for (int j = 0; j < kNumGroups; ++j) {
                codes[j] = Base::activate_group(j, activate, rows, sums.d);
                if (me.row == 0)
                    ptx::store_shared_4(Base::codes_address(me.warp) + first * 2 + j * 16, codes[j]);
            }
            me.sync();
#pragma unroll
            for (int j = 0; j < kNumGroups; ++j)
                codes[j] =
                    ptx::max_u16x2(codes[j], ptx::load_shared_4(Base::codes_address(me.warp ^ 1) + first * 2 + j * 16));
            store_codes(first, codes, sums, tile);
            store_scales(first, codes, tile);
            rows.advance();
        }
        ptx::fence_proxy_async_global();
        me.sync();
        if (me.thread == 0)
            sync::arrive_block_l1_done<C>(ctx, task.block);
    }
};

} // namespace deep_gemm_k3::epilogue
