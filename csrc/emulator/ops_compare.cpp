// setp, set, selp, slct: comparisons and selections.
#include "ops.hpp"

namespace deep_gemm_k3::emulator {

namespace {

enum Relation : u16 { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };
constexpr const char* kNames[] = {
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};

template <class T, u16 R>
inline bool holds(T x, T y) {
    constexpr bool is_float = std::is_floating_point_v<T>;
    if constexpr (R == kEq)
        return x == y;
    else if constexpr (R == kNe)
        return is_float ? x < y || x > y : x != y;
    else if constexpr (R == kLt)
        return x < y;
    else if constexpr (R == kLe)
        return x <= y;
    else if constexpr (R == kGt)
        return x > y;
    else if constexpr (R == kGe)
        return x >= y;
    else if constexpr (R == kEqu)
        return !(x < y || x > y);
    else if constexpr (R == kNeu)
        return x != y;
    else if constexpr (R == kLtu)
        return !(x >= y);
    else if constexpr (R == kLeu)
        return !(x > y);
    else if constexpr (R == kGtu)
        return !(x <= y);
    else if constexpr (R == kGeu)
        return !(x < y);
    else if constexpr (R == kNum)
        return x == x && y == y;
    else
        return x != x || y != y;
}

// how the cell of a type is read: plain numbers, flushed singles, halves
template <class T>
struct Plain {
    using Row = Cell<T>;
    static T get(Row x) { return from_cell<T>(x); }
};
struct Flushed {
    using Row = u32;
    static float get(u32 x) { return bits<float>((x & 0x7f800000u) ? x : x & 0x80000000u); }
};
struct FromF16 {
    using Row = u32;
    static float get(u32 x) { return f16_to_float(x & 0xffff); }
};
struct FromBF16 {
    using Row = u32;
    static float get(u32 x) { return bf16_to_float(x & 0xffff); }
};

using Compare = u32 (*)(Warp&, const Inst&);

template <class L, u16 R>
u32 compare(Warp& w, const Inst& in) {
    const typename L::Row *a = w.row<typename L::Row>(in.a), *b = w.row<typename L::Row>(in.b);
    return mask_of([&](int i) { return holds<decltype(L::get(a[0])), R>(L::get(a[i]), L::get(b[i])); });
}

// setp without a combining predicate
template <class L, u16 R>
void exec_setp(Warp& w, const Inst& in, u32 m) {
    w.set_predicate(in.dst, m, compare<L, R>(w, in));
}

// every other form: mode bits 0-1 combine (1 and, 2 or, 3 xor), bit 2 second destination, bit 3 set to a register, bit
// 4 as float 1.0
template <class L, u16 R>
void exec_setp_full(Warp& w, const Inst& in, u32 m) {
    u32 result = compare<L, R>(w, in), q = 0;
    u16 combine = in.mode & 3;
    if (combine)
        q = w.predicate(in.c);
    auto mix = [&](u32 x) { return combine == 1 ? x & q : combine == 2 ? x | q : combine == 3 ? x ^ q : x; };
    if (in.mode & 8) {
        u32 value = mix(result), one = in.mode & 16 ? 0x3f800000u : kFullMask;
        write_lanes(w.row<u32>(in.dst), m, [&](int i) { return (value >> i) & 1 ? one : 0u; });
        return;
    }
    w.set_predicate(in.dst, m, mix(result));
    if (in.mode & 4)
        w.set_predicate(in.d, m, mix(~result));
}

struct Handlers {
    Handler plain, full;
};

template <class L, bool kFloat>
Handlers pick_relation(u16 relation) {
    switch (relation) {
#define CASE(R)                                                                                                        \
    case R:                                                                                                            \
        return {exec_setp<L, R>, exec_setp_full<L, R>};
        CASE(kEq) CASE(kNe) CASE(kLt) CASE(kLe) CASE(kGt) CASE(kGe) default : break;
    }
    if constexpr (kFloat) {
        switch (relation) {
            CASE(kEqu) CASE(kNeu) CASE(kLtu) CASE(kLeu) CASE(kGtu) CASE(kGeu) CASE(kNum) CASE(kNan) default : break;
        }
    }
#undef CASE
    return {nullptr, nullptr};
}

Handlers pick(Builder& b, Type type, u16 relation, bool ftz) {
    switch (type) {
    case Type::U16:
    case Type::B16:
        return pick_relation<Plain<u16>, false>(relation);
    case Type::S16:
        return pick_relation<Plain<s16>, false>(relation);
    case Type::U32:
    case Type::B32:
        return pick_relation<Plain<u32>, false>(relation);
    case Type::S32:
        return pick_relation<Plain<s32>, false>(relation);
    case Type::U64:
    case Type::B64:
        return pick_relation<Plain<u64>, false>(relation);
    case Type::S64:
        return pick_relation<Plain<s64>, false>(relation);
    case Type::F32:
        return ftz ? pick_relation<Flushed, true>(relation) : pick_relation<Plain<float>, true>(relation);
    case Type::F64:
        return pick_relation<Plain<double>, true>(relation);
    case Type::F16:
        return pick_relation<FromF16, true>(relation);
    case Type::BF16:
        return pick_relation<FromBF16, true>(relation);
    default:
        b.fail("type is not modelled here");
    }
}

u16 take_relation(Builder& b) {
    for (u16 i = 0; i < 14; ++i)
        if (b.take(kNames[i]))
            return i;
    constexpr const char* kUnsigned[] = {"lo", "ls", "hi", "hs"}; // unsigned spellings
    constexpr u16 kMeaning[] = {kLt, kLe, kGt, kGe};
    for (int i = 0; i < 4; ++i)
        if (b.take(kUnsigned[i]))
            return kMeaning[i];
    b.fail("unknown comparison");
}

void build_setp(Builder& b) {
    bool is_set = b.s.op == "set";
    u16 relation = take_relation(b);
    u16 mode = b.take("and") ? 1 : b.take("or") ? 2 : b.take("xor") ? 3 : 0;
    bool ftz = b.take("ftz");
    Type to = Type::Pred;
    if (is_set) {
        to = b.take_type();
        mode |= 8 | (to == Type::F32 ? 16 : 0);
    }
    Type type = b.take_type();
    b.want(mode & 3 ? 4 : 3, mode & 3 ? 4 : 3);
    const Operand& first = b.at(0);
    bool pair = first.kind == Operand::Kind::Pair;
    b.def(&Inst::dst, pair ? first.parts[0] : first, to);
    if (pair) {
        mode |= 4;
        b.def(&Inst::d, first.parts[1], Type::Pred);
    }
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), type);
    if (mode & 3)
        b.use(&Inst::c, b.at(3), Type::Pred);
    b.in.mode = mode;
    Handlers handlers = pick(b, type, relation, ftz);
    if (!handlers.plain)
        b.fail("this comparison does not exist for the type");
    b.emit(mode ? handlers.full : handlers.plain);
}

