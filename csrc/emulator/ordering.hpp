// Memory-ordering modifiers: how loads, stores, atomics, fences and barrier operations state semantics and scope.
#pragma once

#include "ops.hpp"

namespace deep_gemm_k3::emulator {

enum class Order : u8 { Weak, Relaxed, Acquire, Release, AcqRel, Volatile };
enum class Scope : u8 { None, Cta, Cluster, Gpu, Sys };

// Inst::mode of memory instructions
constexpr u16 kOrderMask = 7, kScopeShift = 3, kScopeMask = 7 << 3;
constexpr u16 kSignExtend = 1 << 6, kPolls = 1 << 7;

inline Order order_of(u16 mode) {
    return static_cast<Order>(mode & kOrderMask);
}
inline Scope scope_of(u16 mode) {
    return static_cast<Scope>((mode & kScopeMask) >> kScopeShift);
}

u16 take_ordering(Builder& b, Order fallback, Scope fallback_scope);
void want_order(const Builder& b, u16 mode, std::initializer_list<Order> orders); // one of them, and its scope
Space take_space(Builder& b, Space fallback);
bool take_cache_hints(Builder& b); // true when a cache-policy operand follows

// Parks the warp when the same instruction has seen the same values before and nothing has happened since.
void note_poll(Warp& w, u64 hash);

} // namespace deep_gemm_k3::emulator
