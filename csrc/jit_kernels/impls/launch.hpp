// From a checked call and its plan to a launch, on the target where the buffer lives.
#pragma once

#include "plan_store.hpp"

namespace deep_gemm_k3::impls {

// Once per plan: finds the loaded kernel and makes sure that its CTAs are resident together. Off a device, loads it
// first.
void prepare(Plan& plan, const runtime::Buffer& buffer, const PlanStore& store);

// Before a first call on a device. Refuses it inside a graph capture (it compiles and waits for peers), naming the call
// to make before; and allocates what must not be allocated while a peer's kernel spins.
void prepare_buffer(runtime::Buffer& buffer, const checks::Call& call);

// Runs one call on the CPU through the lent executor; on failure all ranks are told.
void launch_on_cpu(int64_t handle, runtime::Buffer& buffer, const Plan& plan, const checks::Call& call);

// Queues the kernel on the current stream of the buffer's device, or runs it in the emulator.
void launch_kernel(runtime::Buffer& buffer, const Plan& plan, const checks::Call& call);

} // namespace deep_gemm_k3::impls
