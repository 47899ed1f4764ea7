// Sink of a finished routed L1 tile where one CTA has the SM to itself: the math warps leave gates and ups, rounded to
// BF16, in shared memory and go on to the next mainloop; the dispatch warps, idle by then, do what to_pool.cuh
// describes beside it.
//
//   math      wait empty -> all sums to shared memory -> arrive full
//   dispatch  wait full -> two tokens a warp at a time: activate, quantise, 16-byte stores -> arrive empty
//             proxy fence -> barrier of the dispatch warps -> arrivals on the block's L1 counter
//
// A lane has 8 columns of a token, four lanes a group of 32. The first arrival on `empty` says that the dispatch warps
// have done everything else: until then their cursors lie where the tile will. A math warpgroup stages other tiles in
// its half of the same memory, before its first routed L1 tile is in it or after the last one is out of it.
//
// The widest tiles leave memory for some of their tokens (plan::shares_tiles): the math warps hand over these and
// finish the others, and finish all as long as the dispatch warps have something else to do.
#pragma once
#include "to_pool.cuh"

namespace deep_gemm_k3::epilogue {

template <Config C>
struct Exchange {
    static constexpr plan::SharedMemoryLayout kLayout = plan::shared_memory_layout(C);
    static constexpr int kTokens = C.routed_tile.num_tokens;
    static constexpr uint32_t kNumMathWarps = C.num_math_warpgroups * plan::kWarpsPerWarpgroup;
    static_assert(kTokens % 8 == 0);
    static constexpr int kExchanged = plan::exchange_tokens(C); // the first of the tile

    uint32_t base; // shared memory

    __device__ __forceinline__ explicit Exchange(const uint8_t* shared) : base(ptx::shared_address(shared)) {}

    __device__ __forceinline__ uint32_t record() const { return base + kLayout.exchange_control; }
    __device__ __forceinline__ uint32_t full() const { return record() + plan::kExchangeRecordBytes; }
    __device__ __forceinline__ uint32_t empty() const { return full() + 8; }
    __device__ __forceinline__ uint32_t limit() const {
        return base + kLayout.scheduler + plan::roles_memory::kStageLimit;
    }
    // 8 columns of a token: 32 bytes. Swizzled, so that four pairs of tokens fall into different banks.
    static __device__ __forceinline__ uint32_t chunk_offset(uint32_t token, uint32_t chunk) {
        return (chunk >> 3) * plan::exchange_half_bytes(C) + token * plan::kExchangeTokenBytes +
               (((chunk & 7) ^ ((token >> 1) & 3)) << 5);
    }

    // Not zero once the dispatch warps have, or will soon have, nothing else to do.
    __device__ __forceinline__ uint32_t open() const { return record() + 12; }
    __device__ __forceinline__ bool is_open() const { return ptx::load_acquire_cta_shared(open()) != 0; }

    // Called by one thread before the CTA's first barrier.
    __device__ __forceinline__ void initialize() const {
        ptx::mbarrier_init(full(), kNumMathWarps);
        ptx::mbarrier_init(empty(), plan::kNumDispatchWarps);
        ptx::store_shared_4(open(), 0);
    }
};

// The math warps' side. Neither side can wait for something the other never does.
template <Config C>
struct ExchangeWriter : Exchange<C> {
    using Base = Exchange<C>;
    uint32_t parity = 0; // of the phase of `empty` that ends when the last tile is out

    __device__ __forceinline__ explicit ExchangeWriter(const uint8_t* shared) : Base(shared) {}

    // `has_failed`: becomes true where the limit passes.
    __device__ __forceinline__ void wait_empty(bool& has_failed) const {
        has_failed |= ptx::mbarrier_wait_fails(Base::empty(), parity, Base::limit());
    }
    // By all threads; what they wrote is there for whoever sees the phase of `full`.
    __device__ __forceinline__ void hand_over(const MathThread& me, int block, int row_tile, int num_tokens) {
        if (me.warpgroup == 0 && me.thread == 0) {
            ptx::store_shared_4(Base::record(), block);
            ptx::store_shared_4(Base::record() + 4, row_tile);
            ptx::store_shared_4(Base::record() + 8, num_tokens);
        }
        __syncwarp();
        if (me.lane == 0)
            ptx::mbarrier_arrive(Base::full());
        parity ^= 1;
    }
    __device__ __forceinline__ void send(
        const sched::Task& task, const float (&acc)[2][Base::kTokens / 2], bool& has_failed) {
        const MathThread me;
        wait_empty(has_failed);
        const uint32_t tile = Base::base + Base::kLayout.exchange + me.row * 4;
        const uint32_t chunk = 8 * me.warpgroup + 2 * me.warp;
#pragma unroll
        for (int j = 0; j < Base::kExchanged / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int b = 0; b < 2; ++b)
                    ptx::store_shared_4(tile + Base::chunk_offset(8 * j + 2 * me.pair + i, chunk + b),
                        ptx::float_to_bf16x2(acc[b][4 * j + 2 + i], acc[b][4 * j + i]));
        hand_over(me, task.block, task.row_tile, min_of(task.num_valid_tokens, Base::kExchanged));
    }
    // There are no more tiles.
    __device__ __forceinline__ void finish(bool& has_failed) {
        const MathThread me;
        wait_empty(has_failed);
        hand_over(me, 0, 0, 0);
    }
};

// The dispatch warps' side: every tile of the CTA, until there are no more.
template <Config C>
struct ExchangeReader : Exchange<C> {
    using Base = Exchange<C>;
    using Activate = RoutedActivation<C>;
    using Rows = TokenRows<Base::kTokens>;
    static constexpr uint32_t kLanesPerToken = 16, kTokensPerTurn = 2;

