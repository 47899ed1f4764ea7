// A finished tile as the epilogues see it: the sums of this warpgroup's 128 rows, loaded from tensor memory one pass of
// tokens at a time, in the order of a wgmma accumulator.
//
// d[b][4 * j + i]: row 32 * warp + 16 * b + lane / 4 + 8 * (i >> 1) of the warpgroup's rows, token
// 8 * j + 2 * (lane % 4) + (i & 1) of the pass. So L1's 8 gate rows and the 8 up rows of the same columns meet in a
// thread.
#pragma once
#include "pipeline.cuh"

namespace deep_gemm_k3::engine {

template <int kTokens, int kNumCtas>
struct TileSums {
    static constexpr int kPass = tokens_per_pass(kTokens);
    static constexpr int kPerBlock = kPass / 2;

    float d[2][kPerBlock];
    uint32_t address; // of the warp's lanes and the warpgroup's first column
    uint32_t barrier; // gets this warp's arrival when all is loaded
    int num_tokens;
    bool is_loaded; // d holds the only pass already

    // `first_address`: of the accumulator's first lane and the warpgroup's first column.
    __device__ __forceinline__ TileSums(uint32_t first_address, uint32_t empty_barrier, int num_valid_tokens)
        : barrier(empty_barrier), num_tokens(num_valid_tokens), is_loaded(false) {
        address = first_address + (ptx::thread_index() % 128 / 32 * 32 << 16);
    }

    __device__ __forceinline__ void load(int first_token) {
        if (is_loaded)
            return;
#pragma unroll
        for (int b = 0; b < 2; ++b)
            ptx::TensorLoad<kPass>::run(address + (b * 16 << 16) + first_token, d[b]);
        ptx::tensor_wait_loads(d[0], d[1]);
        if (first_token + kPass >= num_tokens)
            release();
    }
    // This warp reads no more.
    __device__ __forceinline__ void release() const {
        ptx::tensor_fence_before_sync();
        __syncwarp();
        if (ptx::thread_index() % 32 == 0)
            arrive_at_leader<kNumCtas>(barrier);
    }
};

} // namespace deep_gemm_k3::engine
