// The fused kernel: dispatch, routed L1 and L2, shared expert, combine, RMSNorm and publication in one persistent
// launch. This file holds the roles and the order in which a CTA starts and ends; everything that multiplies lies
// behind Engine.
//
// Roles of a CTA (num_math_warpgroups * 128 + 128 threads, 32 more with an issuing warp)
//   math warpgroups      tasks: [multiply,] epilogue; then combine + RMSNorm                      [many registers]
//   producer warp        tasks: waits for a tile's inputs, issues the copies                      [few registers]
//   dispatch warps (3)   push, list, gather; counters of the next call; publication visibility    [few registers]
//   issuing warp         SM100: hands stages to the tensor core
//
// Pipelines
//   stages        producer -> math and back: Engine's full and empty barriers
//   list          dispatch -> producer, math: state word in shared memory (release/acquire, CTA)
//   rows          any rank's dispatch -> dispatch: epochs inside the words, or row flags (system)
//   gathered      any CTA's dispatch -> producer: rows of a pool block x parts (GPU)
//   exchange      math -> dispatch and back: sums of routed L1 tiles of many tokens (epilogue/exchange.cuh)
//   L1 done       any CTA's math, or its dispatch -> producer: row tiles of a pool block, of a shared token block (GPU)
//   partials      any rank's math -> math of the token's rank: the values validate themselves (system)
//   publication   every CTA of every rank -> CTA 0 of every rank: cumulative counts (system)
//
// Timelines, one call
//   dispatch     header, routes, rows out | headers in, counts, list | rows in -> pool | counters | [routed L1 tiles of
//                many tokens, from the math warps -> pool] | visibility
//   producer     shared L1 | routed L1 (list, gathered) | routed L2 (L1 done) | shared L2 (shared L1 done)
//   math         shared L1 | routed L1 -> pool          | routed L2 -> peers  | shared L2 -> output, peers | combine
//
// Barriers
//   init --sync-- [dispatch: kDispatch among 3 warps]              +- kTasksDone -> publication warp -+
//                 [math: Engine's, kMath in combine] -- tasks done-+- combine ----------------------- sync -- leave
//
// Aborts: whatever fails sets every rank's abort cell; waits then return at once, all roles walk to their end, the
// kernel returns (sync/abort.cuh). A CTA that finds the cell set when it starts returns at once.
#pragma once
#include "../debug/timeline.cuh"
#include "../plan/shared_memory.cuh"
#include "../roles/combine.cuh"
#include "../roles/dispatch.cuh"
#include "../sched/task.cuh"
#include "../sync/pair.cuh"

namespace deep_gemm_k3::kernels {

// What a role keeps after the warpgroups have traded registers; what the launch bounds give per thread lies between.
struct RegisterSplit {
    int math;
    int other;
};
// Two CTAs on an SM: the shared expert and wider tiles take registers of the math warps that other kernels leave to the
// other roles. With too few the assembler waits for every wgmma (C7512).
DG_HOST_DEVICE constexpr RegisterSplit register_split(const Config& c) {
    if (c.num_math_warpgroups != 2 || c.arch == Architecture::kSM100) // there the sums are no registers
        return {0, 0};
    switch (c.num_ctas_per_sm) {
    case 1:
        if (c.routed_tile.num_tokens <= 64)
            return {200, 104};
        // Exact math beside wide shared tiles needs more in the math warps, split shared tiles more in the producer.
        if (c.routed_tile.num_tokens <= (c.fast_math || c.splits.shared_l1 > 1 ? 112 : 96))
            return {216, 72};
        return {224, 56};
    case 2:
        return c.has_shared() || c.routed_tile.num_tokens > 16 ? RegisterSplit{96, 48} : RegisterSplit{88, 64};
    default:
        return {72, 24};
    }
}

// Thread 0 reads the call's number and the abort cell; everyone learns them behind the barrier that also publishes the
// engine's barriers and the zeroed list.
template <Config C, class Engine>
__device__ __forceinline__ void start(const Params& params, uint8_t* shared, uint8_t* roles) {
    auto* words = reinterpret_cast<uint32_t*>(roles);
    uint32_t num_calls = 0, abort_code = 0;
    if (threadIdx.x == 0) {
        const uint8_t* buffer = params.buffers[params.rank];
        num_calls = ptx::load_relaxed_sys(buffer + plan::control::kEpoch);
        abort_code = ptx::load_relaxed_sys(buffer + plan::control::kAbort + sync::kAbortCode);
    }
    roles::prefetch_inputs<C>(params);
    constexpr int begin = plan::roles_memory::kZeroed / 4, end = plan::roles_memory_bytes(C) / 4;
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x)
        words[i] = 0;
    Engine::initialize(params, shared);
    if (threadIdx.x == 0) {
        words[plan::roles_memory::kEpoch / 4] = num_calls + 1;
        words[plan::roles_memory::kAborted / 4] = abort_code;
        words[plan::roles_memory::kStageLimit / 4] = sync::stage_limit(params);
        if constexpr (C.arch == Architecture::kSM90)
            words[plan::roles_memory::kRank / 4] = params.rank;
    }
    sync::synchronise<C>();
}

