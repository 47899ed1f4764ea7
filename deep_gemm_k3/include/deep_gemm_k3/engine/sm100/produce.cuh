// The producer: one warp walks the CTA's tasks, its lane 0 fills the ring of stages. A routed stage is one tensor copy
// per 128 rows of weights, one bulk copy of their scales and one of the tokens with theirs; a shared stage is one
// tensor copy of weights and one of tokens.
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

// Addresses of one task's operands, advanced stage by stage.
template <Config C>
struct RoutedSource {
    static constexpr uint32_t kWeightBytes = plan::expanded_weight_bytes(C.routed_tile);
    static constexpr uint32_t kTokenBytes = plan::pool_tile_bytes(C);

    const TensorMap* map;
    const uint8_t* scales; // of the tile's rows, next stage
    const uint8_t* tokens;
    int num_halves;
    int column, row; // of the weights
    uint32_t scale_stride;

    __device__ __forceinline__ RoutedSource(const sched::Context& ctx, const sched::Task& task, int first_stage) {
        const bool is_l1 = task.phase == sched::Phase::kRoutedL1;
        const int num_k = sched::num_k_columns(C, task.phase), num_rows = sched::num_weight_rows(C, task.phase);
        const int first_row = task.row_tile * C.routed_tile.num_rows;
        const Params& params = ctx.params;
        map = is_l1 ? &params.routed_maps.l1 : &params.routed_maps.l2;
        num_halves = num_tile_halves(C, task);
        column = first_stage * C.routed_tile.num_k;
        row = task.expert * num_rows + first_row;
        scale_stride = num_rows * 4;
        scales = (is_l1 ? params.routed.l1_scale : params.routed.l2_scale) +
                 (uint64_t(task.expert) * (num_k / C.routed_tile.num_k) + first_stage) * scale_stride + first_row * 4;
        tokens = sched::component<C>(ctx, is_l1 ? plan::Component::kPoolX : plan::Component::kPoolIntermediate) +
                 plan::pool_tile_offset(C, num_k, task.block, first_stage);
    }
    // Tensor copies count what they read: half a byte per code.
    __device__ __forceinline__ uint32_t weight_bytes() const {
        return num_halves * (plan::kHalfRows * C.routed_tile.num_k / 2 + plan::kScaleBlockBytes);
    }
    __device__ __forceinline__ uint32_t token_bytes() const { return kTokenBytes; }
    __device__ __forceinline__ void load_weights(ptx::CopyTarget to) {
        const ptx::CopyTarget scales_to = {to.shared + kWeightBytes + kTokenBytes, to.barrier};
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half) {
            ptx::tensor_load_2d(to, map, column, row + half * plan::kHalfRows, kRoutedWeightPolicy);
            to.shared += kWeightBytes / plan::kNumHalves;
        }
        ptx::bulk_load(scales_to, scales, num_halves * plan::kScaleBlockBytes, kRoutedWeightPolicy);
        column += C.routed_tile.num_k;
        scales += scale_stride;
    }
    __device__ __forceinline__ void load_tokens(ptx::CopyTarget to) {
        to.shared += kWeightBytes;
        ptx::bulk_load(to, tokens, kTokenBytes, kTokenPolicy);
        tokens += kTokenBytes;
    }
};

template <Config C>
struct SharedSource {
    static constexpr uint32_t kWeightBytes = plan::shared_weight_bytes(C.shared_tile);
    static constexpr uint32_t kTokenBytes = plan::shared_token_bytes(C.shared_tile);
    static_assert(C.shared_tile.num_k == plan::kSharedK);

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
        if (is_l1)
            ptx::tensor_load_4d(to, &maps.l1, weight_k, row / 16, kSharedWeightPolicy);
        else
            ptx::tensor_load_2d(to, &maps.l2, weight_k, row, kSharedWeightPolicy);
        weight_k += plan::kSharedK;
    }
    __device__ __forceinline__ void load_tokens(ptx::CopyTarget to) {
        to.shared += kWeightBytes;
        ptx::tensor_load_2d(to, is_l1 ? &maps.x : &maps.intermediate, token_k, token, kTokenPolicy);
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
        return {rings.stage(stage.index), rings.full(stage.index)};
    }
    // The first pass over a ring finds everything empty.
    __device__ __forceinline__ bool is_empty() const {
        return ptx::mbarrier_try_wait(rings.empty(stage.index), stage.parity ^ 1);
    }
    __device__ __forceinline__ void wait_empty() const {
        wait_barrier(
            ctx, {sync::Role::kProducer, sync::What::kStage, stage.index}, rings.empty(stage.index), stage.parity ^ 1);
    }

    __device__ __forceinline__ const TaskRecord& begin(const sched::Task& task, int num_stages) const {
        wait_barrier(ctx, {sync::Role::kProducer, sync::What::kStage, record.index}, rings.record_empty(record.index),
            record.parity ^ 1);
        TaskRecord& next = rings.record(ctx, record.index);
        next.task = task;
        next.num_stages = num_stages;
        return next;
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
            ptx::mbarrier_expect_tx(target().barrier, source.weight_bytes());
            source.load_weights(target());
            stage.advance();
        }
        stage = first_stage;
        debug::mark(ctx, debug::Event::kAsked, debug_argument(task.task));
        sync::wait_ready(ctx, sync::dependency<C>(ctx, task.task), task.task.block);
        debug::mark(ctx, debug::Event::kReady);
        publish();
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            ptx::mbarrier_arrive_expect_tx(target().barrier, source.token_bytes());
            source.load_tokens(target());
            stage.advance();
        }
        return num_stages;
    }

    template <class Source>
    __device__ __forceinline__ void fill(Source source, int num_task_stages, const TaskRecord& task) {
#pragma unroll 1
        for (int num_left = num_task_stages - fill_first(source, task); num_left > 0; --num_left) {
            wait_empty();
            ptx::mbarrier_arrive_expect_tx(target().barrier, source.weight_bytes() + source.token_bytes());
            source.load_weights(target());
            source.load_tokens(target());
            stage.advance();
        }
    }

    // Ends the list, and waits until the tensor core has let go of every stage: its arrivals are the last thing that
    // happens to the barriers.
    __device__ __forceinline__ void finish() {
        begin({}, 0);
        publish();
#pragma unroll 1
        for (uint32_t s = 0; s < rings.kNumStages; ++s) {
            wait_empty();
            stage.advance();
        }
    }
};

// Called by the producer warp. All its copies are waited for by the issuer of the CTA.
template <Config C>
__device__ __forceinline__ void produce(const sched::Context& ctx, sched::TaskIterator<C>& tasks) {
    if (ptx::elect_one()) {
        Producer<C> producer(ctx);
        sched::Task task;
#pragma unroll 1
        while (tasks.next(task)) {
            const sched::StageRange range = task_stages(C, task);
            const TaskRecord& record = producer.begin(task, range.end - range.begin);
            if (!sched::is_shared(task.phase))
                producer.fill(RoutedSource<C>(ctx, task, range.begin), range.end - range.begin, record);
            else if constexpr (C.has_shared())
                producer.fill(SharedSource<C>(ctx, task, range.begin), range.end - range.begin, record);
        }
        producer.finish();
    }
    __syncwarp();
}

} // namespace deep_gemm_k3::engine
