// mma.sync. A is m x k, B k x 8, C and D m x 8 with m 16 or 8. A register holds neighbouring elements along k; the four
// lanes of a group hold neighbouring registers, the eight groups rows of A or columns of B.
#include <cstdlib>

#include "matrix.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr int kMaxK = 256; // of single bits

enum class Element : u8 { F64, TF32, F16, BF16, E4M3, E5M2, S8, U8, S4, U4, B1 };

struct Product {
    Element a, b;
    bool half_c, half_d;       // of F16, two to a register
    bool saturate, intersects; // intersects: of bits, and instead of exclusive or
    int m, k;

    int bits() const {
        constexpr int kBits[] = {64, 32, 16, 16, 8, 8, 8, 8, 4, 4, 1};
        return kBits[static_cast<u8>(a)];
    }
    int per() const { return bits() == 64 ? 1 : 32 / bits(); } // elements of a register
    u32 a_registers() const { return static_cast<u32>(m * k / (32 * per())); }
    u32 b_registers() const { return static_cast<u32>(8 * k / (32 * per())); }
    u32 c_registers() const { return half_c ? 2 : static_cast<u32>(m / 4); }
    u32 d_registers() const { return half_d ? 2 : static_cast<u32>(m / 4); }
};

void pack(Inst& in, const Product& p) {
    in.imm = static_cast<s64>(u64{static_cast<u8>(p.a)} | u64{static_cast<u8>(p.b)} << 8 | u64{p.half_c} << 16 |
                              u64{p.half_d} << 17 | u64{p.saturate} << 18 | u64{p.intersects} << 19 |
                              static_cast<u64>(p.m) << 24 | static_cast<u64>(p.k) << 32);
}

Product unpack(const Inst& in) {
    u64 x = static_cast<u64>(in.imm);
    return {static_cast<Element>(x & 0xff), static_cast<Element>(x >> 8 & 0xff), (x >> 16 & 1) != 0, (x >> 17 & 1) != 0,
        (x >> 18 & 1) != 0, (x >> 19 & 1) != 0, static_cast<int>(x >> 24 & 0xff), static_cast<int>(x >> 32 & 0xffff)};
}

Type type_of(Element element) {
    constexpr Type kTypes[] = {Type::F64, Type::TF32, Type::F16, Type::BF16, Type::E4M3, Type::E5M2};
    return kTypes[static_cast<u8>(element)];
}

float float_element(u32 code, Element element) {
    return matrix_element(code, type_of(element));
}

s32 integer_element(u32 code, Element element) {
    switch (element) {
    case Element::S8:
        return static_cast<s8>(code);
    case Element::U8:
        return static_cast<s32>(code & 0xff);
    case Element::S4:
        return static_cast<s32>(code << 28) >> 28;
    case Element::U4:
        return static_cast<s32>(code & 15);
    default:
        return static_cast<s32>(code & 1);
    }
}

// Calls f(lane, register, element of it, row, k) for A.
template <class F>
void for_a(const Product& p, F f) {
    int per = p.per(), halves = p.m / 8;
    for (u32 r = 0; r < p.a_registers(); ++r)
        for (int lane = 0; lane < kLanes; ++lane)
            for (int j = 0; j < per; ++j) {
                int row = lane / 4 + 8 * (static_cast<int>(r) % halves);
                f(lane, r, j, row, static_cast<int>(r) / halves * 4 * per + lane % 4 * per + j);
            }
}

template <class F>
void for_b(const Product& p, F f) {
    int per = p.per();
    for (u32 r = 0; r < p.b_registers(); ++r)
        for (int lane = 0; lane < kLanes; ++lane)
            for (int j = 0; j < per; ++j)
                f(lane, r, j, static_cast<int>(r) * 4 * per + lane % 4 * per + j, lane / 4);
}

// Where element i of a lane lies in C and D.
inline int place_of(int lane, int i) {
    return (lane / 4 + 8 * (i >> 1)) * 8 + lane % 4 * 2 + (i & 1);
}

// Operands as one number each; extras: registers of d, a, b, c
template <class T, class F>
void load_operands(Warp& w, const Inst& in, const Product& p, std::pair<T*, T*> to, F element) {
    u32 first = p.d_registers();
    int bits = p.bits();
    for_a(p, [&](int lane, u32 r, int j, int row, int k) {
        to.first[row * p.k + k] = element(w.row<u32>(w.extra(in, first + r))[lane] >> (bits* j % 32), p.a);
    });
    first += p.a_registers();
    for_b(p, [&](int lane, u32 r, int j, int k, int column) {
        to.second[k * 8 + column] = element(w.row<u32>(w.extra(in, first + r))[lane] >> (bits* j % 32), p.b);
    });
}