template <class T>
void exec_selp(Warp& w, const Inst& in, u32 m) {
    const T *a = w.row<T>(in.a), *b = w.row<T>(in.b);
    u32 p = w.predicate(in.c);
    write_lanes(w.row<T>(in.dst), m, [&](int i) { return (p >> i) & 1 ? a[i] : b[i]; });
}

void build_selp(Builder& b) {
    Type type = b.take_type();
    b.want(4, 4);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), type);
    b.use(&Inst::c, b.at(3), Type::Pred);
    b.emit(type_size(type) == 8 ? exec_selp<u64> : exec_selp<u32>);
}

template <class T, bool kFloat>
void exec_slct(Warp& w, const Inst& in, u32 m) {
    const T *a = w.row<T>(in.a), *b = w.row<T>(in.b);
    const u32* c = w.row<u32>(in.c);
    write_lanes(w.row<T>(in.dst), m, [&](int i) {
        bool first = kFloat ? bits<float>(c[i]) >= 0.0f : static_cast<s32>(c[i]) >= 0;
        return first ? a[i] : b[i];
    });
}

void build_slct(Builder& b) {
    b.take("ftz");
    Type type = b.take_type(), selector = b.take_type();
    b.want(4, 4);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), type);
    b.use(&Inst::c, b.at(3), selector);
    if (selector == Type::F32)
        return b.emit(type_size(type) == 8 ? exec_slct<u64, true> : exec_slct<u32, true>);
    b.emit(type_size(type) == 8 ? exec_slct<u64, false> : exec_slct<u32, false>);
}

} // namespace

void register_compare(Table& table) {
    table["setp"] = table["set"] = build_setp;
    table["selp"] = build_selp;
    table["slct"] = build_slct;
}

} // namespace deep_gemm_k3::emulator
