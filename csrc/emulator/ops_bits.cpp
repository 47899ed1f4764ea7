// Logic, shifts, permutes, bit fields and bit counting. (budget: flat table)
#include "ops.hpp"

namespace deep_gemm_k3::emulator {

namespace {

template <auto F>
Handler for_bits2(Builder& b, Type type) {
    switch (type_size(type)) {
    case 2:
        return exec_binary<[](u16 x, u16 y) { return static_cast<u16>(F(x, y)); }>;
    case 4:
        return exec_binary<[](u32 x, u32 y) { return static_cast<u32>(F(x, y)); }>;
    case 8:
        return exec_binary<[](u64 x, u64 y) { return static_cast<u64>(F(x, y)); }>;
    default:
        b.fail("type is not modelled here");
    }
}

constexpr auto kAnd = [](u64 x, u64 y) { return x & y; };
constexpr auto kOr = [](u64 x, u64 y) { return x | y; };
constexpr auto kXor = [](u64 x, u64 y) { return x ^ y; };

template <auto F>
void exec_pred2(Warp& w, const Inst& in, u32 m) {
    w.set_predicate(in.dst, m, static_cast<u32>(F(w.predicate(in.a), w.predicate(in.b))));
}

template <auto F>
void build_logic(Builder& b) {
    Type type = b.take_type();
    operands_binary(b, type);
    b.emit(type == Type::Pred ? exec_pred2<F> : for_bits2<F>(b, type));
}

void exec_pred_not(Warp& w, const Inst& in, u32 m) {
    w.set_predicate(in.dst, m, ~w.predicate(in.a));
}

void build_not(Builder& b) {
    Type type = b.take_type();
    operands_unary(b, type);
    if (type == Type::Pred)
        return b.emit(exec_pred_not);
    switch (type_size(type)) {
    case 2:
        return b.emit(exec_unary<[](u16 x) { return static_cast<u16>(~x); }>);
    case 4:
        return b.emit(exec_unary<[](u32 x) { return ~x; }>);
    default:
        return b.emit(exec_unary<[](u64 x) { return ~x; }>);
    }
}

void build_cnot(Builder& b) {
    Type type = b.take_type();
    operands_unary(b, type);
    switch (type_size(type)) {
    case 2:
        return b.emit(exec_unary<[](u16 x) { return static_cast<u16>(x == 0); }>);
    case 4:
        return b.emit(exec_unary<[](u32 x) { return static_cast<u32>(x == 0); }>);
    default:
        return b.emit(exec_unary<[](u64 x) { return static_cast<u64>(x == 0); }>);
    }
}

template <class T>
constexpr auto kShl =
    [](T x, u32 n) { return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(x << (n & (8 * sizeof(T) - 1))); };
template <class T>
constexpr auto kShr = [](T x, u32 n) {
    constexpr u32 width = 8 * sizeof(T);
    if constexpr (std::is_signed_v<T>)
        return static_cast<T>(x >> (n >= width ? width - 1 : n));
    else
        return n >= width ? T{0} : static_cast<T>(x >> (n & (width - 1)));
};

void build_shift(Builder& b) {
    bool left = b.s.op == "shl";
    Type type = b.take_type();
    b.want(3, 3);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), Type::B32);
    if (left) {
        switch (type_size(type)) {
        case 2:
            return b.emit(exec_binary<kShl<u16>>);
        case 4:
            return b.emit(exec_binary<kShl<u32>>);
        default:
            return b.emit(exec_binary<kShl<u64>>);
        }
    }
    switch (type) {
    case Type::S16:
        return b.emit(exec_binary<kShr<s16>>);
    case Type::S32:
        return b.emit(exec_binary<kShr<s32>>);
    case Type::S64:
        return b.emit(exec_binary<kShr<s64>>);
    case Type::U16:
    case Type::B16:
        return b.emit(exec_binary<kShr<u16>>);
    case Type::U32:
    case Type::B32:
        return b.emit(exec_binary<kShr<u32>>);
    case Type::U64:
    case Type::B64:
        return b.emit(exec_binary<kShr<u64>>);
    default:
        b.fail("type is not modelled here");
    }
}

template <bool kLeft, bool kClamp>
constexpr auto kFunnel = [](u32 low, u32 high, u32 n) {
    u32 shift = kClamp ? (n > 32 ? 32 : n) : (n & 31);
    u64 both = static_cast<u64>(high) << 32 | low;
    return kLeft ? static_cast<u32>((both << shift) >> 32) : static_cast<u32>(both >> shift);
};

