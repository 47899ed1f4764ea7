// mov, address conversions, and the special registers that change while a program runs.
#include "ops.hpp"

namespace deep_gemm_k3::emulator {

namespace {

template <class T>
void exec_mov(Warp& w, const Inst& in, u32 m) {
    const T* a = w.row<T>(in.a);
    T* out = w.row<T>(in.dst);
    if (m == kFullMask)
        std::memmove(out, a, sizeof(T) * kLanes);
    else
        write_lanes(out, m, [&](int i) { return a[i]; });
}

void exec_mov_wide(Warp& w, const Inst& in, u32 m) {
    const Vec128* a = w.row<Vec128>(in.a);
    write_active(w.row<Vec128>(in.dst), m, [&](int i) { return a[i]; });
}

void exec_mov_pred(Warp& w, const Inst& in, u32 m) {
    w.set_predicate(in.dst, m, w.predicate(in.a));
}

enum Clock : u16 { kClock32, kClockHigh, kClock64, kTimer, kTimerLow, kTimerHigh };

void exec_clock(Warp& w, const Inst& in, u32 m) {
    u64 now = w.machine->virtual_ns + w.executed / 8;
    u64 cycles = now + now / 2;
    switch (in.mode) {
    case kClock32:
        return write_lanes(w.row<u32>(in.dst), m, [&](int) { return static_cast<u32>(cycles); });
    case kClockHigh:
        return write_lanes(w.row<u32>(in.dst), m, [&](int) { return static_cast<u32>(cycles >> 32); });
    case kClock64:
        return write_lanes(w.row<u64>(in.dst), m, [&](int) { return cycles; });
    case kTimer:
        return write_lanes(w.row<u64>(in.dst), m, [&](int) { return now; });
    case kTimerLow:
        return write_lanes(w.row<u32>(in.dst), m, [&](int) { return static_cast<u32>(now); });
    default:
        return write_lanes(w.row<u32>(in.dst), m, [&](int) { return static_cast<u32>(now >> 32); });
    }
}

bool build_clock(Builder& b) {
    struct Name {
        const char* name;
        Clock clock;
        bool wide;
    };
    constexpr Name kNames[] = {{"%clock", kClock32, false}, {"%clock_hi", kClockHigh, false},
        {"%clock64", kClock64, true}, {"%globaltimer", kTimer, true}, {"%globaltimer_lo", kTimerLow, false},
        {"%globaltimer_hi", kTimerHigh, false}};
    for (const Name& entry : kNames) {
        if (b.at(1).kind != Operand::Kind::Name || b.at(1).name != entry.name)
            continue;
        b.def(&Inst::dst, b.at(0), entry.wide ? Type::B64 : Type::B32);
        b.in.mode = entry.clock;
        b.emit(exec_clock);
        return true;
    }
    return false;
}

void exec_active(Warp& w, const Inst& in, u32 m) {
    write_lanes(w.row<u32>(in.dst), m, [&](int) { return w.mask; });
}

// mov.b32 d, {a, b, ...}: n parts of `mode` bits each
template <class T>
void exec_pack(Warp& w, const Inst& in, u32 m) {
    u32 width = in.mode;
    alignas(64) T value[kLanes] = {};
    for (u32 k = 0; k < in.n; ++k) {
        if constexpr (sizeof(T) == 8) {
            if (width == 32) {
                const u32* part = w.row<u32>(w.extra(in, k));
                for (int i = 0; i < kLanes; ++i)
                    value[i] |= static_cast<u64>(part[i]) << (32 * k);
                continue;
            }
        }
        const u32* part = w.row<u32>(w.extra(in, k));
        u32 mask = width >= 32 ? kFullMask : (1u << width) - 1;
        for (int i = 0; i < kLanes; ++i)
            value[i] |= static_cast<T>(part[i] & mask) << (width * k);
    }
    write_lanes(w.row<T>(in.dst), m, [&](int i) { return value[i]; });
}

template <class T>
void exec_unpack(Warp& w, const Inst& in, u32 m) {
    u32 width = in.mode;
    alignas(64) T value[kLanes];
    std::memcpy(value, w.row<T>(in.a), sizeof(value));
    u32 mask = width >= 32 ? kFullMask : (1u << width) - 1;
    for (u32 k = 0; k < in.n; ++k)
        write_lanes(
            w.row<u32>(w.extra(in, k)), m, [&](int i) { return static_cast<u32>(value[i] >> (width * k)) & mask; });
}

void exec_pack_wide(Warp& w, const Inst& in, u32 m) {
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        if (in.n == 2) {
            w.row<Vec128>(in.dst)[i] = {w.row<u64>(w.extra(in, 0))[i], w.row<u64>(w.extra(in, 1))[i]};
        } else {
            u64 p[4];
            for (u32 k = 0; k < 4; ++k)
                p[k] = w.row<u32>(w.extra(in, k))[i];
            w.row<Vec128>(in.dst)[i] = {p[0] | p[1] << 32, p[2] | p[3] << 32};
        }
    }
}

void exec_unpack_wide(Warp& w, const Inst& in, u32 m) {
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        Vec128 value = w.row<Vec128>(in.a)[i];
        u64 halves[2] = {value.lo, value.hi};
        for (u32 k = 0; k < in.n; ++k) {
            if (in.n == 2)
                w.row<u64>(w.extra(in, k))[i] = halves[k];
            else
                w.row<u32>(w.extra(in, k))[i] = static_cast<u32>(halves[k / 2] >> (32 * (k & 1)));
        }
    }
}

