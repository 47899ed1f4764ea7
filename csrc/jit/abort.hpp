// Host side of the abort path: writing the abort cell into device memory while kernels spin, and the pinned record in
// which a kernel reports.
#pragma once
#include <cstdint>
#include <span>

#include <deep_gemm_k3/plan/workspace.cuh>

namespace deep_gemm_k3::jit {

// Allocates what write_abort_cells needs on the device. Call it when a buffer is created: while a kernel spins nothing
// may be allocated.
void prepare_abort_writer(int device);

// Copies the cell to every address (device memory reachable from `device`, peers included), code last, on a private
// non-blocking stream, and waits for the copies: they pass running kernels and captures.
void write_abort_cells(int device, std::span<const uint64_t> addresses, const plan::AbortCell& cell);

// Pinned host memory, mapped into every context; one record per buffer. Zeroed.
plan::AbortCell* create_error_record();
void destroy_error_record(plan::AbortCell* record);

// A consistent copy; code == 0: nothing reported.
plan::AbortCell read_error_record(const plan::AbortCell* record);

} // namespace deep_gemm_k3::jit
