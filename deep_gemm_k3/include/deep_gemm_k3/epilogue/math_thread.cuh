// A thread of a math warpgroup as the epilogues see it, and the scratch its warpgroup owns.
#pragma once
#include "../plan/shared_memory.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/matrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/sync.cuh"
#include "../sched/task.cuh"

namespace deep_gemm_k3::epilogue {

struct MathThread {
    uint32_t warpgroup;
    uint32_t warp;   // of the warpgroup
    uint32_t thread; // of the warpgroup
    uint32_t lane;
    uint32_t row;  // lane / 4: row of an 8x8 matrix
    uint32_t pair; // lane % 4: its two columns

    // Reads the thread index anew: nothing derived from it occupies a register during the mainloop.
    __device__ __forceinline__ MathThread() {
        const uint32_t index = ptx::thread_index();
        warpgroup = index / 128;
        warp = index / 32 % 4;
        thread = index % 128;
        lane = index % 32;
        row = lane / 4;
        pair = lane % 4;
    }

    // All threads of this warpgroup.
    __device__ __forceinline__ void sync() const {
        ptx::barrier_sync(
            static_cast<ptx::NamedBarrier>(static_cast<int>(ptx::NamedBarrier::kMathGroup0) + warpgroup), 128);
    }
};

template <Config C>
__device__ __forceinline__ uint32_t staging_address(const sched::Context& ctx, const MathThread& me) {
    constexpr plan::SharedMemoryLayout kLayout = plan::shared_memory_layout(C);
    return ptx::shared_address(ctx.shared) + kLayout.staging + me.warpgroup * plan::staging_stride(C);
}

// Two accumulators of adjacent tokens, rounded to BF16 and kept as floats.
__device__ __forceinline__ void round_to_bf16(float& first, float& second) {
    const uint32_t packed = ptx::float_to_bf16x2(second, first);
    first = __uint_as_float(packed << 16);
    second = __uint_as_float(packed & 0xFFFF0000u);
}

// Row information of the tokens of one pool block: lane i keeps that of tokens i, i + 32, ... (their weights for L1,
// their places for L2); shuffles hand it to the lane that needs it. Loaded at the start of a tile, after its first
// stage has arrived, and not touched before its end, so that the loads hide behind the mainloop.
template <int kTokens>
struct TokenRows {
    static constexpr int kPerLane = ceil_div(kTokens, 32);
    uint32_t first[kPerLane], second[kPerLane];

    // Moves on to the next 32 tokens.
    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int i = 1; i < kPerLane; ++i) {
            first[i - 1] = first[i];
            second[i - 1] = second[i];
        }
    }
};

// Moves accumulators down by kCount, so that a rolled loop finds the next ones at the same place.
template <int kCount, int kNumAccumulators>
__device__ __forceinline__ void shift_accumulators(float (&d)[kNumAccumulators]) {
#pragma unroll
    for (int i = kCount; i < kNumAccumulators; ++i)
        d[i - kCount] = d[i];
}

} // namespace deep_gemm_k3::epilogue
