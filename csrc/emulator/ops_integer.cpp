// Integer arithmetic. One flat table of instruction semantics. (budget: flat table)
#include "ops.hpp"

namespace deep_gemm_k3::emulator {

namespace {

using i128 = __int128;

template <class T>
using U = std::make_unsigned_t<T>;
template <class T>
struct Wide;
template <>
struct Wide<u16> {
    using type = u32;
};
template <>
struct Wide<s16> {
    using type = s32;
};
template <>
struct Wide<u32> {
    using type = u64;
};
template <>
struct Wide<s32> {
    using type = s64;
};

// Picks the handler of an operation for an integer type. H<T>() returns a Handler.
template <template <class> class H>
Handler for_integer(Builder& b, Type type) {
    switch (type) {
    case Type::U16:
    case Type::B16:
        return H<u16>::get();
    case Type::S16:
        return H<s16>::get();
    case Type::U32:
    case Type::B32:
        return H<u32>::get();
    case Type::S32:
        return H<s32>::get();
    case Type::U64:
    case Type::B64:
        return H<u64>::get();
    case Type::S64:
        return H<s64>::get();
    default:
        b.fail(std::string("type .") + type_name(type) + " is not modelled here");
    }
}

#define BINARY_OP(NAME, EXPR)                                                                                          \
    template <class T>                                                                                                 \
    struct NAME {                                                                                                      \
        static Handler get() {                                                                                         \
            return exec_binary<[](T x, T y) -> T { return (EXPR); }>;                                                  \
        }                                                                                                              \
    };
#define UNARY_OP(NAME, EXPR)                                                                                           \
    template <class T>                                                                                                 \
    struct NAME {                                                                                                      \
        static Handler get() {                                                                                         \
            return exec_unary<[](T x) -> T { return (EXPR); }>;                                                        \
        }                                                                                                              \
    };
#define TERNARY_OP(NAME, EXPR)                                                                                         \
    template <class T>                                                                                                 \
    struct NAME {                                                                                                      \
        static Handler get() {                                                                                         \
            return exec_ternary<[](T x, T y, T z) -> T { return (EXPR); }>;                                            \
        }                                                                                                              \
    };

template <class T>
T high_product(T x, T y) {
    if constexpr (std::is_signed_v<T>)
        return static_cast<T>((static_cast<i128>(x) * y) >> (8 * sizeof(T)));
    else
        return static_cast<T>((static_cast<unsigned __int128>(x) * y) >> (8 * sizeof(T)));
}
template <class T>
T low_product(T x, T y) {
    return static_cast<T>(static_cast<u64>(x) * static_cast<u64>(y));
}
template <class T>
T quotient(T x, T y) {
    if (y == 0)
        return static_cast<T>(~T{0});
    if constexpr (std::is_signed_v<T>) {
        if (y == -1)
            return static_cast<T>(0 - static_cast<U<T>>(x));
    }
    return static_cast<T>(x / y);
}
template <class T>
T remainder(T x, T y) {
    if (y == 0)
        return x;
    if constexpr (std::is_signed_v<T>) {
        if (y == -1)
            return 0;
    }
    return static_cast<T>(x % y);
}

BINARY_OP(Add, static_cast<T>(static_cast<U<T>>(x) + static_cast<U<T>>(y)))
BINARY_OP(Sub, static_cast<T>(static_cast<U<T>>(x) - static_cast<U<T>>(y)))
BINARY_OP(MulLo, low_product<T>(x, y))
BINARY_OP(MulHi, high_product<T>(x, y))
BINARY_OP(Div, quotient<T>(x, y))
BINARY_OP(Rem, remainder<T>(x, y))
BINARY_OP(Min, x < y ? x : y)
BINARY_OP(Max, x > y ? x : y)
UNARY_OP(Neg, static_cast<T>(0 - static_cast<U<T>>(x)))
UNARY_OP(Abs, static_cast<T>(x < 0 ? 0 - static_cast<U<T>>(x) : static_cast<U<T>>(x)))
TERNARY_OP(MadLo, static_cast<T>(low_product<T>(x, y) + static_cast<U<T>>(z)))
TERNARY_OP(MadHi, static_cast<T>(high_product<T>(x, y) + static_cast<U<T>>(z)))
TERNARY_OP(Sad,
    static_cast<T>((x > y ? static_cast<U<T>>(x) - static_cast<U<T>>(y) : static_cast<U<T>>(y) - static_cast<U<T>>(x)) +
                   static_cast<U<T>>(z)))

template <class A>
using WideOf = typename Wide<A>::type;
template <class A>
constexpr auto kMulWide =
    [](A x, A y) { return static_cast<WideOf<A>>(static_cast<WideOf<A>>(x) * static_cast<WideOf<A>>(y)); };
template <class A>
constexpr auto kMadWide = [](A x, A y, WideOf<A> z) {
    return static_cast<WideOf<A>>(static_cast<U<WideOf<A>>>(static_cast<WideOf<A>>(x) * static_cast<WideOf<A>>(y)) +
                                  static_cast<U<WideOf<A>>>(z));
};
template <class A>
Handler mul_wide() {
    return exec_binary<kMulWide<A>>;
}
template <class A>
Handler mad_wide() {
    return exec_ternary<kMadWide<A>>;
}

s32 saturate32(s64 x) {
    return static_cast<s32>(x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x);
}
constexpr auto kAddSat = [](s32 x, s32 y) { return saturate32(s64{x} + y); };
constexpr auto kSubSat = [](s32 x, s32 y) { return saturate32(s64{x} - y); };
constexpr auto kMadHiSat = [](s32 x, s32 y, s32 z) { return saturate32(s64{high_product<s32>(x, y)} + z); };

template <class T, auto F>
constexpr auto kPairwise = [](u32 x, u32 y) {
    u32 low = static_cast<u16>(F(static_cast<T>(x), static_cast<T>(y)));
    u32 high = static_cast<u16>(F(static_cast<T>(x >> 16), static_cast<T>(y >> 16)));
    return low | high << 16;
};
template <class T, auto F>
Handler pairwise() {
    return exec_binary<kPairwise<T, F>>;
}
constexpr auto kAdd16 = [](u16 x, u16 y) { return x + y; };
constexpr auto kMinU16 = [](u16 x, u16 y) { return x < y ? x : y; };
constexpr auto kMaxU16 = [](u16 x, u16 y) { return x > y ? x : y; };
constexpr auto kMinS16 = [](s16 x, s16 y) { return x < y ? x : y; };
constexpr auto kMaxS16 = [](s16 x, s16 y) { return x > y ? x : y; };

// add.cc, addc, sub.cc, subc, mad.lo.cc ...: mode 1 reads the carry, 2 writes it, 4 subtracts
template <class T>
void exec_carry(Warp& w, const Inst& in, u32 m) {
    const Cell<T>*a = w.row<Cell<T>>(in.a), *b = w.row<Cell<T>>(in.b);
    Cell<T>* out = w.row<Cell<T>>(in.dst);
    u32 carry = w.carry;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u64 y = in.mode & 4 ? static_cast<T>(~b[i]) : b[i];
        u64 c = in.mode & 1 ? (carry >> i) & 1 : (in.mode & 4 ? 1 : 0);
        unsigned __int128 sum = static_cast<unsigned __int128>(a[i]) + y + c;
        out[i] = static_cast<T>(sum);
        u32 bit = (sum >> (8 * sizeof(T))) ? 1u : 0u;
        if (in.mode & 2)
            carry = (carry & ~(1u << i)) | bit << i;
    }
    w.carry = carry;
}

template <class T, bool kHigh>
void exec_mad_carry(Warp& w, const Inst& in, u32 m) {
    const Cell<T>*a = w.row<Cell<T>>(in.a), *b = w.row<Cell<T>>(in.b), *z = w.row<Cell<T>>(in.c);
    Cell<T>* out = w.row<Cell<T>>(in.dst);
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        T product = kHigh ? high_product<T>(static_cast<T>(a[i]), static_cast<T>(b[i]))
                          : low_product<T>(static_cast<T>(a[i]), static_cast<T>(b[i]));
        unsigned __int128 sum =
            static_cast<unsigned __int128>(static_cast<U<T>>(product)) + z[i] + (in.mode & 1 ? (w.carry >> i) & 1 : 0);
        out[i] = static_cast<Cell<T>>(sum);
        if (in.mode & 2)
            w.carry = (w.carry & ~(1u << i)) | ((sum >> (8 * sizeof(T))) ? 1u << i : 0u);
    }
}

