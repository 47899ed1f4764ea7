// Single- and double-precision arithmetic.
#include <cfenv>

#include "ops.hpp"

namespace deep_gemm_k3::emulator {

namespace {

// Inst::mode of the floating-point handlers
constexpr u16 kFtz = 1, kSat = 2, kRoundShift = 2, kRoundMask = 3 << 2, kNanMode = 16, kXorSign = 32, kAbs = 64;

struct RoundScope {
    int old = FE_TONEAREST;
    bool changed = false;
    explicit RoundScope(u16 mode) {
        constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
        u16 round = (mode & kRoundMask) >> kRoundShift;
        if (!round)
            return;
        old = std::fegetround();
        std::fesetround(kModes[round]);
        changed = true;
    }
    ~RoundScope() {
        if (changed)
            std::fesetround(old);
    }
};

inline float flush(float x) {
    return (bits<u32>(x) & 0x7f800000u) == 0 ? bits<float>(bits<u32>(x) & 0x80000000u) : x;
}
inline float saturate(float x) {
    return !(x > 0.0f) ? 0.0f : x > 1.0f ? 1.0f : x;
}
inline double saturate(double x) {
    return !(x > 0.0) ? 0.0 : x > 1.0 ? 1.0 : x;
}

template <class T>
inline T enter(T x, u16 mode) {
    if constexpr (sizeof(T) == 4)
        return mode & kFtz ? flush(x) : x;
    return x;
}
template <class T>
inline T leave(T x, u16 mode) {
    if constexpr (sizeof(T) == 4)
        x = mode & kFtz ? flush(x) : x;
    return mode & kSat ? saturate(x) : x;
}
// NaN results have one form: 0x7fffffff, as the hardware gives
template <class T>
inline Cell<T> pack(T x) {
    if constexpr (sizeof(T) == 4)
        return x != x ? 0x7fffffffu : bits<u32>(x);
    else
        return x != x ? 0x7fffffffffffffffull : bits<u64>(x);
}

template <class T, auto F>
void exec_f1(Warp& w, const Inst& in, u32 m) {
    RoundScope scope(in.mode);
    const Cell<T>* a = w.row<Cell<T>>(in.a);
    u16 mode = in.mode;
    write_lanes(
        w.row<Cell<T>>(in.dst), m, [&](int i) { return pack<T>(leave<T>(F(enter<T>(bits<T>(a[i]), mode)), mode)); });
}

template <class T, auto F>
void exec_f2(Warp& w, const Inst& in, u32 m) {
    RoundScope scope(in.mode);
    const Cell<T>*a = w.row<Cell<T>>(in.a), *b = w.row<Cell<T>>(in.b);
    u16 mode = in.mode;
    write_lanes(w.row<Cell<T>>(in.dst), m, [&](int i) {
        return pack<T>(leave<T>(F(enter<T>(bits<T>(a[i]), mode), enter<T>(bits<T>(b[i]), mode)), mode));
    });
}

template <class T, auto F>
void exec_f3(Warp& w, const Inst& in, u32 m) {
    RoundScope scope(in.mode);
    const Cell<T>*a = w.row<Cell<T>>(in.a), *b = w.row<Cell<T>>(in.b), *c = w.row<Cell<T>>(in.c);
    u16 mode = in.mode;
    write_lanes(w.row<Cell<T>>(in.dst), m, [&](int i) {
        return pack<T>(leave<T>(
            F(enter<T>(bits<T>(a[i]), mode), enter<T>(bits<T>(b[i]), mode), enter<T>(bits<T>(c[i]), mode)), mode));
    });
}

// two singles in a 64-bit register (Blackwell's packed arithmetic)
template <auto F, int kOperands>
void exec_packed(Warp& w, const Inst& in, u32 m) {
    RoundScope scope(in.mode);
    const u64 *a = w.row<u64>(in.a), *b = w.row<u64>(in.b), *c = kOperands == 3 ? w.row<u64>(in.c) : a;
    u16 mode = in.mode;
    auto part = [&](u64 x, int k) { return enter<float>(bits<float>(static_cast<u32>(x >> (32 * k))), mode); };
    write_active(w.row<u64>(in.dst), m, [&](int i) {
        u64 out = 0;
        for (int k = 0; k < 2; ++k)
            out |= static_cast<u64>(pack<float>(leave<float>(F(part(a[i], k), part(b[i], k), part(c[i], k)), mode)))
                   << (32 * k);
        return out;
    });
}

constexpr auto kAdd = [](auto x, auto y) { return x + y; };
constexpr auto kSub = [](auto x, auto y) { return x - y; };
constexpr auto kMul = [](auto x, auto y) { return x * y; };
constexpr auto kDiv = [](auto x, auto y) { return x / y; };
constexpr auto kFma = [](auto x, auto y, auto z) { return std::fma(x, y, z); };
constexpr auto kAdd3 = [](float x, float y, float) { return x + y; };
constexpr auto kSub3 = [](float x, float y, float) { return x - y; };
constexpr auto kMul3 = [](float x, float y, float) { return x * y; };
constexpr auto kRcp = [](auto x) { return decltype(x)(1) / x; };
constexpr auto kSqrt = [](auto x) { return std::sqrt(x); };
constexpr auto kRsqrt = [](auto x) { return static_cast<decltype(x)>(1.0 / std::sqrt(static_cast<double>(x))); };
constexpr auto kSin = [](float x) { return static_cast<float>(std::sin(static_cast<double>(x))); };
constexpr auto kCos = [](float x) { return static_cast<float>(std::cos(static_cast<double>(x))); };
constexpr auto kLg2 = [](float x) { return static_cast<float>(std::log2(static_cast<double>(x))); };
constexpr auto kEx2 = [](float x) { return static_cast<float>(std::exp2(static_cast<double>(x))); };
constexpr auto kTanh = [](float x) { return static_cast<float>(std::tanh(static_cast<double>(x))); };

template <class T, bool kMax>
inline T extreme(T x, T y, u16 mode) {
    if (mode & kAbs)
        x = std::fabs(x), y = std::fabs(y);
    bool x_nan = x != x, y_nan = y != y;
    if (x_nan || y_nan)
        return (mode & kNanMode) || (x_nan && y_nan) ? std::numeric_limits<T>::quiet_NaN() : x_nan ? y : x;
    bool x_first = x == y ? (std::signbit(x) != kMax) : (kMax ? x > y : x < y); // -0 < +0
    return x_first ? x : y;
}

template <class T, bool kMax>
void exec_extreme(Warp& w, const Inst& in, u32 m) {
    const Cell<T>*a = w.row<Cell<T>>(in.a), *b = w.row<Cell<T>>(in.b), *c = w.row<Cell<T>>(in.n == 3 ? in.c : in.b);
    u16 mode = in.mode;
    write_lanes(w.row<Cell<T>>(in.dst), m, [&](int i) {
        T x = enter<T>(bits<T>(a[i]), mode), y = enter<T>(bits<T>(b[i]), mode), z = enter<T>(bits<T>(c[i]), mode);
        T value = extreme<T, kMax>(x, y, mode);
        if (in.n == 3)
            value = extreme<T, kMax>(value, z, mode);
        if ((mode & kXorSign) && value == value)
            value = std::copysign(value, std::signbit(x) != std::signbit(y) ? T(-1) : T(1));
        return pack<T>(value);
    });
}

template <class T, bool kNegate>
void exec_sign(Warp& w, const Inst& in, u32 m) { // neg and abs work on the bits, NaN included
    const Cell<T>* a = w.row<Cell<T>>(in.a);
    constexpr Cell<T> top = Cell<T>{1} << (8 * sizeof(T) - 1);
    u16 mode = in.mode;
    write_lanes(w.row<Cell<T>>(in.dst), m, [&](int i) {
        Cell<T> x = bits<Cell<T>>(enter<T>(bits<T>(a[i]), mode));
        return kNegate ? x ^ top : x & ~top;
    });
}

u16 take_modes(Builder& b) {
    u16 mode = 0;
    if (b.take("ftz"))
        mode |= kFtz;
    if (b.take("sat"))
        mode |= kSat;
    std::string round = b.take_of({"rn", "rz", "rm", "rp"});
    u16 index = round == "rz" ? 1 : round == "rm" ? 2 : round == "rp" ? 3 : 0;
    return mode | static_cast<u16>(index << kRoundShift);
}

// How an instruction says to what precision it computes.
enum class Precision : u8 {
    kMayRound,    // a rounding mode, or none for the nearest
    kRounds,      // a rounding mode
    kChooses,     // a rounding mode or .approx
    kDivides,     // that, or .full
    kApproximates // .approx
};

void take_precision(Builder& b, Precision wanted, bool has_round) {
    bool may = wanted >= Precision::kChooses;
    bool is_approximate = may && b.take("approx"), is_full = wanted == Precision::kDivides && b.take("full");
    int given = has_round + is_approximate + is_full;
    bool fits = wanted == Precision::kMayRound       ? true
                : wanted == Precision::kApproximates ? is_approximate && !has_round
                                                     : given == 1;
    if (!fits)
        b.fail(wanted == Precision::kRounds         ? "wanted a rounding mode"
               : wanted == Precision::kApproximates ? "wanted .approx and no rounding mode"
                                                    : "wanted a rounding mode or .approx");
}

bool has_round(const Builder& b) {
    for (const std::string& mod : b.s.mods)
        if (mod == "rn" || mod == "rz" || mod == "rm" || mod == "rp")
            return true;
    return false;
}

struct Pair {
    Handler single, wide;
    Precision precision = Precision::kMayRound;
};

void build_arith(Builder& b, size_t operands, Pair handlers) {
    u16 mode = take_modes(b);
    take_precision(b, handlers.precision, has_round(b));
    Type type = b.take_type();
    if (operands == 1)
        operands_unary(b, type);
    else if (operands == 2)
        operands_binary(b, type);
    else
        operands_ternary(b, type);
    b.in.mode = mode;
    Handler chosen = type == Type::F32 ? handlers.single : type == Type::F64 ? handlers.wide : nullptr;
    if (!chosen)
        b.fail(std::string("type .") + type_name(type) + " is not modelled here");
    b.emit(chosen);
}

bool build_f32x2(Builder& b) {
    if (!b.take("f32x2"))
        return false;
    u16 mode = take_modes(b);
    bool three = b.s.op == "fma";
    take_precision(b, three ? Precision::kRounds : Precision::kMayRound, has_round(b));
    three ? operands_ternary(b, Type::B64) : operands_binary(b, Type::B64);
    b.in.mode = mode;
    b.emit(three             ? exec_packed<kFma, 3>
           : b.s.op == "add" ? exec_packed<kAdd3, 2>
           : b.s.op == "sub" ? exec_packed<kSub3, 2>
                             : exec_packed<kMul3, 2>);
    return true;
}

template <bool kMax>
void build_extreme(Builder& b) {
    u16 mode = take_modes(b);
    if (b.take("NaN"))
        mode |= kNanMode;
    if (b.take("xorsign"))
        mode |= kXorSign;
    if (b.take("abs"))
        mode |= kAbs;
    Type type = b.take_type();
    if (type != Type::F32 && type != Type::F64)
        b.fail("type is not modelled here");
    if (b.count() == 4)
        operands_ternary(b, type), b.in.n = 3;
    else
        operands_binary(b, type);
    b.in.mode = mode;
    b.emit(type == Type::F32 ? exec_extreme<float, kMax> : exec_extreme<double, kMax>);
}

template <bool kNegate>
void build_sign(Builder& b) {
    u16 mode = take_modes(b);
    Type type = b.take_type();
    operands_unary(b, type);
    b.in.mode = mode;
    b.emit(type == Type::F32 ? exec_sign<float, kNegate> : exec_sign<double, kNegate>);
}

void build_copysign(Builder& b) {
    Type type = b.take_type();
    operands_binary(b, type);
    if (type == Type::F32)
        return b.emit(exec_binary<[](u32 x, u32 y) { return (x & 0x80000000u) | (y & 0x7fffffffu); }>);
    constexpr u64 top = u64{1} << 63;
    b.emit(exec_binary<[](u64 x, u64 y) { return (x & top) | (y & ~top); }>);
}

template <class T>
void exec_testp(Warp& w, const Inst& in, u32 m) {
    const Cell<T>* a = w.row<Cell<T>>(in.a);
    u32 out = mask_of([&](int i) {
        T x = bits<T>(a[i]);
        switch (in.mode) {
        case 0:
            return std::isfinite(x);
        case 1:
            return std::isinf(x);
        case 2:
            return !std::isnan(x);
        case 3:
            return std::isnan(x);
        case 4:
            return std::isnormal(x);
        default:
            return std::fpclassify(x) == FP_SUBNORMAL;
        }
    });
    w.set_predicate(in.dst, m, out);
}

void build_testp(Builder& b) {
    constexpr const char* kNames[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
    u16 mode = 6;
    for (u16 i = 0; i < 6; ++i)
        if (b.take(kNames[i]))
            mode = i;
    if (mode == 6)
        b.fail("unknown test");
    Type type = b.take_type();
    b.want(2, 2);
    b.def(&Inst::dst, b.at(0), Type::Pred);
    b.use(&Inst::a, b.at(1), type);
    b.in.mode = mode;
    b.emit(type == Type::F32 ? exec_testp<float> : exec_testp<double>);
}

bool has_half_type(const Builder& b) {
    for (const std::string& mod : b.s.mods)
        if (mod == "f16" || mod == "f16x2" || mod == "bf16" || mod == "bf16x2")
            return true;
    return false;
}

template <auto F>
void build_approx(Builder& b) {
    if (has_half_type(b))
        return build_half(b);
    build_arith(b, 1, {exec_f1<float, F>, nullptr, Precision::kApproximates});
}

} // namespace

void build_float(Builder& b) {
    const std::string& op = b.s.op;
    if (has_half_type(b))
        return build_half(b);
    if (build_f32x2(b))
        return;
    if (op == "add")
        return build_arith(b, 2, {exec_f2<float, kAdd>, exec_f2<double, kAdd>});
    if (op == "sub")
        return build_arith(b, 2, {exec_f2<float, kSub>, exec_f2<double, kSub>});
    if (op == "mul")
        return build_arith(b, 2, {exec_f2<float, kMul>, exec_f2<double, kMul>});
    if (op == "div")
        return build_arith(b, 2, {exec_f2<float, kDiv>, exec_f2<double, kDiv>, Precision::kDivides});
    if (op == "mad" || op == "fma")
        return build_arith(b, 3, {exec_f3<float, kFma>, exec_f3<double, kFma>, Precision::kRounds});
    if (op == "min")
        return build_extreme<false>(b);
    if (op == "max")
        return build_extreme<true>(b);
    if (op == "neg")
        return build_sign<true>(b);
    if (op == "abs")
        return build_sign<false>(b);
    b.fail("not modelled for this type");
}

void register_float(Table& table) {
    table["fma"] = build_float;
    table["rcp"] = [](Builder& b) {
        build_arith(b, 1, {exec_f1<float, kRcp>, exec_f1<double, kRcp>, Precision::kChooses});
    };
    table["sqrt"] = [](Builder& b) {
        build_arith(b, 1, {exec_f1<float, kSqrt>, exec_f1<double, kSqrt>, Precision::kChooses});
    };
    table["rsqrt"] = [](Builder& b) {
        build_arith(b, 1, {exec_f1<float, kRsqrt>, exec_f1<double, kRsqrt>, Precision::kApproximates});
    };
    table["sin"] = build_approx<kSin>;
    table["cos"] = build_approx<kCos>;
    table["lg2"] = build_approx<kLg2>;
    table["ex2"] = build_approx<kEx2>;
    table["tanh"] = build_approx<kTanh>;
    table["copysign"] = build_copysign;
    table["testp"] = build_testp;
}

} // namespace deep_gemm_k3::emulator
