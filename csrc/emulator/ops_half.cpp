// Half-precision arithmetic: f16, f16x2, bf16, bf16x2. Results are computed exactly and rounded once.
#include "ops.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr u16 kFtz = 1, kSat = 2, kRelu = 4, kNanMode = 8, kXorSign = 16, kAbs = 32;

// A double whose last bit is sticky, as a single whose last bit is sticky; for magnitudes of 2^-120 and more.
inline float to_sticky_single(double x) {
    u64 u = bits<u64>(x), low = u & 0x1fffffffu;
    return static_cast<float>(bits<double>((u & ~u64{0x1fffffff}) | (low ? u64{0x20000000} : 0)));
}
inline bool is_tiny(double x) {
    return std::fabs(x) < 0x1p-120;
}

struct HalfF16 {
    static float load(u32 x) { return f16_to_float(x); }
    static u32 store(float x) { return float_to_f16(x); }
    static u32 store(double x) {
        return is_tiny(x) ? encode(x, kF16, Round::Nearest, false) : float_to_f16(to_sticky_single(x));
    }
    static constexpr u32 kLeastNormal = 0x400;
};
struct HalfBF16 {
    static float load(u32 x) { return bf16_to_float(x); }
    static u32 store(float x) { return float_to_bf16(x); }
    static u32 store(double x) {
        return is_tiny(x) ? encode(x, kBF16, Round::Nearest, false) : float_to_bf16(to_sticky_single(x));
    }
    static constexpr u32 kLeastNormal = 0x80;
};

template <class H>
inline float enter(u32 x, u16 mode) {
    if ((mode & kFtz) && (x & 0x7fff) < H::kLeastNormal)
        x &= 0x8000;
    return H::load(x);
}
template <class H>
inline u32 leave(u32 x, u16 mode) {
    if ((mode & kFtz) && (x & 0x7fff) < H::kLeastNormal)
        x &= 0x8000;
    if (mode & kSat)
        x = H::store(!(H::load(x) > 0.0f) ? 0.0f : H::load(x) > 1.0f ? 1.0f : H::load(x));
    if ((mode & kRelu) && H::load(x) < 0.0f)
        x = 0;
    return x;
}

// rounding to single first does no harm: 24 bits are at least 2 * 11 + 2
constexpr auto kAdd = [](float x, float y) { return x + y; };
constexpr auto kSub = [](float x, float y) { return x - y; };
constexpr auto kMul = [](float x, float y) { return x * y; };

template <class H, int kWide, auto F>
void exec_h2(Warp& w, const Inst& in, u32 m) {
    const u32 *a = w.row<u32>(in.a), *b = w.row<u32>(in.b);
    u16 mode = in.mode;
    auto one = [&](u32 x, u32 y) {
        return leave<H>(H::store(F(enter<H>(x & 0xffff, mode), enter<H>(y & 0xffff, mode))), mode);
    };
    write_lanes(w.row<u32>(in.dst), m,
        [&](int i) { return kWide == 2 ? one(a[i], b[i]) | one(a[i] >> 16, b[i] >> 16) << 16 : one(a[i], b[i]); });
}

// bf16 products below the normal range of single: rounded once, from double
template <int kWide>
void exec_mul_bf16(Warp& w, const Inst& in, u32 m) {
    const u32 *a = w.row<u32>(in.a), *b = w.row<u32>(in.b);
    u32 x[kLanes], y[kLanes];
    std::memcpy(x, a, sizeof(x)), std::memcpy(y, b, sizeof(y));
    exec_h2<HalfBF16, kWide, kMul>(w, in, m);
    u32 tiny = mask_of([&](int i) {
        bool low = std::fabs(bf16_to_float(x[i] & 0xffff) * bf16_to_float(y[i] & 0xffff)) < 0x1p-126f;
        bool high = std::fabs(bf16_to_float(x[i] >> 16) * bf16_to_float(y[i] >> 16)) < 0x1p-126f;
        return low || (kWide == 2 && high);
    });
    u16 mode = in.mode;
    auto one = [&](u32 p, u32 q) {
        return leave<HalfBF16>(
            HalfBF16::store(static_cast<double>(enter<HalfBF16>(p & 0xffff, mode)) * enter<HalfBF16>(q & 0xffff, mode)),
            mode);
    };
    if (tiny & m)
        write_active(w.row<u32>(in.dst), tiny & m,
            [&](int i) { return kWide == 2 ? one(x[i], y[i]) | one(x[i] >> 16, y[i] >> 16) << 16 : one(x[i], y[i]); });
}

template <class H, int kWide, auto F>
void exec_h1(Warp& w, const Inst& in, u32 m) {
    const u32* a = w.row<u32>(in.a);
    u16 mode = in.mode;
    auto one = [&](u32 x) { return leave<H>(H::store(F(enter<H>(x & 0xffff, mode))), mode); };
    write_lanes(
        w.row<u32>(in.dst), m, [&](int i) { return kWide == 2 ? one(a[i]) | one(a[i] >> 16) << 16 : one(a[i]); });
}

