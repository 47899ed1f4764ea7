// Dispatch, list building: from every rank's routing table to the rows of each local expert, their pool blocks, and the
// pool row of every route. The order is fixed: expert, source rank, token, slot.
//
// Every CTA builds the list for itself, in its dispatch warps' shared memory: per-expert counts and first blocks, and
// for each dispatch warp a cursor per expert, the pool row at which its own share of the routes begins. A warp's share
// is a contiguous range of the routes in canonical order, so its pool rows are the cursor plus the order inside the
// share.
//   few routes   every CTA reads all words: one pass, no communication inside the rank. Cost: words / 96 threads, four
//                16-byte loads in flight each.
//   many routes  every CTA reads its own share, publishes its counts, and sums those of the others.
#pragma once
#include "../debug/timeline.cuh"
#include "push.cuh"

namespace deep_gemm_k3::roles {

// Above this many routes the two-level count is cheaper than reading them all.
constexpr int kMaxDirectRoutes = 4096;
constexpr int kNumDispatchThreads = plan::kNumDispatchWarps * 32;

__device__ __forceinline__ void dispatch_barrier() {
    ptx::barrier_sync(ptx::NamedBarrier::kDispatch, kNumDispatchThreads);
}
__device__ __forceinline__ uint32_t* words_at(const Context& ctx, int offset) {
    return reinterpret_cast<uint32_t*>(ctx.roles + offset);
}
template <Config C>
__device__ __forceinline__ uint32_t* cursors(const Context& ctx, int warp) {
    return words_at(ctx, plan::roles_memory::cursors_offset(C)) + warp * plan::roles_memory::padded_experts(C);
}
__device__ __forceinline__ void mark_faulty(const Context& ctx) {
    *static_cast<volatile uint32_t*>(words_at(ctx, plan::roles_memory::kIsFaulty)) = 1;
}
// Meets the other dispatch warps; false when one of them gave up.
__device__ __forceinline__ bool all_healthy(const Context& ctx) {
    dispatch_barrier();
    return *static_cast<volatile uint32_t*>(words_at(ctx, plan::roles_memory::kIsFaulty)) == 0;
}

// What this rank was told to publish to, checked before any task that publishes can start. The ranges are the host's.
template <Config C>
__device__ __forceinline__ void check_publication(const Context& ctx) {
    const PublicationTarget& target = ctx.params.publication;
    const uint32_t generation = target.flags[0], stride = target.flags[2];
    if (generation >= static_cast<uint32_t>(target.num_generations)) {
        sync::note_fault(ctx, sync::Fault::kGenerationOutOfRange, {sync::Role::kDispatch, sync::What::kInput, 0},
            target.num_generations, generation);
        mark_faulty(ctx);
    } else if (stride != target.generation_stride) {
        sync::note_fault(ctx, sync::Fault::kStrideMismatch, {sync::Role::kDispatch, sync::What::kInput, 2},
            static_cast<uint32_t>(target.generation_stride), stride);
        mark_faulty(ctx);
    }
}

// Waits for every rank's header and notes what it tells. One warp.
template <Config C>
__device__ __forceinline__ void read_headers(const Context& ctx) {
    uint32_t num_earlier_words = 0;
#pragma unroll 1
    for (int base = 0; base < C.shape.num_ranks; base += 32) {
        const int rank = base + ctx.lane_idx;
        uint32_t num_words = 0;
        if (rank < C.shape.num_ranks) {
            const uint8_t* address =
                sched::component<C>(ctx, plan::Component::kMetadata) + plan::metadata_offset(C.shape, ctx.parity, rank);
            ptx::Word16 header{};
            const bool arrived =
                sync::wait_until(ctx, {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)},
                    ctx.epoch, [&](uint32_t& seen) {
                        header = ptx::load_relaxed_sys_b128(address);
                        return (seen = header.w) == ctx.epoch;
                    });
            const uint32_t num_shared_tokens = ctx.params.shared.num_tokens;
            if (!arrived) {
                mark_faulty(ctx);
                header.x = 0;
            } else if (header.x > static_cast<uint32_t>(C.shape.num_max_tokens)) {
                sync::note_fault(ctx, sync::Fault::kTokensOutOfRange,
                    {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)}, C.shape.num_max_tokens,
                    header.x);
                mark_faulty(ctx);
                header.x = 0;
            } else if (header.z != num_shared_tokens) {
                sync::note_fault(ctx, sync::Fault::kSharedTokensDiffer,
                    {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)}, num_shared_tokens,
                    header.z);
                mark_faulty(ctx);
            }
            words_at(ctx, plan::roles_memory::kRankTokens)[rank] = header.x | (header.y & kLowLatencyBit);
            words_at(ctx, plan::roles_memory::kRankCtas)[rank] = header.y & ~kLowLatencyBit;
            num_words = (header.x * C.shape.num_topk + 1) / 2;
        }
        uint32_t sum = num_words;
