// The host's part of a buffer's control block in CPU memory: abort cell and cross-rank barrier.
#pragma once

#include "deep_gemm_k3/plan/workspace.cuh"
#include "runtime/registry.hpp"

#include <cstdint>
#include <string>

namespace deep_gemm_k3::runtime {

// Report a host's failure in one rank's control block. Of several reports the first stays.
void write_abort(uint8_t* base, uint32_t rank, const std::string& message);
// The report in a control block, or an empty string. Costs one load when there is none.
std::string read_abort(uint8_t* base, FaultText fault_text);

// Wait until every rank has come to this barrier: what ranks wrote before it is visible after it. `phase` (0..3) names
// the place in the call; ranks that meet in different phases are reported. Bounded by the buffer's time-out, ended by
// an abort; both raise, and a time-out aborts all ranks. Needs nothing but the buffer's memory; zero is a valid start.
void cpu_barrier(Buffer& buffer, int phase);

} // namespace deep_gemm_k3::runtime
