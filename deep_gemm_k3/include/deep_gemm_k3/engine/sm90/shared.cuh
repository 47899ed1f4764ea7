// Mainloop of a shared-expert tile: 128 or 256 weight rows x one token tile, BF16 from shared memory on both sides.
// Each math warpgroup owns one or two m64 blocks. A stage holds num_k / 64 weight boxes, then as many token boxes, all
// 128-byte swizzled.
#pragma once
#include "../../ptx/wgmma.cuh"
#include "../../sched/task.cuh"
#include "pipeline.cuh"

namespace deep_gemm_k3::engine {

template <Config C>
struct SharedMainloop {
    static constexpr int kTokens = C.shared_tile.num_tokens;
    static constexpr int kNumBlocks = C.shared_tile.num_rows / plan::kUnitRows / C.num_math_warpgroups; // m64 blocks
    static constexpr int kNumAccumulators = kTokens / 2;                                                // per block
    static constexpr int kNumBoxes = C.shared_tile.num_k / plan::kSharedK;
    static constexpr uint32_t kWeightBoxBytes = C.shared_tile.num_rows * 128;
    static constexpr uint32_t kTokenBoxBytes = kTokens * 128;
    static constexpr uint32_t kBlockBytes = plan::kUnitRows * 128;
    // With two CTAs on an SM memory is what limits: a stage goes back as soon as its products are done. Else the tensor
    // cores have the next stage's products by then.
    static constexpr bool kReleasesAtOnce = C.num_ctas_per_sm > 1;
    static_assert(C.shared_tile.num_rows == C.num_math_warpgroups * kNumBlocks * plan::kUnitRows);
    static_assert((kNumBlocks == 1 || kNumBlocks == 2) && kTokens >= 16);

    using Accumulators = float[kNumBlocks][kNumAccumulators];

    static __device__ __forceinline__ void run(
        const sched::Context& ctx, Pipeline<C>& pipeline, int num_stages, Accumulators& acc) {
        const uint32_t first_row = ctx.warp_idx / 4 * kNumBlocks * kBlockBytes;
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kNumAccumulators; ++i)
                acc[m][i] = 0.f;
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            pipeline.wait_full();
            const ptx::WgmmaDescriptor weights(pipeline.address() + first_row);
            const ptx::WgmmaDescriptor tokens(pipeline.address() + kNumBoxes * kWeightBoxBytes);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < kNumBoxes * 4; ++step) {
                const uint32_t box = step / 4, inside = step % 4 * 32;
#pragma unroll
                for (int m = 0; m < kNumBlocks; ++m)
                    ptx::Wgmma<kTokens>::from_shared(acc[m],
                        weights.at(box * kWeightBoxBytes + m * kBlockBytes + inside),
                        tokens.at(box * kTokenBoxBytes + inside));
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<kReleasesAtOnce ? 0 : 1>();
            if constexpr (kReleasesAtOnce)
                pipeline.release(ptx::thread_index() % 32 == 0, pipeline.stage);
            else if (k > 0)
                pipeline.release(ptx::thread_index() % 32 == 0, pipeline.previous());
            pipeline.advance();
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kNumAccumulators; ++i)
                ptx::keep(acc[m][i]);
        if constexpr (!kReleasesAtOnce)
            pipeline.release(ptx::thread_index() % 32 == 0, pipeline.previous());
    }
};

} // namespace deep_gemm_k3::engine
