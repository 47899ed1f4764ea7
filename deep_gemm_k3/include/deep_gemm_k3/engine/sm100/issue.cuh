// The issuer: one thread hands every stage to the tensor core. Tokens are as wide as the task needs, in steps of an
// epilogue pass, so that a half-empty block costs half.
//
//   per task:  record; sums empty -> per stage: full -> [routed: scales to tensor memory] multiply, commit to empty
//              -> commit to sums full
//
// Scales have one place in tensor memory: copies and multiplications execute in the order of issue.
#pragma once
#include "pipeline.cuh"

namespace deep_gemm_k3::engine {

constexpr uint32_t kStepBytes = 32; // of K that one multiplication takes per row

template <Config C>
struct Issuer {
    static constexpr plan::TensorMemoryLayout kTensorLayout = Rings<C>::kTensorLayout;
    static constexpr uint32_t kStepsPerStage = 128 / kStepBytes;
    static constexpr uint32_t kHalfBytes = plan::kHalfRows * 128;
    static_assert(C.routed_tile.num_rows == plan::kNumHalves * plan::kHalfRows && C.routed_tile.num_k == 128);
    static_assert(C.routed_tile.num_tokens % 16 == 0 && (!C.has_shared() || C.shared_tile.num_tokens % 16 == 0));
    static_assert(!C.has_shared() || C.shared_tile.num_rows == C.routed_tile.num_rows);

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

    // A tile's scales of one stage: weights of both halves, then tokens.
    __device__ __forceinline__ void copy_scales(uint32_t tokens, int num_halves) const {
        constexpr uint32_t token_scales = C.routed_tile.num_tokens * 128, weight_scales = plan::pool_tile_bytes(C);
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half)
            ptx::tensor_copy_scales(tensor_memory + kTensorLayout.weight_scales + half * plan::kScaleColumns,
                ptx::scale_descriptor(tokens + weight_scales + half * plan::kScaleBlockBytes));
#pragma unroll
        for (int i = 0; i < plan::num_scale_blocks(C.routed_tile.num_tokens); ++i)
            ptx::tensor_copy_scales(tensor_memory + kTensorLayout.token_scales + i * plan::kScaleColumns,
                ptx::scale_descriptor(tokens + token_scales + i * plan::kScaleBlockBytes));
    }

    __device__ __forceinline__ void multiply_routed(int num_tokens, int num_halves, bool accumulate) const {
        const uint32_t rows = rings.stage(stage.index), tokens = rows + plan::expanded_weight_bytes(C.routed_tile);
        copy_scales(tokens, num_halves);
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half) {
            const ptx::ScaleColumns scales = {tensor_memory + kTensorLayout.weight_scales + half * plan::kScaleColumns,
                tensor_memory + kTensorLayout.token_scales};
#pragma unroll
            for (uint32_t step = 0; step < kStepsPerStage; ++step)
                ptx::tensor_multiply_scaled(sums_address(half),
                    ptx::operand_descriptor(rows + half * kHalfBytes + step * kStepBytes),
                    ptx::operand_descriptor(tokens + step * kStepBytes), ptx::scaled_instruction(num_tokens, step),
                    scales, accumulate || step > 0);
        }
    }
    __device__ __forceinline__ void multiply_shared(int num_tokens, int num_halves, bool accumulate) const {
        const uint32_t rows = rings.stage(stage.index), tokens = rows + plan::shared_weight_bytes(C.shared_tile);
        const uint32_t instruction = ptx::bf16_instruction(num_tokens);
#pragma unroll 1
        for (int half = 0; half < num_halves; ++half)
#pragma unroll
            for (uint32_t step = 0; step < kStepsPerStage; ++step)
                ptx::tensor_multiply_bf16(sums_address(half),
                    ptx::operand_descriptor(rows + half * kHalfBytes + step * kStepBytes),
                    ptx::operand_descriptor(tokens + step * kStepBytes), instruction, accumulate || step > 0);
    }

    // False: there are no more tasks.
    __device__ __forceinline__ bool run_task() {
        const auto where = [](uint32_t index) { return sync::Where{sync::Role::kProducer, sync::What::kStage, index}; };
        wait_barrier(ctx, where(record.index), rings.record_full(record.index), record.parity);
        const TaskRecord& next = rings.record(ctx, record.index);
        const int num_stages = next.num_stages, num_halves = num_tile_halves(C, next.task);
        const bool is_shared = C.has_shared() && sched::is_shared(next.task.phase);
        const int pass = tokens_per_pass(is_shared ? C.shared_tile.num_tokens : C.routed_tile.num_tokens);
        const int num_tokens = ceil_div(next.task.num_valid_tokens, pass) * pass;
        ptx::mbarrier_arrive(rings.record_empty(record.index));
        record.advance();
        if (num_stages == 0)
            return false;
        wait_barrier(ctx, where(sums.index), rings.sums_empty(sums.index), sums.parity ^ 1);
        ptx::tensor_fence_after_sync();
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            wait_barrier(ctx, where(stage.index), rings.full(stage.index), stage.parity);
            ptx::tensor_fence_after_sync();
            if (!is_shared)
                multiply_routed(num_tokens, num_halves, k > 0);
            else if constexpr (C.has_shared())
                multiply_shared(num_tokens, num_halves, k > 0);
            ptx::tensor_commit(rings.empty(stage.index));
            stage.advance();
        }
        ptx::tensor_commit(rings.sums_full(sums.index));
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