// a * b is exact in double; the sum is made exact enough by rounding to odd
template <class H, int kWide>
void exec_fma(Warp& w, const Inst& in, u32 m) {
    const u32 *a = w.row<u32>(in.a), *b = w.row<u32>(in.b), *c = w.row<u32>(in.c);
    u16 mode = in.mode;
    auto one = [&](u32 x, u32 y, u32 z) {
        double product = static_cast<double>(enter<H>(x & 0xffff, mode)) * enter<H>(y & 0xffff, mode);
        return leave<H>(H::store(round_to_odd_sum(product, enter<H>(z & 0xffff, mode))), mode);
    };
    write_active(w.row<u32>(in.dst), m, [&](int i) {
        return kWide == 2 ? one(a[i], b[i], c[i]) | one(a[i] >> 16, b[i] >> 16, c[i] >> 16) << 16
                          : one(a[i], b[i], c[i]);
    });
}

constexpr auto kEx2 = [](float x) { return static_cast<float>(std::exp2(static_cast<double>(x))); };
constexpr auto kTanh = [](float x) { return static_cast<float>(std::tanh(static_cast<double>(x))); };

template <class H, int kWide, bool kMax>
void exec_extreme(Warp& w, const Inst& in, u32 m) {
    const u32 *a = w.row<u32>(in.a), *b = w.row<u32>(in.b);
    u16 mode = in.mode;
    auto one = [&](u32 x, u32 y) -> u32 {
        x &= 0xffff, y &= 0xffff;
        u32 sign = (x ^ y) & 0x8000;
        if (mode & kAbs)
            x &= 0x7fff, y &= 0x7fff;
        float p = enter<H>(x, mode), q = enter<H>(y, mode);
        if (p != p || q != q)
            return (mode & kNanMode) || (p != p && q != q) ? 0x7fff : leave<H>(p != p ? y : x, mode);
        bool first = p == q ? ((x & 0x8000) != 0) != kMax : (kMax ? p > q : p < q);
        u32 out = first ? x : y;
        if (mode & kXorSign)
            out = (out & 0x7fff) | sign;
        return leave<H>(out, mode);
    };
    write_active(w.row<u32>(in.dst), m,
        [&](int i) { return kWide == 2 ? one(a[i], b[i]) | one(a[i] >> 16, b[i] >> 16) << 16 : one(a[i], b[i]); });
}

u16 take_modes(Builder& b) {
    u16 mode = 0;
    if (b.take("ftz"))
        mode |= kFtz;
    if (b.take("sat"))
        mode |= kSat;
    if (b.take("relu"))
        mode |= kRelu;
    if (b.take("NaN"))
        mode |= kNanMode;
    if (b.take("xorsign"))
        mode |= kXorSign;
    if (b.take("abs"))
        mode |= kAbs;
    bool rounds = b.take("rn"), is_function = b.s.op == "ex2" || b.s.op == "tanh";
    if (is_function != b.take("approx"))
        b.fail(is_function ? "wanted .approx" : "this instruction has no .approx");
    if (b.s.op == "fma" && !rounds)
        b.fail("wanted a rounding mode");
    return mode;
}

template <class H, int kWide>
Handler pick(const Builder& b) {
    const std::string& op = b.s.op;
    if (op == "add")
        return exec_h2<H, kWide, kAdd>;
    if (op == "sub")
        return exec_h2<H, kWide, kSub>;
    if (op == "mul" && std::is_same_v<H, HalfBF16>)
        return exec_mul_bf16<kWide>;
    if (op == "mul")
        return exec_h2<H, kWide, kMul>;
    if (op == "fma")
        return exec_fma<H, kWide>;
    if (op == "min")
        return exec_extreme<H, kWide, false>;
    if (op == "max")
        return exec_extreme<H, kWide, true>;
    if (op == "ex2")
        return exec_h1<H, kWide, kEx2>;
    if (op == "tanh")
        return exec_h1<H, kWide, kTanh>;
    b.fail("not modelled for this type");
}

template <u32 kAnd, u32 kXor>
constexpr auto kSign = [](u32 x) { return (x & kAnd) ^ kXor; };

} // namespace

void build_half(Builder& b) {
    const std::string& op = b.s.op;
    u16 mode = take_modes(b);
    Type type = b.take_type();
    bool packed = type == Type::F16x2 || type == Type::BF16x2, is_f16 = type == Type::F16 || type == Type::F16x2;
    Type operand = packed ? Type::B32 : Type::B16;
    if (op == "neg" || op == "abs") {
        operands_unary(b, operand);
        if (op == "neg")
            return b.emit(packed ? exec_unary<kSign<0xffffffffu, 0x80008000u>> : exec_unary<kSign<0xffffu, 0x8000u>>);
        return b.emit(packed ? exec_unary<kSign<0x7fff7fffu, 0u>> : exec_unary<kSign<0x7fffu, 0u>>);
    }
    if (op == "fma")
        operands_ternary(b, operand);
    else if (op == "ex2" || op == "tanh")
        operands_unary(b, operand);
    else
        operands_binary(b, operand);
    b.in.mode = mode;
    if (is_f16)
        b.emit(packed ? pick<HalfF16, 2>(b) : pick<HalfF16, 1>(b));
    else
        b.emit(packed ? pick<HalfBF16, 2>(b) : pick<HalfBF16, 1>(b));
}

} // namespace deep_gemm_k3::emulator
