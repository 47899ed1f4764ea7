#include "async.hpp"

#include "races.hpp"

namespace deep_gemm_k3::emulator {

std::shared_ptr<AsyncGroup> open_group(Groups& groups, int lane) {
    LaneGroups& mine = groups[static_cast<u32>(lane)];
    if (!mine.open)
        mine.open = std::make_shared<AsyncGroup>();
    return mine.open;
}

void commit_groups(Groups& groups, u32 m) {
    auto empty = std::make_shared<AsyncGroup>();
    for (u32 left = m; left; left &= left - 1) {
        LaneGroups& mine = groups[static_cast<u32>(first_lane(left))];
        mine.committed.push_back(mine.open ? mine.open : empty);
        mine.open = nullptr;
    }
}

bool wait_groups(Warp& w, Groups& groups, u32 m, u32 keep, bool reads_only, const char* what) {
    u32 stamp = 0;
    for (u32 left = m; left; left &= left - 1) {
        auto found = groups.find(static_cast<u32>(first_lane(left)));
        if (found == groups.end())
            continue;
        LaneGroups& mine = found->second;
        auto& list = mine.committed;
        while (!list.empty() && !list.front()->pending) {
            mine.done_stamp = std::max(mine.done_stamp, list.front()->last_stamp);
            list.pop_front();
        }
        stamp = std::max(stamp, mine.done_stamp);
        for (size_t i = 0; i + keep < list.size(); ++i) {
            AsyncGroup& group = *list[i];
            stamp = std::max(stamp, group.last_stamp);
            if (!(reads_only ? group.pending_reads : group.pending))
                continue;
            group.waiters.emplace_back(&w, w.current);
            w.block(what, 0, 0);
            return false;
        }
    }
    if (w.machine->races)
        w.machine->races->async_done(w, w.id, stamp, reads_only);
    ++w.effects;
    return true;
}

const char* reduce_name(ReduceOp op) {
    constexpr const char* kNames[] = {"", "add", "min", "max", "inc", "dec", "and", "or", "xor"};
    return kNames[static_cast<u8>(op)];
}

bool reduce_exists(ReduceOp op, Type type) {
    bool is_half = type == Type::F16 || type == Type::BF16, is_unsigned = type == Type::U32 || type == Type::U64;
    switch (op) {
    case ReduceOp::Add:
        return is_unsigned || is_half || type == Type::S32 || type == Type::F32 || type == Type::F64;
    case ReduceOp::Min:
    case ReduceOp::Max:
        return is_unsigned || is_half || type == Type::S32 || type == Type::S64;
    case ReduceOp::Inc:
    case ReduceOp::Dec:
        return type == Type::U32;
    default:
        return type == Type::B32 || type == Type::B64;
    }
}

ReduceOp take_reduce(Builder& b) {
    for (u8 i = 1; i < 9; ++i)
        if (b.take(reduce_name(static_cast<ReduceOp>(i))))
            return static_cast<ReduceOp>(i);
    b.fail("no operation");
}

namespace {

template <class T, class F>
void each(u8* memory, const u8* values, u64 bytes, F f) {
    for (u64 i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
        T x, y;
        std::memcpy(&x, memory + i, sizeof(T)), std::memcpy(&y, values + i, sizeof(T));
        T z = static_cast<T>(f(x, y));
        std::memcpy(memory + i, &z, sizeof(T));
    }
}

template <class T>
void reduce_typed(u8* memory, const u8* values, u64 bytes, ReduceOp op) {
    each<T>(memory, values, bytes, [&](T x, T y) -> T {
        switch (op) {
        case ReduceOp::Min:
            return x < y ? x : y;
        case ReduceOp::Max:
            return x > y ? x : y;
        default:
            break;
        }
        if constexpr (std::is_integral_v<T>) {
            switch (op) {
            case ReduceOp::Add:
                return static_cast<T>(
                    static_cast<std::make_unsigned_t<T>>(x) + static_cast<std::make_unsigned_t<T>>(y));
            case ReduceOp::Inc:
                return x >= y ? T{0} : static_cast<T>(x + 1);
            case ReduceOp::Dec:
                return x == 0 || x > y ? y : static_cast<T>(x - 1);
            case ReduceOp::And:
                return x & y;
            case ReduceOp::Or:
                return x | y;
            default:
                return x ^ y;
            }
        } else {
            return x + y;
        }
    });
}

void reduce_half(u8* memory, const u8* values, u64 bytes, ReduceOp op, bool is_f16) {
    each<u16>(memory, values, bytes, [&](u16 p, u16 q) {
        float x = is_f16 ? f16_to_float(p) : bf16_to_float(p), y = is_f16 ? f16_to_float(q) : bf16_to_float(q);
        float r = op == ReduceOp::Add ? x + y : op == ReduceOp::Min ? (x < y ? x : y) : (x > y ? x : y);
        return is_f16 ? float_to_f16(r) : float_to_bf16(r);
    });
}

} // namespace

void reduce_bytes(u8* memory, const u8* values, u64 bytes, ReduceOp op, Type type) {
    switch (type) {
    case Type::F16:
    case Type::F16x2:
        return reduce_half(memory, values, bytes, op, true);
    case Type::BF16:
    case Type::BF16x2:
        return reduce_half(memory, values, bytes, op, false);
    case Type::F32:
        return reduce_typed<float>(memory, values, bytes, op);
    case Type::F64:
        return reduce_typed<double>(memory, values, bytes, op);
    case Type::S32:
        return reduce_typed<s32>(memory, values, bytes, op);
    case Type::S64:
        return reduce_typed<s64>(memory, values, bytes, op);
    case Type::U64:
    case Type::B64:
        return reduce_typed<u64>(memory, values, bytes, op);
    case Type::U16:
    case Type::B16:
        return reduce_typed<u16>(memory, values, bytes, op);
    case Type::U8:
    case Type::B8:
        return reduce_typed<u8>(memory, values, bytes, op);
    default:
        return reduce_typed<u32>(memory, values, bytes, op);
    }
}

namespace {

void check_readers(Cta& cta, u32 offset, u64 bytes) {
    if (!cta.reader_count)
        return;
    for (u64 piece = offset / 16; piece <= (offset + bytes - 1) / 16; ++piece)
        if (cta.readers[piece]) {
            Warp& w = *cta.warps[0];
            w.machine->report("overwrite-in-flight",
                "a copy writes shared memory at offset " + std::to_string(piece * 16) + " of CTA rank " +
                    std::to_string(cta.rank) + " that a matrix instruction may still read, in " +
                    w.program->function->name);
            return;
        }
}

} // namespace

void note_shared_write(Cta& cta, u32 offset, u64 bytes) {
    check_readers(cta, offset, bytes);
    std::memset(cta.written.data() + offset, 1, bytes);
}

void write_shared(Cta& cta, u32 offset, const u8* from, u64 bytes) {
    std::memcpy(cta.shared.data() + offset, from, bytes);
    note_shared_write(cta, offset, bytes);
}

std::unique_ptr<AsyncOp> new_op(Warp& w, const char* what, bool is_generic) {
    auto op = std::make_unique<AsyncOp>();
    op->cta = w.cta;
    op->what = what;
    op->pc = w.pc - 1;
    op->role = w.role;
    if (w.machine->races)
        op->stamp = w.machine->races->issue(w), op->stamp->is_generic = is_generic;
    return op;
}

std::vector<Cta*> multicast_targets(Warp& w, u32 mask) {
    std::vector<Cta*> out;
    Cluster& cluster = *w.cta->cluster;
    for (u32 left = mask; left; left &= left - 1) {
        u32 rank = static_cast<u32>(first_lane(left));
        if (rank >= cluster.ctas.size())
            throw Fault("out-of-bounds",
                "multicast to CTA " + std::to_string(rank) + " of a cluster of " + std::to_string(cluster.ctas.size()));
        out.push_back(cluster.ctas[rank]);
    }
    return out;
}

} // namespace deep_gemm_k3::emulator
