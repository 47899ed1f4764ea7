#include "memory.hpp"

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace deep_gemm_k3::emulator {

void MemoryMap::add(u64 low, u64 bytes, const std::string& name, bool writable) {
    u64 high = low + bytes;
    last_ = nullptr;
    for (Allocation& item : list_) // the same storage twice, or views of it: keep the union
        if (item.alive && low < item.high && item.low < high) {
            low = std::min(low, item.low), high = std::max(high, item.high);
            writable |= item.writable;
            item.high = item.low;
        }
    std::erase_if(list_, [&](const Allocation& item) {
        return item.low >= item.high || (!item.alive && low < item.high && item.low < high);
    });
    Allocation fresh{low, high, name, true, writable};
    list_.insert(
        std::upper_bound(list_.begin(), list_.end(), fresh, [](const auto& x, const auto& y) { return x.low < y.low; }),
        fresh);
}

void MemoryMap::remove(u64 low) {
    last_ = nullptr;
    for (Allocation& item : list_)
        if (item.low == low)
            item.alive = false;
}

void MemoryMap::forget(u64 low) {
    last_ = nullptr;
    std::erase_if(list_, [&](const Allocation& item) { return item.low == low; });
}

void MemoryMap::forget_mapped() {
    last_ = nullptr;
    mapped_.clear(), readable_.clear();
}

const Allocation* MemoryMap::find(u64 address) const {
    auto above = std::upper_bound(
        list_.begin(), list_.end(), address, [](u64 value, const Allocation& item) { return value < item.low; });
    if (above == list_.begin())
        return nullptr;
    const Allocation& item = *std::prev(above);
    return address < item.high ? &item : nullptr;
}

std::string MemoryMap::describe(u64 address) const {
    const Allocation* nearest = nullptr;
    u64 best = ~u64{0};
    for (const Allocation& item : list_) {
        u64 distance = address < item.low ? item.low - address : address >= item.high ? address - item.high + 1 : 0;
        if (distance < best)
            best = distance, nearest = &item;
    }
    if (!nearest)
        return hex(address) + ", and no allocation is registered";
    std::string place = address < nearest->low     ? std::to_string(best) + " bytes before"
                        : address >= nearest->high ? std::to_string(best - 1) + " bytes past the end of"
                                                   : "at byte " + std::to_string(address - nearest->low) + " of";
    return hex(address) + ": " + place + " '" + nearest->name + "' (" + std::to_string(nearest->high - nearest->low) +
           " bytes)";
}

// The range of this process's memory that holds the access, as /proc says, or null. What has been looked up is kept,
// and looked up again when it does not hold the access: memory may have been mapped since.
const Allocation* MemoryMap::find_mapped(u64 address, u64 bytes, bool is_write) {
    auto holder = [&]() -> const Allocation* {
        for (auto* ranges : {&mapped_, &readable_})
            for (const Allocation& item : *ranges)
                if (address >= item.low && address < item.high && bytes <= item.high - address &&
                    (!is_write || item.writable))
                    return &item;
        return nullptr;
    };
    if (const Allocation* known = holder())
        return known;
    forget_mapped();
    std::ifstream maps("/proc/self/maps");
    std::string line;
    while (std::getline(maps, line)) {
        unsigned long low = 0, high = 0;
        char mode[5] = {};
        if (std::sscanf(line.c_str(), "%lx-%lx %4s", &low, &high, mode) != 3 || mode[0] != 'r')
            continue;
        bool writable = mode[1] == 'w';
        if (!mapped_.empty() && mapped_.back().high == low && mapped_.back().writable == writable)
            mapped_.back().high = high;
        else
            mapped_.push_back({low, high, "memory of this process", true, writable});
        if (!readable_.empty() && readable_.back().high == low) // a read may cross into memory of other rights
            readable_.back().high = high;
        else
            readable_.push_back({low, high, "memory of this process", true, false});
    }
    return holder();
}

u8* MemoryMap::check_slow(u64 address, u64 bytes, bool is_write) {
    const Allocation* item = find(address);
    bool fits = item && item->alive && bytes <= item->high - address && (!is_write || item->writable);
    if (!fits && accept_mapped)
        if (const Allocation* known = find_mapped(address, bytes, is_write)) {
            last_ = known;
            return reinterpret_cast<u8*>(address);
        }
    if (!item)
        throw Fault("out-of-bounds", "global access of " + std::to_string(bytes) + " bytes at " + describe(address));
    if (!item->alive)
        throw Fault("use-after-free", "global access at " + describe(address) + ", which has been freed");
    if (bytes > item->high - address)
        throw Fault("out-of-bounds",
            "global access of " + std::to_string(bytes) + " bytes crosses the end: " + describe(address));
    if (is_write && !item->writable)
        throw Fault("read-only", "write to read-only memory at " + describe(address));
    last_ = item;
    return reinterpret_cast<u8*>(address);
}

} // namespace deep_gemm_k3::emulator