void build_carry(Builder& b, u16 mode) {
    if (b.take("cc"))
        mode |= 2;
    Type type = b.take_type();
    operands_binary(b, type);
    b.in.mode = mode;
    b.emit(type_size(type) == 8 ? exec_carry<u64> : exec_carry<u32>);
}

void build_mad_carry(Builder& b, u16 mode) {
    if (b.take("cc"))
        mode |= 2;
    bool high = b.take("hi");
    if (!high && !b.take("lo"))
        b.fail("wanted .hi or .lo");
    Type type = b.take_type();
    operands_ternary(b, type);
    b.in.mode = mode;
    switch (type) {
    case Type::U32:
        return b.emit(high ? exec_mad_carry<u32, true> : exec_mad_carry<u32, false>);
    case Type::S32:
        return b.emit(high ? exec_mad_carry<s32, true> : exec_mad_carry<s32, false>);
    case Type::U64:
        return b.emit(high ? exec_mad_carry<u64, true> : exec_mad_carry<u64, false>);
    case Type::S64:
        return b.emit(high ? exec_mad_carry<s64, true> : exec_mad_carry<s64, false>);
    default:
        b.fail("type is not modelled here");
    }
}

template <template <class> class H>
void build_binary(Builder& b) {
    Type type = b.take_type();
    operands_binary(b, type);
    b.emit(for_integer<H>(b, type));
}

