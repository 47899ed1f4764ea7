// Warp-synchronous instructions: shuffle, vote, match, reduce, elect, warp barrier.
#include "ops.hpp"
#include "races.hpp"

namespace deep_gemm_k3::emulator {

namespace {

// Lanes that come with different member masks, as tiles of a warp do, are groups of their own: `run` executes each.
// Where a group still waits for lanes, the others leave it and try again on their own.
bool apart(Warp& w, const Inst& in, u32 m, const u32* members, Handler run) {
    u32 first = members[first_lane(m)];
    if (!(m & mask_of([&](int i) { return members[i] != first; })))
        return false;
    u32 groups[kLanes], count = 0;
    bool is_complete = true;
    for (u32 left = m; left; left &= ~groups[count++]) {
        u32 mask = members[first_lane(left)];
        groups[count] = left & mask_of([&](int i) { return members[i] == mask; });
        is_complete &= (mask & w.live & ~groups[count]) == 0;
    }
    if (is_complete) {
        for (u32 i = 0; i < count; ++i)
            run(w, in, groups[i]);
        return true;
    }
    u32 others = m & ~groups[0];
    w.new_split(w.pc - 1, others, w.node);
    w.mask &= ~others;
    run(w, in, groups[0]);
    return true;
}

// Brings the lanes of the member mask together; `together` are the lanes that execute. False: blocked, or done by
// `run`.
bool gather(Warp& w, const Inst& in, u32 m, Ref members, u32& together, Handler run) {
    const u32* masks = w.row<u32>(members);
    return !apart(w, in, m, masks, run) && meet(w, in, m, masks[first_lane(m)], together);
}

enum Shuffle : u16 { kUp, kDown, kBfly, kIdx };

void exec_shfl(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!gather(w, in, m, w.extra(in, 0), together, exec_shfl))
        return;
    u32 value[kLanes];
    std::memcpy(value, w.row<u32>(in.a), sizeof(value));
    const u32 *b = w.row<u32>(in.b), *c = w.row<u32>(in.c);
    u32 valid = 0;
    write_lanes(w.row<u32>(in.dst), together, [&](int lane) {
        int clamp = static_cast<int>(c[lane] & 0x1f), segment = static_cast<int>(c[lane] >> 8 & 0x1f);
        int last = (lane & segment) | (clamp & ~segment & 0x1f), first = lane & segment,
            by = static_cast<int>(b[lane] & 0x1f), from = lane;
        bool ok = true;
        switch (in.mode) {
        case kUp:
            from = lane - by, ok = from >= last;
            break;
        case kDown:
            from = lane + by, ok = from <= last;
            break;
        case kBfly:
            from = lane ^ by, ok = from <= last;
            break;
        default:
            from = first | (by & ~segment & 0x1f), ok = from <= last;
        }
        if (!ok)
            from = lane;
        valid |= ok ? 1u << lane : 0;
        return value[from & 31];
    });
    if (in.n == 2)
        w.set_predicate(in.d, together, valid);
}

void build_shfl(Builder& b) {
    if (!b.take("sync"))
        b.fail("only shfl.sync");
    std::string name = b.take_of({"up", "down", "bfly", "idx"});
    if (name.empty())
        b.fail("unknown mode");
    if (b.take_type() != Type::B32)
        b.fail("only .b32");
    b.want(5, 5);
    const Operand& first = b.at(0);
    bool pair = first.kind == Operand::Kind::Pair;
    b.def(&Inst::dst, pair ? first.parts[0] : first, Type::B32);
    if (pair)
        b.def(&Inst::d, first.parts[1], Type::Pred);
    b.use(&Inst::a, b.at(1), Type::B32);
    b.use(&Inst::b, b.at(2), Type::B32);
    b.use(&Inst::c, b.at(3), Type::B32);
    b.use_extra(b.at(4), Type::B32);
    b.in.n = pair ? 2 : 1;
    b.in.mode = name == "up" ? kUp : name == "down" ? kDown : name == "bfly" ? kBfly : kIdx;
    b.emit(exec_shfl);
}

enum Vote : u16 { kAll, kAny, kUni, kBallot };

void exec_vote(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!gather(w, in, m, in.b, together, exec_vote))
        return;
    u32 p = w.predicate(in.a) & together;
    if (in.mode == kBallot)
        return write_lanes(w.row<u32>(in.dst), together, [&](int) { return p; });
    bool result = in.mode == kAll ? p == together : in.mode == kAny ? p != 0 : p == 0 || p == together;
    w.set_predicate(in.dst, together, result ? kFullMask : 0);
}

void build_vote(Builder& b) {
    if (!b.take("sync"))
        b.fail("only vote.sync");
    std::string name = b.take_of({"all", "any", "uni", "ballot"});
    if (name.empty())
        b.fail("unknown mode");
    Type type = b.take_type();
    if ((name == "ballot") != (type == Type::B32))
        b.fail("type does not fit the mode");
    b.want(3, 3);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), Type::Pred);
    b.use(&Inst::b, b.at(2), Type::B32);
    b.in.mode = name == "all" ? kAll : name == "any" ? kAny : name == "uni" ? kUni : kBallot;
    b.emit(exec_vote);
}

