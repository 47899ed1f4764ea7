// The decoded form of a kernel: fixed-size instructions that name rows of the warp's register file.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "syntax.hpp"

namespace deep_gemm_k3::emulator {

struct Warp;
struct Inst;
using Handler = void (*)(Warp&, const Inst&, u32 mask);

// A row reference: byte offset | 1 when the row lies in the constant pool. Rows: predicate 4 bytes (one bit per lane),
// 32-bit 128 bytes, 64-bit 256 bytes, 128-bit 512 bytes. Types below 32 bits live zero-extended in 32-bit rows.
// Address operands carry | 2 when the row is 64-bit; predicate operands carry | 2 when negated.
using Ref = u32;

struct Inst {
    Handler run = nullptr;
    s64 imm = 0;  // address offset, table, count: the handler knows
    u32 pred = 0; // 0: always; else offset of the predicate row | 2 when negated
    Ref dst = 0, a = 0, b = 0, c = 0, d = 0;
    u32 extra = 0;          // first entry of this instruction in Program::extra
    u32 target = kNoPc;     // branch target
    u32 reconverge = kNoPc; // where the two sides of a branch meet
    u32 statement = 0;      // index into Function::statements
    u16 mode = 0;           // handler-specific bits
    u8 n = 1;               // number of vector elements or extra operands
    Space space = Space::Generic;
    bool is_aligned = false; // whole warps execute it
};

enum class Special : u8 {
    TidX,
    TidY,
    TidZ,
    NtidX,
    NtidY,
    NtidZ,
    CtaidX,
    CtaidY,
    CtaidZ,
    NctaidX,
    NctaidY,
    NctaidZ,
    LaneId,
    WarpId,
    NwarpId,
    SmId,
    NsmId,
    GridId,
    LaneMaskEq,
    LaneMaskLe,
    LaneMaskLt,
    LaneMaskGe,
    LaneMaskGt,
    ClusterIdX,
    ClusterIdY,
    ClusterIdZ,
    NclusterIdX,
    NclusterIdY,
    NclusterIdZ,
    ClusterCtaidX,
    ClusterCtaidY,
    ClusterCtaidZ,
    ClusterNctaidX,
    ClusterNctaidY,
    ClusterNctaidZ,
    ClusterCtaRank,
    ClusterNctaRank,
    IsExplicitCluster,
    DynamicSmem,
    TotalSmem,
    ReservedBegin,
    ReservedHalf,
    ReservedEnd,
    SharedBase,
    ParamBase,
    GlobalBase,
    Count
};

struct SpecialRow {
    Special what;
    u32 offset; // of the row in the register file
    bool wide;
    u64 addend; // symbol rows: base plus this
};

// An instruction that mentions registers of wgmma, by their number among the watched ones.
struct Watch {
    u32 inst = 0;
    Handler run = nullptr; // the instruction itself
    bool is_copy = false;  // mov of the register in uses to the one in defs
    std::vector<u32> uses, defs;
};

// An instruction that may come before the tcgen05.wait::ld of a load whose registers it mentions.
struct LoadHazard {
    u32 load = 0;
    Handler run = nullptr; // the instruction itself
};

struct Program {
    const Syntax* syntax = nullptr;
    const Function* function = nullptr;
    std::vector<Inst> code;
    std::vector<u32> extra;
    std::vector<u64> constants;       // the constant pool, as 8-byte words
    std::vector<SpecialRow> specials; // rows the machine fills when a warp starts
    u32 register_bytes = 0;
    u32 static_shared = 0; // end of static shared variables, from address 0
    u32 dynamic_base = 0;  // where dynamic shared memory begins
    u32 local_bytes = 0;
    u32 param_bytes = 0;
    u32 cta_group = 0;                      // of all its tcgen05 instructions; 0: it has none
    std::map<u32, LoadHazard> load_hazards; // by pc
    u32 watched_registers = 0;
    std::vector<Watch> watches;
    std::vector<u32> watch_at;       // per instruction: index into watches; empty when there are none
    std::string where(u32 pc) const; // "kernel, PTX line 12 (source file.cu:34): add.s32"
};

constexpr u32 kSharedReserved = 1024;            // static and dynamic shared memory begin here, as on sm_90 and later
constexpr u64 kSharedWindow = u64{0x7100} << 48; // generic addresses outside the host's canonical range
constexpr u64 kLocalWindow = u64{0x7200} << 48;
constexpr u64 kWindowMask = u64{0xffff} << 48;

} // namespace deep_gemm_k3::emulator
