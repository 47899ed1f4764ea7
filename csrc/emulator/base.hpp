// Plain types, errors and bit helpers shared by every part of the emulator.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace deep_gemm_k3::emulator {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
using f32 = float;
using f64 = double;

constexpr int kLanes = 32;
constexpr u32 kFullMask = 0xffffffffu;
constexpr u32 kNoPc = 0xffffffffu;

struct Vec128 {
    u64 lo, hi;
};

// A text that cannot be executed: unknown opcode, modifier, operand, symbol. Always names the line.
struct PtxError : std::runtime_error {
    int line;
    PtxError(int line_number, const std::string& text)
        : std::runtime_error("PTX line " + std::to_string(line_number) + ": " + text), line(line_number) {}
};

// A program that goes wrong while it runs: it ends the launch.
struct Fault : std::runtime_error {
    std::string kind;
    Fault(std::string fault_kind, const std::string& text) : std::runtime_error(text), kind(std::move(fault_kind)) {}
};

template <class To, class From>
inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

std::string hex(u64 value);

} // namespace deep_gemm_k3::emulator
