// cvt to and from packed and narrow formats, and cvt.pack.
#include "convert.hpp"

namespace deep_gemm_k3::emulator {

namespace {

// two singles into one packed register: the first operand gives the upper half
void exec_pair(Warp& w, const Inst& in, u32 m) {
    Conversion c = unpack_conversion(in);
    bool is_f16 = c.to == Type::F16x2;
    bool plain = c.round == Round::Nearest && !c.satfinite && !c.relu;
    const float *a = w.row<float>(in.a), *b = w.row<float>(in.b);
    if (plain && !is_f16)
        return write_lanes(
            w.row<u32>(in.dst), m, [&](int i) { return float_to_bf16(a[i]) << 16 | float_to_bf16(b[i]); });
    if (plain)
        return write_lanes(w.row<u32>(in.dst), m, [&](int i) { return float_to_f16(a[i]) << 16 | float_to_f16(b[i]); });
    auto one = [&](float x) { return encode(c.relu && x < 0 ? 0.0 : x, is_f16 ? kF16 : kBF16, c.round, c.satfinite); };
    write_active(w.row<u32>(in.dst), m, [&](int i) { return one(a[i]) << 16 | one(b[i]); });
}

const Format* narrow_format(Type type) {
    switch (type) {
    case Type::E4M3x2:
        return &kE4M3;
    case Type::E5M2x2:
        return &kE5M2;
    case Type::E2M1x2:
        return &kE2M1;
    case Type::E2M3x2:
        return &kE2M3;
    case Type::E3M2x2:
        return &kE3M2;
    default:
        return nullptr;
    }
}

// n == 2: from two singles; n == 1: from a packed pair of halves
void exec_to_narrow(Warp& w, const Inst& in, u32 m) {
    Conversion c = unpack_conversion(in);
    int width = c.to == Type::E2M1x2 ? 4 : 8;
    const Format* format = narrow_format(c.to);
    auto one = [&](double x) -> u32 {
        if (c.to == Type::UE8M0x2)
            return encode_ue8m0(x, c.round, c.satfinite);
        if (c.relu && x < 0)
            x = 0;
        return encode(x, *format, c.round, true);
    };
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u32 packed = w.row<u32>(in.a)[i];
        double high, low;
        if (in.n == 2)
            high = bits<float>(packed), low = bits<float>(w.row<u32>(in.b)[i]);
        else if (c.from == Type::F16x2)
            high = f16_to_float(packed >> 16), low = f16_to_float(packed & 0xffff);
        else
            high = bf16_to_float(packed >> 16), low = bf16_to_float(packed & 0xffff);
        w.row<u32>(in.dst)[i] = one(high) << width | one(low);
    }
}

void exec_from_narrow(Warp& w, const Inst& in, u32 m) {
    Conversion c = unpack_conversion(in);
    int width = c.from == Type::E2M1x2 ? 4 : 8;
    const Format* format = narrow_format(c.from);
    auto one = [&](u32 code) -> u32 {
        double x = format ? decode(code, *format) : decode_ue8m0(code);
        if (c.relu && x < 0)
            x = 0;
        return encode(x, c.to == Type::F16x2 ? kF16 : kBF16, Round::Nearest, false);
    };
    u32 mask = (1u << width) - 1;
    const u32* a = w.row<u32>(in.a);
    write_active(w.row<u32>(in.dst), m, [&](int i) { return one((a[i] >> width) & mask) << 16 | one(a[i] & mask); });
}

s64 saturated(s64 x, bool is_signed, int width) {
    s64 high = (s64{1} << (is_signed ? width - 1 : width)) - 1, low = is_signed ? -high - 1 : 0;
    return x > high ? high : x < low ? low : x;
}

// cvt.pack.sat.u8.s32.b32 d, a, b, c: a and b saturated side by side; c shifted up above them
void exec_pack_convert(Warp& w, const Inst& in, u32 m) {
    Conversion c = unpack_conversion(in);
    const s32 *a = w.row<s32>(in.a), *b = w.row<s32>(in.b);
    int width = in.mode;
    const u32* rest = in.n == 3 ? w.row<u32>(in.c) : nullptr;
    write_active(w.row<u32>(in.dst), m, [&](int i) {
        u32 mask = (1u << width) - 1;
        auto one = [&](s32 x) { return static_cast<u32>(saturated(x, type_is_signed(c.to), width)) & mask; };
        u32 out = one(a[i]) << width | one(b[i]);
        return rest ? rest[i] << (2 * width) | out : out;
    });
}

} // namespace

