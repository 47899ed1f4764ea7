// The dispatch warps, from the first push to the end of the call.
#pragma once
#include "../debug/timeline.cuh"
#include "../sched/stage_rows.cuh"
#include "cleanup.cuh"
#include "gather.cuh"

namespace deep_gemm_k3::roles {

// Engine::assist(ctx, warp), if there is one, takes the warps once the rows are gathered.
// An engine that has gather_into_stages(ctx, self) gets the rows of few routes without the pool.
template <Config C, class Engine>
__device__ __forceinline__ void dispatch(const Context& ctx) {
    const int warp = ctx.warp_idx - C.num_math_warpgroups * 4 - 1;
    const DispatchWarp self = {warp};
    push<C>(ctx, self);
    debug::mark(ctx, debug::Event::kPushed);
    Share<C> share;
    const bool healthy = build_list<C>(ctx, self, share);
    if (healthy) {
        debug::mark(ctx, debug::Event::kListed);
        bool is_gathered_by_ctas = false;
        if constexpr (requires { Engine::gather_into_stages(ctx, self); }) {
            is_gathered_by_ctas = sched::gathers_into_stages<C>(ctx, share.num_blocks);
            if (is_gathered_by_ctas) {
                Engine::gather_into_stages(ctx, self);
                share.load_again(ctx); // meanwhile its words occupy no registers
            }
        }
        gather<C>(ctx, self, share, is_gathered_by_ctas);
        debug::mark(ctx, debug::Event::kGathered);
        // Only what goes to other ranks, partials and publication, waits for this.
        if (C.shape.num_ranks > 1 && warp == 2)
            wait_ranks_ready<C>(ctx);
        reset_counters<C>(ctx, self);
        if (C.has_statistics && ctx.cta_idx == 0)
            add_statistics<C>(ctx, self);
    }
    if constexpr (requires { Engine::assist(ctx, 0u); })
        Engine::assist(ctx, warp);
    if (C.counts_publication() && self.warp == 0)
        make_publication_visible<C>(ctx, healthy);
}

} // namespace deep_gemm_k3::roles