#pragma unroll 1
        for (int delta = 1; delta < 32; delta *= 2) {
            const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, delta);
            sum += ctx.lane_idx >= delta ? other : 0;
        }
        if (rank < C.shape.num_ranks)
            words_at(ctx, plan::roles_memory::kFirstWord)[rank + 1] = num_earlier_words + sum;
        num_earlier_words += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (ctx.lane_idx == 0)
        words_at(ctx, plan::roles_memory::kFirstWord)[0] = 0;
}

// Waits until every rank has begun this call, and acquires it: their earlier calls are over, so what they read in our
// slots and what we may now overwrite in theirs is settled before anything that the list lets this CTA do. One warp. A
// rank may be one call ahead.
template <Config C>
__device__ __forceinline__ void wait_ranks_ready(const Context& ctx) {
#pragma unroll 1
    for (int rank = ctx.lane_idx; rank < C.shape.num_ranks; rank += 32) {
        const uint8_t* ready = ctx.buffer + plan::control::kReady + rank * plan::kControlLineBytes;
        const Where where = {sync::Role::kDispatch, sync::What::kHeader, static_cast<uint32_t>(rank)};
        if (!sync::wait_until(ctx, where, ctx.epoch, [&](uint32_t& seen) {
                seen = ptx::load_acquire_sys(ready);
                return static_cast<int32_t>(seen - ctx.epoch) >= 0;
            }))
            mark_faulty(ctx);
    }
    __syncwarp();
}

// Walks words in canonical order and finds where each one lies.
template <Config C>
struct WordCursor {
    static_assert(plan::component_bytes(C.shape, plan::Component::kMetadata) <= 0xFFFFFFFFull);
    int rank = 0;
    // Byte offset of a word in kMetadata; `word` must not decrease from call to call.
    __device__ __forceinline__ uint32_t locate(const Context& ctx, uint32_t word) {
        const uint32_t* first_word = words_at(ctx, plan::roles_memory::kFirstWord);
        while (word >= first_word[rank + 1]) // the last entry exceeds every word
            ++rank;
        return static_cast<uint32_t>(plan::metadata_offset(C.shape, ctx.parity, rank)) +
               (1 + word - first_word[rank]) * 16;
    }
};

// Local expert of one half of a route word's ids, or a number >= the count of local experts.
template <Config C>
__device__ __forceinline__ uint32_t local_expert(const Context& ctx, uint32_t ids, int half) {
    return (half != 0 ? ids >> 16 : ids & 0xFFFF) - ctx.params.rank * C.shape.num_local_experts();
}

