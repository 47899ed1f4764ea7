// Dispatch, receiving side: each route of this warp's share becomes a row of the pool, converted from E4M3 x 2^s to
// BF16 operand tiles of value x 2^8 (exact; the routed weights carry 2^-8), and RowInfo tells where its partial goes.
#pragma once
#include "../plan/operand_tile.cuh"
#include "../ptx/convert.cuh"
#include "../sync/dependencies.cuh"
#include "list.cuh"

namespace deep_gemm_k3::roles {

// 2^(s + 8) for the scale byte s + 127. Bytes above 246 would leave FP32: they saturate.
__device__ __forceinline__ float operand_scale(uint32_t scale_byte) {
    return __uint_as_float(min(scale_byte + 8, 254u) << 23);
}

__device__ __forceinline__ uint32_t convert_pair(uint32_t codes, float scale) {
    const uint32_t halves = ptx::e4m3x2_to_half2(static_cast<uint16_t>(codes));
    return ptx::float_to_bf16x2(ptx::half_to_float(static_cast<uint16_t>(halves >> 16)) * scale,
        ptx::half_to_float(static_cast<uint16_t>(halves)) * scale);
}

// One group of 32 columns of one row, into the four chunks it fills.
template <Config C>
__device__ __forceinline__ void store_group(
    uint8_t* block, int row, int group, const uint32_t (&codes)[8], uint32_t scale_byte) {
    constexpr int num_tokens = C.routed_tile.num_tokens;
    const float scale = operand_scale(scale_byte);
    uint8_t* tile = block + (group >> 2) * plan::operand_tile_bytes(num_tokens);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = codes[2 * i], high = codes[2 * i + 1];
        const uint4 chunk = {convert_pair(low, scale), convert_pair(low >> 16, scale), convert_pair(high, scale),
            convert_pair(high >> 16, scale)};
        *reinterpret_cast<uint4*>(tile + plan::operand_chunk_offset(num_tokens, row, (group & 3) * 4 + i)) = chunk;
    }
}

// Where a row comes from and goes to.
struct Row {
    int source_rank;
    int token;
    uint32_t pool_row;
    int begin_group, end_group; // columns / 32
};

// Groups that a lane has in flight: loads of a row are issued before its first store. What the dispatch warps'
// registers allow; with two CTAs per SM there are twice as many warps instead.
template <Config C>
constexpr int kGroupsInFlight = C.num_ctas_per_sm > 1 ? 1 : (C.routed_tile.num_tokens <= 64 ? 4 : 2);

struct Group {
    uint32_t codes[8];
    uint32_t scale;
};

template <Config C>
__device__ __forceinline__ void gather_codes(
    const Context& ctx, const Row& row, uint8_t* block, int tile_row, const uint8_t* codes, const uint8_t* scales) {
    constexpr int in_flight = kGroupsInFlight<C>;
#pragma unroll 1
    for (int first = row.begin_group + ctx.lane_idx; first < row.end_group; first += 32 * in_flight) {
        Group groups[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; ++i) {
            const int group = in_flight == 1 ? first : min(first + 32 * i, row.end_group - 1);
            const auto* vectors = reinterpret_cast<const uint4*>(codes + group * 32);
            const uint4 a = vectors[0], b = vectors[1];
            groups[i] = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, scales[group]};
        }
#pragma unroll
        for (int i = 0; i < in_flight; ++i)
            if (first + 32 * i < row.end_group)
                store_group<C>(block, tile_row, first + 32 * i, groups[i].codes, groups[i].scale);
    }
}

// A batch of words is loaded, tested once, and loaded again while one of them lacks the epoch.
template <Config C>
__device__ __forceinline__ void gather_low_latency(
    const Context& ctx, const Row& row, const Where& where, uint8_t* block, int tile_row) {
    constexpr int in_flight = kGroupsInFlight<C>;
    const uint8_t* words = sched::component<C>(ctx, plan::Component::kLowLatencyRows) +
                           plan::low_latency_row_offset(C.shape, ctx.parity, row.source_rank, row.token);
#pragma unroll 1
    for (int first = row.begin_group + ctx.lane_idx; first < row.end_group; first += 32 * in_flight) {
        Group groups[in_flight];
        const bool arrived = sync::wait_until(ctx, where, ctx.epoch, [&](uint32_t& seen) {
            seen = ctx.epoch;
#pragma unroll
            for (int i = 0; i < in_flight; ++i) {
                const int group = in_flight == 1 ? first : min(first + 32 * i, row.end_group - 1);
                const uint8_t* from = words + group * 48;
                const ptx::Word16 a = ptx::load_relaxed_sys_b128(from), b = ptx::load_relaxed_sys_b128(from + 16),
                                  c = ptx::load_relaxed_sys_b128(from + 32);
                groups[i] = {{a.x, a.y, a.z, b.x, b.y, b.z, c.x, c.y}, c.z & 0xFF};
                seen = min(min(seen, a.w), min(b.w, c.w)); // what is not there yet is older
            }
            return seen == ctx.epoch;
        });
        if (!arrived)
            break;
#pragma unroll
        for (int i = 0; i < in_flight; ++i)
            if (first + 32 * i < row.end_group)
                store_group<C>(block, tile_row, first + 32 * i, groups[i].codes, groups[i].scale);
    }
    __syncwarp();
}

