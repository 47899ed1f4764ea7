// The issuer: one thread hands every stage to the tensor core. Tokens are as wide as the task needs, in steps of an
// epilogue pass, so that a half-empty block costs half.
//
//   per task:  record; sums empty -> per stage: full -> [routed: scales to tensor memory] multiply, commit to empty
//              -> commit to sums full
//
// Scales have one place in tensor memory: copies and multiplications execute in the order of issue. In a pair the
// leader's issuer alone works; everything lies at the same offsets in both CTAs.
#pragma once
#include "pipeline.cuh"

namespace deep_gemm_k3::engine {

constexpr uint32_t kStepBytes = 32; // of K that one multiplication takes per row

template <Config C>
struct Issuer {
    static constexpr plan::TensorMemoryLayout kTensorLayout = Rings<C>::kTensorLayout;
    static constexpr plan::ScaledStage kStage = plan::scaled_stage(C);
    static constexpr int kNumCtas = C.num_cluster_ctas;
    static constexpr uint32_t kStepsPerStage = 128 / kStepBytes;
    static constexpr uint32_t kHalfBytes = plan::kHalfRows * 128;
    static constexpr int kTileRows = plan::kTensorTileRows * kNumCtas, kTokenStep = 16;
    static_assert(C.routed_tile.num_rows == kTileRows && C.routed_tile.num_k == 128);
    static_assert(C.routed_tile.num_tokens % kTokenStep == 0);
    static_assert(
        !C.has_shared() || (C.shared_tile.num_rows == kTileRows && C.shared_tile.num_tokens % kTokenStep == 0));

    const sched::Context& ctx;
    Rings<C> rings;
    typename Rings<C>::StagePlace stage;
    typename Rings<C>::SumsPlace sums;
    typename Rings<C>::RecordPlace record;
    uint32_t tensor_memory;

    __device__ __forceinline__ Issuer(const sched::Context& context, uint32_t address)
        : ctx(context), rings(context.shared), tensor_memory(address) {}

    __device__ __forceinline__ uint32_t sums_address(int half) const {
        return tensor_memory + sums.index * kTensorLayout.stage_columns + half * kTensorLayout.half_columns;
    }
    // K step `step` of a stage of `rows` (of one half) and `tokens`, both in shared memory.
    __device__ __forceinline__ ptx::Product product(
        int half, uint32_t rows, uint32_t tokens, uint32_t step, bool accumulate) const {
        return {sums_address(half), ptx::operand_descriptor(rows + half * kHalfBytes + step * kStepBytes),
            ptx::operand_descriptor(tokens + step * kStepBytes), 0, accumulate || step > 0};
    }

    // A tile's scales of one stage: weights of both halves, then tokens.
    __device__ __forceinline__ void copy_scales(uint32_t shared, int num_halves) const {
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half)
            ptx::tensor_copy_scales<kNumCtas>(tensor_memory + kTensorLayout.weight_scales + half * plan::kScaleColumns,
                ptx::scale_descriptor(shared + kStage.weight_scales + half * plan::kScaleBlockBytes));
#pragma unroll
        for (int i = 0; i < plan::num_scale_blocks(C.routed_tile.num_tokens); ++i)
            ptx::tensor_copy_scales<kNumCtas>(tensor_memory + kTensorLayout.token_scales + i * plan::kScaleColumns,
                ptx::scale_descriptor(shared + kStage.token_scales + i * plan::kScaleBlockBytes));
    }

    __device__ __forceinline__ void multiply_routed(int num_tokens, int num_halves, bool accumulate) const {
        const uint32_t rows = rings.stage(stage.index), tokens = rows + kStage.tokens;
        copy_scales(rows, num_halves);
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half) {
            const ptx::ScaleColumns scales = {tensor_memory + kTensorLayout.weight_scales + half * plan::kScaleColumns,
                tensor_memory + kTensorLayout.token_scales};
#pragma unroll
            for (uint32_t step = 0; step < kStepsPerStage; ++step) {
                ptx::Product next = product(half, rows, tokens, step, accumulate);
                next.instruction = ptx::scaled_instruction<kNumCtas>(num_tokens, step);
                ptx::tensor_multiply_scaled<kNumCtas>(next, scales);
            }
        }
    }
    __device__ __forceinline__ void multiply_shared(int num_tokens, int num_halves, bool accumulate) const {
        const uint32_t rows = rings.stage(stage.index);
        const uint32_t tokens = rows + plan::shared_weight_bytes(plan::cta_operands(C, C.shared_tile));
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half)
#pragma unroll
            for (uint32_t step = 0; step < kStepsPerStage; ++step) {
                ptx::Product next = product(half, rows, tokens, step, accumulate);
                next.instruction = ptx::bf16_instruction<kNumCtas>(num_tokens);
                ptx::tensor_multiply_bf16<kNumCtas>(next);
            }
    }

    // False: there are no more tasks, or a limit has passed.
    __device__ __forceinline__ bool run_task() {
        const auto where = [](uint32_t index) { return sync::Where{sync::Role::kProducer, sync::What::kStage, index}; };
        if (!wait_barrier(ctx, where(record.index), rings.record_full(record.index), record.parity))
            return false;
        const TaskRecord& next = rings.record(ctx, record.index);
        const int num_stages = next.num_stages, num_halves = num_product_halves(C, next.task);
        const int num_tokens = num_product_tokens(C, next.task);
        const bool is_shared = C.has_shared() && sched::is_shared(next.task.phase);
        ptx::mbarrier_arrive(rings.record_empty(record.index));
        record.advance();
        if (num_stages == 0)
            return false;
        if (!wait_leader_barrier<C>(ctx, where(sums.index), rings.sums_empty(sums.index), sums.parity ^ 1))
            return false;
        ptx::tensor_fence_after_sync();
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            if (!wait_leader_barrier<C>(ctx, where(stage.index), rings.full(stage.index), stage.parity))
                return false;
            ptx::tensor_fence_after_sync();
            if (!is_shared)
                multiply_routed(num_tokens, num_halves, k > 0);
            else if constexpr (C.has_shared())
                multiply_shared(num_tokens, num_halves, k > 0);
            ptx::tensor_commit<kNumCtas>(rings.empty(stage.index));
            stage.advance();
        }
        ptx::tensor_commit<kNumCtas>(rings.sums_full(sums.index));
        sums.advance();
        return true;
    }
};

// Called by the issuing warp.
template <Config C>
__device__ __forceinline__ void issue(const sched::Context& ctx, uint32_t tensor_memory) {
    if (ptx::elect_one()) {
        Issuer<C> issuer(ctx, tensor_memory);
#pragma unroll 1
        while (issuer.run_task()) {
        }
    }
    __syncwarp();
}

} // namespace deep_gemm_k3::engine
