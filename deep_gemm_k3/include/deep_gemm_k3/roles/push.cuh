// Dispatch, sending side: the routing table goes to every rank, each token's row to every rank that owns one of its
// experts, once, however many of them it owns.
//
// Slots are fixed, [parity][source rank][token]: nothing is counted or reserved before a store. Two parities suffice: a
// rank that sends for call e + 2 has seen in call e + 1 that every rank had begun e + 1, so had ended call e, which
// read the slots. The ready word says so; it is released and acquired, so that this holds by happens-before.
//
// Row formats; the source chooses and its header tells, so readers need not know its configuration:
//   low latency  16-byte words {12 bytes, epoch}: each word validates itself, no fence, no flag; three words carry the
//   32
//                codes and the scale of one group of columns. For ranks x tokens <= kLowLatencyTokenBudget.
//   plain        codes, then scales, then a flag released with the epoch. Reads and writes 1.03 bytes per element.
// A rank keeps its own rows at home: the gathering side reads the input views directly.
#pragma once
#include "../plan/call_kind.cuh"
#include "../plan/roles_memory.cuh"
#include "../sync/wait.cuh"

namespace deep_gemm_k3::roles {

using sched::Context;
using sync::Where;

constexpr uint32_t kNoExpert = 0xFFFF;
constexpr uint32_t kLowLatencyBit = 0x80000000u;

// Read anew each time: it takes no register in between.
__device__ __forceinline__ int lane_index() {
    return static_cast<int>(ptx::lane_index());
}

// All dispatch warps of the rank work as one team. For pushing, consecutive units lie on different CTAs: a few tokens
// spread over the whole chip.
struct DispatchWarp {
    int warp; // 0..kNumDispatchWarps-1 in its CTA
    // The others are read anew each time: they take no registers in between.
    __device__ __forceinline__ int thread() const { // 0..95 in its CTA
        return warp * 32 + static_cast<int>(ptx::thread_index() % 32);
    }
    __device__ __forceinline__ int unit() const { // in the rank
        return warp * static_cast<int>(ptx::cta_count()) + static_cast<int>(ptx::cta_index());
    }
    __device__ __forceinline__ int num_units() const {
        return plan::kNumDispatchWarps * static_cast<int>(ptx::cta_count());
    }
};

template <Config C>
__device__ __forceinline__ bool is_low_latency(int num_tokens) {
    return num_tokens <= plan::num_low_latency_tokens(C.shape);
}

// Tells every rank that this one has begun the call: all that it did in earlier calls is released with it. Apart from
// the header, which need not wait for the fence.
template <Config C>
__device__ __forceinline__ void push_ready(const Context& ctx) {
#pragma unroll 1
    for (int rank = lane_index(); rank < C.shape.num_ranks; rank += 32)
        ptx::store_release_sys(
            ctx.params.buffers[rank] + plan::control::kReady + ctx.params.rank * plan::kControlLineBytes, ctx.epoch);
}

// {tokens, CTAs | kind of call | low-latency bit, shared tokens, epoch}.
template <Config C>
__device__ __forceinline__ ptx::Word16 own_header(const Context& ctx) {
    const int num_tokens = ctx.params.num_tokens;
    return {static_cast<uint32_t>(num_tokens),
        static_cast<uint32_t>(ctx.num_ctas) | plan::CallKind::of(C).packed() << plan::kCallKindShift |
            (is_low_latency<C>(num_tokens) ? kLowLatencyBit : 0),
        static_cast<uint32_t>(ctx.params.shared.num_tokens), ctx.epoch};
}
// To every other rank.
template <Config C>
__device__ __forceinline__ void push_header(const Context& ctx) {
    const ptx::Word16 header = own_header<C>(ctx);
#pragma unroll 1
    for (int rank = lane_index(); rank < C.shape.num_ranks; rank += 32)
        if (rank != ctx.params.rank)
            ptx::store_relaxed_sys_b128(sched::peer_component<C>(ctx, rank, plan::Component::kMetadata) +
                                            plan::metadata_offset(C.shape, ctx.parity, ctx.params.rank),
                header);
}

// Two routes per word {two expert ids, weight, weight, epoch}. A word with an id outside [-1, E) is never sent: its
// absence keeps every rank from completing its list, so nothing is computed from it before all have seen the abort.
template <Config C>
__device__ __forceinline__ void push_route_words(const Context& ctx, const DispatchWarp& self) {
    const int num_routes = ctx.params.num_tokens * C.shape.num_topk;
    const auto* ids = reinterpret_cast<const longlong2*>(sched::component<C>(ctx, plan::Component::kInputTopkIdx));
    const auto* weights = reinterpret_cast<const float2*>(sched::component<C>(ctx, plan::Component::kInputTopkWeights));
    const uint64_t offset = plan::component_offset(C.shape, plan::Component::kMetadata) +
                            plan::metadata_offset(C.shape, ctx.parity, ctx.params.rank) + 16;
    for (int i = self.unit() * 32 + lane_index(); 2 * i < num_routes; i += self.num_units() * 32) {
        longlong2 id = ids[i];
        const float2 weight = weights[i];
        if (2 * i + 1 >= num_routes)
            id.y = -1;
        const bool first_is_bad = id.x < -1 || id.x >= C.shape.num_experts;
        if (first_is_bad || id.y < -1 || id.y >= C.shape.num_experts) {
            sync::note_fault(ctx, sync::Fault::kExpertOutOfRange,
                {sync::Role::kDispatch, sync::What::kInput, static_cast<uint32_t>(2 * i + (first_is_bad ? 0 : 1))},
                C.shape.num_experts, static_cast<uint32_t>(first_is_bad ? id.x : id.y));
            continue;
        }
        const ptx::Word16 word = {(static_cast<uint32_t>(id.x) & 0xFFFF) | static_cast<uint32_t>(id.y) << 16,
            __float_as_uint(weight.x), __float_as_uint(weight.y), ctx.epoch};
#pragma unroll 1
        for (int rank = 0; rank < C.shape.num_ranks; ++rank)
            ptx::store_relaxed_sys_b128(ctx.params.buffers[rank] + offset + uint64_t(i) * 16, word);
    }
}

// Other ranks that own an expert of a token: one bit each. All lanes of a warp together.
struct RankMask {
    uint32_t low, high;
    __device__ __forceinline__ bool any() const { return (low | high) != 0; }
    __device__ __forceinline__ bool has(int rank) const { return ((rank < 32 ? low : high) >> (rank & 31) & 1) != 0; }
};
template <Config C>
__device__ __forceinline__ RankMask destinations(const Context& ctx, int token) {
    const auto* ids = reinterpret_cast<const int64_t*>(sched::component<C>(ctx, plan::Component::kInputTopkIdx));
    const int64_t id = lane_index() < C.shape.num_topk ? ids[int64_t(token) * C.shape.num_topk + lane_index()] : -1;
    const bool valid = id >= 0 && id < C.shape.num_experts;
    const int rank = valid ? static_cast<int>(id) / C.shape.num_local_experts() : ctx.params.rank;
    const uint32_t bit = rank == ctx.params.rank ? 0 : 1u << (rank & 31);
    RankMask mask;
    mask.low = __reduce_or_sync(0xFFFFFFFFu, rank < 32 ? bit : 0);
    mask.high = C.shape.num_ranks > 32 ? __reduce_or_sync(0xFFFFFFFFu, rank < 32 ? 0 : bit) : 0;
    return mask;
}

// One lane per group of 32 columns.
template <Config C>
__device__ __forceinline__ void push_low_latency_rows(const Context& ctx, const DispatchWarp& self) {
    constexpr int num_groups = C.shape.hidden / 32, num_chunks = ceil_div(num_groups, 32);
    const uint8_t* x = sched::component<C>(ctx, plan::Component::kInputX);
    const uint8_t* scales = sched::component<C>(ctx, plan::Component::kInputScales);
    for (int item = self.unit(); item < ctx.params.num_tokens * num_chunks; item += self.num_units()) {
        const int token = item / num_chunks, group = item % num_chunks * 32 + lane_index();
        const RankMask mask = destinations<C>(ctx, token);
        if (!mask.any() || group >= num_groups)
            continue;
        const auto* codes = reinterpret_cast<const uint4*>(x + uint64_t(token) * C.shape.hidden + group * 32);
        const uint4 a = codes[0], b = codes[1];
        const uint32_t scale = scales[uint64_t(token) * num_groups + group];
        const uint64_t offset = plan::component_offset(C.shape, plan::Component::kLowLatencyRows) +
                                plan::low_latency_row_offset(C.shape, ctx.parity, ctx.params.rank, token) + group * 48;
#pragma unroll 1
        for (int rank = 0; rank < C.shape.num_ranks; ++rank) {
            if (!mask.has(rank))
                continue;
            uint8_t* to = ctx.params.buffers[rank] + offset;
            ptx::store_relaxed_sys_b128(to, {a.x, a.y, a.z, ctx.epoch});
            ptx::store_relaxed_sys_b128(to + 16, {a.w, b.x, b.y, ctx.epoch});
            ptx::store_relaxed_sys_b128(to + 32, {b.z, b.w, scale, ctx.epoch});
        }
    }
}

template <Config C>
__device__ __forceinline__ void push_plain_rows(const Context& ctx, const DispatchWarp& self) {
    constexpr int num_vectors = C.shape.hidden / 16, num_scale_words = C.shape.hidden / 128;
    const uint8_t* x = sched::component<C>(ctx, plan::Component::kInputX);
    const uint8_t* scales = sched::component<C>(ctx, plan::Component::kInputScales);
    for (int token = self.unit(); token < ctx.params.num_tokens; token += self.num_units()) {
        const RankMask mask = destinations<C>(ctx, token);
        if (!mask.any())
            continue;
        const auto* codes = reinterpret_cast<const uint4*>(x + uint64_t(token) * C.shape.hidden);
        const auto* words = reinterpret_cast<const uint32_t*>(scales) + uint64_t(token) * num_scale_words;
        const uint64_t row = plan::row_index(C.shape, ctx.parity, ctx.params.rank, token);
        const uint64_t offset =
            plan::component_offset(C.shape, plan::Component::kRows) + row * plan::row_bytes(C.shape);
#pragma unroll 1
        for (int i = lane_index(); i < num_vectors; i += 32) {
            const uint4 vector = codes[i];
#pragma unroll 1
            for (int rank = 0; rank < C.shape.num_ranks; ++rank)
                if (mask.has(rank))
                    reinterpret_cast<uint4*>(ctx.params.buffers[rank] + offset)[i] = vector;
        }
#pragma unroll 1
        for (int i = lane_index(); i < num_scale_words; i += 32) {
            const uint32_t word = words[i];
#pragma unroll 1
            for (int rank = 0; rank < C.shape.num_ranks; ++rank)
                if (mask.has(rank))
                    reinterpret_cast<uint32_t*>(ctx.params.buffers[rank] + offset + C.shape.hidden)[i] = word;
        }
        __syncwarp();
#pragma unroll 1
        for (int rank = lane_index(); rank < C.shape.num_ranks; rank += 32)
            if (mask.has(rank))
                ptx::store_release_sys(
                    sched::peer_component<C>(ctx, rank, plan::Component::kRowFlags) + row * 4, ctx.epoch);
        __syncwarp();
    }
}

// What this rank will read of its own inputs, asked for in the kernel's first instructions, one line a thread: the
// copies of weights, which begin when the call's number has been read, then queue behind it, not before it. Every line
// that is asked for later comes several microseconds late.
template <Config C>
__device__ __forceinline__ void prefetch_inputs(const Params& params) {
    constexpr int kLineBytes = 128;
    int line = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const auto ask = [&](const void* from, int num_bytes) {
        const int num_lines = ceil_div(num_bytes, kLineBytes);
        if (line >= 0 && line < num_lines)
            ptx::prefetch_l2(static_cast<const uint8_t*>(from) + line * kLineBytes);
        line -= num_lines;
    };
    const auto ask_component = [&](plan::Component which, int num_bytes) {
        ask(params.buffers[params.rank] + plan::component_offset(C.shape, which), num_bytes);
    };
    ask_component(plan::Component::kInputTopkIdx, params.num_tokens * C.shape.num_topk * 8);
    ask_component(plan::Component::kInputTopkWeights, params.num_tokens * C.shape.num_topk * 4);
    ask_component(plan::Component::kInputX, params.num_tokens * C.shape.hidden);
    ask_component(plan::Component::kInputScales, params.num_tokens * (C.shape.hidden / 32));
    if constexpr (C.has_rms_norm)
        ask(params.rms_weight, C.shape.hidden * 2);
    if constexpr (C.is_published()) {
        ask(params.publication.flags, 12);
        ask(params.publication.peer_ptrs, C.shape.num_ranks * 8);
    }
}

template <Config C>
__device__ __forceinline__ void push(const Context& ctx, const DispatchWarp& self) {
    // The first CTAs begin first. But a fence waits behind the copies of its SM, and the last CTAs have no shared tile
    // to copy for.
    if (C.shape.num_ranks > 1 && ctx.cta_idx == 0 && self.warp == 0)
        push_header<C>(ctx);
    if (C.shape.num_ranks > 1 && ctx.cta_idx == ctx.num_ctas - 1 && self.warp == 1)
        push_ready<C>(ctx);
    push_route_words<C>(ctx, self);
    if constexpr (C.shape.num_ranks > 1) {
        if (is_low_latency<C>(ctx.params.num_tokens))
            push_low_latency_rows<C>(ctx, self);
        else
            push_plain_rows<C>(ctx, self);
    }
}

} // namespace deep_gemm_k3::roles
