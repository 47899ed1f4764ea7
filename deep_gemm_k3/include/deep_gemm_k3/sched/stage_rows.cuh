// Few routes, and all tiles of routed L1 taken at once: then every CTA gathers the rows of its tile straight into its
// stages. The way through the pool is five round trips to memory: rows stored, counted, the count seen, rows copied.
// The list decides, so all CTAs of a rank find the same.
#pragma once
#include "task.cuh"

namespace deep_gemm_k3::sched {

constexpr int kMaxStageRouteWords = 32; // of all ranks; two routes each

// Written by the producer when it knows its first task, once: kGathered stays, since then no other task of routed L1
// follows.
enum class FirstTask : uint32_t { kUnknown = 0, kGathered = 1, kOther = 2 };

// Whether the rows of a tile may be gathered into its stages: a few rows, no more stages than the ring holds twice,
// rows of other ranks as low-latency words.
DG_HOST_DEVICE constexpr bool can_gather_into_stages(const Config& c) {
    return c.arch == Architecture::kSM90 && c.splits.routed_l1 > 1 &&
           c.routed_tile.num_tokens <= plan::roles_memory::kMaxStageRows &&
           ceil_div(c.shape.hidden / c.routed_tile.num_k, c.splits.routed_l1) <= 2 * c.num_stages &&
           (c.shape.num_ranks == 1 ||
               2 * kMaxStageRouteWords / c.shape.num_topk <= plan::num_low_latency_tokens(c.shape));
}

// Asked once the list is complete; `num_blocks` of the pool, as the asking warp knows it.
template <Config C>
__device__ __forceinline__ bool gathers_into_stages(const Context& ctx, int num_blocks) {
    if constexpr (!can_gather_into_stages(C)) {
        return false;
    } else {
        const int num_words =
            *reinterpret_cast<const int*>(ctx.roles + plan::roles_memory::kFirstWord + C.shape.num_ranks * 4);
        const int num_shared = num_shared_blocks<C>(ctx);
        const PhaseSplits routed = phase_splits<C>(Phase::kRoutedL1, num_shared, num_blocks, ctx.num_ctas);
        int num_tasks = num_blocks * num_row_tiles(C, Phase::kRoutedL1) * routed.num_splits;
        if constexpr (C.has_shared())
            num_tasks += num_shared * num_row_tiles(C, Phase::kSharedL1) *
                         phase_splits<C>(Phase::kSharedL1, num_shared, num_blocks, ctx.num_ctas).num_splits;
        return num_words <= kMaxStageRouteWords && routed.num_splits == C.splits.routed_l1 && num_tasks <= ctx.num_ctas;
    }
}

} // namespace deep_gemm_k3::sched
