// What a plan is made from: the problem and the device, as plain values.
#pragma once

#include "deep_gemm_k3/config.cuh"

namespace deep_gemm_k3::heuristics {

struct DeviceFacts {
    Architecture arch;
    int num_sms; // the rank's share of the device
    // False: other kernels that this one may wait for, such as another local rank's, run on the rest of the device.
    bool is_whole = true;
};

// What a measurement insists on instead of the planner's choice. 0: the planner chooses.
struct Overrides {
    int routed_tokens; // tokens of a routed tile
    int shared_tokens; // tokens of a shared tile
    int shared_rows;   // weight rows of a shared tile
    int num_ctas_per_sm;
    int num_cluster_ctas;
    int num_stages;
    SplitCounts splits;
    NarrowWidths narrow_widths; // of a routed tile
};

// Everything a launch depends on. `signature` fields are compared between ranks; the two token counts are not among
// them.
struct Problem {
    BufferShape shape;
    int num_tokens;        // this rank's live routed rows
    int num_shared_tokens; // rows of shared_x
    int shared_hidden;     // 0: no shared expert
    Activation activation;
    SharedOutput shared_output;
    bool has_clamp;
    bool fast_math;
    bool has_rms_norm;
    bool has_statistics;
    bool batch_invariant;
    Overrides overrides{};
};

} // namespace deep_gemm_k3::heuristics
