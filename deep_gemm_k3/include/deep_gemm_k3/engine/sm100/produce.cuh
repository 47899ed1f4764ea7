// The producer: one warp walks the CTA's tasks, its lane 0 fills the ring of stages. A routed stage is one tensor copy
// per 128 rows of weights, one of their scales, one of tokens and one of theirs; a shared stage is one of weights and
// one of tokens. In a pair each CTA copies its own rows, its half of the tokens and all their scales, and all bytes are
// counted at the leader.
//
// Weights need no dependency. So the weights of a task's first stages go out before anybody asks whether its tokens are
// ready; then the record is published; the tokens follow, and with them the arrival that completes each of those
// stages.
//
//   per task:  wait for a record to be empty, write it
//              weights into the stages that are empty now; wait for the tokens; publish the record
//              tokens and arrival of those stages
//              per further stage: wait empty, expect all bytes, copies
#pragma once
#include "../../plan/pool_tile.cuh"
#include "../../ptx/copy.cuh"
#include "../../sync/dependencies.cuh"
#include "pipeline.cuh"

namespace deep_gemm_k3::engine {

// Routed weights are read once, or by a few CTAs at about the same time; shared ones by every token block; tokens by
// the CTAs of all row tiles.
constexpr uint64_t kRoutedWeightPolicy = ptx::kPolicyEvictFirst;
constexpr uint64_t kSharedWeightPolicy = ptx::kPolicyEvictNormal;
constexpr uint64_t kTokenPolicy = ptx::kPolicyEvictLast;
constexpr int kClaimStages = 2;

// Copies that report to the leader's barrier.
template <Config C>
__device__ __forceinline__ void load_2d(ptx::CopyTarget to, const TensorMap* map, int x, int y, uint64_t policy) {
    if constexpr (C.num_cluster_ctas == 1)
        ptx::tensor_load_2d(to, map, x, y, policy);
    else
        ptx::tensor_load_2d_pair(to, map, x, y, policy);
}
template <Config C>
__device__ __forceinline__ void load_4d(ptx::CopyTarget to, const TensorMap* map, int x, int w, uint64_t policy) {
    if constexpr (C.num_cluster_ctas == 1)
        ptx::tensor_load_4d(to, map, x, w, policy);
    else
        ptx::tensor_load_4d_pair(to, map, x, w, policy);
}
// First of the tokens that this CTA copies, of those that are multiplied.
template <Config C>
__device__ __forceinline__ int first_token(const sched::Task& task) {
    return rank_in_pair<C>() * (num_product_tokens(C, task) / C.num_cluster_ctas);
}

// Coordinates of one task's operands, advanced stage by stage. Bytes are those of one CTA.
template <Config C>
struct RoutedSource {
    static constexpr plan::ScaledStage kStage = plan::scaled_stage(C);
    static constexpr int kUnitK = C.routed_tile.num_k;
    static constexpr int kTileLines = plan::pool_tile_bytes(C) / 128; // rows of the pool's maps

    const RoutedMaps& maps;
    int num_halves;
    int column, row;     // of the weights
    int scale_row, unit; // of their scales
    int token_line, scale_line;