template <class T>
void exec_match(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!gather(w, in, m, in.b, together, exec_match<T>))
        return;
    T value[kLanes];
    std::memcpy(value, w.row<T>(in.a), sizeof(value));
    if (in.mode == 0) {
        return write_active(w.row<u32>(in.dst), together,
            [&](int i) { return together & mask_of([&](int j) { return value[j] == value[i]; }); });
    }
    u32 same = mask_of([&](int j) { return value[j] == value[first_lane(together)]; });
    bool all = (same & together) == together;
    write_lanes(w.row<u32>(in.dst), together, [&](int) { return all ? together : 0u; });
    if (in.n == 2)
        w.set_predicate(in.d, together, all ? kFullMask : 0);
}

void build_match(Builder& b) {
    bool any = b.take("any");
    if (!any && !b.take("all"))
        b.fail("wanted .any or .all");
    if (!b.take("sync"))
        b.fail("wanted .sync");
    Type type = b.take_type();
    b.want(3, 3);
    const Operand& first = b.at(0);
    bool pair = first.kind == Operand::Kind::Pair;
    b.def(&Inst::dst, pair ? first.parts[0] : first, Type::B32);
    if (pair)
        b.def(&Inst::d, first.parts[1], Type::Pred);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), Type::B32);
    b.in.n = pair ? 2 : 1;
    b.in.mode = any ? 0 : 1;
    if (type != Type::B32 && type != Type::B64)
        b.fail("only .b32 and .b64");
    b.emit(type_size(type) == 8 ? exec_match<u64> : exec_match<u32>);
}

enum Reduce : u16 { kAdd, kMin, kMax, kAnd, kOr, kXor, kFloatMin, kFloatMax };

void exec_redux(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!gather(w, in, m, in.b, together, exec_redux))
        return;
    const u32* a = w.row<u32>(in.a);
    u16 op = in.mode & 15;
    bool is_signed = in.mode & 16, by_magnitude = in.mode & 32, keep_nan = in.mode & 64;
    u32 result = 0;
    bool first = true, nan = false;
    for (u32 left = together; left; left &= left - 1) {
        u32 x = a[first_lane(left)];
        if (op >= kFloatMin) {
            if (by_magnitude)
                x &= 0x7fffffffu;
            if (bits<float>(x) != bits<float>(x)) {
                nan = true;
                continue;
            }
        }
        if (first) {
            result = x, first = false;
            continue;
        }
        bool less = is_signed         ? static_cast<s32>(x) < static_cast<s32>(result)
                    : op >= kFloatMin ? bits<float>(x) < bits<float>(result)
                                      : x < result;
        switch (op) {
        case kAdd:
            result += x;
            break;
        case kMin:
        case kFloatMin:
            result = less ? x : result;
            break;
        case kMax:
        case kFloatMax:
            result = less || x == result ? result : x;
            break;
        case kAnd:
            result &= x;
            break;
        case kOr:
            result |= x;
            break;
        default:
            result ^= x;
        }
    }
    if (op >= kFloatMin && (first || (nan && keep_nan)))
        result = 0x7fffffff;
    write_lanes(w.row<u32>(in.dst), together, [&](int) { return result; });
}

void build_redux(Builder& b) {
    if (!b.take("sync"))
        b.fail("wanted .sync");
    std::string name = b.take_of({"add", "min", "max", "and", "or", "xor"});
    bool magnitude = b.take("abs"), nan = b.take("NaN");
    Type type = b.take_type();
    constexpr const char* kNames[] = {"add", "min", "max", "and", "or", "xor"};
    u16 op = 0;
    while (op < 6 && name != kNames[op])
        ++op;
    if (op == 6)
        b.fail("unknown operation");
    bool is_float = type == Type::F32, is_extreme = op == kMin || op == kMax;
    bool fits = op >= kAnd ? type == Type::B32 : is_float ? is_extreme : type == Type::U32 || type == Type::S32;
    if (!fits || ((magnitude || nan) && !is_float))
        b.fail("this operation does not exist for this type");
    if (is_float)
        op = name == "min" ? kFloatMin : kFloatMax;
    b.want(3, 3);
    b.def(&Inst::dst, b.at(0), Type::B32);
    b.use(&Inst::a, b.at(1), Type::B32);
    b.use(&Inst::b, b.at(2), Type::B32);
    b.in.mode = static_cast<u16>(op | (type == Type::S32 ? 16 : 0) | (magnitude ? 32 : 0) | (nan ? 64 : 0));
    b.emit(exec_redux);
}

void exec_elect(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!gather(w, in, m, in.b, together, exec_elect))
        return;
    u32 leader = static_cast<u32>(first_lane(together));
    write_lanes(w.row<u32>(in.dst), together, [&](int) { return leader; });
    w.set_predicate(in.d, together, 1u << leader);
}

void build_elect(Builder& b) {
    if (!b.take("sync"))
        b.fail("wanted .sync");
    b.want(2, 2);
    if (b.at(0).kind != Operand::Kind::Pair)
        b.fail("wanted d|p");
    b.def(&Inst::dst, b.at(0).parts[0], Type::B32);
    b.def(&Inst::d, b.at(0).parts[1], Type::Pred);
    b.use(&Inst::b, b.at(1), Type::B32);
    b.emit(exec_elect);
}

} // namespace

void exec_warp_barrier(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (gather(w, in, m, in.b, together, exec_warp_barrier) && w.machine->races)
        w.machine->races->order_lanes(w, together);
}

void register_warp(Table& table) {
    table["shfl"] = build_shfl;
    table["vote"] = build_vote;
    table["match"] = build_match;
    table["redux"] = build_redux;
    table["elect"] = build_elect;
}

} // namespace deep_gemm_k3::emulator
