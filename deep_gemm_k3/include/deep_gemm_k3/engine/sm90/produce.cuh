// The producer: one warp walks the CTA's tasks, its lane 0 fills the ring. A routed stage is one bulk copy of tokens
// plus one per m64 block of weights; a shared stage is one tensor copy per 64-wide box of weights and of tokens.
//
// Weights need no dependency. So the weights of a task's first stages go out before anybody asks whether its tokens are
// ready; the tokens follow, and with them the arrival that completes each of those stages.
//
//   per task:  wait for its first stage to be empty, write its record
//              weights into the stages that are empty now; wait for the tokens; tokens and arrival of those stages
//              per further stage: wait empty, expect all bytes, copies
//
// Memory answers in turn: a word that is asked for behind 10 MB of weights comes 2 us later. Where every CTA has one
// split of an L1, sums of splits are what L2 waits for, and L2's weights have time: they are asked for slowly.
#pragma once
#include "../../debug/timeline.cuh"
#include "../../epilogue/exchange.cuh"
#include "../../plan/operand_tile.cuh"
#include "../../ptx/copy.cuh"
#include "../../sched/task.cuh"
#include "../../sync/dependencies.cuh"
#include "../../sync/stage_rows.cuh"
#include "pipeline.cuh"

namespace deep_gemm_k3::engine {

// Routed weights are read once, or by a few CTAs at about the same time; shared ones by every token block, of which few
// tokens make one; tokens by the CTAs of all row tiles.
constexpr uint64_t kRoutedWeightPolicy = ptx::kPolicyEvictFirst;
constexpr uint64_t kTokenPolicy = ptx::kPolicyEvictLast;

// Addresses of one task's operands, advanced stage by stage.
template <Config C>
struct RoutedSource {
    static constexpr uint32_t kTokenBytes = plan::routed_token_bytes(C.routed_tile);
    static constexpr int kTileBlocks = C.routed_tile.num_rows / plan::kUnitRows;

    const uint8_t* weights; // first m64 block, next stage
    const uint8_t* tokens;
    uint32_t block_stride; // bytes between m64 blocks
    uint32_t num_blocks;
    uint32_t token_bytes_; // of a stage: those of the tokens that are multiplied

    __device__ __forceinline__ RoutedSource(const sched::Context& ctx, const sched::Task& task, int first_stage) {
        const bool is_l1 = task.phase == sched::Phase::kRoutedL1;
        const int num_k = sched::num_k_columns(C, task.phase), num_rows = sched::num_weight_rows(C, task.phase);
        const int first_block = task.row_tile * kTileBlocks;
        block_stride = num_k / plan::kUnitK * plan::kUnitBytes;
        num_blocks = min_of(kTileBlocks, num_rows / plan::kUnitRows - first_block);
        const RoutedOperands& routed = ctx.params.routed;
        weights = (is_l1 ? routed.l1_weight : routed.l2_weight) +
                  (uint64_t(task.expert) * (num_rows / plan::kUnitRows) + first_block) * block_stride +
                  first_stage * plan::kUnitBytes;
        tokens = sched::component<C>(ctx, is_l1 ? plan::Component::kPoolX : plan::Component::kPoolIntermediate) +
                 plan::operand_tile_offset(C.routed_tile.num_tokens, num_k, task.block, first_stage);
        token_bytes_ = kTokenBytes;
        if constexpr (plan::has_widths(C))
            token_bytes_ = plan::width_of(C, task.num_valid_tokens) * 256;
    }
    __device__ __forceinline__ uint32_t weight_bytes() const { return num_blocks * plan::kUnitBytes; }
    __device__ __forceinline__ uint32_t token_bytes() const { return token_bytes_; }
    __device__ __forceinline__ void load_weights(ptx::CopyTarget to) {
        const uint8_t* from = weights;
        to.shared += kTokenBytes;
#pragma unroll 1
        for (uint32_t i = 0; i < num_blocks; ++i) {
            ptx::bulk_load(to, from, plan::kUnitBytes, kRoutedWeightPolicy);
            to.shared += plan::kUnitBytes;
            from += block_stride;
        }
        weights += plan::kUnitBytes;
    }
    __device__ __forceinline__ void load_tokens(ptx::CopyTarget to) {
        ptx::bulk_load(to, tokens, token_bytes_, kTokenPolicy);
        tokens += kTokenBytes;
    }
};

// Few tokens: all shared tasks run at once, each reads its weights once, and the ring does not cover a round trip to
// memory. Weights of L2 that do not fit into it are asked for into the L2 cache while the tokens are waited for, unless
// sums of routed L1 are on their way.
DG_HOST_DEVICE constexpr bool asks_slowly(const Config& c) {
    return sched::can_gather_into_stages(c);
}
DG_HOST_DEVICE constexpr bool has_shared_splits(const Config& c) {
    return c.has_shared() && c.splits.shared_l1 > 1;
}
DG_HOST_DEVICE constexpr bool asks_ahead(const Config& c) {
    return has_shared_splits(c) && !asks_slowly(c);
}
DG_HOST_DEVICE constexpr uint64_t shared_weight_policy(const Config& c) {
    return has_shared_splits(c) ? ptx::kPolicyEvictFirst : ptx::kPolicyEvictNormal;
}
// Until the first stage of L2's weights is asked for, and from one to the next: partials of the CTA's last tile are out
// by then, and all weights are there before L1 is done.
constexpr uint64_t kFirstAskNs = 1000, kNextAskNs = 400;

template <Config C>
struct SharedSource {
    static constexpr int kNumBoxes = C.shared_tile.num_k / plan::kSharedK;
    static constexpr uint32_t kWeightBytes = plan::shared_weight_bytes(C.shared_tile);
    static constexpr uint32_t kTokenBytes = plan::shared_token_bytes(C.shared_tile);