template <template <class> class H>
void build_unary(Builder& b) {
    Type type = b.take_type();
    operands_unary(b, type);
    b.emit(for_integer<H>(b, type));
}

bool is_float_statement(const Builder& b) {
    for (const std::string& mod : b.s.mods)
        if (type_is_float(type_from_name(mod)))
            return true;
    return false;
}

bool build_packed16(Builder& b, Handler unsigned_handler, Handler signed_handler) {
    bool is_unsigned = b.take("u16x2");
    if (!is_unsigned && !b.take("s16x2"))
        return false;
    operands_binary(b, Type::B32);
    b.emit(is_unsigned ? unsigned_handler : signed_handler);
    return true;
}

void build_add(Builder& b) {
    if (is_float_statement(b))
        return build_float(b);
    if (build_packed16(b, pairwise<u16, kAdd16>(), pairwise<u16, kAdd16>()))
        return;
    for (const std::string& mod : b.s.mods)
        if (mod == "cc")
            return build_carry(b, 0);
    if (!b.take("sat"))
        return build_binary<Add>(b);
    if (b.take_type() != Type::S32)
        b.fail(".sat is for .s32");
    operands_binary(b, Type::S32);
    b.emit(exec_binary<kAddSat>);
}

void build_sub(Builder& b) {
    if (is_float_statement(b))
        return build_float(b);
    for (const std::string& mod : b.s.mods)
        if (mod == "cc")
            return build_carry(b, 4);
    if (!b.take("sat"))
        return build_binary<Sub>(b);
    if (b.take_type() != Type::S32)
        b.fail(".sat is for .s32");
    operands_binary(b, Type::S32);
    b.emit(exec_binary<kSubSat>);
}

void build_mul(Builder& b) {
    if (is_float_statement(b))
        return build_float(b);
    std::string part = b.take_of({"lo", "hi", "wide"});
    if (part == "lo")
        return build_binary<MulLo>(b);
    if (part == "hi")
        return build_binary<MulHi>(b);
    if (part.empty())
        b.fail("wanted .lo, .hi or .wide");
    Type type = b.take_type();
    b.want(3, 3);
    b.def(&Inst::dst, b.at(0), type_size(type) == 2 ? Type::B32 : Type::B64);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), type);
    switch (type) {
    case Type::U16:
        return b.emit(mul_wide<u16>());
    case Type::S16:
        return b.emit(mul_wide<s16>());
    case Type::U32:
        return b.emit(mul_wide<u32>());
    case Type::S32:
        return b.emit(mul_wide<s32>());
    default:
        b.fail("type is not modelled here");
    }
}

void build_mad(Builder& b) {
    if (is_float_statement(b))
        return build_float(b);
    for (const std::string& mod : b.s.mods)
        if (mod == "cc")
            return build_mad_carry(b, 0);
    std::string part = b.take_of({"lo", "hi", "wide"});
    bool sat = b.take("sat");
    Type type = b.take_type();
    if (part == "lo" || part == "hi") {
        operands_ternary(b, type);
        if (sat)
            return b.emit(exec_ternary<kMadHiSat>);
        return b.emit(part == "lo" ? for_integer<MadLo>(b, type) : for_integer<MadHi>(b, type));
    }
    if (part.empty())
        b.fail("wanted .lo, .hi or .wide");
    Type wide = type_size(type) == 2 ? Type::B32 : Type::B64;
    b.want(4, 4);
    b.def(&Inst::dst, b.at(0), wide);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), type);
    b.use(&Inst::c, b.at(3), wide);
    switch (type) {
    case Type::U16:
        return b.emit(mad_wide<u16>());
    case Type::S16:
        return b.emit(mad_wide<s16>());
    case Type::U32:
        return b.emit(mad_wide<u32>());
    case Type::S32:
        return b.emit(mad_wide<s32>());
    default:
        b.fail("type is not modelled here");
    }
}

