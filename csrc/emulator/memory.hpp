// Global memory as the emulated devices see it: registered host allocations, checked on every access.
#pragma once

#include <string>
#include <vector>

#include "base.hpp"

namespace deep_gemm_k3::emulator {

struct Allocation {
    u64 low = 0, high = 0; // [low, high)
    std::string name;
    bool alive = true;
    bool writable = true;
};

class MemoryMap {
  public:
    void add(u64 low, u64 bytes, const std::string& name, bool writable = true);
    void forget_mapped();                      // what accept_mapped has looked up: it may be unmapped by now
    void remove(u64 low);                      // freed: a later access is reported as such
    void forget(u64 low);                      // never was: the emulator's own memory
    const Allocation* find(u64 address) const; // the one that holds the address, alive or not
    std::string describe(u64 address) const;   // for messages: the nearest allocations

    // Accept addresses that nobody has registered when this process has them mapped: for callers whose kernels reach
    // memory through pointers in memory.
    bool accept_mapped = false;

    // host pointer of [address, address + bytes), or a Fault
    inline u8* check(u64 address, u64 bytes, bool is_write) {
        if (last_ && address - last_->low < last_->high - last_->low && bytes <= last_->high - address &&
            (!is_write || last_->writable))
            return reinterpret_cast<u8*>(address);
        return check_slow(address, bytes, is_write);
    }

  private:
    std::vector<Allocation> list_; // sorted by low, no overlap among the living
    const Allocation* last_ = nullptr;
    std::vector<Allocation> mapped_, readable_; // what accept_mapped has looked up: by rights, and whatever can be read
    const Allocation* find_mapped(u64 address, u64 bytes, bool is_write);
    u8* check_slow(u64 address, u64 bytes, bool is_write);
};

} // namespace deep_gemm_k3::emulator
