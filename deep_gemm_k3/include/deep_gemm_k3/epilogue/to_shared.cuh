// Sinks of finished shared-expert tiles.
//
// L1: a tile of rows is half as many gate/up pairs; a warp's 16 rows are 8 gates and the 8 ups of the same columns.
// SiTU, BF16, into the plain row-major shared intermediate; then one arrival on the token block's counter. L2: BF16
// rows of the output, to the dense output or to peers' workspaces. The destination is chosen for every vector of 8
// columns, because a tile may straddle two shards. Published values are bitwise the dense ones.
#pragma once
#include "../plan/workspace.cuh"
#include "../sync/dependencies.cuh"
#include "activation.cuh"
#include "split.cuh"
#include "transpose.cuh"

namespace deep_gemm_k3::epilogue {

template <Config C>
struct SharedToIntermediate {
    static constexpr int kTokens = C.shared_tile.num_tokens;
    static constexpr int kPass = tokens_per_pass(C, kTokens);
    static constexpr int kNumBlocks = C.shared_tile.num_rows / plan::kUnitRows / C.num_math_warpgroups;
    using Accumulators = float[kNumBlocks][kTokens / 2];
    using Activate = SiTU<C.fast_math>;

    const sched::Context& ctx;
    MathThread me;

    __device__ __forceinline__ explicit SharedToIntermediate(const sched::Context& context) : ctx(context) {}

    // 32 columns of the warpgroup: 64 bytes per token, the warp's 8 columns in chunk `warp`, positions swizzled.
    static __device__ __forceinline__ uint32_t chunk_address(uint32_t staging, uint32_t token, uint32_t chunk) {
        return staging + token * 64 + ((chunk ^ ((token >> 1) & 3)) << 4);
    }

    __device__ __forceinline__ void stage(
        uint32_t staging, const Activate& activation, const float (&d)[kTokens / 2]) const {
#pragma unroll
        for (int j = 0; j < kPass / 8; j += 2) {
            uint32_t matrix[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float value[4];
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    value[e] = d[4 * (j + i) + e];
                round_to_bf16(value[0], value[1]);
                round_to_bf16(value[2], value[3]);
                matrix[i] = ptx::float_to_bf16x2(activation(value[1], value[3]), activation(value[0], value[2]));
            }
            const uint32_t token = 8 * j + (me.lane & 15);
            ptx::store_matrix_x2_transposed(chunk_address(staging, token, me.warp), matrix[0], matrix[1]);
        }
    }

    // One m64 block: 32 columns of all tokens, to `block`.
    __device__ __forceinline__ void store(
        const Activate& activation, int num_tokens, float (&d)[kTokens / 2], uint8_t* block) const {
        const uint32_t staging = staging_address<C>(ctx, me);
        const uint32_t token = me.thread / 4, chunk = me.thread % 4;
#pragma unroll 1
        for (int pass = 0; pass < num_tokens; pass += kPass) {
            stage(staging, activation, d);
            me.sync();
            if (token < kPass && pass + static_cast<int>(token) < num_tokens)
                *reinterpret_cast<ptx::Vector4*>(
                    block + (pass + token) * uint64_t(C.shape.shared_intermediate) * 2 + chunk * 16) =
                    ptx::load_shared_16(chunk_address(staging, token, chunk));
            me.sync();
            shift_accumulators<kPass / 2>(d);
        }
    }

    // `slice`: the tokens of the tile whose accumulators begin at acc[m][0].
    __device__ __forceinline__ void finish(const sched::Task& task, TokenSlice slice, Accumulators& acc) const {
        const Activate activation(ctx.params.scalars.situ_beta, ctx.params.scalars.situ_linear_beta);
        const int num_tokens = slice.count;
        const uint32_t column = task.row_tile * (C.shared_tile.num_rows / 2) + me.warpgroup * kNumBlocks * 32;
        const uint64_t first_token = uint64_t(task.block) * kTokens + slice.first;
        uint8_t* block = sched::component<C>(ctx, plan::Component::kSharedIntermediate) +
                         (first_token * C.shape.shared_intermediate + column) * 2;
#pragma unroll 1
        for (int m = 0; m < kNumBlocks; ++m) {
            store(activation, num_tokens, acc[0], block + m * 64);
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i)
                acc[0][i] = acc[kNumBlocks - 1][i];
        }
        ptx::fence_proxy_async_global();
        me.sync();
        if (me.thread == 0)
            sync::arrive_shared_l1_done<C>(ctx, task.block);
    }
};

