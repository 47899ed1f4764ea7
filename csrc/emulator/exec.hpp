// Helpers for instruction handlers: rows as vectors of lanes, and the memory access paths.
#pragma once

#include "machine.hpp"

namespace deep_gemm_k3::emulator {

inline constexpr char kSleeps[] = "sleeps"; // Wait::what of one that has looked at nothing since it last slept
void exec_exit(Warp& w, const Inst& in, u32 m);
void exec_label(Warp& w, const Inst& in, u32 m);
void exec_reconverge(Warp& w, const Inst& in, u32 m);
void exec_warp_barrier(Warp& w, const Inst& in, u32 m);

template <class T>
using Cell = std::conditional_t<sizeof(T) == 8, u64, u32>;

template <class T>
inline T from_cell(Cell<T> cell) {
    if constexpr (sizeof(T) == sizeof(Cell<T>)) {
        return std::bit_cast<T>(cell);
    } else if constexpr (sizeof(T) == 2) {
        return std::bit_cast<T>(static_cast<u16>(cell));
    } else {
        return std::bit_cast<T>(static_cast<u8>(cell));
    }
}

template <class T>
inline Cell<T> to_cell(T value) {
    if constexpr (sizeof(T) == sizeof(Cell<T>)) {
        return std::bit_cast<Cell<T>>(value);
    } else if constexpr (sizeof(T) == 2) {
        return std::bit_cast<u16>(value);
    } else {
        return std::bit_cast<u8>(value);
    }
}

// Writes f(lane) to the lanes of m. f must be defined on every lane.
template <class C, class F>
inline void write_lanes(C* out, u32 m, F f) {
    alignas(64) C value[kLanes];
    for (int i = 0; i < kLanes; ++i)
        value[i] = f(i);
    if (m == kFullMask) {
        std::memcpy(out, value, sizeof(value));
    } else {
        for (int i = 0; i < kLanes; ++i)
            out[i] = ((m >> i) & 1) ? value[i] : out[i];
    }
}

// Writes f(lane) to the lanes of m, calling f on those only.
template <class C, class F>
inline void write_active(C* out, u32 m, F f) {
    for (u32 left = m; left; left &= left - 1) {
        int i = std::countr_zero(left);
        out[i] = f(i);
    }
}

template <class F>
inline u32 mask_of(F f) {
    alignas(64) u32 value[kLanes];
    for (int i = 0; i < kLanes; ++i)
        value[i] = f(i) ? 1u << i : 0u;
    u32 out = 0;
    for (int i = 0; i < kLanes; ++i)
        out |= value[i];
    return out;
}

inline int first_lane(u32 m) {
    return std::countr_zero(m);
}

// Host pointer for an access of `bytes` at a shared (cta or cluster) address.
u8* shared_pointer_slow(Warp& w, u64 address, u32 bytes, bool is_write);
inline u8* shared_pointer(Warp& w, u64 address, u32 bytes, bool is_write) {
    Cta& cta = *w.cta;
    u32 offset = static_cast<u32>(address) & 0xffffffu;
    bool is_own = static_cast<u32>(address) >> 24 == cta.rank;
    if (is_own && (offset & (bytes - 1)) == 0 && u64{offset} + bytes <= cta.shared.size() &&
        offset >= kSharedReserved) {
        if (is_write)
            std::memset(cta.written.data() + offset, 1, bytes);
        return cta.shared.data() + offset;
    }
    return shared_pointer_slow(w, address, bytes, is_write);
}

enum class Access : u8 { Read, Write, Atomic };
u8* local_pointer(Warp& w, u64 address, u32 bytes, int lane);
u8* resolve_slow(Warp& w, Space space, u64 address, u32 bytes, Access access, int lane);
void check_initialised(Warp& w, const u8* pointer, u32 bytes, u64 address);
[[noreturn]] void fault_misaligned(Warp& w, u64 address, u32 bytes);
constexpr int kManyLanes = kLanes; // in place of a lane: several lanes do it together
void note_access(Warp& w, u16 mode, u8* p, u32 bytes, Access access, int lane); // mode: ordering and scope

// `bytes` is a power of two
inline u8* resolve(Warp& w, Space space, u64 address, u32 bytes, Access access, int lane) {
    if (space == Space::Shared)
        return shared_pointer(w, address, bytes, access != Access::Read);
    if (space == Space::Global || (space == Space::Generic && (address & kWindowMask) < kSharedWindow)) {
        if (address & (bytes - 1))
            fault_misaligned(w, address, bytes);
        return w.machine->memory.check(address, bytes, access != Access::Read);
    }
    return resolve_slow(w, space, address, bytes, access, lane);
}

inline bool is_shared_access(Space space, u64 address) {
    return space == Space::Shared || (space == Space::Generic && (address & kWindowMask) == kSharedWindow);
}

// `bytes` of global memory from `address` on were read or written by a warp.
inline void count_global(Warp& w, u64 address, u64 bytes, bool is_write) {
    Counters& c = w.machine->counters;
    (is_write ? c.global_written : c.global_read) += bytes;
    if (w.machine->observer.is_peers(address, w.cta->launch->rank))
        (is_write ? c.peer_written : c.peer_read) += bytes;
}

// The CTA and offset behind a shared address; a Fault when there is none.
struct SharedPlace {
    Cta* cta;
    u32 offset;
};
SharedPlace shared_place(Warp& w, u64 address, u32 bytes);

// Brings the lanes named in `members` together; true when the instruction may execute for mask `together`.
bool meet(Warp& w, const Inst& in, u32 m, u32 members, u32& together);

} // namespace deep_gemm_k3::emulator
