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

// Registers the part of this process's memory that holds the range, as far as no allocation is known there.
bool MemoryMap::add_mapping(u64 address, u64 bytes) {
    std::ifstream maps("/proc/self/maps");
    std::string line;
    while (std::getline(maps, line)) {
        u64 low = 0, high = 0;
        char mode[5] = {};
        if (std::sscanf(line.c_str(), "%lx-%lx %4s", &low, &high, mode) != 3 || address < low || address + bytes > high)
            continue;
        if (mode[0] != 'r')
            return false;
        for (const Allocation& known : list_) { // not over what is registered
            if (known.high <= address)
                low = std::max(low, known.high);
            if (known.low > address)
                high = std::min(high, known.low);
        }
        add(low, high - low, "unregistered memory of this process", mode[1] == 'w');
        return true;
    }
    return false;
}

u8* MemoryMap::check_slow(u64 address, u64 bytes, bool is_write) {
    const Allocation* item = find(address);
    if (!item && accept_mapped && add_mapping(address, bytes))
        item = find(address);
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
