// Failures: noted inside the CTA first, then published to all ranks.
//
// Whoever fails (a wait that passed its limit, an argument that a role checks) notes it in the CTA's shared memory and
// carries on. Every wait of the CTA then gives up at once, so the CTA walks to its end; its last thread publishes the
// note (roles/cleanup.cuh). No role ever traps, and no call stands inside a loop that multiplies.
//
// The abort cell is the first failure of a call in a rank's control block, read by every waiter. A cell may be claimed
// by several threads of several ranks at once. `reserved` is the claim word: the one whose compare-and-swap finds zero
// writes the fields and then releases `code`; later failures leave the cell alone.
#pragma once
#include "../plan/roles_memory.cuh"
#include "../plan/workspace.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/sync.cuh"
#include "../sched/context.cuh"
#include "fault.cuh"

namespace deep_gemm_k3::sync {

// Pinned host memory behind Params::error_record: the rank's own abort cell, copied by the last CTA that leaves.
using ErrorRecord = plan::AbortCell;

// Byte offsets of an AbortCell's fields.
constexpr int kAbortCode = 0, kAbortRank = 4, kAbortWhere = 8, kAbortIndex = 12, kAbortWanted = 16, kAbortSeen = 20,
              kAbortEpoch = 24, kAbortReserved = 28;

__device__ __forceinline__ bool is_aborted(const uint8_t* buffer) {
    return ptx::load_relaxed_sys(buffer + plan::control::kAbort) != 0;
}

// The CTA's note of its first failure, in the roles' shared memory.
struct LocalFault {
    uint32_t code; // 0: none; else 1 + Fault; also the claim word
    uint32_t where;
    uint32_t index;
    uint32_t wanted;
    uint32_t seen;
};
static_assert(sizeof(LocalFault) <= plan::roles_memory::kLocalFaultBytes);

__device__ __forceinline__ LocalFault* local_fault(const sched::Context& ctx) {
    return reinterpret_cast<LocalFault*>(ctx.roles + plan::roles_memory::kLocalFault);
}
__device__ __forceinline__ void note_fault(
    const sched::Context& ctx, Fault fault, Where where, uint32_t wanted, uint32_t seen) {
    LocalFault* note = local_fault(ctx);
    if (atomicCAS(&note->code, 0u, 1 + static_cast<uint32_t>(fault)) != 0)
        return;
    note->where = pack_where(where.role, where.what);
    note->index = where.index;
    note->wanted = wanted;
    note->seen = seen;
}
// What the CTAs of a pair tell each other about their expert lists (sync/pair.cuh).
enum class Verdict : uint32_t { kNone = 0, kComplete = 1, kGivenUp = 2 };

// True when this CTA, the other one of its pair, or any rank has failed: nothing is worth waiting for any more.
__device__ __forceinline__ bool must_drain(const sched::Context& ctx) {
    const auto* verdict = reinterpret_cast<const volatile uint32_t*>(ctx.roles + plan::roles_memory::kPeerVerdict);
    return *static_cast<volatile uint32_t*>(&local_fault(ctx)->code) != 0 ||
           *verdict == static_cast<uint32_t>(Verdict::kGivenUp) || is_aborted(ctx.buffer);
}

// Publishes the CTA's note to all ranks. One thread, after the CTA's other threads are done.
__device__ __forceinline__ void publish_fault(const sched::Context& ctx) {
    const LocalFault& note = *local_fault(ctx);
    if (note.code == 0)
        return;
    for (int i = 0; i < ctx.num_ranks; ++i) {
        const int rank = (ctx.params.rank + i) % ctx.num_ranks; // our own cell first
        uint8_t* cell = ctx.params.buffers[rank] + plan::control::kAbort;
        if (ptx::atom_relaxed_sys_cas(cell + kAbortReserved, 0, 1) != 0)
            continue;
        ptx::store_relaxed_sys(cell + kAbortRank, ctx.params.rank);
        ptx::store_relaxed_sys(cell + kAbortWhere, note.where);
        ptx::store_relaxed_sys(cell + kAbortIndex, note.index);
        ptx::store_relaxed_sys(cell + kAbortWanted, note.wanted);
        ptx::store_relaxed_sys(cell + kAbortSeen, note.seen);
        ptx::store_relaxed_sys(cell + kAbortEpoch, ctx.epoch);
        ptx::store_release_sys(cell + kAbortCode, note.code);
    }
}

} // namespace deep_gemm_k3::sync
