// The one bounded wait. `poll(seen)` tests the condition and reports the value it saw. The first test costs nothing
// extra; then every few tests the abort cell and the clock are read. A wait ends in one of three ways: condition met
// (true), the CTA or a rank has failed (false), or the limit passed and this thread notes the time-out (false). After
// false the caller carries on without what it waited for: it neither hangs nor traps.
//
// Waits on other CTAs and ranks use the caller's limit; waits inside a CTA twice that, so that the thread at the root
// of a stall is the one that names it.
#pragma once
#include "../sched/context.cuh"
#include "abort.cuh"

namespace deep_gemm_k3::sync {

// Looks up from a wait now and then. `start` is the time the wait began, 0 at first.
__device__ __forceinline__ bool give_up(
    const sched::Context& ctx, Where where, uint32_t wanted, uint32_t seen, uint64_t& start) {
    if (must_drain(ctx))
        return true;
    const uint64_t now = ptx::global_timer();
    if (start == 0)
        start = now;
    if (now - start <= ctx.params.scalars.timeout_ns)
        return false;
    note_fault(ctx, Fault::kTimeout, where, wanted, seen);
    return true;
}

// Waits for another CTA or rank.
template <class Poll>
__device__ __forceinline__ bool wait_until(const sched::Context& ctx, Where where, uint32_t wanted, Poll poll) {
    uint32_t seen = 0, num_polls = 0;
    uint64_t start = 0;
    while (!poll(seen)) {
        if ((++num_polls & 63) == 0 && give_up(ctx, where, wanted, seen, start))
            return false;
    }
    return true;
}

// The same for all lanes of a warp, which leave it together: when all have met the condition or given up.
template <class Poll>
__device__ __forceinline__ void wait_together(const sched::Context& ctx, Where where, uint32_t wanted, Poll poll) {
    uint32_t seen = 0, num_polls = 0;
    uint64_t start = 0;
    bool is_over = false;
    while (!__all_sync(0xFFFFFFFFu, is_over || poll(seen)))
        if ((++num_polls & 63) == 0)
            is_over = give_up(ctx, where, wanted, seen, start);
}

// Waits for another warp of this CTA or for its own copies; `poll()` typically is an mbarrier's try_wait. What it waits
// for always comes, since nobody in a CTA stops before; the limit is there for hardware that fails. After false a role
// leaves its tasks, and those who wait for it pass their own limits.
template <class Poll>
__device__ __forceinline__ bool wait_local(const sched::Context& ctx, Where where, Poll poll) {
    uint32_t num_polls = 0;
    uint64_t start = 0;
    while (!poll()) {
        if ((++num_polls & 255) != 0)
            continue;
        const uint64_t now = ptx::global_timer();
        if (start == 0)
            start = now;
        if (now - start > ctx.params.scalars.timeout_ns * 2) {
            note_fault(ctx, Fault::kTimeout, where, 0, 0);
            return false;
        }
    }
    return true;
}
// The same limit for waits between instructions that multiply, which find it in shared memory
// (ptx::mbarrier_wait_fails), in units of 2^20 ns; at least one.
__device__ __forceinline__ uint32_t stage_limit(const Params& params) {
    const uint64_t units = params.scalars.timeout_ns >> 19;
    return units < 0xFFFFFFFF ? static_cast<uint32_t>(units) + 1 : 0xFFFFFFFF;
}

// Address of a word of the roles' shared memory (plan/roles_memory.cuh).
__device__ __forceinline__ uint32_t role_word(const sched::Context& ctx, int offset) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(ctx.roles + offset));
}

// State of a CTA's expert list, in shared memory.
enum class ListState : uint32_t { kBuilding = 0, kReady = 1, kAborted = 2 };

__device__ __forceinline__ void publish_list(const sched::Context& ctx, ListState state) {
    ptx::store_release_cta_shared(role_word(ctx, plan::roles_memory::kListState), static_cast<uint32_t>(state));
}

// Whether this CTA has anything to publish: the producer says it when it has handed over all tasks.
__device__ __forceinline__ void tell_publishes(const sched::Context& ctx, uint32_t what) {
    ptx::store_release_cta_shared(role_word(ctx, plan::roles_memory::kPublishes), what);
}
__device__ __forceinline__ uint32_t wait_publishes(const sched::Context& ctx) {
    const uint32_t address = role_word(ctx, plan::roles_memory::kPublishes);
    uint32_t what = 0;
    wait_local(ctx, {Role::kPublication, What::kPublicationDone, 0}, [&] {
        what = ptx::load_acquire_cta_shared(address);
        if (what != 0)
            return true;
        ptx::nanosleep(100);
        return false;
    });
    return what;
}

// Every rank has begun this call, and a dispatch warp of this CTA has acquired it. Or it has given up: it says so in
// any case.
__device__ __forceinline__ void tell_ranks_begun(const sched::Context& ctx) {
    ptx::store_release_cta_shared(
        static_cast<uint32_t>(__cvta_generic_to_shared(ctx.roles + plan::roles_memory::kRanksBegun)), 1);
}
__device__ __forceinline__ void wait_ranks_begun(const sched::Context& ctx) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(ctx.roles + plan::roles_memory::kRanksBegun));
    wait_local(ctx, {Role::kProducer, What::kHeader, 0}, [&] {
        if (ptx::load_acquire_cta_shared(address) != 0)
            return true;
        ptx::nanosleep(20);
        return false;
    });
}

// Waits for the dispatch warps of this CTA, which always leave a verdict; false: there is no list to work from.
__device__ __forceinline__ bool wait_list(const sched::Context& ctx) {
    const uint32_t address = role_word(ctx, plan::roles_memory::kListState);
    uint32_t state = 0;
    wait_local(ctx, {Role::kProducer, What::kList, 0}, [&] {
        state = ptx::load_acquire_cta_shared(address);
        if (state != static_cast<uint32_t>(ListState::kBuilding))
            return true;
        ptx::nanosleep(20);
        return false;
    });
    return state == static_cast<uint32_t>(ListState::kReady);
}

} // namespace deep_gemm_k3::sync
