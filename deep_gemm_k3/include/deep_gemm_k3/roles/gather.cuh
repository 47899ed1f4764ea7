// Dispatch, receiving side: each route of this warp's share becomes a row of the pool, and RowInfo tells where its
// partial goes. On SM90 the row is converted from E4M3 x 2^s to BF16 operand tiles of value x 2^8 (exact; the routed
// weights carry 2^-8); SM100 multiplies codes and scales as they come.
#pragma once
#include "../epilogue/expand.cuh"
#include "../plan/pool_rows.cuh"
#include "../plan/pool_tile.cuh"
#include "../ptx/keep.cuh"
#include "../sync/dependencies.cuh"
#include "list.cuh"

namespace deep_gemm_k3::roles {

// 8 columns of one row.
__device__ __forceinline__ uint4 expand_vector(uint2 codes, float scale) {
    using epilogue::expand_pair;
    return {expand_pair(codes.x, scale, scale), expand_pair(codes.x >> 16, scale, scale),
        expand_pair(codes.y, scale, scale), expand_pair(codes.y >> 16, scale, scale)};
}

// One group of 32 columns of one row, into the chunks it fills: four of BF16, or two of codes and a scale byte.
template <Config C>
__device__ __forceinline__ void store_group(
    uint8_t* block, int row, int group, uint32_t (&codes)[8], uint32_t scale_byte) {
    constexpr int num_tokens = C.routed_tile.num_tokens;
    uint8_t* tile = block + (group >> 2) * plan::pool_tile_bytes(C);
    if constexpr (C.arch == Architecture::kSM100) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            *reinterpret_cast<uint4*>(tile + plan::scaled_chunk_offset(row, (group & 3) * 2 + i)) = {
                codes[4 * i], codes[4 * i + 1], codes[4 * i + 2], codes[4 * i + 3]};
        tile[plan::scale_word_offset(num_tokens, row) + (group & 3)] = static_cast<uint8_t>(scale_byte);
    } else {
        const float scale = epilogue::operand_scale(scale_byte);
        constexpr int kUnrolled = C.num_ctas_per_sm > 1 ? 1 : 4; // chunks in registers at a time
#pragma unroll kUnrolled
        for (int i = 0; i < 4; ++i) {
            *reinterpret_cast<uint4*>(tile + plan::operand_chunk_offset(row, (group & 3) * 4 + i)) =
                expand_vector({codes[0], codes[1]}, scale);
#pragma unroll
            for (int j = 2; j < 8; ++j)
                codes[j - 2] = codes[j];
        }
    }
}

// Where a row comes from and goes to.
struct Row {
    int source_rank;
    int token;
    uint32_t pool_row;
    int begin_group, end_group; // columns / 32
};

// A route's row, of its place as RowInfo has it.
template <Config C>
__device__ __forceinline__ Row row_of(uint32_t place, uint32_t pool_row, int begin_group, int end_group) {
    return {static_cast<int>(place % kMaxNumRanks), static_cast<int>(place / kMaxNumRanks / C.shape.num_topk), pool_row,
        begin_group, end_group};
}

// Groups that a lane has in flight: loads of a row are issued before its first store. What the dispatch warps'
// registers allow; with two CTAs per SM there are twice as many warps instead.
template <Config C>
constexpr int kGroupsInFlight =
    C.num_ctas_per_sm > 1 ? 1 : (C.routed_tile.num_tokens <= 64 ? 4 : (C.routed_tile.num_tokens <= 96 ? 2 : 1));

struct Group {
    uint32_t codes[8];
    uint32_t scale;
};
__device__ __forceinline__ void load_codes(Group& group, const uint8_t* from) {
    const uint4 first = reinterpret_cast<const uint4*>(from)[0], second = reinterpret_cast<const uint4*>(from)[1];
    group.codes[0] = first.x, group.codes[1] = first.y, group.codes[2] = first.z, group.codes[3] = first.w;
    group.codes[4] = second.x, group.codes[5] = second.y, group.codes[6] = second.z, group.codes[7] = second.w;
}

// 8 columns of one row, into the chunk of BF16 that they fill.
template <Config C>
__device__ __forceinline__ void store_vector(uint8_t* block, int row, int vector, uint2 codes, uint32_t scale_byte) {
    *reinterpret_cast<uint4*>(
        block + (vector >> 4) * plan::pool_tile_bytes(C) + plan::operand_chunk_offset(row, vector & 15)) =
        expand_vector(codes, epilogue::operand_scale(scale_byte));
}

