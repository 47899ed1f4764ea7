// cvt and cvt.pack: fast paths for what kernels use all the time, one general path for the rest.
#include "convert.hpp"

namespace deep_gemm_k3::emulator {

namespace {

struct Value { // an operand on its way: integer or real
    bool is_integer;
    s64 integer;
    bool is_unsigned64;
    double real;
};

bool is_integer_type(Type type) {
    return type_size(type) > 0 && !type_is_float(type);
}

Value load(u64 cell, Type type, bool ftz) {
    Value out{false, 0, false, 0};
    switch (type) {
    case Type::U8:
    case Type::B8:
        return {true, static_cast<u8>(cell), false, 0};
    case Type::S8:
        return {true, static_cast<s8>(cell), false, 0};
    case Type::U16:
    case Type::B16:
        return {true, static_cast<u16>(cell), false, 0};
    case Type::S16:
        return {true, static_cast<s16>(cell), false, 0};
    case Type::U32:
    case Type::B32:
        return {true, static_cast<u32>(cell), false, 0};
    case Type::S32:
        return {true, static_cast<s32>(cell), false, 0};
    case Type::U64:
    case Type::B64:
        return {true, static_cast<s64>(cell), true, 0};
    case Type::S64:
        return {true, static_cast<s64>(cell), false, 0};
    case Type::F16:
        out.real = f16_to_float(cell & 0xffff);
        break;
    case Type::BF16:
        out.real = bf16_to_float(cell & 0xffff);
        break;
    case Type::F64:
        out.real = bits<double>(cell);
        break;
    default: {
        u32 x = static_cast<u32>(cell);
        if (ftz && (x & 0x7f800000u) == 0)
            x &= 0x80000000u;
        out.real = bits<float>(x);
    }
    }
    return out;
}

double round_to_integer(double x, Round round) {
    switch (round) {
    case Round::Zero:
        return std::trunc(x);
    case Round::Down:
        return std::floor(x);
    case Round::Up:
        return std::ceil(x);
    default:
        return std::nearbyint(x);
    }
}

u64 clamp_to_integer(double x, Type type) {
    int width = 8 * type_size(type);
    if (std::isnan(x))
        return type == Type::S64 || type == Type::U64 ? u64{1} << 63 : 0;
    bool is_signed = type_is_signed(type);
    double high = std::ldexp(1.0, is_signed ? width - 1 : width), low = is_signed ? -high : 0.0;
    if (x >= high)
        return is_signed ? (u64{1} << (width - 1)) - 1 : width == 64 ? ~u64{0} : (u64{1} << width) - 1;
    if (x < low)
        return is_signed ? static_cast<u64>(-1) << (width - 1) : 0;
    return is_signed ? static_cast<u64>(static_cast<s64>(x)) : static_cast<u64>(x);
}

u64 integer_to_integer(const Value& value, Type type, bool sat) {
    if (!sat)
        return static_cast<u64>(value.integer);
    int width = 8 * type_size(type);
    __int128 x = value.is_unsigned64 ? static_cast<__int128>(static_cast<u64>(value.integer)) : value.integer;
    __int128 one = 1, high = type_is_signed(type) ? (one << (width - 1)) - 1 : (one << width) - 1,
             low = type_is_signed(type) ? -(one << (width - 1)) : 0;
    return static_cast<u64>(x > high ? high : x < low ? low : x);
}

double integer_to_double_odd(
    const Value& value) { // 64-bit integers: last bit sticky, so that the next rounding is right
    bool negative = !value.is_unsigned64 && value.integer < 0;
    u64 magnitude = negative ? 0 - static_cast<u64>(value.integer) : static_cast<u64>(value.integer);
    if (magnitude >> 53) {
        int drop = 11 - std::countl_zero(magnitude);
        bool sticky = (magnitude & ((u64{1} << drop) - 1)) != 0;
        magnitude = ((magnitude >> drop) | (sticky ? 1 : 0)) << drop;
    }
    double out = static_cast<double>(magnitude);
    return negative ? -out : out;
}

u64 store_real(double x, const Conversion& c) {
    if (c.relu && !(x > 0))
        x = std::isnan(x) ? x : 0;
    switch (c.to) {
    case Type::F16:
        return encode(x, kF16, c.round, c.satfinite);
    case Type::BF16:
        return encode(x, kBF16, c.round, c.satfinite);
    case Type::F64:
        return bits<u64>(x);
    case Type::TF32:
        return u64{encode(x, kTF32, c.round, c.satfinite)} << 13;
    default: {
        float y = round_to_single(x, c.round);
        if (y != y)
            return 0x7fffffff;
        u32 out = bits<u32>(y);
        if (c.ftz && (out & 0x7f800000u) == 0)
            out &= 0x80000000u;
        return out;
    }
    }
}

u64 convert(u64 cell, const Conversion& c) {
    Value value = load(cell, c.from, c.ftz);
    if (is_integer_type(c.to)) {
        if (value.is_integer)
            return integer_to_integer(value, c.to, c.sat);
        return clamp_to_integer(round_to_integer(value.real, c.round), c.to);
    }
    if (value.is_integer) {
        if (c.to == Type::F64 && c.round == Round::Nearest)
            return bits<u64>(value.is_unsigned64 ? static_cast<double>(static_cast<u64>(value.integer))
                                                 : static_cast<double>(value.integer));
        value.real = integer_to_double_odd(value);
    }
    if (c.to_integer)
        value.real = round_to_integer(value.real, c.round);
    if (c.sat)
        value.real = !(value.real > 0) ? 0.0 : value.real > 1 ? 1.0 : value.real;
    return store_real(value.real, c);
}

u64 truncated(u64 x, Type type, bool wide_row) { // results in wider registers are extended
    int size = type_size(type);
    if (size >= 8)
        return x;
    u64 mask = (u64{1} << (8 * size)) - 1;
    bool sign = type_is_signed(type) && !type_is_float(type) && (x >> (8 * size - 1)) & 1;
    u64 out = sign ? x | ~mask : x & mask;
    return wide_row ? out : out & 0xffffffffu;
}

// mode 1: source row is wide, 2: destination row is wide
void exec_general(Warp& w, const Inst& in, u32 m) {
    Conversion c = unpack_conversion(in);
    bool from_wide = in.mode & 1, to_wide = in.mode & 2;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u64 cell = from_wide ? w.row<u64>(in.a)[i] : w.row<u32>(in.a)[i];
        u64 out = truncated(convert(cell, c), c.to, to_wide);
        if (to_wide)
            w.row<u64>(in.dst)[i] = out;
        else
            w.row<u32>(in.dst)[i] = static_cast<u32>(out);
    }
}

template <class Result, class Source>
struct Rows {
    using R = Result;
    using A = Source;
};

template <class Both, class To, class From>
void exec_cast(Warp& w, const Inst& in, u32 m) {
    using R = typename Both::R;
    using A = typename Both::A;
    const A* a = w.row<A>(in.a);
    write_lanes(w.row<R>(in.dst), m, [&](int i) {
        To value = static_cast<To>(static_cast<From>(a[i]));
        if constexpr (sizeof(R) == 8)
            return static_cast<R>(static_cast<std::conditional_t<std::is_signed_v<To>, s64, u64>>(value));
        else
            return static_cast<R>(static_cast<std::conditional_t<std::is_signed_v<To>, s32, u32>>(value));
    });
}

template <class Both, class From>
Handler cast_to(Type to) {
    switch (to) {
    case Type::U8:
    case Type::B8:
        return exec_cast<Both, u8, From>;
    case Type::S8:
        return exec_cast<Both, s8, From>;
    case Type::U16:
    case Type::B16:
        return exec_cast<Both, u16, From>;
    case Type::S16:
        return exec_cast<Both, s16, From>;
    case Type::U32:
    case Type::B32:
        return exec_cast<Both, u32, From>;
    case Type::S32:
        return exec_cast<Both, s32, From>;
    case Type::U64:
    case Type::B64:
        return exec_cast<Both, u64, From>;
    case Type::S64:
        return exec_cast<Both, s64, From>;
    default:
        return nullptr;
    }
}

template <class Both>
Handler cast_from(Type to, Type from) {
    switch (from) {
    case Type::U8:
    case Type::B8:
        return cast_to<Both, u8>(to);
    case Type::S8:
        return cast_to<Both, s8>(to);
    case Type::U16:
    case Type::B16:
        return cast_to<Both, u16>(to);
    case Type::S16:
        return cast_to<Both, s16>(to);
    case Type::U32:
    case Type::B32:
        return cast_to<Both, u32>(to);
    case Type::S32:
        return cast_to<Both, s32>(to);
    case Type::U64:
    case Type::B64:
        return cast_to<Both, u64>(to);
    case Type::S64:
        return cast_to<Both, s64>(to);
    default:
        return nullptr;
    }
}

Handler integer_cast(const Conversion& c, u16 mode) {
    if (c.sat || !is_integer_type(c.to) || !is_integer_type(c.from))
        return nullptr;
    if (mode == 0)
        return cast_from<Rows<u32, u32>>(c.to, c.from);
    if (mode == 1)
        return cast_from<Rows<u32, u64>>(c.to, c.from);
    if (mode == 2)
        return cast_from<Rows<u64, u32>>(c.to, c.from);
    return cast_from<Rows<u64, u64>>(c.to, c.from);
}

constexpr auto kS32ToF32 = [](s32 x) { return static_cast<float>(x); };
constexpr auto kU32ToF32 = [](u32 x) { return static_cast<float>(x); };
constexpr auto kF32ToBF16 = [](float x) { return float_to_bf16(x); };
constexpr auto kF32ToF16 = [](float x) { return float_to_f16(x); };
constexpr auto kBF16ToF32 = [](u32 x) {
    float y = bf16_to_float(x & 0xffff);
    return y != y ? 0x7fffffffu : bits<u32>(y);
};
constexpr auto kF16ToF32 = [](u32 x) {
    float y = f16_to_float(x & 0xffff);
    return y != y ? 0x7fffffffu : bits<u32>(y);
};

Handler fast_path(const Conversion& c) {
    bool plain = !c.ftz && !c.sat && !c.satfinite && !c.relu && !c.to_integer && c.round == Round::Nearest;
    if (!plain)
        return nullptr;
    if (c.to == Type::F32 && c.from == Type::S32)
        return exec_unary<kS32ToF32>;
    if (c.to == Type::F32 && c.from == Type::U32)
        return exec_unary<kU32ToF32>;
    if (c.to == Type::BF16 && c.from == Type::F32)
        return exec_unary<kF32ToBF16>;
    if (c.to == Type::F16 && c.from == Type::F32)
        return exec_unary<kF32ToF16>;
    if (c.to == Type::F32 && c.from == Type::BF16)
        return exec_unary<kBF16ToF32>;
    if (c.to == Type::F32 && c.from == Type::F16)
        return exec_unary<kF16ToF32>;
    return nullptr;
}

// Which rounding modes a conversion may and must name.
void check_rounding(const Builder& b, const Conversion& c, const std::string& name) {
    bool to_int = is_integer_type(c.to), from_int = is_integer_type(c.from);
    bool narrows = type_size(c.to) < type_size(c.from) || (c.to != c.from && type_size(c.to) == type_size(c.from));
    auto pair = [](Type type) { return type == Type::F16x2 || type == Type::BF16x2; };
    auto is_element = [](Type type) { return type == Type::E4M3 || type == Type::E5M2; };
    bool fits;
    if (is_element(c.to) || is_element(c.from) || (is_narrow(c.from) && !pair(c.to)) ||
        (is_narrow(c.to) && !pair(c.from) && c.from != Type::F32))
        b.fail("this conversion does not exist");
    if (c.to == Type::UE8M0x2)
        fits = name == "rz" || name == "rp";
    else if (is_narrow(c.to) || is_narrow(c.from))
        fits = name == "rn" && (c.satfinite || !is_narrow(c.to));
    else if (c.to == Type::F16x2 || c.to == Type::BF16x2)
        fits = name == "rn" || name == "rz";
    else if (c.to == Type::TF32)
        fits = name == "rn" || name == "rz" || name == "rna";
    else if (to_int)
        fits = from_int ? name.empty() : c.to_integer;
    else if (from_int || narrows)
        fits = !name.empty() && !c.to_integer && name != "rna";
    else
        fits = name.empty() || (c.to_integer && c.to == c.from);
    if (!fits)
        b.fail(name.empty() ? "wanted a rounding mode" : "this conversion has no rounding mode ." + name);
}

std::string take_round_name(Builder& b) {
    return b.take_of({"rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi"});
}

Round take_round(const std::string& name, Conversion& c) {
    c.to_integer = name.size() == 3 && name[2] == 'i';
    if (name == "rna")
        return Round::Away;
    switch (name.size() > 1 ? name[1] : 'n') {
    case 'z':
        return Round::Zero;
    case 'm':
        return Round::Down;
    case 'p':
        return Round::Up;
    default:
        return Round::Nearest;
    }
}

void build_convert(Builder& b) {
    Conversion c;
    if (b.take("pack"))
        return build_pack(b, c);
    std::string round = take_round_name(b);
    c.round = take_round(round, c);
    c.ftz = b.take("ftz");
    c.sat = b.take("sat");
    c.satfinite = b.take("satfinite");
    c.relu = b.take("relu");
    c.to = b.take_any_type();
    c.from = b.take_any_type();
    check_rounding(b, c, round);
    if (is_narrow(c.to) || is_narrow(c.from))
        return build_narrow(b, c);
    pack_conversion(b.in, c);
    if (c.to == Type::F16x2 || c.to == Type::BF16x2) {
        b.want(3, 3);
        b.def(&Inst::dst, b.at(0), Type::B32);
        b.use(&Inst::a, b.at(1), Type::F32);
        b.use(&Inst::b, b.at(2), Type::F32);
        return b.emit(pair_handler());
    }
    b.want(2, 2);
    b.def_any(&Inst::dst, b.at(0), c.to);
    b.use_any(&Inst::a, b.at(1), c.from);
    Type to = b.register_type(b.at(0)), from = b.register_type(b.at(1));
    bool to_wide = row_class(to == Type::None ? c.to : to) == RowClass::Double,
         from_wide = row_class(from == Type::None ? c.from : from) == RowClass::Double;
    b.in.mode = static_cast<u16>((from_wide ? 1 : 0) | (to_wide ? 2 : 0));
    Handler handler = integer_cast(c, b.in.mode);
    bool rows_fit = to_wide == (type_size(c.to) == 8) && from_wide == (type_size(c.from) == 8);
    if (!handler && rows_fit)
        handler = fast_path(c);
    b.emit(handler ? handler : exec_general);
}

} // namespace

void register_convert(Table& table) {
    table["cvt"] = build_convert;
}

} // namespace deep_gemm_k3::emulator