    const SharedMaps& maps;
    bool is_l1;
    int weight_k, token_k; // next stage's first column
    int row, token;

    __device__ __forceinline__ SharedSource(const sched::Context& ctx, const sched::Task& task, int first_stage)
        : maps(ctx.params.maps), is_l1(task.phase == sched::Phase::kSharedL1),
          weight_k(first_stage * C.shared_tile.num_k), token_k(weight_k), row(task.row_tile * C.shared_tile.num_rows),
          token(task.block * C.shared_tile.num_tokens) {}
    __device__ __forceinline__ uint32_t weight_bytes() const { return kWeightBytes; }
    __device__ __forceinline__ uint32_t token_bytes() const { return kTokenBytes; }
    __device__ __forceinline__ void load_weights(ptx::CopyTarget to) {
#pragma unroll 1
        for (int i = 0; i < kNumBoxes; ++i) {
            if (is_l1)
                ptx::tensor_load_4d(to, &maps.l1, weight_k, row / 16, shared_weight_policy(C));
            else
                ptx::tensor_load_2d(to, &maps.l2, weight_k, row, shared_weight_policy(C));
            to.shared += kWeightBytes / kNumBoxes;
            weight_k += plan::kSharedK;
        }
    }
    // Weights of the next stages of L2, into the L2 cache.
    __device__ __forceinline__ void prefetch_weights(int num_stages) const {
        const int end = weight_k + num_stages * C.shared_tile.num_k;
#pragma unroll 1
        for (int k = weight_k; k < end; k += plan::kSharedK)
            ptx::tensor_prefetch_2d(&maps.l2, k, row);
    }
    __device__ __forceinline__ void load_tokens(ptx::CopyTarget to) {
        to.shared += kWeightBytes;
#pragma unroll 1
        for (int i = 0; i < kNumBoxes; ++i) {
            ptx::tensor_load_2d(to, is_l1 ? &maps.x : &maps.intermediate, token_k, token, kTokenPolicy);
            to.shared += kTokenBytes / kNumBoxes;
            token_k += plan::kSharedK;
        }
    }
};

// Registers are few here: a task lives in its record, in shared memory, from the moment it is known.
template <Config C>
struct Producer {
    // Finding the next task and looking for its tokens takes longer than multiplying a stage. Two CTAs on an SM fill in
    // for each other, and their producers lack the registers.
    static constexpr bool kTakesEarly = C.num_ctas_per_sm == 1 && !sched::can_gather_into_stages(C);

    const sched::Context& ctx;
    Pipeline<C> pipeline;

    __device__ __forceinline__ explicit Producer(const sched::Context& context)
        : ctx(context), pipeline(context.shared) {}

    __device__ __forceinline__ ptx::CopyTarget target() const {
        return {pipeline.address(), pipeline.full(pipeline.stage)};
    }

    // Weights of a task's first stages, after the `num_stages` that have theirs, as far as empty stages reach.
    // `can_wait`: for a while for those that are still being multiplied. Returns how many have weights then.
    template <class Source>
    __device__ __forceinline__ int fill_weights(
        Source& source, const TaskRecord& record, int num_stages, bool can_wait) {
#pragma unroll 1
        for (; num_stages < min(record.num_stages, C.num_stages) &&
               (pipeline.is_empty_now() || (can_wait && pipeline.is_empty()));
            ++num_stages) {
            ptx::mbarrier_expect_tx(target().barrier, source.weight_bytes());
            source.load_weights(target());
            pipeline.advance();
        }
        return num_stages;
    }