// A row of codes and scales as they lie in the inputs and in plain rows. On SM90 neighbouring lanes take neighbouring
// vectors of 8 columns: whole lines are read and written. Several are in flight; their conversion is rolled, because
// few rows are gathered by code that has never run before, and fetching it takes longer than running it.
template <Config C>
__device__ __forceinline__ void gather_codes(
    const Context& ctx, const Row& row, uint8_t* block, int tile_row, const uint8_t* codes, const uint8_t* scales) {
    if constexpr (C.arch == Architecture::kSM100) {
#pragma unroll 1
        for (int group = row.begin_group + lane_index(); group < row.end_group; group += 32) {
            Group values;
            load_codes(values, codes + group * 32);
            store_group<C>(block, tile_row, group, values.codes, scales[group]);
        }
    } else {
        constexpr int kInFlight = C.num_ctas_per_sm > 1 || C.routed_tile.num_tokens > 96 ? 4 : 8;
        const int end = row.end_group * 4;
#pragma unroll 1
        for (int first = row.begin_group * 4 + lane_index(); first < end; first += 32 * kInFlight) {
            uint2 vectors[kInFlight];
            uint32_t scale_bytes[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const int vector = min(first + 32 * i, end - 1);
                vectors[i] = *reinterpret_cast<const uint2*>(codes + vector * 8);
                scale_bytes[i] = scales[vector >> 2];
            }
            const int last = min(first + 32 * kInFlight, end);
#pragma unroll 1
            for (int vector = first; vector < last; vector += 32) {
                store_vector<C>(block, tile_row, vector, vectors[0], scale_bytes[0]);
#pragma unroll
                for (int i = 1; i < kInFlight; ++i) {
                    vectors[i - 1] = vectors[i];
                    scale_bytes[i - 1] = scale_bytes[i];
                }
            }
        }
    }
}

// The three words of a group; the oldest of their epochs, which is older than the call's while one is not there yet.
__device__ __forceinline__ uint32_t read_low_latency(const uint8_t* from, Group& group) {
    const ptx::Word16 a = ptx::load_relaxed_sys_b128(from), b = ptx::load_relaxed_sys_b128(from + 16),
                      c = ptx::load_relaxed_sys_b128(from + 32);
    group = {{a.x, a.y, a.z, b.x, b.y, b.z, c.x, c.y}, c.z & 0xFF};
    return min(a.w, min(b.w, c.w));
}