    __device__ __forceinline__ RoutedSource(const sched::Context& ctx, const sched::Task& task, int first_stage)
        : maps(task.phase == sched::Phase::kRoutedL1 ? ctx.params.routed_l1 : ctx.params.routed_l2),
          num_halves(num_product_halves(C, task)), column(first_stage * kUnitK) {
        const int num_units = sched::num_k_columns(C, task.phase) / kUnitK;
        scale_row = task.row_tile * plan::kTensorTileRows;
        row = task.expert * sched::num_weight_rows(C, task.phase) + scale_row;
        unit = task.expert * num_units + first_stage;
        const int first_line = (task.block * num_units + first_stage) * kTileLines;
        token_line = first_line + first_token<C>(task);
        scale_line = first_line + C.routed_tile.num_tokens;
    }
    // Copies count what they read: half a byte per code.
    __device__ __forceinline__ uint32_t weight_bytes() const {
        return num_halves * plan::kHalfRows * kUnitK / 2 + (kStage.total - kStage.weight_scales);
    }
    __device__ __forceinline__ uint32_t token_bytes() const { return kStage.weight_scales - kStage.tokens; }
    __device__ __forceinline__ void load_weights(ptx::CopyTarget to) {
        constexpr int half_bytes = kStage.tokens / plan::kNumHalves;
        load_2d<C>({to.shared + kStage.weight_scales, to.barrier}, &maps.weight_scales, scale_row, unit++,
            kRoutedWeightPolicy);
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half) {
            load_2d<C>(to, &maps.weights, column, row + half * plan::kHalfRows, kRoutedWeightPolicy);
            to.shared += half_bytes;
        }
        column += kUnitK;
    }
    __device__ __forceinline__ void load_tokens(ptx::CopyTarget to) {
        load_2d<C>({to.shared + kStage.tokens, to.barrier}, &maps.tokens, 0, token_line, kTokenPolicy);
        load_2d<C>({to.shared + kStage.token_scales, to.barrier}, &maps.token_scales, 0, scale_line, kTokenPolicy);
        token_line += kTileLines;
        scale_line += kTileLines;
    }
};

template <Config C>
struct SharedSource {
    static constexpr TileShape kOperands = plan::cta_operands(C, C.shared_tile);
    static constexpr uint32_t kWeightBytes = plan::shared_weight_bytes(kOperands);
    static constexpr uint32_t kTokenBytes = plan::shared_token_bytes(kOperands);
    static_assert(C.shared_tile.num_k == plan::kSharedK);

    const SharedMaps& maps;
    bool is_l1;
    int weight_k, token_k; // next stage's first column
    int row, token;

    __device__ __forceinline__ SharedSource(const sched::Context& ctx, const sched::Task& task, int first_stage)
        : maps(ctx.params.maps), is_l1(task.phase == sched::Phase::kSharedL1),
          weight_k(first_stage * C.shared_tile.num_k), token_k(weight_k), row(task.row_tile * plan::kTensorTileRows),
          token(task.block * C.shared_tile.num_tokens + first_token<C>(task)) {}
    __device__ __forceinline__ uint32_t weight_bytes() const { return kWeightBytes; }
    __device__ __forceinline__ uint32_t token_bytes() const { return kTokenBytes; }
    __device__ __forceinline__ void load_weights(ptx::CopyTarget to) {
        if (is_l1)
            load_4d<C>(to, &maps.l1, weight_k, row / 16, kSharedWeightPolicy);
        else
            load_2d<C>(to, &maps.l2, weight_k, row, kSharedWeightPolicy);
        weight_k += plan::kSharedK;
    }
    __device__ __forceinline__ void load_tokens(ptx::CopyTarget to) {
        to.shared += kWeightBytes;
        load_2d<C>(to, is_l1 ? &maps.x : &maps.intermediate, token_k, token, kTokenPolicy);
        token_k += plan::kSharedK;
    }
};

template <Config C>
struct Producer {
    const sched::Context& ctx;
    Rings<C> rings;
    typename Rings<C>::StagePlace stage;
    typename Rings<C>::RecordPlace record;

    __device__ __forceinline__ explicit Producer(const sched::Context& context) : ctx(context), rings(context.shared) {}

    __device__ __forceinline__ ptx::CopyTarget target() const {
        return {rings.stage(stage.index), at_leader<C>(rings.full(stage.index))};
    }
    // The leader's producer expects the bytes of all CTAs.
    __device__ __forceinline__ void expect(uint32_t num_bytes) const {
        if (rank_in_pair<C>() == 0)
            ptx::mbarrier_expect_tx(rings.full(stage.index), num_bytes * C.num_cluster_ctas);
    }
    __device__ __forceinline__ void arrive_and_expect(uint32_t num_bytes) const {
        if (rank_in_pair<C>() == 0)
            ptx::mbarrier_arrive_expect_tx(rings.full(stage.index), num_bytes * C.num_cluster_ctas);
        else
            arrive_at_leader<C.num_cluster_ctas>(target().barrier);
    }
    // The first pass over a ring finds everything empty.
    __device__ __forceinline__ bool is_empty() const {
        return ptx::mbarrier_try_wait(rings.empty(stage.index), stage.parity ^ 1);
    }
    __device__ __forceinline__ bool wait_empty() const {
        return wait_barrier(
            ctx, {sync::Role::kProducer, sync::What::kStage, stage.index}, rings.empty(stage.index), stage.parity ^ 1);
    }