bool build_pack(Builder& b, Type type) {
    bool packs = b.at(1).kind == Operand::Kind::Vector, unpacks = b.at(0).kind == Operand::Kind::Vector;
    if (!packs && !unpacks)
        return false;
    const Operand& parts = packs ? b.at(1) : b.at(0);
    int total = 8 * type_size(type), count = static_cast<int>(parts.parts.size());
    if (count == 0 || total % count)
        b.fail("the parts do not fill the register");
    int width = total / count;
    Type part = width == 64 ? Type::B64 : width == 32 ? Type::B32 : width == 16 ? Type::B16 : Type::B8;
    b.in.n = static_cast<u8>(count);
    b.in.mode = static_cast<u16>(width);
    if (packs) {
        b.def(&Inst::dst, b.at(0), type);
        for (const Operand& operand : parts.parts)
            b.use_extra(operand, part);
        b.emit(total == 128 ? exec_pack_wide : total == 64 ? exec_pack<u64> : exec_pack<u32>);
    } else {
        b.use(&Inst::a, b.at(1), type);
        for (const Operand& operand : parts.parts)
            b.def_extra(operand, part);
        b.emit(total == 128 ? exec_unpack_wide : total == 64 ? exec_unpack<u64> : exec_unpack<u32>);
    }
    return true;
}

void build_mov(Builder& b) {
    Type type = b.take_type();
    b.want(2, 2);
    if (build_clock(b) || build_pack(b, type))
        return;
    if (b.at(1).kind == Operand::Kind::Name && b.at(1).name == "%activemask")
        b.fail("use activemask");
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    if (type == Type::Pred)
        return b.emit(exec_mov_pred);
    b.emit(type_size(type) == 16 ? exec_mov_wide : type_size(type) == 8 ? exec_mov<u64> : exec_mov<u32>);
}

// cvta: shared and local addresses live in windows; everything else is its own generic address
void exec_cvta(Warp& w, const Inst& in, u32 m) {
    u64 window = static_cast<u64>(in.imm);
    bool to_generic = !(in.mode & 1), source_wide = in.mode & 2, wide = in.mode & 4;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u64 x = source_wide ? w.row<u64>(in.a)[i] : w.row<u32>(in.a)[i];
        u64 out = window == 0 ? x : to_generic ? (x & ~kWindowMask) | window : x & ~kWindowMask;
        if (wide)
            w.row<u64>(in.dst)[i] = out;
        else
            w.row<u32>(in.dst)[i] = static_cast<u32>(out);
    }
}

void build_cvta(Builder& b) {
    bool to = b.take("to");
    std::string space =
        b.take_of({"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry"});
    if (space.empty())
        b.fail("unknown state space");
    Type type = b.take_type();
    b.want(2, 2);
    b.def(&Inst::dst, b.at(0), type);
    b.use_any(&Inst::a, b.at(1), type);
    bool is_shared = space.rfind("shared", 0) == 0;
    b.in.imm = static_cast<s64>(is_shared ? kSharedWindow : space == "local" ? kLocalWindow : 0);
    Type source = b.register_type(b.at(1));
    bool source_wide = source == Type::None ? type_size(type) == 8 : row_class(source) == RowClass::Double;
    b.in.mode = static_cast<u16>((to ? 1 : 0) | (source_wide ? 2 : 0) | (type_size(type) == 8 ? 4 : 0));
    b.emit(exec_cvta);
}