// Where 8 columns of one shared token go.
template <Config C>
struct SharedDestination {
    static constexpr uint32_t kHidden = C.shared_hidden;
    static constexpr uint32_t kShard = C.shared_hidden / C.shape.num_ranks;

    const Params& params;
    int generation; // negative: nothing may be written

    __device__ __forceinline__ explicit SharedDestination(const sched::Context& ctx)
        : params(ctx.params), generation(0) {
        if constexpr (C.is_published()) {
            // The dispatch warps noted it before the list was complete, and reported one that is out of range.
            generation = *reinterpret_cast<const volatile int*>(ctx.roles + plan::roles_memory::kGeneration);
        }
    }
    __device__ __forceinline__ bool is_valid() const { return generation >= 0; }
    __device__ __forceinline__ uint8_t* peer(uint32_t rank) const {
        return reinterpret_cast<uint8_t*>(params.publication.peer_ptrs[rank]) +
               static_cast<uint32_t>(generation) * params.publication.generation_stride;
    }
    __device__ __forceinline__ uint8_t* address(uint32_t token, uint32_t column) const {
        if constexpr (C.shared_output == SharedOutput::kHiddenSharded) {
            const uint32_t rank = column / kShard;
            return peer(rank) + (uint64_t(token) * kHidden + params.rank * kShard + (column - rank * kShard)) * 2;
        } else if constexpr (C.shared_output == SharedOutput::kTokenOwner) {
            const uint32_t tokens_per_rank = max_of(1, params.shared.num_tokens / C.shape.num_ranks);
            const uint32_t rank = token / tokens_per_rank, local = token - rank * tokens_per_rank;
            return peer(rank) + ((uint64_t(local) * C.shape.num_ranks + params.rank) * kHidden + column) * 2;
        } else {
            return static_cast<uint8_t*>(params.shared.output) + (uint64_t(token) * kHidden + column) * 2;
        }
    }
};

template <Config C>
struct SharedToOutput {
    static constexpr int kTokens = C.shared_tile.num_tokens;
    static constexpr int kPass = tokens_per_pass(C, kTokens);
    static constexpr int kNumBlocks = C.shared_tile.num_rows / plan::kUnitRows / C.num_math_warpgroups;
    using Accumulators = float[kNumBlocks][kTokens / 2];

    const sched::Context& ctx;
    MathThread me;

    __device__ __forceinline__ explicit SharedToOutput(const sched::Context& context) : ctx(context) {}

    // One m64 block: 64 columns from `first_row` on, of all tokens of the tile.
    __device__ __forceinline__ void store(const SharedDestination<C>& destination, const sched::Task& task,
        float (&d)[kTokens / 2], int first_row) const {
        const uint32_t staging = staging_address<C>(ctx, me);
        const int num_tokens = task.num_valid_tokens, first_token = task.block * kTokens;
#pragma unroll 1
        for (int pass = 0; pass < num_tokens; pass += kPass) {
            stage_transposed<kPass>(me, staging, d, 0, 0);
            me.sync();
            for_each_staged<kPass>(me, staging, [&](int, uint32_t token, uint32_t chunk, const ptx::Vector4& value) {
                const int in_block = pass + static_cast<int>(token);
                if (in_block < num_tokens && destination.is_valid())
                    *reinterpret_cast<ptx::Vector4*>(
                        destination.address(first_token + in_block, first_row + chunk * 8)) = value;
            });
            me.sync();
            shift_accumulators<kPass / 2>(d);
        }
    }

    __device__ __forceinline__ void finish(const sched::Task& task, Accumulators& acc) const {
        const SharedDestination<C> destination(ctx);
#pragma unroll 1
        for (int m = 0; m < kNumBlocks; ++m) {
            const int first_row =
                task.row_tile * C.shared_tile.num_rows + (me.warpgroup * kNumBlocks + m) * plan::kUnitRows;
            if (C.shared_hidden % C.shared_tile.num_rows == 0 || first_row < C.shared_hidden)
                store(destination, task, acc[0], first_row);
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i)
                acc[0][i] = acc[kNumBlocks - 1][i];
        }
    }
};

} // namespace deep_gemm_k3::epilogue