void count(Warp& w, const Product& p) {
    ++w.machine->counters.mma;
    w.machine->counters.macs += static_cast<u64>(p.m * 8 * p.k);
}

void exec_float(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    Product p = unpack(in);
    float a[16 * 32], b[32 * 8], c[16 * 8];
    load_operands<float>(w, in, p, {a, b}, float_element);
    u32 first = p.d_registers() + p.a_registers() + p.b_registers();
    for (int lane = 0; lane < kLanes; ++lane)
        for (int i = 0; i < 4; ++i) {
            u32 cell = w.row<u32>(w.extra(in, first + static_cast<u32>(p.half_c ? i / 2 : i)))[lane];
            c[place_of(lane, i)] = p.half_c ? f16_to_float(cell >> (16 * (i & 1)) & 0xffff) : bits<float>(cell);
        }
    product_add(w, c, a, b, {16, 8, p.k, type_of(p.a), true});
    for (u32 r = 0; r < p.d_registers(); ++r)
        write_lanes(w.row<u32>(w.extra(in, r)), together, [&](int lane) {
            int i = static_cast<int>(r);
            if (!p.half_d)
                return bits<u32>(c[place_of(lane, i)]);
            return float_to_f16(c[place_of(lane, 2 * i)]) | float_to_f16(c[place_of(lane, 2 * i + 1)]) << 16;
        });
    count(w, p);
}

// One element of D: exact, then saturated or cut to 32 bits.
u32 integer_sum(const Product& p, const s32* a, const s32* b, s32 c) {
    s64 sum = c;
    if (p.a == Element::B1)
        for (int k = 0; k < p.k; ++k)
            sum += p.intersects ? a[k] & b[k * 8] : a[k] ^ b[k * 8];
    else
        for (int k = 0; k < p.k; ++k)
            sum += s64{a[k]} * b[k * 8];
    if (p.saturate)
        sum = std::clamp<s64>(sum, INT32_MIN, INT32_MAX);
    return static_cast<u32>(sum);
}

void exec_integer(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    Product p = unpack(in);
    s32 a[16 * kMaxK], b[kMaxK * 8];
    load_operands<s32>(w, in, p, {a, b}, integer_element);
    u32 first = p.d_registers() + p.a_registers() + p.b_registers(), result[4][kLanes];
    for (u32 r = 0; r < p.d_registers(); ++r)
        for (int lane = 0; lane < kLanes; ++lane) {
            int at = place_of(lane, static_cast<int>(r));
            s32 c = static_cast<s32>(w.row<u32>(w.extra(in, first + r))[lane]);
            result[r][lane] = integer_sum(p, a + at / 8 * p.k, b + at % 8, c);
        }
    for (u32 r = 0; r < p.d_registers(); ++r)
        write_lanes(w.row<u32>(w.extra(in, r)), together, [&](int lane) { return result[r][lane]; });
    count(w, p);
}

// In double every step is a fused one, in the order of k.
void exec_double(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    Product p = unpack(in);
    double a[16 * 16], b[16 * 8];
    u32 first = p.d_registers();
    for_a(p, [&](int lane, u32 r, int, int row, int k) {
        a[row * p.k + k] = bits<double>(w.row<u64>(w.extra(in, first + r))[lane]);
    });
    first += p.a_registers();
    for_b(p, [&](int lane, u32 r, int, int k, int column) {
        b[k * 8 + column] = bits<double>(w.row<u64>(w.extra(in, first + r))[lane]);
    });
    first += p.b_registers();
    u64 result[4][kLanes];
    for (u32 r = 0; r < p.d_registers(); ++r)
        for (int lane = 0; lane < kLanes; ++lane) {
            int at = place_of(lane, static_cast<int>(r));
            double sum = bits<double>(w.row<u64>(w.extra(in, first + r))[lane]);
            for (int k = 0; k < p.k; ++k)
                sum = std::fma(a[at / 8 * p.k + k], b[k * 8 + at % 8], sum);
            result[r][lane] = bits<u64>(sum);
        }
    for (u32 r = 0; r < p.d_registers(); ++r)
        write_lanes(w.row<u64>(w.extra(in, r)), together, [&](int lane) { return result[r][lane]; });
    count(w, p);
}

// ---- decoding

struct Form {
    Element element;
    int m, k; // the smallest k; twice and four times that where there are more
    int ks;
};
constexpr Form kForms[] = {{Element::F64, 8, 4, 1}, {Element::F64, 16, 4, 3}, {Element::TF32, 16, 4, 2},
    {Element::F16, 16, 8, 2}, {Element::BF16, 16, 8, 2}, {Element::E4M3, 16, 16, 2}, {Element::E5M2, 16, 16, 2},
    {Element::S8, 8, 16, 1}, {Element::S8, 16, 16, 2}, {Element::U8, 8, 16, 1}, {Element::U8, 16, 16, 2},
    {Element::S4, 8, 32, 1}, {Element::S4, 16, 32, 2}, {Element::U4, 8, 32, 1}, {Element::U4, 16, 32, 2},
    {Element::B1, 8, 128, 1}, {Element::B1, 16, 128, 2}};