void build_shf(Builder& b) {
    bool left = b.take("l");
    if (!left && !b.take("r"))
        b.fail("wanted .l or .r");
    bool clamp = b.take("clamp");
    if (!clamp && !b.take("wrap"))
        b.fail("wanted .clamp or .wrap");
    if (b.take_type() != Type::B32)
        b.fail("only .b32");
    operands_ternary(b, Type::B32);
    if (left)
        return b.emit(clamp ? exec_ternary<kFunnel<true, true>> : exec_ternary<kFunnel<true, false>>);
    b.emit(clamp ? exec_ternary<kFunnel<false, true>> : exec_ternary<kFunnel<false, false>>);
}

void exec_lop3(Warp& w, const Inst& in, u32 m) {
    const u32 *a = w.row<u32>(in.a), *b = w.row<u32>(in.b), *c = w.row<u32>(in.c);
    u32 table = static_cast<u32>(in.imm), k[8];
    for (int i = 0; i < 8; ++i)
        k[i] = (table >> i) & 1 ? kFullMask : 0;
    write_lanes(w.row<u32>(in.dst), m, [&](int i) {
        u32 x = a[i], y = b[i], z = c[i];
        u32 off = (~y & ((~z & k[0]) | (z & k[1]))) | (y & ((~z & k[2]) | (z & k[3])));
        u32 on = (~y & ((~z & k[4]) | (z & k[5]))) | (y & ((~z & k[6]) | (z & k[7])));
        return (~x & off) | (x & on);
    });
}

void exec_lop3_predicate(Warp& w, const Inst& in, u32 m) {
    exec_lop3(w, in, m);
    const u32* d = w.row<u32>(in.dst);
    u32 some = mask_of([&](int i) { return d[i] != 0; });
    u32 q = w.predicate(w.extra(in, 1));
    w.set_predicate(w.extra(in, 0), m, in.mode ? (some & q) : (some | q));
}

void build_lop3(Builder& b) {
    std::string logic = b.take_of({"or", "and"});
    if (b.take_type() != Type::B32)
        b.fail("only .b32");
    b.want(logic.empty() ? 5 : 6, logic.empty() ? 5 : 6);
    const Operand& first = b.at(0);
    const Operand& d = logic.empty() ? first : first.kind == Operand::Kind::Pair ? first.parts[0] : first;
    b.def(&Inst::dst, d, Type::B32);
    b.use(&Inst::a, b.at(1), Type::B32);
    b.use(&Inst::b, b.at(2), Type::B32);
    b.use(&Inst::c, b.at(3), Type::B32);
    b.in.imm = static_cast<s64>(b.constant(b.at(4)));
    if (logic.empty())
        return b.emit(exec_lop3);
    if (first.kind != Operand::Kind::Pair)
        b.fail("wanted d|p");
    b.def_extra(first.parts[1], Type::Pred);
    b.use_extra(b.at(5), Type::Pred);
    b.in.mode = logic == "and";
    b.emit(exec_lop3_predicate);
}

u32 permute(u32 x, u32 y, u32 selector) {
    u64 both = static_cast<u64>(y) << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) {
        u32 nibble = (selector >> (4 * i)) & 0xf;
        u32 byte = static_cast<u32>(both >> (8 * (nibble & 7))) & 0xff;
        if (nibble & 8)
            byte = byte & 0x80 ? 0xff : 0;
        out |= byte << (8 * i);
    }
    return out;
}
constexpr u16 kPermuteModes[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
    {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333}, {0x0000, 0x1110, 0x2210, 0x3210},
    {0x1010, 0x3232, 0x1010, 0x3232}};
template <int kMode>
constexpr auto kPermute = [](u32 x, u32 y, u32 s) { return permute(x, y, kPermuteModes[kMode][s & 3]); };
constexpr auto kPermuteAny = [](u32 x, u32 y, u32 s) { return permute(x, y, s); };