    // Null: no record became empty in time.
    __device__ __forceinline__ const TaskRecord* begin(const sched::Task& task, int num_stages) const {
        const sync::Where where = {sync::Role::kProducer, sync::What::kStage, record.index};
        if (!wait_barrier(ctx, where, rings.record_empty(record.index), record.parity ^ 1))
            return nullptr;
        TaskRecord& next = rings.record(ctx, record.index);
        next.task = task;
        next.num_stages = num_stages;
        return &next;
    }
    __device__ __forceinline__ void publish() {
        ptx::mbarrier_arrive(rings.record_full(record.index));
        record.advance();
    }

    // Weights of the first stages, as far as empty stages reach; then the tokens of those stages, once they are ready.
    template <class Source>
    __device__ __forceinline__ int fill_first(Source& source, const TaskRecord& task) {
        const auto first_stage = stage;
        const int num_wanted = min(task.num_stages, C.num_stages);
        int num_stages = 0;
#pragma unroll 1
        for (; num_stages < num_wanted && is_empty(); ++num_stages) {
            expect(source.weight_bytes());
            source.load_weights(target());
            stage.advance();
        }
        stage = first_stage;
        debug::mark(ctx, debug::Event::kAsked, debug_argument(task.task));
        sync::wait_ready(ctx, sync::dependency<C>(ctx, task.task), task.task.block);
        sync::wait_receivers<C>(ctx, task.task.phase);
        debug::mark(ctx, debug::Event::kReady);
        publish();
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            arrive_and_expect(source.token_bytes());
            source.load_tokens(target());
            stage.advance();
        }
        return num_stages;
    }

    // The next task is claimed kClaimStages before the end of this one: as late as the answer's way allows. False: a
    // stage was not released in time.
    template <class Source>
    __device__ __forceinline__ bool fill(Source source, const TaskRecord& task, sched::TaskIterator<C>& tasks) {
        int num_left = task.num_stages;
        num_left -= fill_first(source, task);
        if (num_left < kClaimStages)
            tasks.claim();
#pragma unroll 1
        for (; num_left > 0; --num_left) {
            if (num_left == kClaimStages)
                tasks.claim();
            if (!wait_empty())
                return false;
            arrive_and_expect(source.weight_bytes() + source.token_bytes());
            source.load_weights(target());
            source.load_tokens(target());
            stage.advance();
        }
        return true;
    }

    // True when the task is on its way, all of it.
    __device__ __forceinline__ bool run(const sched::Task& task, sched::TaskIterator<C>& tasks) {
        const sched::StageRange range = task_stages(C, task);
        const TaskRecord* next = begin(task, range.end - range.begin);
        if (next == nullptr)
            return false;
        if (!sched::is_shared(task.phase))
            return fill(RoutedSource<C>(ctx, task, range.begin), *next, tasks);
        if constexpr (C.has_shared())
            return fill(SharedSource<C>(ctx, task, range.begin), *next, tasks);
        return true;
    }

    // Ends the list, and waits until the tensor core has let go of every stage: its arrivals are the last thing that
    // happens to the barriers.
    __device__ __forceinline__ void finish() {
        if (begin({}, 0) == nullptr)
            return;
        publish();
#pragma unroll 1
        for (uint32_t s = 0; s < rings.kNumStages && wait_empty(); ++s)
            stage.advance();
    }
};

// Called by the producer warp. All its copies are waited for by the issuer of the CTA.
template <Config C>
__device__ __forceinline__ void produce(const sched::Context& ctx, sched::TaskIterator<C>& tasks) {
    if (ptx::elect_one()) {
        Producer<C> producer(ctx);
        sched::Task task;
        bool is_running = true;
#pragma unroll 1
        while (is_running && tasks.next(task))
            is_running = producer.run(task, tasks);
        if (is_running)
            producer.finish();
    }
    __syncwarp();
}

} // namespace deep_gemm_k3::engine