Element take_element(Builder& b) {
    constexpr const char* kNames[] = {"f64", "tf32", "f16", "bf16", "e4m3", "e5m2", "s8", "u8", "s4", "u4", "b1"};
    std::string name = b.take_next();
    for (u8 i = 0; i < 11; ++i)
        if (name == kNames[i])
            return static_cast<Element>(i);
    b.fail("elements of type ." + name + " are not modelled");
}

void take_shape(Builder& b, Product& p) {
    std::string shape = b.take_next();
    size_t at = shape.find("n8k");
    if (at == std::string::npos || at < 2 || shape[0] != 'm')
        b.fail("the shape " + shape + " is not modelled");
    p.m = std::atoi(shape.c_str() + 1), p.k = std::atoi(shape.c_str() + at + 3);
}

bool pairs_fit(const Product& p) {
    auto is_eight = [](Element e) { return e == Element::E4M3 || e == Element::E5M2; };
    bool both_eight = is_eight(p.a) && is_eight(p.b);
    bool integers = p.a >= Element::S8 && p.a < Element::B1 && p.b >= Element::S8 && p.b < Element::B1;
    Product other = p;
    other.a = p.b;
    return p.a == p.b || both_eight || (integers && p.bits() == other.bits());
}

void check_form(Builder& b, const Product& p, Type c, Type d) {
    bool is_known = false;
    for (const Form& form : kForms)
        for (int i = 0; i < form.ks; ++i)
            is_known |= form.element == p.a && form.m == p.m && form.k << i == p.k;
    bool halves = p.a == Element::F16 || p.a == Element::E4M3 || p.a == Element::E5M2;
    auto fits = [&](Type type) {
        if (p.a == Element::F64)
            return type == Type::F64;
        if (p.a >= Element::S8)
            return type == Type::S32;
        return type == Type::F32 || (halves && type == Type::F16);
    };
    if (!is_known || !pairs_fit(p) || !fits(c) || !fits(d))
        b.fail("this combination of shape and types is not modelled");
    if (p.saturate && (p.a < Element::S8 || p.a == Element::B1))
        b.fail(".satfinite is for integers");
}

void take_registers(Builder& b, size_t operand, u32 wanted, Type type) {
    const Operand& given = b.at(operand);
    bool is_vector = given.kind == Operand::Kind::Vector;
    size_t count = is_vector ? given.parts.size() : 1;
    if (count != wanted)
        b.fail("operand " + std::to_string(operand + 1) + ": wanted " + std::to_string(wanted) + " registers, found " +
               std::to_string(count));
    for (size_t i = 0; i < count; ++i) {
        const Operand& one = is_vector ? given.parts[i] : given;
        operand == 0 ? b.def_extra(one, type) : b.use_extra(one, type);
    }
}

void build_mma(Builder& b) {
    if (b.take_any({"sp", "sp::ordered_metadata"}))
        b.fail("sparse products are not modelled");
    if (!b.take("sync") || !b.take("aligned"))
        b.fail("wanted .sync.aligned");
    Product p{};
    take_shape(b, p);
    if (b.take_next() != "row" || b.take_next() != "col")
        b.fail("wanted .row.col");
    p.saturate = b.take("satfinite");
    bool counts = b.take("popc");
    std::string how = b.take_of({"xor", "and"});
    p.intersects = how == "and";
    Type d = b.take_type();
    p.a = take_element(b), p.b = take_element(b);
    Type c = b.take_type();
    p.half_c = c == Type::F16, p.half_d = d == Type::F16;
    check_form(b, p, c, d);
    if (counts != (p.a == Element::B1) || how.empty() == counts)
        b.fail("products of single bits want .xor.popc or .and.popc, others do not");
    b.want(4, 4);
    Type type = p.a == Element::F64 ? Type::B64 : Type::B32;
    const u32 counts_of[] = {p.d_registers(), p.a_registers(), p.b_registers(), p.c_registers()};
    for (size_t i = 0; i < 4; ++i)
        take_registers(b, i, counts_of[i], type);
    pack(b.in, p);
    b.emit(p.a == Element::F64 ? exec_double : p.a >= Element::S8 ? exec_integer : exec_float);
}

} // namespace

void register_mma(Table& table) {
    table["mma"] = build_mma;
}

} // namespace deep_gemm_k3::emulator
