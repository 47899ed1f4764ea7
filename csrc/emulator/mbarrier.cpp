#include "mbarrier.hpp"

#include "races.hpp"

namespace deep_gemm_k3::emulator {

MbarrierWord MbarrierWord::load(u64 word) {
    s32 transactions = static_cast<s32>(static_cast<u32>(word >> 40) << 10) >> 10;
    return {static_cast<u32>(word & 0xfffff), static_cast<u32>(word >> 20 & 0xfffff), transactions, (word >> 63) != 0};
}

u64 MbarrierWord::store() const {
    return u64{pending & 0xfffff} | u64{expected & 0xfffff} << 20 |
           (u64{static_cast<u32>(transactions)} & 0x3fffff) << 40 | u64{phase} << 63;
}

SharedPlace mbarrier_place(Warp& w, u64 address, bool generic) {
    if (generic && (address & kWindowMask) != kSharedWindow)
        throw Fault("mbarrier", "mbarrier address " + hex(address) + " is not in shared memory");
    if (address & 7)
        throw Fault("misaligned", "mbarrier at " + hex(address) + " is not aligned to 8 bytes");
    return shared_place(w, address & ~kWindowMask, 8);
}

namespace {

MbarrierInfo& find(Cta& cta, u32 offset) {
    auto found = cta.mbarriers.find(offset);
    if (found == cta.mbarriers.end())
        throw Fault("mbarrier", "shared offset " + std::to_string(offset) + " of CTA rank " + std::to_string(cta.rank) +
                                    " holds no initialised mbarrier");
    return found->second;
}

u64 read(const Cta& cta, u32 offset) {
    u64 word;
    std::memcpy(&word, cta.shared.data() + offset, 8);
    return word;
}

void settle(Machine& machine, Cta& cta, u32 offset, MbarrierInfo& info, MbarrierWord& word) {
    ++machine.epoch;
    if (machine.races && machine.completing)
        machine.races->release_async(*machine.completing, &info, word.phase);
    bool is_complete = word.pending == 0 && word.transactions == 0;
    if (is_complete) {
        if (machine.races)
            machine.races->forget(&info, !word.phase);
        word.phase = !word.phase;
        word.pending = word.expected;
    }
    u64 packed = word.store();
    std::memcpy(cta.shared.data() + offset, &packed, 8);
    if (is_complete)
        machine.wake_all(info.waiters);
}

void add_transactions(Cta& cta, u32 offset, MbarrierWord& word, s32 change) {
    s64 sum = s64{word.transactions} + change;
    if (sum > kTransactionLimit || sum < -kTransactionLimit)
        throw Fault("transaction-overflow", "the transaction count of the mbarrier at shared offset " +
                                                std::to_string(offset) + " of CTA rank " + std::to_string(cta.rank) +
                                                " leaves its range: " + std::to_string(sum));
    word.transactions = static_cast<s32>(sum);
}

} // namespace

u64 mbarrier_arrive(Machine& machine, Cta& cta, u32 offset, u32 count, s32 expect, bool drop) {
    MbarrierInfo& info = find(cta, offset);
    u64 before = read(cta, offset);
    MbarrierWord word = MbarrierWord::load(before);
    add_transactions(cta, offset, word, expect);
    if (count > word.pending)
        throw Fault("mbarrier", "arrival without expectation: " + std::to_string(count) + " arrivals where " +
                                    std::to_string(word.pending) + " of " + std::to_string(word.expected) +
                                    " are pending, mbarrier at shared offset " + std::to_string(offset) +
                                    " of CTA rank " + std::to_string(cta.rank));
    word.pending -= count;
    if (drop)
        word.expected -= count;
    settle(machine, cta, offset, info, word);
    return before;
}

void mbarrier_transactions(Machine& machine, Cta& cta, u32 offset, s32 change) {
    MbarrierInfo& info = find(cta, offset);
    MbarrierWord word = MbarrierWord::load(read(cta, offset));
    add_transactions(cta, offset, word, change);
    settle(machine, cta, offset, info, word);
}

bool mbarrier_phase(Machine&, Cta& cta, u32 offset) {
    find(cta, offset);
    return MbarrierWord::load(read(cta, offset)).phase;
}

const MbarrierInfo& mbarrier_info(Cta& cta, u32 offset) {
    return find(cta, offset);
}

std::string mbarrier_text(const Cta& cta, u32 offset) {
    MbarrierWord word = MbarrierWord::load(read(cta, offset));
    return "mbarrier at shared offset " + std::to_string(offset) + " of CTA rank " + std::to_string(cta.rank) +
           " (phase " + std::to_string(word.phase) + ", " + std::to_string(word.pending) + " of " +
           std::to_string(word.expected) + " arrivals and " + std::to_string(word.transactions) + " bytes outstanding)";
}

} // namespace deep_gemm_k3::emulator