constexpr auto kMul24U = [](u32 x, u32 y) { return (x & 0xffffffu) * (y & 0xffffffu); };
constexpr auto kMul24S = [](s32 x, s32 y) {
    return static_cast<s32>(static_cast<u32>(static_cast<s32>(static_cast<u32>(x) << 8) >> 8) *
                            static_cast<u32>(static_cast<s32>(static_cast<u32>(y) << 8) >> 8));
};

void build_mul24(Builder& b) {
    if (!b.take("lo"))
        b.fail("only .lo is modelled");
    Type type = b.take_type();
    operands_binary(b, type);
    b.emit(type == Type::S32 ? exec_binary<kMul24S> : exec_binary<kMul24U>);
}

void build_div(Builder& b) {
    is_float_statement(b) ? build_float(b) : build_binary<Div>(b);
}
void build_neg(Builder& b) {
    is_float_statement(b) ? build_float(b) : build_unary<Neg>(b);
}
void build_abs(Builder& b) {
    is_float_statement(b) ? build_float(b) : build_unary<Abs>(b);
}

void build_min(Builder& b) {
    if (is_float_statement(b))
        return build_float(b);
    if (!build_packed16(b, pairwise<u16, kMinU16>(), pairwise<s16, kMinS16>()))
        build_binary<Min>(b);
}

void build_max(Builder& b) {
    if (is_float_statement(b))
        return build_float(b);
    if (!build_packed16(b, pairwise<u16, kMaxU16>(), pairwise<s16, kMaxS16>()))
        build_binary<Max>(b);
}

void build_sad(Builder& b) {
    Type type = b.take_type();
    operands_ternary(b, type);
    b.emit(for_integer<Sad>(b, type));
}

// dp4a and dp2a: mode 1: a signed, 2: b signed, 4: dp2a, 8: dp2a.hi
void exec_dot(Warp& w, const Inst& in, u32 m) {
    const u32 *a = w.row<u32>(in.a), *b = w.row<u32>(in.b), *c = w.row<u32>(in.c);
    u16 mode = in.mode;
    auto byte = [](u32 x, int k, bool is_signed) {
        u32 v = (x >> (8 * k)) & 0xff;
        return is_signed ? static_cast<s32>(static_cast<s8>(v)) : static_cast<s32>(v);
    };
    auto half = [](u32 x, int k, bool is_signed) {
        u32 v = (x >> (16 * k)) & 0xffff;
        return is_signed ? static_cast<s32>(static_cast<s16>(v)) : static_cast<s32>(v);
    };
    write_lanes(w.row<u32>(in.dst), m, [&](int i) {
        u32 sum = c[i];
        if (mode & 4) {
            for (int k = 0; k < 2; ++k)
                sum += static_cast<u32>(half(a[i], k, mode & 1) * byte(b[i], k + (mode & 8 ? 2 : 0), mode & 2));
        } else {
            for (int k = 0; k < 4; ++k)
                sum += static_cast<u32>(byte(a[i], k, mode & 1) * byte(b[i], k, mode & 2));
        }
        return sum;
    });
}

void build_dot(Builder& b) {
    u16 mode = b.s.op == "dp2a" ? 4 : 0;
    if (mode && b.take("hi"))
        mode |= 8;
    else if (mode && !b.take("lo"))
        b.fail("wanted .lo or .hi");
    Type first = b.take_type(), second = b.take_type();
    if ((first != Type::U32 && first != Type::S32) || (second != Type::U32 && second != Type::S32))
        b.fail("wanted .u32 or .s32, twice");
    mode |= static_cast<u16>((first == Type::S32 ? 1 : 0) | (second == Type::S32 ? 2 : 0));
    operands_ternary(b, Type::B32);
    b.in.mode = mode;
    b.emit(exec_dot);
}

} // namespace

void register_integer(Table& table) {
    table["add"] = build_add;
    table["sub"] = build_sub;
    table["mul"] = build_mul;
    table["mad"] = build_mad;
    table["mul24"] = build_mul24;
    table["div"] = build_div;
    table["rem"] = build_binary<Rem>;
    table["neg"] = build_neg;
    table["abs"] = build_abs;
    table["min"] = build_min;
    table["max"] = build_max;
    table["sad"] = build_sad;
    table["dp4a"] = table["dp2a"] = build_dot;
    table["addc"] = [](Builder& b) { build_carry(b, 1); };
    table["subc"] = [](Builder& b) { build_carry(b, 5); };
    table["madc"] = [](Builder& b) { build_mad_carry(b, 1); };
}

} // namespace deep_gemm_k3::emulator
