// Sink of a finished routed L2 tile: BF16 partials of (token, top-k slot), stored bitwise complemented straight into
// the source rank's buffer. A zero there means "not yet": NaN leaves the conversion only as 0x7FFF, so a complement is
// never zero. The stores carry their own arrival; no fence, no flag.
#pragma once
#include "../plan/workspace.cuh"
#include "transpose.cuh"

namespace deep_gemm_k3::epilogue {

template <Config C>
struct ToPeer {
    static constexpr int kTokens = C.routed_tile.num_tokens;
    static constexpr int kPass = tokens_per_pass(C, kTokens);
    using Rows = TokenRows<kTokens>;
    using Accumulators = float[2][kTokens / 2];

    const sched::Context& ctx;
    MathThread me;

    __device__ __forceinline__ explicit ToPeer(const sched::Context& context) : ctx(context) {}

    // Places of the tokens' partials.
    __device__ __forceinline__ void load_rows(const sched::Task& task, Rows& rows) const {
#pragma unroll
        for (int i = 0; i < Rows::kPerLane; ++i)
            rows.first[i] = ptx::load_relaxed_sys(
                &sched::row_info<C>(ctx, task.block * kTokens + (me.lane + 32 * i) % kTokens)->place);
    }

    // Turns places into addresses; zero for a token that is not there, or never came after an abort.
    __device__ __forceinline__ void locate(const sched::Task& task, Rows& rows) const {
#pragma unroll
        for (int i = 0; i < Rows::kPerLane; ++i) {
            const uint32_t slot = rows.first[i] / kMaxNumRanks, rank = rows.first[i] % kMaxNumRanks;
            uint64_t address = 0;
            if (static_cast<int>(me.lane + 32 * i) < task.num_valid_tokens && rank < C.shape.num_ranks &&
                slot < static_cast<uint32_t>(C.shape.num_max_tokens * C.shape.num_topk))
                address = reinterpret_cast<uint64_t>(sched::peer_component<C>(ctx, rank, plan::Component::kPartials) +
                                                     plan::partial_offset(C.shape, slot));
            rows.first[i] = static_cast<uint32_t>(address);
            rows.second[i] = static_cast<uint32_t>(address >> 32);
        }
    }

    __device__ __forceinline__ void finish(const sched::Task& task, Rows& rows, const Accumulators& acc) const {
        locate(task, rows);
        const uint32_t staging = staging_address<C>(ctx, me);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint32_t first_row =
                task.row_tile * C.routed_tile.num_rows + (me.warpgroup * 2 + m) * plan::kUnitRows;
#pragma unroll
            for (int pass = 0; pass < kTokens; pass += kPass) {
                if (pass >= task.num_valid_tokens)
                    break;
                stage_transposed<kPass>(me, staging, acc[m], pass / 8, 0xFFFFFFFFu);
                me.sync();
                for_each_staged<kPass>(
                    me, staging, [&](int first, uint32_t token, uint32_t chunk, const ptx::Vector4& v) {
                        const int index = (pass + first) / 32; // the same for all 16 tokens of a visit
                        const uint32_t from = (pass + token) & 31;
                        const uint64_t low = __shfl_sync(0xFFFFFFFFu, rows.first[index], from);
                        const uint64_t high = __shfl_sync(0xFFFFFFFFu, rows.second[index], from);
                        if ((low | high) != 0)
                            ptx::store_relaxed_sys_v4(
                                reinterpret_cast<void*>((low | high << 32) + (first_row + chunk * 8) * 2),
                                {v.word[0], v.word[1], v.word[2], v.word[3]});
                    });
                me.sync();
            }
        }
    }
};

} // namespace deep_gemm_k3::epilogue