    // The same for weights that have time, at most until the tokens are ready.
    template <class Source>
    __device__ __forceinline__ int fill_weights_slowly(Source& source, const TaskRecord& record) {
        uint64_t due = ptx::global_timer() + kFirstAskNs;
        int num_stages = 0;
#pragma unroll 1
        for (; num_stages < min(record.num_stages, C.num_stages) && pipeline.is_empty(); ++num_stages) {
            if (sync::is_ready_before(sync::dependency<C>(ctx, record.task), due))
                break;
            ptx::mbarrier_expect_tx(target().barrier, source.weight_bytes());
            source.load_weights(target());
            pipeline.advance();
            due += kNextAskNs;
        }
        return num_stages;
    }

    // Weights of the first stages, then the tokens of those stages, once they are ready. Where they already are, no
    // stage waits for weights of a later one.
    template <class Source>
    __device__ __forceinline__ int fill_first(Source& source, const TaskRecord& record) {
        const uint32_t first_stage = pipeline.stage, first_parity = pipeline.parity;
        int num_stages = asks_slowly(C) && !sched::is_l1(record.task.phase) ? fill_weights_slowly(source, record)
                                                                            : fill_weights(source, record, 0, false);
        debug::mark(ctx, debug::Event::kAsked, debug_argument(record.task));
        if constexpr (sched::can_gather_into_stages(C))
            if (record.task.phase == sched::Phase::kRoutedL2) // whose L1 did not wait for whoever placed the rows
                sync::wait_ready(ctx, sync::gathered<C>(ctx, record.task), record.task.block);
        const sync::Dependency tokens = sync::dependency<C>(ctx, record.task);
        if (!sync::is_ready(tokens)) {
            if constexpr (asks_ahead(C) && requires { source.prefetch_weights(0); })
                if (record.task.phase == sched::Phase::kSharedL2)
                    source.prefetch_weights(record.num_stages - num_stages);
            num_stages = fill_weights(source, record, num_stages, true);
            sync::wait_ready(ctx, tokens, record.task.block);
        }
        sync::wait_receivers<C>(ctx, record.task.phase);
        debug::mark(ctx, debug::Event::kReady);
        pipeline.stage = first_stage;
        pipeline.parity = first_parity;
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            ptx::mbarrier_arrive_expect_tx(target().barrier, source.token_bytes());
            source.load_tokens(target());
            pipeline.advance();
        }
        return num_stages;
    }

    // The next task is claimed kClaimStages before the end of this one: as late as the answer's way allows; and taken
    // while the last stage is waited for, unless the list of experts might have to be waited for too. `is_ready`: the
    // tokens are there. False: a stage was not released in time.
    template <class Source, class TakeEarly>
    __device__ __forceinline__ bool fill(
        Source source, const TaskRecord& record, bool is_ready, sched::TaskIterator<C>& tasks, TakeEarly take_early) {
        constexpr int kClaimStages = kTakesEarly ? 3 : 2;
        int num_left = record.num_stages;
        if (!is_ready)
            num_left -= fill_first(source, record);
        if (num_left < kClaimStages)
            tasks.claim();
#pragma unroll 1
        for (; num_left > 0; --num_left) {
            if (num_left == kClaimStages)
                tasks.claim();
            if (kTakesEarly && num_left == 1 && record.task.phase != sched::Phase::kSharedL1)
                take_early();
            if (!pipeline.wait_empty(ctx))
                return false;
            ptx::mbarrier_arrive_expect_tx(target().barrier, source.weight_bytes() + source.token_bytes());
            source.load_weights(target());
            source.load_tokens(target());
            pipeline.advance();
        }
        return true;
    }

    // A task whose rows the dispatch warps write into the stages (stage_rows.cuh): weights of a stage once it is empty;
    // its arrival once its rows are there too. False: the limit has passed.
    template <class Source>
    __device__ __forceinline__ bool fill_beside_rows(
        Source source, const TaskRecord& record, sched::TaskIterator<C>& tasks) {
        Pipeline<C> ahead = pipeline;
        int num_asked = 0, num_filled = 0;
        return sync::wait_local(ctx, {sync::Role::kProducer, sync::What::kStage, pipeline.stage}, [&] {
            if (num_asked < record.num_stages && ahead.is_empty_now()) {
                const ptx::CopyTarget to = {ahead.address(), ahead.full(ahead.stage)};
                ptx::mbarrier_expect_tx(to.barrier, source.weight_bytes());
                source.load_weights(to);
                ahead.advance();
                if (++num_asked == record.num_stages)
                    tasks.claim();
            } else if (num_filled < num_asked && num_filled < sync::stages_gathered(ctx)) {
                ptx::mbarrier_arrive(pipeline.full(pipeline.stage));
                pipeline.advance();
                ++num_filled;
            }
            return num_filled == record.num_stages;
        });
    }