// Reads words [begin, end), one per thread and `stride`, several in flight, and calls visit(word index, its two ids).
// Words that are late are waited for together with their batch.
template <Config C, class Visit>
__device__ __forceinline__ void scan_words(const Context& ctx, uint32_t begin, uint32_t end, int stride, Visit visit) {
    constexpr int kInFlight = C.num_ctas_per_sm > 1 || C.routed_tile.num_tokens > 64 ? 4 : 8;
    const uint8_t* metadata = sched::component<C>(ctx, plan::Component::kMetadata);
    WordCursor<C> cursor;
    for (uint32_t first = begin; first < end; first += stride * kInFlight) {
        uint32_t ids[kInFlight];
        const Where where = {sync::Role::kDispatch, sync::What::kRouteWords, static_cast<uint32_t>(cursor.rank)};
        const bool arrived = sync::wait_until(ctx, where, ctx.epoch, [&](uint32_t& seen) {
            ptx::Word16 words[kInFlight];
            WordCursor<C> next = cursor;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i)
                words[i] = ptx::load_relaxed_sys_b128(metadata + next.locate(ctx, min(first + i * stride, end - 1)));
            bool all_arrived = true;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                ids[i] = words[i].x;
                all_arrived &= words[i].w == ctx.epoch;
                seen = words[i].w != ctx.epoch ? words[i].w : seen;
            }
            return all_arrived;
        });
        if (!arrived)
            return mark_faulty(ctx);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + i * stride < end)
                visit(first + i * stride, ids[i]);
        cursor.locate(ctx, first);
    }
}

// A warp's share of the routes, in canonical order. A route may be cut into parts of its columns, so that a few routes
// keep many warps busy; then neighbours share a route and split its parts.
struct Share {
    uint32_t begin_part, end_part; // route * num_parts + part
    uint32_t num_parts;
    __device__ __forceinline__ uint32_t begin_route() const { return begin_part / num_parts; }
    __device__ __forceinline__ uint32_t end_route() const { return (end_part + num_parts - 1) / num_parts; }
};
__device__ __forceinline__ Share share_of(uint32_t num_routes, uint32_t unit, uint32_t num_units) {
    const uint32_t num_parts = max(1u, min(4u, num_units / max(num_routes, 1u)));
    const uint64_t total = uint64_t(num_routes) * num_parts;
    return {static_cast<uint32_t>(total * unit / num_units), static_cast<uint32_t>(total * (unit + 1) / num_units),
        num_parts};
}

// Counts a word's routes: f(local expert, route).
template <Config C, class F>
__device__ __forceinline__ void for_each_route(const Context& ctx, uint32_t index, uint32_t ids, F f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t expert = local_expert<C>(ctx, ids, half);
        if (expert < static_cast<uint32_t>(C.shape.num_local_experts()))
            f(expert, 2 * index + half);
    }
}

// Both ways of counting leave: num_rows[expert] of the whole rank; cursor 0 the routes before this CTA's share; cursor
// w those between the begins of shares w - 1 and w of this CTA.
template <Config C>
__device__ __forceinline__ void count_directly(
    const Context& ctx, const DispatchWarp& self, uint32_t num_words, const uint32_t (&begins)[4]) {
    uint32_t* num_rows = words_at(ctx, plan::roles_memory::num_rows_offset(C));
    scan_words<C>(ctx, self.thread, num_words, kNumDispatchThreads, [&](uint32_t index, uint32_t ids) {
        for_each_route<C>(ctx, index, ids, [&](uint32_t expert, uint32_t route) {
            atomicAdd(&num_rows[expert], 1u);
            if (route < begins[2])
                atomicAdd(&cursors<C>(ctx, route < begins[0] ? 0 : (route < begins[1] ? 1 : 2))[expert], 1u);
        });
    });
}

// How a CTA publishes its counts: two experts to a word while no share can reach 65536 routes, else one.
template <Config C, bool kIsWide>
struct RouteCounts {
    static constexpr int kExpertsPerVector = kIsWide ? 4 : 8;
    static constexpr int kNumVectors = plan::roles_memory::padded_experts(C) / kExpertsPerVector;

