// The abort cell: the first failure of a call, written into every rank's control block and read by every waiter.
//
// A cell may be claimed by several threads of several ranks at once. `reserved` is the claim word: the one whose
// compare-and-swap finds zero writes the fields and then releases `code`; later failures leave the cell alone. Nothing
// is ever trapped: whoever sees a non-zero code stops waiting and carries on to its end.
#pragma once
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

// Publishes a failure to all ranks. Called by one thread; runs once or twice in the life of a buffer. It takes no
// Context: an address that escapes into a call would push the caller's Context from registers into memory.
__device__ __noinline__ void raise_abort(const Params& params, int num_ranks, uint32_t epoch, Fault fault,
    uint32_t where, uint32_t index, uint32_t wanted, uint32_t seen) {
    for (int i = 0; i < num_ranks; ++i) {
        const int rank = (params.rank + i) % num_ranks; // our own cell first
        uint8_t* cell = params.buffers[rank] + plan::control::kAbort;
        if (ptx::atom_relaxed_sys_cas(cell + kAbortReserved, 0, 1) != 0)
            continue;
        ptx::store_relaxed_sys(cell + kAbortRank, params.rank);
        ptx::store_relaxed_sys(cell + kAbortWhere, where);
        ptx::store_relaxed_sys(cell + kAbortIndex, index);
        ptx::store_relaxed_sys(cell + kAbortWanted, wanted);
        ptx::store_relaxed_sys(cell + kAbortSeen, seen);
        ptx::store_relaxed_sys(cell + kAbortEpoch, epoch);
        ptx::store_release_sys(cell + kAbortCode, 1 + static_cast<uint32_t>(fault));
    }
}
__device__ __forceinline__ void raise_abort(
    const sched::Context& ctx, Fault fault, Where where, uint32_t wanted, uint32_t seen) {
    raise_abort(
        ctx.params, ctx.num_ranks, ctx.epoch, fault, pack_where(where.role, where.what), where.index, wanted, seen);
}

} // namespace deep_gemm_k3::sync