// Tests only: this rank takes part late.
__device__ __forceinline__ void delay(const Params& params) {
    if (params.scalars.debug_delay_ns == 0)
        return;
    const uint64_t begin = ptx::global_timer();
    while (ptx::global_timer() - begin < params.scalars.debug_delay_ns)
        ptx::nanosleep(1000);
}

// On SM90 the assembler keeps the place of a parameter's element that is taken by rank from the kernel's beginning on,
// and spills it, unless the rank comes from memory; on SM100 it takes the place anew by itself.
template <Config C>
__device__ __forceinline__ uint8_t* own_buffer(const Params& params, const uint8_t* roles) {
    if constexpr (C.arch == Architecture::kSM90)
        return params.buffers[*reinterpret_cast<const volatile uint32_t*>(roles + plan::roles_memory::kRank)];
    else
        return params.buffers[params.rank];
}

// A role's view of the call, read anew by each role: what one of them needs occupies no register while another runs.
// Whole warps together.
template <Config C>
__device__ __forceinline__ sched::Context make_context(const Params& params, uint8_t* shared) {
    uint8_t* roles = shared + plan::shared_memory_layout(C).scheduler;
    const uint32_t epoch = *reinterpret_cast<const volatile uint32_t*>(roles + plan::roles_memory::kEpoch);
    const int thread = ptx::thread_index(), warp = __shfl_sync(0xFFFFFFFFu, thread / 32, 0);
    return {params, own_buffer<C>(params, roles), shared, roles, epoch, epoch & 1, C.shape.num_ranks,
        static_cast<int>(ptx::cta_index()), static_cast<int>(gridDim.x), thread, warp, thread % 32};
}

template <Config C, class Engine>
__device__ __forceinline__ void run_math(const Params& params, uint8_t* shared) {
    Engine::consume(make_context<C>(params, shared));
    const sched::Context ctx = make_context<C>(params, shared);
    debug::mark(ctx, debug::Event::kTasksDone);
    if constexpr (C.counts_publication())
        ptx::barrier_arrive(ptx::NamedBarrier::kTasksDone, C.num_math_warpgroups * 128 + 32);
    roles::combine<C>(ctx);
    debug::mark(ctx, debug::Event::kCombined);
}

// After the producer's walk, by the lane that made it; where none did, as in engines of tests, everything is possible.
template <Config C>
__device__ __forceinline__ void tell_what_is_published(const sched::Context& ctx, const sched::TaskIterator<C>& tasks) {
    const bool has_walked = tasks.has_begun(), has_any = __any_sync(0xFFFFFFFFu, has_walked);
    if (has_walked)
        sync::tell_publishes(ctx, static_cast<uint32_t>(tasks.publishes()));
    else if (!has_any && ctx.lane_idx == 0)
        sync::tell_publishes(ctx, static_cast<uint32_t>(sched::Publishes::kSomething));
    __syncwarp();
}

template <class Engine>
__device__ __forceinline__ void finalize(const uint8_t* shared) {
    if constexpr (requires { Engine::finalize(shared); })
        Engine::finalize(shared);
}

// Engine: static initialize(params, shared), produce(ctx, iterator) for one warp, consume(ctx) for the math
// warpgroups. consume returns when the calling thread's stores are issued and its bulk stores have completed. An engine
// that has issue(ctx) gets a warp of its own for it, the last; finalize(shared), if there is one, ends a CTA.
template <Config C, class Engine>
__device__ __forceinline__ void run(const Params& params, uint8_t* shared) {
    constexpr int num_math_warps = C.num_math_warpgroups * 4;
    constexpr int first_issuing_warp = num_math_warps + 1 + plan::kNumDispatchWarps;
    constexpr RegisterSplit registers = register_split(C);
    constexpr bool has_issuer = requires(const sched::Context& ctx) { Engine::issue(ctx); };
    static_assert(C.num_threads == (first_issuing_warp + has_issuer) * 32);
    uint8_t* roles = shared + plan::shared_memory_layout(C).scheduler;
    start<C, Engine>(params, shared, roles);
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
    if (sync::started_aborted<C>(roles)) {
        const sched::Context ctx = make_context<C>(params, shared);
        if (threadIdx.x == 0)
            roles::report_abort(ctx);
        sync::synchronise<C>();
        finalize<Engine>(shared);
        return;
    }
    delay(params);
    debug::mark(make_context<C>(params, shared), debug::Event::kStart);
    if (warp < num_math_warps) {
        if constexpr (registers.math != 0)
            ptx::increase_registers<registers.math>();
        run_math<C, Engine>(params, shared);
    } else {
        if constexpr (registers.other != 0)
            ptx::decrease_registers<registers.other>();
        const sched::Context ctx = make_context<C>(params, shared);
        if (warp == num_math_warps) {
            sched::TaskIterator<C> tasks(ctx);
            Engine::produce(ctx, tasks);
            if constexpr (C.counts_publication())
                tell_what_is_published<C>(ctx, tasks);
        } else if (warp < first_issuing_warp) {
            roles::dispatch<C, Engine>(ctx);
        } else {
            if constexpr (has_issuer)
                Engine::issue(ctx);
        }
    }
    sync::synchronise<C>();
    finalize<Engine>(shared);
    const sched::Context ctx = make_context<C>(params, shared);
    debug::mark(ctx, debug::Event::kEnd);
    if (threadIdx.x == 0)
        roles::leave(ctx);
}

} // namespace deep_gemm_k3::kernels
