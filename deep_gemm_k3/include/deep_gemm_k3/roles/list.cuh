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
#include "../sync/pair.cuh"
#include "headers.cuh"

namespace deep_gemm_k3::roles {

// Above this many routes the two-level count is cheaper than reading them all.
constexpr int kMaxDirectRoutes = 4096;

// Walks words in canonical order and finds where each one lies.
template <Config C>
struct WordCursor {
    static_assert(plan::component_bytes(C.shape, plan::Component::kMetadata) <= 0xFFFFFFFFull);
    int rank = 0;
    // Byte offset of a word in kMetadata; `word` must not decrease from call to call.
    __device__ __forceinline__ uint32_t locate(const Context& ctx, uint32_t word) {
        if constexpr (C.shape.num_ranks == 1)
            return static_cast<uint32_t>(plan::metadata_offset(C.shape, ctx.parity, 0)) + (1 + word) * 16;
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
        // Rolled: code that runs for the first time takes longer to fetch than to run.
#pragma unroll 1
        for (uint32_t index = first; index < min(first + stride * kInFlight, end); index += stride) {
            visit(index, ids[0]);
#pragma unroll
            for (int i = 1; i < kInFlight; ++i)
                ids[i - 1] = ids[i];
        }
        cursor.locate(ctx, first);
    }
}

// How the routes, in canonical order, are shared out to the dispatch warps of the rank: contiguous and even. A route
// may be cut into parts of its columns, so that a few routes keep many warps busy; then neighbours share a route and
// split its parts. Everything in parts: route << log_parts | part.
struct Shares {
    uint32_t quotient, remainder;
    uint32_t log_parts;
    __device__ __forceinline__ Shares(uint32_t num_routes, uint32_t num_units)
        : log_parts(4 * num_routes <= num_units ? 2 : (2 * num_routes <= num_units ? 1 : 0)) {
        const uint32_t num_parts = num_routes << log_parts;
        quotient = num_parts / num_units;
        remainder = num_parts - quotient * num_units;
    }
    __device__ __forceinline__ uint32_t begin_part(uint32_t unit) const {
        return quotient * unit + min(unit, remainder);
    }
    __device__ __forceinline__ uint32_t begin_route(uint32_t unit) const { return begin_part(unit) >> log_parts; }
};

// The share of one warp, and where it stands in it.
template <Config C>
struct Share {
    uint32_t begin_part = 0, end_part = 0;
    uint32_t log_parts = 0;
    uint32_t num_blocks = 0; // of the rank's pool
    WordCursor<C> cursor;
    uint32_t ids = 0, weight = 0; // of this lane's route in the batch at hand
    __device__ __forceinline__ uint32_t begin_route() const { return begin_part >> log_parts; }
    // Whether the share has a part of this route, which is none before its first.
    __device__ __forceinline__ bool reaches(uint32_t route) const {
        return begin_part < end_part && route << log_parts < end_part;
    }

    // Loads the word of the lane's route of the batch of 32 that begins at `first`. One batch ahead, the first while
    // the list is laid out.
    __device__ __forceinline__ void load(const Context& ctx, uint32_t first) {
        const uint32_t index = first + ptx::lane_index();
        if (!reaches(index))
            return;
        const ptx::Word16 word = ptx::load_relaxed_sys_b128(
            sched::component<C>(ctx, plan::Component::kMetadata) + cursor.locate(ctx, index / 2));
        ids = word.x;
        weight = (index & 1) != 0 ? word.z : word.y;
    }
    __device__ __forceinline__ void load_again(const Context& ctx) {
        ids = weight = 0;
        load(ctx, begin_route());
    }
};

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

// Both ways of counting leave: num_rows[expert] of the whole rank, and in cursor w the routes before the share of warp
// w.
template <Config C>
__device__ __forceinline__ void count_directly(
    const Context& ctx, const DispatchWarp& self, uint32_t num_words, const Shares& shares) {
    uint32_t* num_rows = words_at(ctx, plan::roles_memory::num_rows_offset(C));
    const uint32_t unit = ctx.cta_idx * plan::kNumDispatchWarps;
    const uint32_t begins[3] = {shares.begin_route(unit), shares.begin_route(unit + 1), shares.begin_route(unit + 2)};
    scan_words<C>(ctx, self.thread(), num_words, kNumDispatchThreads, [&](uint32_t index, uint32_t ids) {
        for_each_route<C>(ctx, index, ids, [&](uint32_t expert, uint32_t route) {
            atomicAdd(&num_rows[expert], 1u);
#pragma unroll
            for (int warp = 0; warp < plan::kNumDispatchWarps; ++warp)
                if (route < begins[warp])
                    atomicAdd(&cursors<C>(ctx, warp)[expert], 1u);
        });
    });
}

// How a CTA publishes its counts: two experts to a word while an expert of the rank cannot reach 65536 routes, so that
// sums of words need not be taken apart; else one.
template <Config C, bool kIsWide>
struct RouteCounts {
    static constexpr int kExpertsPerVector = kIsWide ? 4 : 8;
    static constexpr int kNumVectors = plan::roles_memory::padded_experts(C) / kExpertsPerVector;
    // Threads that share the CTAs of one vector.
    static constexpr int kThreadsPerVector = max_of(1, kNumDispatchThreads / kNumVectors);