void build_prmt(Builder& b) {
    if (b.take_type() != Type::B32)
        b.fail("only .b32");
    std::string mode = b.take_of({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
    operands_ternary(b, Type::B32);
    if (mode == "f4e")
        return b.emit(exec_ternary<kPermute<0>>);
    if (mode == "b4e")
        return b.emit(exec_ternary<kPermute<1>>);
    if (mode == "rc8")
        return b.emit(exec_ternary<kPermute<2>>);
    if (mode == "ecl")
        return b.emit(exec_ternary<kPermute<3>>);
    if (mode == "ecr")
        return b.emit(exec_ternary<kPermute<4>>);
    if (mode == "rc16")
        return b.emit(exec_ternary<kPermute<5>>);
    b.emit(exec_ternary<kPermuteAny>);
}

template <class T>
constexpr auto kExtract = [](T x, u32 position, u32 length) -> T {
    constexpr u32 width = 8 * sizeof(T);
    u32 pos = position & 0xff, len = length & 0xff;
    if (len == 0)
        return 0;
    bool fill = false;
    if constexpr (std::is_signed_v<T>) {
        u32 top = pos + len - 1 < width - 1 ? pos + len - 1 : width - 1;
        fill = (static_cast<u64>(x) >> top) & 1;
    }
    std::make_unsigned_t<T> ones = static_cast<std::make_unsigned_t<T>>(~std::make_unsigned_t<T>{0});
    std::make_unsigned_t<T> mask = len >= width ? ones : static_cast<std::make_unsigned_t<T>>(~(ones << len));
    std::make_unsigned_t<T> shifted = pos >= width ? 0 : static_cast<std::make_unsigned_t<T>>(x) >> pos;
    u32 valid = pos >= width ? 0 : width - pos; // bits that exist above pos
    std::make_unsigned_t<T> present = valid >= width ? ones : static_cast<std::make_unsigned_t<T>>(~(ones << valid));
    std::make_unsigned_t<T> field = shifted & mask & present;
    std::make_unsigned_t<T> beyond = static_cast<std::make_unsigned_t<T>>(~(mask & present));
    return static_cast<T>(fill ? field | beyond : field);
};

void build_bfe(Builder& b) {
    Type type = b.take_type();
    b.want(4, 4);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), Type::B32);
    b.use(&Inst::c, b.at(3), Type::B32);
    switch (type) {
    case Type::U32:
        return b.emit(exec_ternary<kExtract<u32>>);
    case Type::S32:
        return b.emit(exec_ternary<kExtract<s32>>);
    case Type::U64:
        return b.emit(exec_ternary<kExtract<u64>>);
    case Type::S64:
        return b.emit(exec_ternary<kExtract<s64>>);
    default:
        b.fail("type is not modelled here");
    }
}

template <class T>
void exec_bfi(Warp& w, const Inst& in, u32 m) {
    const T *a = w.row<T>(in.a), *b = w.row<T>(in.b);
    const u32 *c = w.row<u32>(in.c), *d = w.row<u32>(in.d);
    constexpr u32 width = 8 * sizeof(T);
    write_lanes(w.row<T>(in.dst), m, [&](int i) {
        u32 pos = c[i] & 0xff, len = d[i] & 0xff;
        T mask = len >= width ? ~T{0} : ~(~T{0} << len);
        T placed = pos >= width ? 0 : mask << pos, value = pos >= width ? 0 : (a[i] & mask) << pos;
        return (b[i] & ~placed) | (value & placed);
    });
}

void build_bfi(Builder& b) {
    Type type = b.take_type();
    b.want(5, 5);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), type);
    b.use(&Inst::c, b.at(3), Type::B32);
    b.use(&Inst::d, b.at(4), Type::B32);
    b.emit(type_size(type) == 8 ? exec_bfi<u64> : exec_bfi<u32>);
}

constexpr auto kReverse32 = [](u32 x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
};
constexpr auto kReverse64 = [](u64 x) {
    return static_cast<u64>(kReverse32(static_cast<u32>(x))) << 32 | kReverse32(static_cast<u32>(x >> 32));
};

void build_brev(Builder& b) {
    Type type = b.take_type();
    operands_unary(b, type);
    b.emit(type_size(type) == 8 ? exec_unary<kReverse64> : exec_unary<kReverse32>);
}

template <auto F32, auto F64>
void build_count(Builder& b) {
    Type type = b.take_type();
    b.want(2, 2);
    b.def(&Inst::dst, b.at(0), Type::B32);
    b.use(&Inst::a, b.at(1), type);
    b.emit(type_size(type) == 8 ? exec_unary<F64> : exec_unary<F32>);
}

constexpr auto kPop32 = [](u32 x) { return static_cast<u32>(std::popcount(x)); };
constexpr auto kPop64 = [](u64 x) { return static_cast<u32>(std::popcount(x)); };
constexpr auto kClz32 = [](u32 x) { return static_cast<u32>(std::countl_zero(x)); };
constexpr auto kClz64 = [](u64 x) { return static_cast<u32>(std::countl_zero(x)); };

