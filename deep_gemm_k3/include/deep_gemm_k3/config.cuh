// The one template argument of every kernel. A structural type, so that the JIT source holds a readable literal with
// named fields; the same literal is the cache key and the log line. Run-time scalars (betas, clamp, epsilon, time-outs,
// token counts) are Params: they must not cost a compile.
#pragma once
#include "types.cuh"

namespace deep_gemm_k3 {

enum class Architecture : int { kSM90 = 90, kSM100 = 100 };
enum class Activation : int { kSwiGLU = 0, kSiTU = 1 };
// Where the shared expert's output goes. kNone: there is no shared expert in this call.
enum class SharedOutput : int { kNone = 0, kDense = 1, kHiddenSharded = 2, kTokenOwner = 3 };

constexpr int kMaxNumRanks = 64;
constexpr int kMaxNumTopk = 32;

// The shape of the buffer: everything that decides where a byte lies in the symmetric buffer. Equal on all ranks.
struct BufferShape {
    int num_ranks;
    int num_experts; // over all ranks
    int num_topk;
    int num_max_tokens;        // per rank, a multiple of 384
    int num_max_shared_tokens; // rows of the shared intermediate
    int hidden;                // routed (latent) width
    int intermediate;          // routed intermediate width
    int shared_intermediate;   // this rank's slice; 0: no shared expert

    DG_HOST_DEVICE constexpr int num_local_experts() const { return num_experts / num_ranks; }
};

// One tile of weights x tokens. Weights are always the MMA's M side, tokens its N side.
struct TileShape {
    int num_rows;   // weight rows of one tile, of all CTAs that multiply it together
    int num_tokens; // tokens of one tile
    int num_k;      // K extent of one pipeline stage
};

// Narrower instances of the mainloop of a routed tile, both or none (0); equal: there is only one.
struct NarrowWidths {
    int middle;
    int least;
};

// K splits per GEMM phase; 1 = not split. Split tiles meet in FP32 partials summed in ascending split order.
struct SplitCounts {
    int routed_l1;
    int routed_l2;
    int shared_l1;
    int shared_l2;
};

struct Config {
    Architecture arch;
    BufferShape shape;
    int shared_hidden; // width of shared_x and of the shared output; 0: no shared expert
    Activation activation;
    SharedOutput shared_output;
    bool has_clamp;
    bool fast_math;
    bool has_rms_norm;
    bool has_statistics;
    TileShape routed_tile;
    TileShape shared_tile;
    SplitCounts splits;
    int num_stages;
    int num_math_warpgroups;
    int num_threads;
    int num_ctas_per_sm;
    int num_cluster_ctas = 1; // CTAs that multiply a tile together: each its rows, all the same tokens. 2 on SM100 only
    NarrowWidths narrow_widths = {0, 0};

    DG_HOST_DEVICE constexpr bool has_shared() const { return shared_output != SharedOutput::kNone; }
    DG_HOST_DEVICE constexpr bool is_published() const {
        return shared_output == SharedOutput::kHiddenSharded || shared_output == SharedOutput::kTokenOwner;
    }
    // Whether ranks tell each other that they have published. What a rank wrote itself it sees when its kernel has
    // ended.
    DG_HOST_DEVICE constexpr bool counts_publication() const { return is_published() && shape.num_ranks > 1; }
};

} // namespace deep_gemm_k3