    static __device__ __forceinline__ uint32_t pack(const uint32_t* num_rows, int word) {
        return kIsWide ? num_rows[word] : num_rows[2 * word] | num_rows[2 * word + 1] << 16;
    }
    static __device__ __forceinline__ void add(uint4& sum, const uint4& more) {
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    static __device__ __forceinline__ uint32_t unpack(const uint32_t (&words)[4], int i) {
        return kIsWide ? words[i] : (words[i / 2] >> (i % 2 * 16)) & 0xFFFF;
    }
    // Adds to the rank's counts, and to our cursors what lies before our share.
    static __device__ __forceinline__ void add_to_list(
        const Context& ctx, const uint4& all, const uint4& before, int expert) {
        const uint32_t all_words[4] = {all.x, all.y, all.z, all.w};
        const uint32_t before_words[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (int i = 0; i < kExpertsPerVector; ++i) {
            const uint32_t num_all = unpack(all_words, i), num_before = unpack(before_words, i);
            if (num_all == 0)
                continue;
            atomicAdd(&words_at(ctx, plan::roles_memory::num_rows_offset(C))[expert + i], num_all);
#pragma unroll
            for (int warp = 0; warp < plan::kNumDispatchWarps; ++warp)
                if (num_before != 0)
                    atomicAdd(&cursors<C>(ctx, warp)[expert + i], num_before);
        }
    }
};

template <Config C, bool kIsWide>
__device__ __forceinline__ void exchange_counts(const Context& ctx, const DispatchWarp& self);

template <Config C>
__device__ __forceinline__ void count_by_shares(
    const Context& ctx, const DispatchWarp& self, uint32_t num_words, const Shares& shares) {
    uint32_t* num_rows = words_at(ctx, plan::roles_memory::num_rows_offset(C));
    const uint32_t unit = ctx.cta_idx * plan::kNumDispatchWarps + self.warp;
    const uint32_t begin = shares.begin_route(unit), end = shares.begin_route(unit + 1);
    scan_words<C>(ctx, begin / 2 + lane_index(), (end + 1) / 2, 32, [&](uint32_t index, uint32_t ids) {
        for_each_route<C>(ctx, index, ids, [&](uint32_t expert, uint32_t route) {
            if (route < begin || route >= end)
                return;
            atomicAdd(&num_rows[expert], 1u);
#pragma unroll
            for (int warp = 1; warp < plan::kNumDispatchWarps; ++warp)
                if (warp > self.warp)
                    atomicAdd(&cursors<C>(ctx, warp)[expert], 1u);
        });
    });
    if (!all_healthy(ctx))
        return;
    if (2 * num_words < 0x10000) // the same for all CTAs
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
    for (int i = self.thread(); i < Counts::kNumVectors * 4; i += kNumDispatchThreads)
        counts[ctx.cta_idx * Counts::kNumVectors * 4 + i] = Counts::pack(num_rows, i);
    dispatch_barrier();
#pragma unroll 1
    for (int i = self.thread(); i < C.shape.num_local_experts(); i += kNumDispatchThreads)
        num_rows[i] = 0;
    if (!rank_barrier(ctx, self, 1))
        return;
    constexpr int kInFlight = C.num_ctas_per_sm > 1 ? 2 : 8; // what the registers allow
    const auto* vectors = reinterpret_cast<const uint4*>(counts);
#pragma unroll 1
    for (int i = self.thread(); i < Counts::kNumVectors * Counts::kThreadsPerVector; i += kNumDispatchThreads) {
        const int vector = i % Counts::kNumVectors;
        uint4 all = {0, 0, 0, 0}, before = {0, 0, 0, 0};
#pragma unroll kInFlight
        for (int cta = i / Counts::kNumVectors; cta < ctx.num_ctas; cta += Counts::kThreadsPerVector) {
            const uint4 more = vectors[cta * Counts::kNumVectors + vector];
            Counts::add(all, more);
            if (cta < ctx.cta_idx)
                Counts::add(before, more);
        }
        Counts::add_to_list(ctx, all, before, vector * Counts::kExpertsPerVector);
    }
}

// First pool block of every expert, which warp 0 notes for all, and the pool rows at which this warp's share begins.
// Each lane owns a run of experts; the warps work side by side and need not meet.
template <Config C>
__device__ __forceinline__ uint32_t lay_out(const Context& ctx, const DispatchWarp& self) {
    constexpr int num_experts = C.shape.num_local_experts(), num_per_lane = ceil_div(num_experts, 32);
    constexpr uint32_t tile = C.routed_tile.num_tokens;
    const uint32_t* num_rows = words_at(ctx, plan::roles_memory::num_rows_offset(C));
    uint32_t* first_block = words_at(ctx, plan::roles_memory::first_block_offset(C));
    const int begin = min(lane_index() * num_per_lane, num_experts), end = min(begin + num_per_lane, num_experts);
    uint32_t sum = 0;
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert)
        sum += (num_rows[expert] + tile - 1) / tile;
    uint32_t block = sum;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, block, delta);
        block += lane_index() >= delta ? other : 0;
    }
    if (self.thread() == 31) {
        first_block[num_experts] = block;
        *words_at(ctx, plan::roles_memory::kNumBlocks) = block;
    }
    block -= sum;
#pragma unroll 1
    for (int expert = begin; expert < end; ++expert) {
        cursors<C>(ctx, self.warp)[expert] += block * tile;
        if (self.warp == 0)
            first_block[expert] = block;
        block += (num_rows[expert] + tile - 1) / tile;
    }
    return __shfl_sync(0xFFFFFFFFu, block, 31); // lane 31 ends the last run
}