u32 find_leading(u64 x, bool is_signed, bool is_wide, bool as_shift) {
    if (!is_wide)
        x = is_signed ? static_cast<u64>(static_cast<s64>(static_cast<s32>(x))) : x & 0xffffffffu;
    if (is_signed && static_cast<s64>(x) < 0)
        x = ~x;
    if (x == 0)
        return kFullMask;
    u32 top = 63 - static_cast<u32>(std::countl_zero(x));
    return as_shift ? (is_wide ? 63 : 31) - top : top;
}

template <class T>
void exec_bfind(Warp& w, const Inst& in, u32 m) {
    const T* a = w.row<T>(in.a);
    write_lanes(
        w.row<u32>(in.dst), m, [&](int i) { return find_leading(a[i], in.mode & 1, sizeof(T) == 8, in.mode & 2); });
}

void build_bfind(Builder& b) {
    bool shift = b.take("shiftamt");
    Type type = b.take_type();
    b.want(2, 2);
    b.def(&Inst::dst, b.at(0), Type::B32);
    b.use(&Inst::a, b.at(1), type);
    b.in.mode = static_cast<u16>((type_is_signed(type) ? 1 : 0) | (shift ? 2 : 0));
    b.emit(type_size(type) == 8 ? exec_bfind<u64> : exec_bfind<u32>);
}

constexpr auto kFns = [](u32 mask, u32 base, s32 offset) -> u32 {
    if (offset == 0)
        return (mask >> (base & 31)) & 1 ? base : kFullMask;
    s32 step = offset > 0 ? 1 : -1, left = offset > 0 ? offset : -offset;
    for (s32 at = static_cast<s32>(base); at >= 0 && at < 32; at += step)
        if ((mask >> at) & 1 && --left == 0)
            return static_cast<u32>(at);
    return kFullMask;
};

void build_fns(Builder& b) {
    b.take_type();
    operands_ternary(b, Type::B32);
    b.emit(exec_ternary<kFns>);
}

constexpr auto kBmskClamp = [](u32 a, u32 n) {
    return a >= 32 ? 0u : static_cast<u32>(((n >= 32 ? u64{0xffffffff} : (u64{1} << n) - 1) << a));
};
constexpr auto kBmskWrap = [](u32 a, u32 n) { return static_cast<u32>(((u64{1} << (n & 31)) - 1) << (a & 31)); };

void build_bmsk(Builder& b) {
    bool clamp = b.take("clamp");
    if (!clamp && !b.take("wrap"))
        b.fail("wanted .clamp or .wrap");
    b.take_type();
    operands_binary(b, Type::B32);
    b.emit(clamp ? exec_binary<kBmskClamp> : exec_binary<kBmskWrap>);
}

template <bool kClamp, bool kSigned>
constexpr auto kSzext = [](u32 x, u32 n) {
    u32 len = kClamp ? n : n & 31;
    if (len >= 32)
        return x;
    u32 low = x & ((1u << len) - 1);
    bool fill = kSigned && len && (x >> (len - 1)) & 1;
    return fill ? low | ~((1u << len) - 1) : low;
};

void build_szext(Builder& b) {
    bool clamp = b.take("clamp");
    if (!clamp && !b.take("wrap"))
        b.fail("wanted .clamp or .wrap");
    bool is_signed = b.take_type() == Type::S32;
    operands_binary(b, Type::B32);
    if (is_signed)
        return b.emit(clamp ? exec_binary<kSzext<true, true>> : exec_binary<kSzext<false, true>>);
    b.emit(clamp ? exec_binary<kSzext<true, false>> : exec_binary<kSzext<false, false>>);
}

} // namespace

void register_bits(Table& table) {
    table["and"] = build_logic<kAnd>;
    table["or"] = build_logic<kOr>;
    table["xor"] = build_logic<kXor>;
    table["not"] = build_not;
    table["cnot"] = build_cnot;
    table["shl"] = table["shr"] = build_shift;
    table["shf"] = build_shf;
    table["lop3"] = build_lop3;
    table["prmt"] = build_prmt;
    table["bfe"] = build_bfe;
    table["bfi"] = build_bfi;
    table["brev"] = build_brev;
    table["popc"] = build_count<kPop32, kPop64>;
    table["clz"] = build_count<kClz32, kClz64>;
    table["bfind"] = build_bfind;
    table["fns"] = build_fns;
    table["bmsk"] = build_bmsk;
    table["szext"] = build_szext;
}

} // namespace deep_gemm_k3::emulator
