// Sink of a finished routed L2 tile on SM100; what is stored, and where, is that of to_peer.cuh.
#pragma once
#include "../../engine/sm100/tile_sums.cuh"
#include "../to_peer.cuh"

namespace deep_gemm_k3::epilogue {

// First of the 8 weight rows, of a warpgroup's 128, in a chunk of the staged block `b` (16 rows of every warp).
__device__ __forceinline__ uint32_t staged_row(int b, uint32_t chunk) {
    return chunk / 2 * 32 + b * 16 + chunk % 2 * 8;
}

template <Config C>
struct ToPeerSM100 : ToPeer<C> {
    using Base = ToPeer<C>;
    using Sums = engine::TileSums<C.routed_tile.num_tokens, C.num_cluster_ctas>;
    using Base::ctx;
    using Base::me;
    static constexpr int kPass = Sums::kPass;

    __device__ __forceinline__ explicit ToPeerSM100(const sched::Context& context) : Base(context) {}

    __device__ __forceinline__ void finish(
        const sched::Task& task, TokenRows<C.routed_tile.num_tokens>& rows, Sums& sums) const {
        Base::locate(task, rows);
        const uint32_t staging = staging_address<C>(ctx, me);
        const uint32_t first_row = task.row_tile * plan::kTensorTileRows + me.warpgroup * plan::kHalfRows;
#pragma unroll 1
        for (int pass = 0; pass < task.num_valid_tokens; pass += kPass) {
            sums.load(pass);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                stage_transposed<kPass>(me, staging, sums.d[b], 0, 0xFFFFFFFFu);
                me.sync();
                for_each_staged<kPass>(me, staging, [&](int, uint32_t token, uint32_t chunk, const ptx::Vector4& v) {
                    const uint64_t low = __shfl_sync(0xFFFFFFFFu, rows.first[0], token);
                    const uint64_t high = __shfl_sync(0xFFFFFFFFu, rows.second[0], token);
                    if (pass + static_cast<int>(token) < task.num_valid_tokens)
                        ptx::store_relaxed_sys_v4(
                            reinterpret_cast<void*>((low | high << 32) + (first_row + staged_row(b, chunk)) * 2),
                            {v.word[0], v.word[1], v.word[2], v.word[3]});
                });
                me.sync();
            }
            rows.advance();
        }
    }
};

} // namespace deep_gemm_k3::epilogue