    static __device__ __forceinline__ uint32_t pack(const uint32_t* num_rows, int word) {
        return kIsWide ? num_rows[word] : num_rows[2 * word] | num_rows[2 * word + 1] << 16;
    }
    // Adds one CTA's counts to the rank's, and to cursor 0 when that CTA's share lies before ours.
    static __device__ __forceinline__ void add(const Context& ctx, uint4 counts, bool is_before, int expert) {
        const uint32_t words[4] = {counts.x, counts.y, counts.z, counts.w};
#pragma unroll
        for (int i = 0; i < kExpertsPerVector; ++i) {
            const uint32_t count = kIsWide ? words[i] : ((i & 1) != 0 ? words[i / 2] >> 16 : words[i / 2] & 0xFFFF);
            if (count == 0)
                continue;
            atomicAdd(&words_at(ctx, plan::roles_memory::num_rows_offset(C))[expert + i], count);
            if (is_before)
                atomicAdd(&cursors<C>(ctx, 0)[expert + i], count);
        }
    }
};

template <Config C, bool kIsWide>
__device__ __forceinline__ void exchange_counts(const Context& ctx, const DispatchWarp& self);

template <Config C>
__device__ __forceinline__ void count_by_shares(
    const Context& ctx, const DispatchWarp& self, uint32_t num_words, const uint32_t (&begins)[4]) {
    uint32_t* num_rows = words_at(ctx, plan::roles_memory::num_rows_offset(C));
    const uint32_t begin = self.warp == 0 ? begins[0] : (self.warp == 1 ? begins[1] : begins[2]);
    const uint32_t end = self.warp == 0 ? begins[1] : (self.warp == 1 ? begins[2] : begins[3]);
    scan_words<C>(ctx, begin / 2 + ctx.lane_idx, (end + 1) / 2, 32, [&](uint32_t index, uint32_t ids) {
        for_each_route<C>(ctx, index, ids, [&](uint32_t expert, uint32_t route) {
            if (route < begin || route >= end)
                return;
            atomicAdd(&num_rows[expert], 1u);
            if (self.warp < 2)
                atomicAdd(&cursors<C>(ctx, self.warp + 1)[expert], 1u);
        });
    });
    if (!all_healthy(ctx))
        return;
    // The same for all CTAs: a share is hardly longer than the mean.
    if (num_words / ctx.num_ctas < 0x7F00)
        exchange_counts<C, false>(ctx, self);
    else
        exchange_counts<C, true>(ctx, self);
}

// Publishes this CTA's counts and sums all CTAs'. kRouteCounts needs one copy only: a kernel boundary lies between the
// readers of one call and the writers of the next.
template <Config C, bool kIsWide>
__device__ __forceinline__ void exchange_counts(const Context& ctx, const DispatchWarp& self) {
    using Counts = RouteCounts<C, kIsWide>;
    uint32_t* num_rows = words_at(ctx, plan::roles_memory::num_rows_offset(C));
    auto* counts = reinterpret_cast<uint32_t*>(sched::component<C>(ctx, plan::Component::kRouteCounts));
#pragma unroll 1
    for (int i = self.thread; i < Counts::kNumVectors * 4; i += kNumDispatchThreads)
        counts[ctx.cta_idx * Counts::kNumVectors * 4 + i] = Counts::pack(num_rows, i);
    dispatch_barrier();
#pragma unroll 1
    for (int i = self.thread; i < C.shape.num_local_experts(); i += kNumDispatchThreads)
        num_rows[i] = 0;
    if (self.thread == 0) {
        uint8_t* arrivals = ctx.buffer + plan::control::kScanBarrier + ctx.parity * plan::kControlLineBytes;
        ptx::red_release_gpu_add(arrivals, 1);
        const Where where = {sync::Role::kDispatch, sync::What::kCounts, static_cast<uint32_t>(ctx.cta_idx)};
        if (!sync::wait_until(ctx, where, ctx.num_ctas, [&](uint32_t& seen) {
                seen = ptx::load_acquire_gpu(arrivals);
                return seen == static_cast<uint32_t>(ctx.num_ctas);
            }))
            mark_faulty(ctx);
    }
    if (!all_healthy(ctx))
        return;
    const auto* vectors = reinterpret_cast<const uint4*>(counts);
#pragma unroll 4
    for (int i = self.thread; i < ctx.num_ctas * Counts::kNumVectors; i += kNumDispatchThreads)
        Counts::add(ctx, vectors[i], i / Counts::kNumVectors < ctx.cta_idx,
            i % Counts::kNumVectors * Counts::kExpertsPerVector);
}

