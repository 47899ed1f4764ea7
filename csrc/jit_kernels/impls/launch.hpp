// From a checked call and its plan to a launch, on the target where the buffer lives.
#pragma once

#include "plan_store.hpp"

namespace deep_gemm_k3::impls {

// Once per plan: finds the loaded kernel and makes sure that its CTAs are resident together. Off a device, loads it
// first.
void prepare(Plan& plan, const runtime::Buffer& buffer, Route route);

// A first call compiles and waits for peers; a stream that records a graph cannot wait. Names the call to make before.
void refuse_first_call_in_capture(const checks::Call& call);

// Runs one call on the CPU through the lent executor; on failure all ranks are told.
void launch_on_cpu(int64_t handle, runtime::Buffer& buffer, const Plan& plan, const checks::Call& call);

// Queues the kernel on the current stream of the buffer's device, or runs it in the emulator.
void launch_kernel(runtime::Buffer& buffer, const Plan& plan, const checks::Call& call);

} // namespace deep_gemm_k3::impls
