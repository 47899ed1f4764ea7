// Mainloop of a routed tile: 256 weight rows x one token tile, K in stages of 128. Each math warpgroup owns two m64
// blocks. Weights go from packed shared memory through registers (dequantise.cuh) into operand A; tokens are operand B.
//
// A scheduler's tensor core and its other units take turns, so the cycles of both add up. wgmma takes three quarters of
// the cycles for 8 tokens that it takes for 32, mma.sync half of those. So with two CTAs on an SM, whose warps are many
// enough to cover latencies, 8 tokens are multiplied by mma.sync: no groups, and a stage is released when it is read.
// Splits of routed L1 are short, and nothing covers their products: there blocks of 16 tokens are multiplied so, too.
//
// wgmma: a stage is four k32 blocks. kGroupBlocks of them form one wgmma group; the fragments of the next group are
// computed while the tensor cores work on this one (two fragment buffers, one group in flight). A stage is released one
// group into the next stage: then all its wgmmas have retired.
#pragma once
#include "../../plan/operand_tile.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/sync.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../sched/task.cuh"
#include "dequantise.cuh"
#include "pipeline.cuh"

namespace deep_gemm_k3::engine {

template <Config C, int kTokens = C.routed_tile.num_tokens>
struct RoutedMainloop {
    static constexpr int kTileTokens = C.routed_tile.num_tokens;
    static constexpr int kNumBlocks = C.routed_tile.num_rows / plan::kUnitRows / C.num_math_warpgroups; // m64 blocks
    static constexpr int kNumAccumulators = kTileTokens / 2;                                            // per block
    static constexpr int kBlocksPerStage = 4;                                                           // k32 blocks
    // Registers decide both: two CTAs per SM leave 96, 128 tokens take 128 for the accumulators, and with several
    // widths the assembler finds none for a second block.
    static constexpr int kGroupBlocks = plan::has_widths(C) || kTileTokens >= 128 || C.num_ctas_per_sm > 1 ? 1 : 2;
    static constexpr bool kPrefetch = kTileTokens < 128 && C.num_ctas_per_sm == 1;
    static constexpr int kNumGroups = kBlocksPerStage / kGroupBlocks;
    // The widest tiles leave fragments for one k32 block of each m64 block only: a group is then one of those.
    static constexpr bool kAlternates = kTileTokens > 112;
    static constexpr bool kMultipliesByWarps =
        C.num_ctas_per_sm > 1 && (kTokens == 8 || (kTokens == 16 && C.splits.routed_l1 > 1));
    static_assert(kNumBlocks == 2 && C.routed_tile.num_k == plan::kUnitK);

    using Accumulators = float[kNumBlocks][kNumAccumulators];
    using Fragments = uint32_t[kNumBlocks][8 * kGroupBlocks];

    // Packed weights of this thread: 16 bytes per block and k64 half, scales of rows g and g + 8.
    struct Packed {
        ptx::Vector4 codes[2][kNumBlocks];
        ptx::Vector2 scales[kNumBlocks];
    };

    uint32_t codes_offset; // of this thread inside a stage
    uint32_t scales_offset;

    __device__ __forceinline__ RoutedMainloop() {
        const uint32_t thread = ptx::thread_index();
        const uint32_t warpgroup = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
        const uint32_t first = plan::routed_token_bytes(C.routed_tile) + warpgroup * kNumBlocks * plan::kUnitBytes;
        codes_offset = first + thread % 128 * 16;
        scales_offset = first + plan::kUnitCodeBytes + (warp * 8 + lane / 4) * 8;
    }

    // From what is in a register anyway: all other parts of the offset are multiples of 512. Computed anew each time:
    // a condition that does not change would make the compiler split the loop in two, one half of the warp in each.
    __device__ __forceinline__ bool is_first_lane() const {
        uint32_t offset = codes_offset;
        ptx::keep(offset);
        return (offset & 0x1F0) == 0;
    }

    template <int kHalf>
    __device__ __forceinline__ void load_half(uint32_t stage, Packed& packed) const {
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m) {
            packed.codes[kPrefetch ? kHalf : 0][m] =
                ptx::load_shared_16(stage + codes_offset + m * plan::kUnitBytes + kHalf * 2048);
            if constexpr (kHalf == 0)
                packed.scales[m] = ptx::load_shared_8(stage + scales_offset + m * plan::kUnitBytes);
        }
    }

