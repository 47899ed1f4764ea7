// Host side of the abort path for buffers in device memory: writing the abort cells of all ranks while kernels spin,
// and the pinned record in which a kernel reports.
#pragma once

#include "runtime/registry.hpp"

#include <cstdint>
#include <string>

#include <deep_gemm_k3/plan/workspace.cuh>

namespace deep_gemm_k3::jit {

// The pinned host record of a buffer, mapped into every context (Params::error_record). Made on first use, freed with
// the buffer. Ask for it before the first launch: while a kernel spins nothing may be allocated.
plan::AbortCell* error_record(runtime::Buffer& buffer);

// Writes text and cell of a host's refusal into every rank's control block, code last, on a private non-blocking stream
// and with copies from pinned memory, so that neither running kernels nor captures are in the way. A cell that holds a
// report keeps it. Never raises.
void abort_device_peers(runtime::Buffer& buffer, const std::string& message);

// What a kernel of this buffer reported, in words; empty: nothing. Costs one load from host memory when there is none.
std::string device_abort_report(runtime::Buffer& buffer);

// A cell in words: "rank 1: time-out: dispatch waits for header 3: wanted 5, seen 4".
std::string abort_words(const plan::AbortCell& cell);

} // namespace deep_gemm_k3::jit