// First pool block of every expert. One warp; each lane owns a run of experts.
template <Config C>
__device__ __forceinline__ void lay_out_blocks(const Context& ctx) {
    constexpr int num_experts = C.shape.num_local_experts(), num_per_lane = ceil_div(num_experts, 32);
    const uint32_t* num_rows = words_at(ctx, plan::roles_memory::num_rows_offset(C));
    uint32_t* first_block = words_at(ctx, plan::roles_memory::first_block_offset(C));
    const int begin = min(ctx.lane_idx * num_per_lane, num_experts), end = min(begin + num_per_lane, num_experts);
    constexpr uint32_t tile = C.routed_tile.num_tokens;
    uint32_t sum = 0;
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert)
        sum += (num_rows[expert] + tile - 1) / tile;
    uint32_t block = sum;
#pragma unroll 1
    for (int delta = 1; delta < 32; delta *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, block, delta);
        block += ctx.lane_idx >= delta ? other : 0;
    }
    if (ctx.lane_idx == 31) {
        first_block[num_experts] = block;
        *words_at(ctx, plan::roles_memory::kNumBlocks) = block;
    }
    block -= sum;
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) {
        first_block[expert] = block;
        block += (num_rows[expert] + tile - 1) / tile;
    }
}

// Turns the counts of the cursors into pool rows.
template <Config C>
__device__ __forceinline__ void place_cursors(const Context& ctx, const DispatchWarp& self) {
    const uint32_t* first_block = words_at(ctx, plan::roles_memory::first_block_offset(C));
#pragma unroll 1
    for (int expert = self.thread; expert < C.shape.num_local_experts(); expert += kNumDispatchThreads) {
        uint32_t row = first_block[expert] * C.routed_tile.num_tokens;
#pragma unroll 1
        for (int warp = 0; warp < plan::kNumDispatchWarps; ++warp) {
            row += cursors<C>(ctx, warp)[expert];
            cursors<C>(ctx, warp)[expert] = row;
        }
    }
}

// Builds the list and gives the CTA its verdict. True: the list is complete and `share` is this warp's.
template <Config C>
__device__ __forceinline__ bool build_list(const Context& ctx, const DispatchWarp& self, Share& share) {
    if (C.is_published() && self.thread == 32)
        check_publication<C>(ctx);
    if (self.warp == 0)
        read_headers<C>(ctx);
    else if (C.shape.num_ranks > 1 && self.warp == 2)
        wait_ranks_ready<C>(ctx);
    bool healthy = all_healthy(ctx);
    debug::mark(ctx, debug::Event::kHeaders);
    if (healthy) {
        const uint32_t num_words = words_at(ctx, plan::roles_memory::kFirstWord)[C.shape.num_ranks];
        const uint32_t first_unit = ctx.cta_idx * plan::kNumDispatchWarps;
        uint32_t begins[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            begins[i] = share_of(2 * num_words, first_unit + i, self.num_units).begin_route();
        share = share_of(2 * num_words, first_unit + self.warp, self.num_units);
        if (2 * num_words <= kMaxDirectRoutes)
            count_directly<C>(ctx, self, num_words, begins);
        else
            count_by_shares<C>(ctx, self, num_words, begins);
        healthy = all_healthy(ctx);
    }
    if (healthy) {
        if (self.warp == 0)
            lay_out_blocks<C>(ctx);
        dispatch_barrier();
        place_cursors<C>(ctx, self);
        if (self.thread == 0)
            *words_at(ctx, plan::roles_memory::kRowParts) = share.num_parts;
        dispatch_barrier();
    }
    if (self.thread == 0)
        sync::publish_list(ctx, healthy ? sync::ListState::kReady : sync::ListState::kAborted);
    return healthy;
}

} // namespace deep_gemm_k3::roles
