// The one bounded wait. `poll(seen)` tests the condition and reports the value it saw. The first test costs nothing
// extra; then every few tests the abort cell and the clock are read. A wait ends in one of three ways: condition met
// (true), another rank or CTA aborted (false), or the limit passed and this thread publishes the time-out (false).
// After false the caller carries on without what it waited for: it neither hangs nor traps.
//
// Waits on other CTAs and ranks use the caller's limit; waits inside a CTA twice that, so that the thread at the root
// of a stall is the one that names it.
#pragma once
#include "../plan/roles_memory.cuh"
#include "../sched/context.cuh"
#include "abort.cuh"

namespace deep_gemm_k3::sync {

// Called now and then by a waiting thread. Returns the time the wait began (first call: now), or 0 when it must end.
// Out of line, scalars only: the polling loops stay small and the caller's Context stays in registers.
__device__ __noinline__ uint64_t check_wait(const Params& params, int num_ranks, uint32_t epoch, uint64_t start,
    uint32_t where, uint32_t index, uint32_t wanted, uint32_t seen) {
    if (is_aborted(params.buffers[params.rank]))
        return 0;
    const uint64_t now = ptx::global_timer();
    if (start == 0)
        return now;
    if (now - start <= params.scalars.timeout_ns)
        return start;
    raise_abort(params, num_ranks, epoch, Fault::kTimeout, where, index, wanted, seen);
    return 0;
}

// Waits for another CTA or rank.
template <class Poll>
__device__ __forceinline__ bool wait_until(const sched::Context& ctx, Where where, uint32_t wanted, Poll poll) {
    uint32_t seen = 0;
    if (poll(seen))
        return true;
    uint64_t start = 0;
    for (uint32_t num_polls = 1; !poll(seen); ++num_polls) {
        if ((num_polls & 63) != 0)
            continue;
        start = check_wait(
            ctx.params, ctx.num_ranks, ctx.epoch, start, pack_where(where.role, where.what), where.index, wanted, seen);
        if (start == 0)
            return false;
    }
    return true;
}

// Waits for another warp of this CTA or for its own copies, `poll()` typically being an mbarrier try_wait. Fully inline
// and without calls, so that it may stand between wgmma instructions. A time-out is noted in shared memory; the CTA's
// exit publishes it (roles/cleanup.cuh).
template <class Poll>
__device__ __forceinline__ bool wait_local(const sched::Context& ctx, Where where, Poll poll) {
    if (poll())
        return true;
    uint64_t start = 0;
    for (uint32_t num_polls = 1; !poll(); ++num_polls) {
        if ((num_polls & 255) != 0)
            continue;
        const uint64_t now = ptx::global_timer();
        if (start == 0)
            start = now;
        if (now - start <= 2 * ctx.params.scalars.timeout_ns)
            continue;
        *reinterpret_cast<volatile uint32_t*>(ctx.roles + plan::roles_memory::kLocalFault) =
            pack_where(where.role, where.what) | 0x80000000u;
        *reinterpret_cast<volatile uint32_t*>(ctx.roles + plan::roles_memory::kLocalFaultIndex) = where.index;
        return false;
    }
    return true;
}

// State of a CTA's expert list, in shared memory.
enum class ListState : uint32_t { kBuilding = 0, kReady = 1, kAborted = 2 };

// Waits for the dispatch warps of this CTA; false: the call was aborted before the list was complete.
__device__ __forceinline__ bool wait_list(const sched::Context& ctx) {
    const uint32_t address =
        static_cast<uint32_t>(__cvta_generic_to_shared(ctx.roles + plan::roles_memory::kListState));
    uint32_t state = 0;
    // The dispatch warps always leave a verdict: their own waits are bounded. So this one needs no clock of its own.
    while ((state = ptx::load_acquire_cta_shared(address)) == static_cast<uint32_t>(ListState::kBuilding))
        ptx::nanosleep(20);
    return state == static_cast<uint32_t>(ListState::kReady);
}

} // namespace deep_gemm_k3::sync