    template <int kBlock>
    __device__ __forceinline__ void dequantise_block(const Packed& packed, int m, uint32_t* fragments) const {
        constexpr int kHalf = kPrefetch ? kBlock / 2 : 0, kWord = (kBlock & 1) * 2;
        const ptx::Vector4& codes = packed.codes[kHalf][m];
        dequantise(codes.word[kWord], codes.word[kWord + 1], scale_pair<kBlock>(packed.scales[m].word[0]),
            scale_pair<kBlock>(packed.scales[m].word[1]), fragments);
    }
    template <int kBlock>
    __device__ __forceinline__ void dequantise_blocks(const Packed& packed, Fragments& fragments) const {
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
            dequantise_block<kBlock>(packed, m, &fragments[m][8 * (kBlock % kGroupBlocks)]);
    }

    // The accumulators of the tokens that are multiplied.
    static __device__ __forceinline__ float (&used(float (&acc)[kNumAccumulators]))
        [kTokens / 2] { return reinterpret_cast<float (&)[kTokens / 2]>(acc); }

    template <int kGroup>
    __device__ __forceinline__
        void multiply(ptx::WgmmaDescriptor stage, Fragments& fragments, Accumulators& acc) const {
        ptx::wgmma_fence();
#pragma unroll
        for (int j = 0; j < 2 * kGroupBlocks; ++j) {
            const int step = kGroup * kGroupBlocks * 2 + j; // k16 step of the stage
            const uint64_t tokens =
                stage.at<plan::kOperandGroupBytes>(step / 4 * plan::kOperandHalfBytes + step % 4 * 32);
#pragma unroll
            for (int m = 0; m < kNumBlocks; ++m)
                ptx::Wgmma<kTokens>::from_registers(used(acc[m]), &fragments[m][4 * j], tokens);
        }
        ptx::wgmma_commit();
    }