// mapa: the address of the same variable in another CTA of the cluster
void exec_mapa(Warp& w, const Inst& in, u32 m) {
    const u32* rank = w.row<u32>(in.b);
    bool wide = in.mode & 1, is_shared = in.mode & 2;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        if (rank[i] >= w.cta->cluster->ctas.size())
            throw Fault("out-of-bounds", "mapa names CTA " + std::to_string(rank[i]) + " of a cluster of " +
                                             std::to_string(w.cta->cluster->ctas.size()));
        u64 x = wide ? w.row<u64>(in.a)[i] : w.row<u32>(in.a)[i];
        u64 out = (x & 0xffffffu) | u64{rank[i]} << 24 | (is_shared ? 0 : kSharedWindow);
        if (wide)
            w.row<u64>(in.dst)[i] = out;
        else
            w.row<u32>(in.dst)[i] = static_cast<u32>(out);
    }
}

void build_mapa(Builder& b) {
    bool is_shared = b.take("shared::cluster");
    Type type = b.take_type();
    b.want(3, 3);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), Type::B32);
    b.in.mode = static_cast<u16>((type_size(type) == 8 ? 1 : 0) | (is_shared ? 2 : 0));
    b.emit(exec_mapa);
}

void exec_getctarank(Warp& w, const Inst& in, u32 m) {
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u64 x = in.mode & 1 ? w.row<u64>(in.a)[i] : w.row<u32>(in.a)[i];
        w.row<u32>(in.dst)[i] = static_cast<u32>(x) >> 24;
    }
}

void build_getctarank(Builder& b) {
    b.take("shared::cluster");
    Type type = b.take_type();
    b.want(2, 2);
    b.def(&Inst::dst, b.at(0), Type::B32);
    b.use(&Inst::a, b.at(1), type);
    b.in.mode = type_size(type) == 8;
    b.emit(exec_getctarank);
}

void exec_isspacep(Warp& w, const Inst& in, u32 m) {
    const u64* a = w.row<u64>(in.a);
    u32 rank = w.cta->rank;
    w.set_predicate(in.dst, m, mask_of([&](int i) {
        u64 window = a[i] & kWindowMask;
        bool is_shared = window == kSharedWindow, is_local = window == kLocalWindow;
        switch (in.mode) {
        case 0:
            return !is_shared && !is_local;
        case 1:
            return is_shared && (static_cast<u32>(a[i]) >> 24) == rank;
        case 2:
            return is_shared;
        case 3:
            return is_local;
        default:
            return false;
        }
    }));
}

void build_isspacep(Builder& b) {
    std::string space = b.take_of({"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param"});
    if (space.empty())
        b.fail("wanted a state space");
    b.want(2, 2);
    b.def(&Inst::dst, b.at(0), Type::Pred);
    b.use(&Inst::a, b.at(1), Type::B64);
    b.in.mode = space == "global"               ? 0
                : space == "shared::cluster"    ? 2
                : space.rfind("shared", 0) == 0 ? 1
                : space == "local"              ? 3
                                                : 4;
    b.emit(exec_isspacep);
}

void build_activemask(Builder& b) {
    if (b.take_type() != Type::B32)
        b.fail("only .b32");
    b.want(1, 1);
    b.def(&Inst::dst, b.at(0), Type::B32);
    b.emit(exec_active);
}

// cache policies are opaque 64-bit values without an effect here
void exec_policy(Warp& w, const Inst& in, u32 m) {
    write_lanes(w.row<u64>(in.dst), m, [](int) { return u64{0x14f0000000000000}; });
}

void build_policy(Builder& b) {
    std::string kind = b.take_of({"fractional", "range", "cvt"});
    size_t low = kind == "range" ? 4 : kind == "cvt" ? 2 : 1, high = kind == "fractional" ? 2 : low;
    if (kind == "cvt" ? !b.take("L2") : kind.empty())
        b.fail("unknown form");
    if (kind == "range")
        b.take("global");
    if (kind != "cvt" && !b.take_any({"L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged"}))
        b.fail("wanted a priority");
    b.take_any({"L2::evict_first", "L2::evict_unchanged"});
    if (b.take_type() != Type::B64)
        b.fail("wanted .b64");
    b.want(low, high);
    b.def(&Inst::dst, b.at(0), Type::B64);
    b.emit(exec_policy);
}

} // namespace

void register_move(Table& table) {
    table["mov"] = build_mov;
    table["cvta"] = build_cvta;
    table["mapa"] = build_mapa;
    table["getctarank"] = build_getctarank;
    table["isspacep"] = build_isspacep;
    table["activemask"] = build_activemask;
    table["createpolicy"] = build_policy;
}

} // namespace deep_gemm_k3::emulator