    const sched::Context& ctx;
    uint32_t warp; // of the dispatch warps
    uint32_t parity = 0;

    __device__ __forceinline__ ExchangeReader(const sched::Context& context, uint32_t dispatch_warp)
        : Base(context.shared), ctx(context), warp(dispatch_warp) {}

    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (ctx.lane_idx == 0)
            ptx::mbarrier_arrive(Base::empty());
    }

    // Activates, quantises and expands 8 columns of one token.
    static __device__ __forceinline__ ptx::Vector4 finish_chunk(
        const Activate& activate, const ptx::Vector4 (&pairs)[2], float weight) {
        float value[8], amax = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float gate[4], of_pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                gate[i] = __uint_as_float(pairs[half].word[i] << 16);
                of_pair[i] = __uint_as_float(pairs[half].word[i] & 0xFFFF0000u);
            }
            activate.replace(gate, of_pair);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                value[4 * half + i] = gate[i] * weight;
                amax = fmaxf(amax, fabsf(value[4 * half + i]));
            }
        }
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
        const uint32_t code = scale_code(amax);
        const float down = inverse_scale(code), up = operand_scale(code);
        ptx::Vector4 chunk;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            chunk.word[i] = expand_pair(ptx::float_to_e4m3x2(value[2 * i + 1] * down, value[2 * i] * down), up, up);
        return chunk;
    }

    __device__ __forceinline__ void finish_tile(
        const Activate& activate, uint32_t block, uint32_t row_tile, uint32_t num_tokens) const {
        uint8_t* tile = sched::component<C>(ctx, plan::Component::kPoolIntermediate) +
                        plan::operand_tile_offset(Base::kTokens, C.shape.intermediate, block, row_tile);
        const uint32_t chunk = ctx.lane_idx % kLanesPerToken, of_pair = ctx.lane_idx / kLanesPerToken;
        const auto weight_of = [&](uint32_t token) {
            const uint32_t row = block * Base::kTokens + min_of(token, Base::kTokens - 1);
            return __uint_as_float(ptx::load_relaxed_sys(&sched::row_info<C>(ctx, row)->weight));
        };
        uint32_t token = warp * kTokensPerTurn + of_pair;
        float weight = weight_of(token);
#pragma unroll 1
        for (uint32_t first = warp * kTokensPerTurn; first < num_tokens;
            first += plan::kNumDispatchWarps * kTokensPerTurn) {
            const uint32_t from = Base::base + Base::kLayout.exchange + Base::chunk_offset(token, chunk);
            const ptx::Vector4 pairs[2] = {ptx::load_shared_16(from), ptx::load_shared_16(from + 16)};
            const float next_weight = weight_of(token + plan::kNumDispatchWarps * kTokensPerTurn);
            const ptx::Vector4 result = finish_chunk(activate, pairs, weight);
            if (token < num_tokens)
                *reinterpret_cast<ptx::Vector4*>(tile + plan::operand_chunk_offset(token, chunk)) = result;
            token += plan::kNumDispatchWarps * kTokensPerTurn;
            weight = next_weight;
        }
    }

    __device__ __forceinline__ void run() {
        const Activate activate(ctx.params.scalars);
        if (warp == 0 && ctx.lane_idx == 0)
            ptx::store_release_cta_shared(Base::open(), 1);
        release();
#pragma unroll 1
        while (true) {
            // The math warps always say that there are no more; the limit is there for hardware that fails.
            const bool has_failed = ptx::mbarrier_wait_fails(Base::full(), parity, Base::limit());
            __syncwarp();
            parity ^= 1;
            const uint32_t block = ptx::load_shared_4(Base::record()),
                           row_tile = ptx::load_shared_4(Base::record() + 4);
            const uint32_t num_tokens = ptx::load_shared_4(Base::record() + 8);
            if (has_failed)
                sync::note_fault(ctx, sync::Fault::kTimeout, {sync::Role::kDispatch, sync::What::kStage, 0}, 0, 0);
            if (num_tokens == 0 || has_failed)
                break;
            finish_tile(activate, block, row_tile, num_tokens);
            release();
            ptx::fence_proxy_async_global();
            ptx::barrier_sync(ptx::NamedBarrier::kDispatch, plan::kNumDispatchWarps * 32);
            if (warp == 0 && ctx.lane_idx == 0)
                sync::arrive_block_l1_done<C>(ctx, block, C.num_math_warpgroups);
        }
    }
};

} // namespace deep_gemm_k3::epilogue