    static __device__ __forceinline__ void keep(Fragments& fragments) {
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < 8 * kGroupBlocks; ++i)
                ptx::keep(fragments[m][i]);
    }

    // One m64 block after the other: while one is multiplied, the other's fragments are computed.
    template <int kBlock>
    __device__ __forceinline__ void run_alternating(
        ptx::WgmmaDescriptor stage, const Packed& packed, Fragments& fragments, Accumulators& acc) const {
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m) {
            dequantise_block<kBlock>(packed, m, fragments[m]);
            ptx::wgmma_fence();
#pragma unroll
            for (int j = 0; j < 2; ++j)
                ptx::Wgmma<kTokens>::from_registers(used(acc[m]), &fragments[m][4 * j],
                    stage.at<plan::kOperandGroupBytes>(
                        kBlock / 2 * plan::kOperandHalfBytes + (kBlock % 2 * 2 + j) * 32));
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
#pragma unroll
            for (int i = 0; i < 8; ++i)
                ptx::keep(fragments[m ^ 1][i]);
        }
    }

    // One wgmma group of a stage: fragments, then the multiplications, then the previous group retires.
    template <int kGroup>
    __device__ __forceinline__ void run_group(uint32_t stage, ptx::WgmmaDescriptor tokens, Packed& packed,
        Fragments (&fragments)[2], Accumulators& acc) const {
        constexpr int kFirst = kGroup * kGroupBlocks;
        if constexpr (!kPrefetch && kFirst % 2 == 0)
            load_half<kFirst / 2>(stage, packed);
        if constexpr (kAlternates) {
            run_alternating<kGroup>(tokens, packed, fragments[0], acc);
            return;
        }
        dequantise_blocks<kFirst>(packed, fragments[kGroup & 1]);
        if constexpr (kGroupBlocks == 2)
            dequantise_blocks<kFirst + 1>(packed, fragments[kGroup & 1]);
        if constexpr (kPrefetch && kFirst + kGroupBlocks == 2)
            load_half<1>(stage, packed);
        multiply<kGroup>(tokens, fragments[kGroup & 1], acc);
        ptx::wgmma_wait<1>();
        keep(fragments[(kGroup & 1) ^ 1]);
    }

    // One k32 block of the warp's rows, 8 tokens at a time. `tokens`: where this lane's matrix row lies, of even
    // blocks.
    template <int kBlock>
    __device__ __forceinline__ void multiply_by_warps(
        uint32_t stage, uint32_t tokens, Packed& packed, Accumulators& acc) const {
        if constexpr (kBlock % 2 == 0)
            load_half<kBlock / 2>(stage, packed);
        uint32_t b[kTokens / 8][4]; // 8 columns of k each
#pragma unroll
        for (int i = 0; i < kTokens / 8; ++i)
            ptx::load_matrix_x4(
                (tokens ^ kBlock % 2 * 64) + kBlock / 2 * plan::kOperandHalfBytes + i * plan::kOperandGroupBytes, b[i]);
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m) {
            uint32_t a[8];
            dequantise_block<kBlock>(packed, m, a);
#pragma unroll
            for (int i = 0; i < kTokens / 8; ++i) {
                ptx::multiply_m16n8k16(&acc[m][4 * i], a, b[i][0], b[i][1]);
                ptx::multiply_m16n8k16(&acc[m][4 * i], a + 4, b[i][2], b[i][3]);
            }
        }
    }
    __device__ __forceinline__ void run_by_warps(Pipeline<C>& pipeline, int num_stages, Accumulators& acc) const {
        Packed packed;
        const uint32_t lane = ptx::thread_index() % 32;
        const uint32_t token_offset = plan::operand_chunk_offset(lane % 8, lane / 8);
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            pipeline.wait_full();
            const uint32_t stage = pipeline.address(), tokens = stage + token_offset;
            multiply_by_warps<0>(stage, tokens, packed, acc);
            multiply_by_warps<1>(stage, tokens, packed, acc);
            multiply_by_warps<2>(stage, tokens, packed, acc);
            multiply_by_warps<3>(stage, tokens, packed, acc);
            // Loads may still be under way when a later arrival is seen, and a copy into the stage does not queue
            // behind them: without the fence a product now and then gets words of the next stage.
            ptx::fence_proxy_async_shared();
            __syncwarp();
            pipeline.release(is_first_lane(), pipeline.stage);
            pipeline.advance();
        }
    }

    __device__ __forceinline__ void run_by_warpgroups(Pipeline<C>& pipeline, int num_stages, Accumulators& acc) const {
        Fragments fragments[2];
        Packed packed;
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            pipeline.wait_full();
            const uint32_t stage = pipeline.address();
            const ptx::WgmmaDescriptor tokens(stage);
            if constexpr (kPrefetch)
                load_half<0>(stage, packed);
            run_group<0>(stage, tokens, packed, fragments, acc);
            if (k > 0)
                pipeline.release(is_first_lane(), pipeline.previous());
            run_group<1>(stage, tokens, packed, fragments, acc);
            if constexpr (kNumGroups == 4) {
                run_group<2>(stage, tokens, packed, fragments, acc);
                run_group<3>(stage, tokens, packed, fragments, acc);
            }
            pipeline.advance();
        }
        ptx::wgmma_wait<0>();
        keep(fragments[0]);
        if constexpr (!kAlternates)
            keep(fragments[1]);
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kNumAccumulators; ++i)
                ptx::keep(acc[m][i]);
        pipeline.release(is_first_lane(), pipeline.previous());
    }

    __device__ __forceinline__ void run(Pipeline<C>& pipeline, int num_stages, Accumulators& acc) const {
#pragma unroll
        for (int m = 0; m < kNumBlocks; ++m)
#pragma unroll
            for (int i = 0; i < kNumAccumulators; ++i)
                acc[m][i] = 0.f;
        if constexpr (kMultipliesByWarps)
            run_by_warps(pipeline, num_stages, acc);
        else
            run_by_warpgroups(pipeline, num_stages, acc);
    }

    // A warpgroup without rows in the last tile only keeps the ring turning. A stage is released once all lanes have
    // seen it full and have read the task's record; in a mainloop wgmma or a barrier does that.
    __device__ __forceinline__ void skip(Pipeline<C>& pipeline, int num_stages) const {
#pragma unroll 1
        for (int k = 0; k < num_stages; ++k) {
            pipeline.wait_full();
            __syncwarp();
            pipeline.release(is_first_lane(), pipeline.stage);
            pipeline.advance();
        }
    }
};

} // namespace deep_gemm_k3::engine