template <Config C>
__device__ __forceinline__ void gather_row(const Context& ctx, const Row& row) {
    constexpr int num_tokens = C.routed_tile.num_tokens, num_groups = C.shape.hidden / 32;
    const int block_idx = row.pool_row / num_tokens, tile_row = row.pool_row % num_tokens;
    uint8_t* block = sched::component<C>(ctx, plan::Component::kPoolX) +
                     plan::operand_tile_offset(num_tokens, C.shape.hidden, block_idx, 0);
    if (row.source_rank == ctx.params.rank) {
        gather_codes<C>(ctx, row, block, tile_row,
            sched::component<C>(ctx, plan::Component::kInputX) + uint64_t(row.token) * C.shape.hidden,
            sched::component<C>(ctx, plan::Component::kInputScales) + uint64_t(row.token) * num_groups);
        return;
    }
    const Where where = {sync::Role::kDispatch, sync::What::kRow,
        static_cast<uint32_t>(row.source_rank) << 24 | static_cast<uint32_t>(row.token)};
    if ((words_at(ctx, plan::roles_memory::kRankTokens)[row.source_rank] & kLowLatencyBit) != 0) {
        gather_low_latency<C>(ctx, row, where, block, tile_row);
        return;
    }
    const uint64_t index = plan::row_index(C.shape, ctx.parity, row.source_rank, row.token);
    const uint8_t* flag = sched::component<C>(ctx, plan::Component::kRowFlags) + index * 4;
    sync::wait_until(ctx, where, ctx.epoch, [&](uint32_t& seen) {
        seen = ptx::load_acquire_sys(flag);
        return seen == ctx.epoch;
    });
    __syncwarp();
    const uint8_t* codes = sched::component<C>(ctx, plan::Component::kRows) + index * plan::row_bytes(C.shape);
    gather_codes<C>(ctx, row, block, tile_row, codes, codes + C.shape.hidden);
}

// What one lane knows about its route.
struct Route {
    bool valid;
    int source_rank;
    uint32_t token_slot;
    uint32_t pool_row;
    uint32_t begin_part, end_part; // of the row, in this warp's share
};

// Finds pool rows of the 32 routes from `first` on and notes their RowInfo. Ranks inside the warp's share follow the
// order of the routes: equal experts are matched across the lanes, the lowest lane moves the cursor.
template <Config C>
__device__ __forceinline__ Route place_route(
    const Context& ctx, const DispatchWarp& self, const Share& share, uint32_t first, WordCursor<C>& cursor) {
    const uint32_t index = first + ctx.lane_idx;
    uint32_t expert = 0xFFFFFFFFu, weight = 0;
    Route route{};
    if (index < share.end_route()) {
        const uint32_t offset = cursor.locate(ctx, index / 2);
        const ptx::Word16 word =
            ptx::load_relaxed_sys_b128(sched::component<C>(ctx, plan::Component::kMetadata) + offset);
        expert = local_expert<C>(ctx, word.x, index & 1);
        weight = (index & 1) != 0 ? word.z : word.y;
        route.source_rank = cursor.rank;
        route.token_slot = index - 2 * words_at(ctx, plan::roles_memory::kFirstWord)[cursor.rank];
        const uint32_t part = index * share.num_parts;
        route.begin_part = max(part, share.begin_part) - part;
        route.end_part = min(part + share.num_parts, share.end_part) - part;
    }
    route.valid = expert < static_cast<uint32_t>(C.shape.num_local_experts());
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, route.valid ? expert : 0xFFFFFFFFu);
    const uint32_t num_before = __popc(same & ((1u << ctx.lane_idx) - 1));
    uint32_t* next = cursors<C>(ctx, self.warp) + expert;
    if (route.valid)
        route.pool_row = *next + num_before;
    __syncwarp();
    if (route.valid && num_before == 0)
        *next += __popc(same);
    __syncwarp();
    if (route.valid && route.begin_part == 0) {
        auto* info = reinterpret_cast<plan::RowInfo*>(sched::component<C>(ctx, plan::Component::kPoolRowInfo));
        info[route.pool_row] = {route.token_slot, static_cast<uint32_t>(route.source_rank), __uint_as_float(weight), 0};
    }
    return route;
}

// All routes of this warp's share. Rows of one batch are released together: one fence for up to 32 rows.
template <Config C>
__device__ __forceinline__ void gather(const Context& ctx, const DispatchWarp& self, const Share& share) {
    constexpr int num_groups = C.shape.hidden / 32;
    WordCursor<C> cursor;
    for (uint32_t first = share.begin_route(); first < share.end_route(); first += 32) {
        const Route route = place_route<C>(ctx, self, share, first, cursor);
        uint32_t remaining = __ballot_sync(0xFFFFFFFFu, route.valid);
        while (remaining != 0) {
            const int lane = __ffs(remaining) - 1;
            remaining &= remaining - 1;
            const uint32_t token_slot = __shfl_sync(0xFFFFFFFFu, route.token_slot, lane);
            const uint32_t begin = __shfl_sync(0xFFFFFFFFu, route.begin_part, lane);
            const uint32_t end = __shfl_sync(0xFFFFFFFFu, route.end_part, lane);
            const Row row = {__shfl_sync(0xFFFFFFFFu, route.source_rank, lane),
                static_cast<int>(token_slot / C.shape.num_topk), __shfl_sync(0xFFFFFFFFu, route.pool_row, lane),
                static_cast<int>(num_groups * begin / share.num_parts),
                static_cast<int>(num_groups * end / share.num_parts)};
            gather_row<C>(ctx, row);
        }
        ptx::fence_proxy_async_global();
        __syncwarp();
        if (route.valid)
            ptx::red_release_gpu_add(sync::block_counter<C>(ctx, ctx.parity, sync::BlockCounter::kGathered,
                                         route.pool_row / C.routed_tile.num_tokens),
                route.end_part - route.begin_part);
    }
}

} // namespace deep_gemm_k3::roles
