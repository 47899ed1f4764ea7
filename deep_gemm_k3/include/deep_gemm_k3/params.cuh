// The one kernel argument, passed by value as __grid_constant__. An absent feature is a null pointer in a phase that
// the Config compiles out, never an aliased descriptor. Host code fills it; the CPU target reads the same struct.
#pragma once
#include "config.cuh"
#include "types.cuh"

namespace deep_gemm_k3 {

// 128 opaque bytes: a CUtensorMap on the GPU, our own encoding in the emulator.
struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

struct RoutedOperands {
    const uint8_t* l1_weight; // target layout, see docs/layouts.md
    const uint8_t* l2_weight;
    const uint8_t* l1_scale; // null on SM90: the scales live inside the weight units
    const uint8_t* l2_scale;
};

struct SharedOperands {
    const void* x;  // BF16 [num_shared_tokens, shared_hidden]
    const void* l1; // BF16 [2 * shared_intermediate, shared_hidden], rows [gate; up]
    const void* l2; // BF16 [shared_hidden, shared_intermediate]
    void* output;   // BF16 [num_shared_tokens, shared_hidden]; dense mode only
    int num_tokens;
};

// What the publication modes read; addresses follow docs/protocol.md.
struct PublicationTarget {
    const int32_t* flags;       // device memory; [0] generation to write, [2] bytes between generations
    const int64_t* peer_ptrs;   // device memory, [num_ranks]
    uint64_t generation_stride; // bytes, expected in flags[2]
    int num_generations;
};

struct Scalars {
    float activation_clamp;
    float situ_beta;
    float situ_linear_beta;
    float rms_epsilon;
    uint64_t timeout_ns;
    uint32_t debug_delay_ns; // tests only: this rank sleeps that long before it takes part
};

// Tiled maps of the shared expert's operands (2-D unless said otherwise), 128-byte swizzle, BF16.
struct SharedMaps {
    TensorMap x;            // box {64 k, shared token tile}
    TensorMap l1;           // 4-D {k, 8 rows, gate|up, row group}: lands as 16-row groups of 8 gate and 8 up rows
    TensorMap intermediate; // box {64 k, shared token tile} over the workspace's shared intermediate
    TensorMap l2;           // box {64 k, rows of one tile}
};

// Tiled maps of a routed GEMM's operands on SM100 (2-D), zero elsewhere.
struct RoutedMaps {
    TensorMap weights;       // packed E2M1 that spreads to a byte per code, 128-byte swizzle, box {128 k, 128 rows},
                             // over the rows of all local experts
    TensorMap weight_scales; // int32, box {256 rows, 1}, over [expert and k128 unit, row]
    TensorMap tokens;        // the pool's tiles as rows of 128 bytes, box {128, tokens of one CTA}
    TensorMap token_scales;  // the same, box {128, rows of a tile's scales}
};

struct Params {
    uint8_t* buffers[kMaxNumRanks]; // every rank's symmetric buffer, addressable from this device; [rank] is our own
    int rank;
    int num_tokens;
    RoutedOperands routed;
    void* y;                // BF16 [num_tokens, hidden]
    const void* rms_weight; // BF16 [hidden], or null
    int32_t* statistics;    // [num_local_experts], or null
    SharedOperands shared;
    PublicationTarget publication;
    Scalars scalars;
    void* error_record; // pinned host memory, one ErrorRecord (sync/abort.cuh)
    void* timeline;     // debug builds only, else null
    SharedMaps maps;
    RoutedMaps routed_l1;
    RoutedMaps routed_l2;
};

} // namespace deep_gemm_k3