// Builds the list and gives the CTA its verdict. True: the list is complete and `share` is this warp's, its first words
// on their way.
template <Config C>
__device__ __forceinline__ bool build_list(const Context& ctx, const DispatchWarp& self, Share<C>& share) {
    if (self.warp == 0)
        read_headers<C>(ctx);
    bool healthy = all_healthy(ctx);
    debug::mark(ctx, debug::Event::kHeaders);
    if (healthy) {
        const uint32_t num_words = words_at(ctx, plan::roles_memory::kFirstWord)[C.shape.num_ranks];
        const Shares shares(2 * num_words, self.num_units());
        if (C.is_published() && self.thread() == 64) // beside the others' words; a warp that few words leave idle
            check_publication<C>(ctx);
        if (2 * num_words <= kMaxDirectRoutes)
            count_directly<C>(ctx, self, num_words, shares);
        else
            count_by_shares<C>(ctx, self, num_words, shares);
        healthy = all_healthy(ctx);
        const uint32_t unit = ctx.cta_idx * plan::kNumDispatchWarps + self.warp;
        share.begin_part = shares.begin_part(unit);
        share.end_part = shares.begin_part(unit + 1);
        share.log_parts = shares.log_parts;
    }
    if (healthy) {
        share.load(ctx, share.begin_route());
        share.num_blocks = lay_out<C>(ctx, self);
        if (self.thread() == 0)
            *words_at(ctx, plan::roles_memory::kRowParts) = 1u << share.log_parts;
        __syncwarp();
    }
    if (self.thread() == 0)
        sync::publish_list(ctx, sync::agree<C>(ctx, healthy) ? sync::ListState::kReady : sync::ListState::kAborted);
    return healthy;
}

} // namespace deep_gemm_k3::roles