    // Writes the record of a task, once its first stage is empty: then the record is free too. Null: that stage was not
    // released in time.
    __device__ __forceinline__ const TaskRecord* begin(const sched::Task& task, int num_stages) {
        if (!pipeline.wait_empty(ctx))
            return nullptr;
        TaskRecord& record = pipeline.next_record(ctx);
        record.task = task;
        record.num_stages = num_stages;
        if constexpr (plan::shares_tiles(C))
            record.num_handed_over = epilogue::Exchange<C>(ctx.shared).is_open() ? plan::exchange_tokens(C) : 0;
        return &record;
    }
    // True when the task is on its way, all of it.
    template <class TakeEarly>
    __device__ __forceinline__ bool run(
        const sched::Task& task, bool is_ready, sched::TaskIterator<C>& tasks, TakeEarly take_early) {
        const sched::StageRange range = task_stages(C, task);
        const TaskRecord* record = begin(task, range.end - range.begin);
        if (record == nullptr)
            return false;
        if constexpr (sched::can_gather_into_stages(C)) {
            const bool gathers = record->task.phase == sched::Phase::kRoutedL1 &&
                                 sched::gathers_into_stages<C>(ctx, tasks.num_pool_blocks());
            sync::publish_first_task(ctx, gathers ? sched::FirstTask::kGathered : sched::FirstTask::kOther);
            if (gathers)
                return fill_beside_rows(RoutedSource<C>(ctx, record->task, range.begin), *record, tasks);
        }
        if (!sched::is_shared(record->task.phase))
            return fill(RoutedSource<C>(ctx, record->task, range.begin), *record, is_ready, tasks, take_early);
        if constexpr (C.has_shared())
            return fill(SharedSource<C>(ctx, record->task, range.begin), *record, is_ready, tasks, take_early);
        return true;
    }
    // Ends the list.
    __device__ __forceinline__ void finish(int order) {
        if (begin({}, 0) == nullptr)
            return;
        *reinterpret_cast<volatile uint32_t*>(ctx.roles + plan::roles_memory::kOrderOfEnd) = order + 1;
        ptx::mbarrier_arrive(pipeline.full(pipeline.stage));
    }
};

// The next task, taken when it is needed or ahead of time.
template <Config C>
struct NextTask {
    const sched::Context& ctx;
    sched::TaskIterator<C>& tasks;
    sched::Task task;
    bool exists = false;
    bool is_taken = false; // ahead of time
    bool is_ready = false; // its tokens are, as seen when it was taken ahead of time

    // False: there are no more.
    __device__ __forceinline__ bool take() {
        if (!is_taken) {
            exists = tasks.next(task);
            is_ready = false;
        }
        is_taken = false;
        return exists;
    }
    __device__ __forceinline__ void take_early() {
        exists = tasks.next(task);
        is_ready = exists && sync::is_ready(sync::dependency<C>(ctx, task));
        if (is_ready)
            sync::wait_receivers<C>(ctx, task.phase);
        is_taken = true;
    }
};

// Called by the producer warp. All its copies are waited for by the math warps of the CTA.
template <Config C>
__device__ __forceinline__ void produce(const sched::Context& ctx, sched::TaskIterator<C>& tasks) {
    if (ptx::elect_one()) {
        Producer<C> producer(ctx);
        bool is_running = true;
        if constexpr (Producer<C>::kTakesEarly) {
            NextTask<C> next{ctx, tasks};
#pragma unroll 1
            while (is_running && next.take())
                is_running = producer.run(next.task, next.is_ready, tasks, [&] { next.take_early(); });
        } else {
            sched::Task task;
#pragma unroll 1
            while (is_running && tasks.next(task))
                is_running = producer.run(task, false, tasks, [] {});
        }
        if constexpr (sched::can_gather_into_stages(C)) // whoever has found no task must hear of that too
            sync::publish_first_task(ctx, sched::FirstTask::kOther);
        if (is_running)
            producer.finish(tasks.order_of_end());
    }
    __syncwarp();
}

} // namespace deep_gemm_k3::engine
