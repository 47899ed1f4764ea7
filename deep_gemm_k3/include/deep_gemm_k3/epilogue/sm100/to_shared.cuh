// Sinks of finished shared-expert tiles on SM100; what is stored, and where, is that of to_shared.cuh. A tile has 256
// rows: in L1 128 gate/up pairs, 64 of each warpgroup.
#pragma once
#include "../../engine/sm100/tile_sums.cuh"
#include "../to_shared.cuh"
#include "to_peer.cuh"

namespace deep_gemm_k3::epilogue {

template <Config C>
struct SharedToIntermediateSM100 {
    using Sums = engine::TileSums<C.shared_tile.num_tokens, C.num_cluster_ctas>;
    using Activate = SiTU<C.fast_math>;
    static constexpr int kPass = Sums::kPass;

    const sched::Context& ctx;
    MathThread me;

    __device__ __forceinline__ explicit SharedToIntermediateSM100(const sched::Context& context) : ctx(context) {}

    // 64 columns of the warpgroup: 128 bytes per token, the warp's 16 columns in chunks 2 * warp and 2 * warp + 1.
    __device__ __forceinline__ void stage(uint32_t staging, const Activate& activation, const Sums& sums) const {
#pragma unroll
        for (int j = 0; j < kPass / 8; j += 2) {
            uint32_t matrix[4]; // 2 * i + b: tokens of group j + i, block b
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* d = &sums.d[i & 1][4 * (j + (i >> 1))];
                float value[4] = {d[0], d[1], d[2], d[3]};
                round_to_bf16(value[0], value[1]);
                round_to_bf16(value[2], value[3]);
                matrix[i] = ptx::float_to_bf16x2(activation(value[1], value[3]), activation(value[0], value[2]));
            }
            const uint32_t token = 8 * j + (me.lane >> 4) * 8 + (me.lane & 7),
                           chunk = 2 * me.warp + ((me.lane >> 3) & 1);
            ptx::store_matrix_x4_transposed(staged_chunk(staging, token, chunk), matrix);
        }
    }

    __device__ __forceinline__ void finish(const sched::Task& task, Sums& sums) const {
        const Activate activation(ctx.params.scalars.situ_beta, ctx.params.scalars.situ_linear_beta);
        const uint32_t staging = staging_address<C>(ctx, me);
        const uint32_t column = task.row_tile * (plan::kTensorTileRows / 2) + me.warpgroup * (plan::kHalfRows / 2);
        const uint64_t row_bytes = uint64_t(C.shape.shared_intermediate) * 2;
        uint8_t* block = sched::component<C>(ctx, plan::Component::kSharedIntermediate) +
                         uint64_t(task.block) * C.shared_tile.num_tokens * row_bytes + column * 2;
#pragma unroll 1
        for (int pass = 0; pass < task.num_valid_tokens; pass += kPass) {
            sums.load(pass);
            stage(staging, activation, sums);
            me.sync();
            for_each_staged<kPass>(me, staging, [&](int, uint32_t token, uint32_t chunk, const ptx::Vector4& value) {
                if (pass + static_cast<int>(token) < task.num_valid_tokens)
                    *reinterpret_cast<ptx::Vector4*>(block + (pass + token) * row_bytes + chunk * 16) = value;
            });
            me.sync();
        }
        ptx::fence_proxy_async_global();
        me.sync();
        if (me.thread == 0)
            sync::arrive_shared_l1_done<C>(ctx, task.block);
    }
};

template <Config C>
struct SharedToOutputSM100 {
    using Sums = engine::TileSums<C.shared_tile.num_tokens, C.num_cluster_ctas>;
    static constexpr int kPass = Sums::kPass;

    const sched::Context& ctx;
    MathThread me;

    __device__ __forceinline__ explicit SharedToOutputSM100(const sched::Context& context) : ctx(context) {}

    __device__ __forceinline__ void finish(const sched::Task& task, Sums& sums) const {
        const SharedDestination<C> destination(ctx);
        const uint32_t staging = staging_address<C>(ctx, me);
        const uint32_t first_row = task.row_tile * plan::kTensorTileRows + me.warpgroup * plan::kHalfRows;
#pragma unroll 1
        for (int pass = 0; pass < task.num_valid_tokens; pass += kPass) {
            sums.load(pass);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                stage_transposed<kPass>(me, staging, sums.d[b], 0, 0);
                me.sync();
                for_each_staged<kPass>(
                    me, staging, [&](int, uint32_t token, uint32_t chunk, const ptx::Vector4& value) {
                        const int in_block = pass + static_cast<int>(token);
                        if (in_block < task.num_valid_tokens && destination.is_valid())
                            *reinterpret_cast<ptx::Vector4*>(destination.address(
                                task.block * C.shared_tile.num_tokens + in_block, first_row + staged_row(b, chunk))) =
                                value;
                    });
                me.sync();
            }
        }
    }
};

} // namespace deep_gemm_k3::epilogue
