// Lanes of a warp apart: independent thread scheduling promises that lanes are together only in instructions that bring
// them together. As an adversary the emulator parts them anywhere else.
#include <algorithm>

#include "exec.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr u32 kMaxParts = 4;

// Some of the lanes: often the first one, which many programs let speak for all.
u32 choose(std::mt19937_64& random, u32 mask) {
    u64 dice = random();
    u32 some = 0;
    switch (dice & 3) {
    case 0:
        return mask & (~mask + 1);
    case 1:
        some = mask & 0xffff;
        break;
    case 2:
        some = mask & static_cast<u32>(dice >> 32);
        break;
    default:
        some = mask & ~(mask & (~mask + 1));
    }
    return some;
}

} // namespace

// Between two instructions of the running split.
void Machine::part_lanes(Warp& w) {
    u32 parts = 0;
    for (auto& split : w.splits)
        parts += split->state != SplitState::Dead;
    if (parts >= kMaxParts || !(w.mask & (w.mask - 1)))
        return;
    u32 some = choose(random, w.mask);
    if (!some || some == w.mask)
        return;
    Split* other = w.new_split(w.pc, w.mask & ~some, w.node); // leaves the running split where it is
    std::copy(std::begin(w.current->polls), std::end(w.current->polls), other->polls); // what it polls in vain
    other->num_polls = w.current->num_polls;
    w.mask = some;
}

// Before an instruction that whole warps execute: true when all lanes are here, or when the program itself has parted
// them.
bool Machine::come_together(Warp& w, const Inst& in) {
    u32 together;
    return w.node || meet(w, in, w.mask, w.live, together);
}

} // namespace deep_gemm_k3::emulator