// A batch of words is loaded, tested once, and loaded again while one of them lacks the epoch.
template <Config C>
__device__ __forceinline__ void gather_low_latency(
    const Context& ctx, const Row& row, const Where& where, uint8_t* block, int tile_row) {
    constexpr int in_flight = kGroupsInFlight<C>;
    const uint8_t* words = sched::component<C>(ctx, plan::Component::kLowLatencyRows) +
                           plan::low_latency_row_offset(C.shape, ctx.parity, row.source_rank, row.token);
#pragma unroll 1
    for (int first = row.begin_group + lane_index(); first < row.end_group; first += 32 * in_flight) {
        Group groups[in_flight];
        const bool arrived = sync::wait_until(ctx, where, ctx.epoch, [&](uint32_t& seen) {
            seen = ctx.epoch;
#pragma unroll
            for (int i = 0; i < in_flight; ++i) {
                const int group = in_flight == 1 ? first : min(first + 32 * i, row.end_group - 1);
                seen = min(seen, read_low_latency(words + group * 48, groups[i]));
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

// Waits for a row that another rank sent in the plain format; its place among all plain rows.
template <Config C>
__device__ __forceinline__ uint64_t wait_plain_row(const Context& ctx, const Row& row, const Where& where) {
    const uint64_t index = plan::row_index(C.shape, ctx.parity, row.source_rank, row.token);
    const uint8_t* flag = sched::component<C>(ctx, plan::Component::kRowFlags) + index * 4;
    sync::wait_until(ctx, where, ctx.epoch, [&](uint32_t& seen) {
        seen = ptx::load_acquire_sys(flag);
        return seen == ctx.epoch;
    });
    __syncwarp();
    return index;
}

template <Config C>
__device__ __forceinline__ void gather_row(const Context& ctx, const Row& row) {
    constexpr int num_tokens = C.routed_tile.num_tokens, num_groups = C.shape.hidden / 32;
    const int block_idx = row.pool_row / num_tokens, tile_row = row.pool_row % num_tokens;
    uint8_t* block =
        sched::component<C>(ctx, plan::Component::kPoolX) + plan::pool_tile_offset(C, C.shape.hidden, block_idx, 0);
    const uint8_t* codes = sched::component<C>(ctx, plan::Component::kInputX) + uint64_t(row.token) * C.shape.hidden;
    const uint8_t* scales = sched::component<C>(ctx, plan::Component::kInputScales) + uint64_t(row.token) * num_groups;
    if (C.shape.num_ranks > 1 && row.source_rank != ctx.params.rank) {
        const Where where = {sync::Role::kDispatch, sync::What::kRow,
            static_cast<uint32_t>(row.source_rank) << 24 | static_cast<uint32_t>(row.token)};
        if ((words_at(ctx, plan::roles_memory::kRankTokens)[row.source_rank] & kLowLatencyBit) != 0) {
            gather_low_latency<C>(ctx, row, where, block, tile_row);
            return;
        }
        codes = sched::component<C>(ctx, plan::Component::kRows) +
                wait_plain_row<C>(ctx, row, where) * plan::row_bytes(C.shape);
        scales = codes + C.shape.hidden;
    }
    gather_codes<C>(ctx, row, block, tile_row, codes, scales);
}

// What one lane knows about its route.
struct Route {
    bool valid;
    uint32_t place; // see row_place
    uint32_t pool_row;
    uint32_t parts; // of the row, in this warp's share: the first, and the one after the last << 16
    // Taken out of the one word where they are needed: both live through the gathering of 32 rows.
    __device__ __forceinline__ uint32_t begin_part() const { return unpacked() & 0xFFFF; }
    __device__ __forceinline__ uint32_t num_parts() const {
        const uint32_t both = unpacked();
        return (both >> 16) - (both & 0xFFFF);
    }

  private:
    __device__ __forceinline__ uint32_t unpacked() const {
        uint32_t both = parts;
        ptx::keep(both);
        return both;
    }
};

template <Config C>
__device__ __forceinline__ plan::ExpertBlocks blocks_of(const Context& ctx, int expert) {
    const uint32_t* first_block = words_at(ctx, plan::roles_memory::first_block_offset(C)) + expert;
    return {C, static_cast<int>(words_at(ctx, plan::roles_memory::num_rows_offset(C))[expert]),
        static_cast<int>(first_block[1] - first_block[0])};
}

// The place of an expert's row that is number `row` counted from the start of its first block.
template <Config C>
__device__ __forceinline__ uint32_t pool_row(const Context& ctx, int expert, uint32_t row) {
    if constexpr (!plan::spreads_rows(C)) {
        return row;
    } else {
        const uint32_t first =
            words_at(ctx, plan::roles_memory::first_block_offset(C))[expert] * C.routed_tile.num_tokens;
        return first + blocks_of<C>(ctx, expert).place_of(static_cast<int>(row - first));
    }
}

// Finds pool rows of the 32 routes from `first` on, whose words are in `share`, and notes their RowInfo. Ranks inside
// the warp's share follow the order of the routes: equal experts are matched across the lanes, the lowest lane moves
// the cursor.
template <Config C>
__device__ __forceinline__ Route place_route(
    const Context& ctx, const DispatchWarp& self, const Share<C>& share, uint32_t first) {
    const uint32_t index = first + ptx::lane_index(), part = index << share.log_parts;
    const int half = index & 1;
    const uint32_t expert =
        share.reaches(index) ? local_expert<C>(ctx, share.ids, half) : static_cast<uint32_t>(kNoExpert);
    Route route;
    route.valid = expert < static_cast<uint32_t>(C.shape.num_local_experts());
    const auto rank = static_cast<uint32_t>(share.cursor.rank);
    const uint32_t token_slot = index - 2 * words_at(ctx, plan::roles_memory::kFirstWord)[rank];
    route.place = plan::row_place(token_slot, rank);
    const uint32_t begin_part = max(part, share.begin_part) - part;
    route.parts = begin_part | (min((index + 1) << share.log_parts, share.end_part) - part) << 16;
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, route.valid ? expert : 0xFFFFFFFFu);
    const uint32_t num_before = __popc(same & ptx::lower_lanes());
    uint32_t warp = self.warp;
    ptx::keep(warp); // no address derived from it stays in a register through the loop over routes
    uint32_t* next = cursors<C>(ctx, warp) + expert;
    if (route.valid)
        route.pool_row = pool_row<C>(ctx, expert, *next + num_before);
    __syncwarp();
    if (route.valid && num_before == 0)
        *next += __popc(same);
    __syncwarp();
    if (route.valid && route.begin_part() == 0)
        *sched::row_info<C>(ctx, route.pool_row) = {token_slot, rank, __uint_as_float(share.weight), route.place};
    return route;
}

// Gathers the rows of one batch, unless each CTA does that for itself, and releases them together: one fence for up to
// 32 rows.
template <Config C>
__device__ __forceinline__ void gather_batch(
    const Context& ctx, uint32_t log_parts, const Route& route, bool is_gathered_by_ctas) {
    constexpr int num_groups = C.shape.hidden / 32;
    uint32_t remaining = is_gathered_by_ctas ? 0 : __ballot_sync(0xFFFFFFFFu, route.valid);
    while (remaining != 0) {
        const int lane = __ffs(remaining) - 1;
        remaining &= remaining - 1;
        const uint32_t place = __shfl_sync(0xFFFFFFFFu, route.place, lane);
        const uint32_t parts = __shfl_sync(0xFFFFFFFFu, route.parts, lane);
        gather_row<C>(ctx, row_of<C>(place, __shfl_sync(0xFFFFFFFFu, route.pool_row, lane),
                               num_groups * (parts & 0xFFFF) >> log_parts, num_groups * (parts >> 16) >> log_parts));
    }
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (route.valid)
        ptx::red_release_gpu_add(sync::block_counter_of_call<C>(
                                     ctx, sync::BlockCounter::kGathered, route.pool_row / C.routed_tile.num_tokens),
            route.num_parts());
}

// Places all routes of this warp's share. `kGathers`: gathers their rows as well.
template <Config C, bool kGathers>
__device__ __forceinline__ void place_share(
    const Context& ctx, const DispatchWarp& self, Share<C>& share, bool is_gathered_by_ctas = false) {
#pragma unroll 1
    for (uint32_t first = share.begin_route(); share.reaches(first); first += 32) {
        const Route route = place_route<C>(ctx, self, share, first);
        share.load(ctx, first + 32);
        if constexpr (kGathers)
            gather_batch<C>(ctx, share.log_parts, route, is_gathered_by_ctas);
    }
}

// Many rows: all warps of the rank gather in the order of the pool, so that the blocks of the first experts are
// complete early and the first tasks need not wait for the whole batch. Worth a barrier among the rank's CTAs when
// every warp has more than a few rows.
constexpr uint32_t kMinPoolOrderRows = 8; // per warp

// Walks one warp's rows: every num_units-th of the pool that is no padding of an expert's last block.
template <Config C>
struct PoolRows {
    uint32_t row;
    int expert = 0;

    // False: there are no more.
    __device__ __forceinline__ bool find(const Context& ctx, int num_units) {
        constexpr uint32_t tile = C.routed_tile.num_tokens;
        const uint32_t* first_block = words_at(ctx, plan::roles_memory::first_block_offset(C));
        for (; row < first_block[C.shape.num_local_experts()] * tile; row += num_units) {
            while (first_block[expert + 1] * tile <= row) // the last entry exceeds every row
                ++expert;
            const int block = static_cast<int>(row / tile - first_block[expert]);
            if (static_cast<int>(row % tile) < blocks_of<C>(ctx, expert).num_rows_of(block))
                return true;
        }
        return false;
    }
};

template <Config C>
__device__ __forceinline__ void gather_in_pool_order(const Context& ctx, const DispatchWarp& self) {
    PoolRows<C> rows = {static_cast<uint32_t>(self.unit())};
    bool is_there = rows.find(ctx, self.num_units());
    uint32_t place = 0;
    if (is_there)
        place = sched::row_info<C>(ctx, rows.row)->place;
#pragma unroll 1
    while (is_there) {
        const Row row = row_of<C>(place, rows.row, 0, C.shape.hidden / 32);
        rows.row += self.num_units();
        is_there = rows.find(ctx, self.num_units());
        if (is_there)
            place = sched::row_info<C>(ctx, rows.row)->place; // arrives while this row is gathered
        gather_row<C>(ctx, row);
        ptx::fence_proxy_async_global();
        __syncwarp();
        if (ptx::lane_index() == 0)
            ptx::red_release_gpu_add(sync::block_counter_of_call<C>(
                                         ctx, sync::BlockCounter::kGathered, row.pool_row / C.routed_tile.num_tokens),
                1);
    }
}

// `is_gathered_by_ctas`: every CTA gathers the rows of its first task for itself (sched/stage_rows.cuh); what is left
// is to tell where the rows' partials go.
template <Config C>
__device__ __forceinline__ void gather(
    const Context& ctx, const DispatchWarp& self, Share<C>& share, bool is_gathered_by_ctas) {
    const uint32_t num_routes = 2 * words_at(ctx, plan::roles_memory::kFirstWord)[C.shape.num_ranks];
    if constexpr (plan::spreads_rows(C)) // blocks of experts, which warp 0 has noted
        dispatch_barrier();
    if (num_routes <= kMaxDirectRoutes ||
        share.num_blocks * C.routed_tile.num_tokens < kMinPoolOrderRows * self.num_units()) {
        place_share<C, true>(ctx, self, share, is_gathered_by_ctas);
        return;
    }
    // Routes that were counted by shares come whole: one part each.
    place_share<C, false>(ctx, self, share);
    if (rank_barrier(ctx, self, 2))
        gather_in_pool_order<C>(ctx, self);
}

} // namespace deep_gemm_k3::roles
