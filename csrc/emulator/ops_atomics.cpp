// atom and red: every operation, type and vector width.
#include "ordering.hpp"

namespace deep_gemm_k3::emulator {

namespace {

enum AtomicOp : u8 { kAdd, kMin, kMax, kInc, kDec, kExch, kCas, kAnd, kOr, kXor };
constexpr const char* kNames[] = {"add", "min", "max", "inc", "dec", "exch", "cas", "and", "or", "xor"};

bool is_half(Type type) {
    return type == Type::F16 || type == Type::BF16 || type == Type::F16x2 || type == Type::BF16x2;
}

// Which types an operation has, alone and in vectors.
bool exists(AtomicOp op, Type type, u32 count) {
    int size = type_size(type);
    if (count > 1)
        return is_half(type) ? op <= kMax && size * count <= 16 : op == kAdd && type == Type::F32 && count <= 4;
    switch (op) {
    case kAdd:
        return type == Type::U32 || type == Type::S32 || type == Type::U64 || type == Type::F32 || type == Type::F64 ||
               is_half(type);
    case kMin:
    case kMax:
        return type == Type::U32 || type == Type::S32 || type == Type::U64 || type == Type::S64;
    case kInc:
    case kDec:
        return type == Type::U32;
    case kCas:
        return type == Type::B16 || type == Type::B32 || type == Type::B64 || type == Type::B128;
    case kExch:
        return type == Type::B32 || type == Type::B64 || type == Type::B128;
    default:
        return type == Type::B32 || type == Type::B64;
    }
}

template <class T>
T apply_float(AtomicOp op, T old, T value) {
    if (op == kAdd)
        return old + value;
    if (old != old)
        return value;
    if (value != value)
        return old;
    return op == kMin ? (value < old ? value : old) : (value > old ? value : old);
}

u32 apply_half(AtomicOp op, u32 old, u32 value, bool is_f16) {
    float x = is_f16 ? f16_to_float(old) : bf16_to_float(old), y = is_f16 ? f16_to_float(value) : bf16_to_float(value);
    float r = apply_float(op, x, y);
    return is_f16 ? float_to_f16(r) : float_to_bf16(r);
}

template <class T>
u64 apply_integer(AtomicOp op, u64 old, u64 value) {
    T x = static_cast<T>(old), y = static_cast<T>(value);
    switch (op) {
    case kAdd:
        return static_cast<std::make_unsigned_t<T>>(
            static_cast<std::make_unsigned_t<T>>(x) + static_cast<std::make_unsigned_t<T>>(y));
    case kMin:
        return static_cast<u64>(x < y ? x : y);
    case kMax:
        return static_cast<u64>(x > y ? x : y);
    case kInc:
        return static_cast<u64>(x >= y ? T{0} : static_cast<T>(x + 1));
    case kDec:
        return static_cast<u64>(x == 0 || x > y ? y : static_cast<T>(x - 1));
    case kAnd:
        return old & value;
    case kOr:
        return old | value;
    case kXor:
        return old ^ value;
    default:
        return value;
    }
}

u64 apply(AtomicOp op, Type type, u64 old, u64 value) {
    switch (type) {
    case Type::F32:
        if (op != kExch)
            return bits<u32>(apply_float(op, bits<float>(static_cast<u32>(old)), bits<float>(static_cast<u32>(value))));
        break;
    case Type::F64:
        if (op != kExch)
            return bits<u64>(apply_float(op, bits<double>(old), bits<double>(value)));
        break;
    case Type::F16:
        return apply_half(op, old & 0xffff, value & 0xffff, true);
    case Type::BF16:
        return apply_half(op, old & 0xffff, value & 0xffff, false);
    case Type::F16x2:
    case Type::BF16x2: {
        bool f16 = type == Type::F16x2;
        return apply_half(op, old & 0xffff, value & 0xffff, f16) |
               apply_half(op, old >> 16 & 0xffff, value >> 16 & 0xffff, f16) << 16;
    }
    case Type::S32:
        return static_cast<u32>(apply_integer<s32>(op, old, value));
    case Type::S64:
        return apply_integer<s64>(op, old, value);
    case Type::U64:
    case Type::B64:
        return apply_integer<u64>(op, old, value);
    default:
        break;
    }
    return static_cast<u32>(apply_integer<u32>(op, old, value));
}

u64 read_row(Warp& w, Ref ref, int lane, u32 size) {
    return size == 8 ? w.row<u64>(ref)[lane] : w.row<u32>(ref)[lane];
}

// One step that other processes cannot come between: f(old, mask of the size) replaces what lies at p; returns the old.
template <class T, class F>
u64 update_typed(u8* p, F f) {
    T* place = reinterpret_cast<T*>(p);
    T old = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(
        place, &old, static_cast<T>(f(old, static_cast<T>(~T{0}))), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    return old;
}

template <class F>
u64 update(u8* p, u32 size, F f) {
    return size == 8 ? update_typed<u64>(p, f) : size == 4 ? update_typed<u32>(p, f) : update_typed<u16>(p, f);
}

// imm holds the offset; n vector elements; mode as for loads; extras: op, type, returns, then rows (d.., b.., c)
void exec_atomic(Warp& w, const Inst& in, u32 m) {
    AtomicOp op = static_cast<AtomicOp>(w.extra(in, 0));
    Type type = static_cast<Type>(w.extra(in, 1));
    bool returns = w.extra(in, 2);
    u32 size = static_cast<u32>(type_size(type)), n = in.n, bytes = size * n, at = returns ? 3 + n : 3;
    bool changed = false;
    u64 hash = 0;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u64 address = w.address(in.a, i) + static_cast<u64>(in.imm);
        u8* p = resolve(w, in.space, address, bytes, Access::Atomic, i);
        if (w.machine->races)
            note_access(w, in.mode, p, bytes, Access::Atomic, i);
        for (u32 k = 0; k < n; ++k) {
            u64 value = read_row(w, w.extra(in, at + k), i, size);
            u64 swap = op == kCas ? read_row(w, w.extra(in, at + n), i, size) : 0, fresh = 0;
            u64 old = update(p + k * size, size, [&](u64 now, u64 mask) {
                fresh = op != kCas ? apply(op, type, now, value) : now == (value & mask) ? swap : now;
                return fresh &= mask;
            });
            changed |= fresh != old;
            hash = hash * 0x9e3779b97f4a7c15ull + old + address;
            if (!returns)
                continue;
            if (size == 8)
                w.row<u64>(w.extra(in, 3 + k))[i] = old;
            else
                w.row<u32>(w.extra(in, 3 + k))[i] = static_cast<u32>(old);
        }
    }
    ++w.machine->counters.atomics;
    if (scope_of(in.mode) == Scope::Sys)
        ++w.machine->counters.system_operations;
    if (changed)
        w.machine->touch(w);
    else
        note_poll(w, hash);
}

void exec_atomic_wide(Warp& w, const Inst& in, u32 m) { // .b128 exch and cas
    AtomicOp op = static_cast<AtomicOp>(w.extra(in, 0));
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u8* p = resolve(w, in.space, w.address(in.a, i) + static_cast<u64>(in.imm), 16, Access::Atomic, i);
        if (w.machine->races)
            note_access(w, in.mode, p, 16, Access::Atomic, i);
        Vec128 old, value = w.row<Vec128>(w.extra(in, 4))[i];
        std::memcpy(&old, p, 16);
        bool equal = old.lo == value.lo && old.hi == value.hi;
        if (op == kExch)
            std::memcpy(p, &value, 16);
        else if (equal)
            std::memcpy(p, &w.row<Vec128>(w.extra(in, 5))[i], 16);
        w.row<Vec128>(w.extra(in, 3))[i] = old;
    }
    ++w.machine->counters.atomics;
    w.machine->touch(w);
}

void build_atomic(Builder& b) {
    bool returns = b.s.op == "atom";
    bool is_async = !returns && b.take("async");
    if (is_async)
        return build_red_async(b);
    u16 mode = take_ordering(b, Order::Relaxed, Scope::Gpu);
    if (returns)
        want_order(b, mode, {Order::Relaxed, Order::Acquire, Order::Release, Order::AcqRel});
    else
        want_order(b, mode, {Order::Relaxed, Order::Release});
    bool hint = take_cache_hints(b);
    Space space = take_space(b, Space::Generic);
    std::string name = b.take_of({"add", "min", "max", "inc", "dec", "exch", "cas", "and", "or", "xor"});
    if (name.empty())
        b.fail("no operation");
    bool noftz = b.take("noftz");
    std::string vector = b.take_of({"v2", "v4", "v8"});
    u32 n = vector.empty() ? 1 : static_cast<u32>(vector[1] - '0');
    Type type = b.take_type();
    u32 op = 0;
    while (name != kNames[op])
        ++op;
    bool is_exchange = op == kExch || op == kCas;
    if (!exists(static_cast<AtomicOp>(op), type, n) || noftz != is_half(type) || (is_exchange && !returns))
        b.fail("this operation does not exist for this type");
    size_t first = returns ? 1 : 0, count = first + 2 + (op == kCas ? 1 : 0) + (hint ? 1 : 0);
    b.want(count, count);
    b.in.mode = mode;
    b.in.space = space;
    b.in.n = static_cast<u8>(n);
    b.address(&Inst::a, b.at(first));
    b.constant_extra(op);
    b.constant_extra(static_cast<u32>(type));
    b.constant_extra(returns);
    auto element = [&](const Operand& operand, u32 k) -> const Operand& {
        if (n == 1)
            return operand;
        if (operand.kind != Operand::Kind::Vector || operand.parts.size() != n)
            b.fail("wanted a vector operand");
        return operand.parts[k];
    };
    for (u32 k = 0; returns && k < n; ++k)
        b.def_extra(element(b.at(0), k), type);
    for (u32 k = 0; k < n; ++k)
        b.use_extra(element(b.at(first + 1), k), type);
    if (op == kCas)
        b.use_extra(b.at(first + 2), type);
    b.emit(type_size(type) == 16 ? exec_atomic_wide : exec_atomic);
}

} // namespace

void register_atomics(Table& table) {
    table["atom"] = table["red"] = build_atomic;
}

} // namespace deep_gemm_k3::emulator
