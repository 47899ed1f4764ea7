// The mbarrier object: its 64-bit word in shared memory, and the operations on it.
#pragma once

#include "exec.hpp"

namespace deep_gemm_k3::emulator {

// bits 0-19 pending arrivals, 20-39 expected arrivals, 40-61 transaction count (signed), 63 phase
struct MbarrierWord {
    u32 pending, expected;
    s32 transactions;
    bool phase;
    static MbarrierWord load(u64 word);
    u64 store() const;
};

constexpr const char* kWaitsForMbarrier = "waits for an mbarrier"; // Wait::object is rank << 24 | offset
constexpr s32 kTransactionLimit = (1 << 20) - 1;

SharedPlace mbarrier_place(Warp& w, u64 address, bool generic);
// All of these check that the barrier has been initialised.
u64 mbarrier_arrive(Machine& machine, Cta& cta, u32 offset, u32 count, s32 expect, bool drop);
void mbarrier_transactions(Machine& machine, Cta& cta, u32 offset, s32 change); // expect_tx: +, complete_tx: -
bool mbarrier_phase(Machine& machine, Cta& cta, u32 offset);
const MbarrierInfo& mbarrier_info(Cta& cta, u32 offset);
std::string mbarrier_text(const Cta& cta, u32 offset);

} // namespace deep_gemm_k3::emulator
