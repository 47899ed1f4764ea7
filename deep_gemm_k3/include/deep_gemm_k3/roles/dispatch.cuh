// The dispatch warps, from the first push to the end of the call.
#pragma once
#include "../debug/timeline.cuh"
#include "cleanup.cuh"
#include "gather.cuh"

namespace deep_gemm_k3::roles {

// Engine::assist(ctx, warp), if there is one, takes the warps once the rows are gathered.
template <Config C, class Engine>
__device__ __forceinline__ void dispatch(const Context& ctx) {
    const int warp = ctx.warp_idx - C.num_math_warpgroups * 4 - 1;
    DispatchWarp self = {
        warp, warp * 32 + ctx.lane_idx, warp * ctx.num_ctas + ctx.cta_idx, plan::kNumDispatchWarps * ctx.num_ctas};
    push<C>(ctx, self);
    debug::mark(ctx, debug::Event::kPushed);
    Share<C> share;
    const bool healthy = build_list<C>(ctx, self, share);
    if (healthy) {
        debug::mark(ctx, debug::Event::kListed);
        gather<C>(ctx, self, share);
        debug::mark(ctx, debug::Event::kGathered);
        reset_counters<C>(ctx, self);
        if (C.has_statistics && ctx.cta_idx == 0)
            add_statistics<C>(ctx, self);
    }
    if constexpr (requires { Engine::assist(ctx, 0u); })
        Engine::assist(ctx, warp);
    if (C.is_published() && self.warp == 0)
        make_publication_visible<C>(ctx, healthy);
}

} // namespace deep_gemm_k3::roles