bool is_narrow(Type type) {
    return narrow_format(type) || type == Type::UE8M0x2;
}

Handler pair_handler() {
    return exec_pair;
}

Conversion unpack_conversion(const Inst& in) {
    Conversion c;
    u64 x = static_cast<u64>(in.imm);
    c.to = static_cast<Type>(x & 0xff), c.from = static_cast<Type>(x >> 8 & 0xff);
    c.round = static_cast<Round>(x >> 16 & 0xff);
    c.to_integer = x >> 24 & 1, c.ftz = x >> 25 & 1, c.sat = x >> 26 & 1, c.satfinite = x >> 27 & 1,
    c.relu = x >> 28 & 1;
    return c;
}

void pack_conversion(Inst& in, const Conversion& c) {
    in.imm = static_cast<s64>(u64{static_cast<u8>(c.to)} | u64{static_cast<u8>(c.from)} << 8 |
                              u64{static_cast<u8>(c.round)} << 16 | u64{c.to_integer} << 24 | u64{c.ftz} << 25 |
                              u64{c.sat} << 26 | u64{c.satfinite} << 27 | u64{c.relu} << 28);
}

void build_narrow(Builder& b, const Conversion& c) {
    bool to_narrow = narrow_format(c.to) || c.to == Type::UE8M0x2;
    Type narrow = to_narrow ? c.to : c.from, row = narrow == Type::E2M1x2 ? Type::B8 : Type::B16;
    pack_conversion(b.in, c);
    if (!to_narrow) {
        b.want(2, 2);
        b.def(&Inst::dst, b.at(0), Type::B32);
        b.use(&Inst::a, b.at(1), row);
        return b.emit(exec_from_narrow);
    }
    bool two = c.from == Type::F32;
    b.want(two ? 3 : 2, two ? 3 : 2);
    b.def(&Inst::dst, b.at(0), row);
    b.use(&Inst::a, b.at(1), Type::B32);
    if (two)
        b.use(&Inst::b, b.at(2), Type::B32);
    b.in.n = two ? 2 : 1;
    b.emit(exec_to_narrow);
}

void build_pack(Builder& b, Conversion c) {
    if (!b.take("sat"))
        b.fail("cvt.pack wants .sat");
    int width = 0;
    std::string sub = b.take_of({"u2", "s2", "u4", "s4"});
    if (!sub.empty()) {
        width = sub[1] - '0';
        c.to = sub[0] == 'u' ? Type::U8 : Type::S8;
    } else {
        c.to = b.take_type();
        width = 8 * type_size(c.to);
    }
    c.from = b.take_type();
    bool has_rest = b.take("b32");
    b.want(has_rest ? 4 : 3, has_rest ? 4 : 3);
    b.def(&Inst::dst, b.at(0), Type::B32);
    b.use(&Inst::a, b.at(1), Type::B32);
    b.use(&Inst::b, b.at(2), Type::B32);
    if (has_rest)
        b.use(&Inst::c, b.at(3), Type::B32);
    b.in.n = has_rest ? 3 : 2;
    b.in.mode = static_cast<u16>(width);
    pack_conversion(b.in, c);
    b.emit(exec_pack_convert);
}

} // namespace deep_gemm_k3::emulator
