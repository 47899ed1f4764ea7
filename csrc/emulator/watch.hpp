// Registers that wgmma reads and writes asynchronously: who touches them too early, and what lacks a wgmma.fence.
//
// Rows of the register file are reused, so the check goes by the program's own registers. Only instructions that
// mention a register of some wgmma, or a copy of one, are watched; all others run as ever. Copies are followed, because
// compilers move accumulators between registers that the assembler later makes one.
#pragma once

#include "decode.hpp"
#include "machine.hpp"

namespace deep_gemm_k3::emulator {

// The registers of one wgmma.mma_async, before and after it runs.
void watch_product(Warp& w);
void watch_fence(Warp& w);            // wgmma.fence
void watch_wait(Warp& w, u64 groups); // the first `groups` groups of the warp are complete

} // namespace deep_gemm_k3::emulator
