// Bulk copies, ordinary asynchronous copies, their groups, and asynchronous stores.
#include "async.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr u16 kMulticast = 1, kToGlobal = 2, kFromShared = 4, kByteMask = 8;

void check_aligned(Warp& w, u64 address, u64 bytes) {
    if (address & 15)
        fault_misaligned(w, address, 16);
    if (bytes & 15)
        throw Fault("misaligned", "a bulk copy of " + std::to_string(bytes) + " bytes: not a multiple of 16");
}

// extras: dst (2), src (2), size, mbarrier (2), mask
void load_one(Warp& w, const Inst& in, int lane) {
    Machine& machine = *w.machine;
    u64 target = extra_address(w, in, 0, lane) & ~kWindowMask, source = extra_address(w, in, 2, lane),
        barrier = extra_address(w, in, 5, lane);
    u32 size = w.row<u32>(w.extra(in, 4))[lane];
    check_aligned(w, target, size);
    check_aligned(w, source, size);
    SharedPlace to = shared_place(w, target, size), bar = mbarrier_place(w, barrier, false);
    std::vector<Cta*> targets{to.cta};
    bool multicast = in.mode & kMulticast;
    if (multicast)
        targets = multicast_targets(w, w.row<u32>(w.extra(in, 7))[lane] & 0xffff);
    const u8* from;
    Cta* source_cta = nullptr;
    u32 source_offset = 0;
    if (in.mode & kFromShared) {
        SharedPlace at = shared_place(w, source & ~kWindowMask, size);
        source_cta = at.cta, source_offset = at.offset;
        from = nullptr;
    } else {
        from = machine.memory.check(source, size, false);
        count_global(w, source, size, false);
    }
    ++machine.counters.bulk_copies;
    auto op = new_op(w, "a bulk copy into shared memory");
    op->to_shared = true;
    for (Cta* cta : targets)
        note_async(w, *op, cta->shared.data() + to.offset, size, true);
    note_async(w, *op, source_cta ? source_cta->shared.data() + source_offset : from, size, false);
    auto data = std::make_shared<std::vector<u8>>(size);
    op->read = [=] { std::memcpy(data->data(), source_cta ? source_cta->shared.data() + source_offset : from, size); };
    op->write = [=, &machine] {
        for (Cta* cta : targets) {
            write_shared(*cta, to.offset, data->data(), size);
            mbarrier_transactions(machine, multicast ? *cta : *bar.cta, bar.offset, -static_cast<s32>(size));
        }
    };
    machine.submit(std::move(op));
}

void exec_bulk_load(Warp& w, const Inst& in, u32 m) {
    for (u32 left = m; left; left &= left - 1)
        load_one(w, in, first_lane(left));
    ++w.effects;
}

// extras: dst (2), src (2), size, then for kByteMask the mask; reduction in imm (op, type)
void exec_bulk_store(Warp& w, const Inst& in, u32 m) {
    Machine& machine = *w.machine;
    ReduceOp reduce = static_cast<ReduceOp>(in.imm & 0xff);
    Type type = static_cast<Type>(in.imm >> 8 & 0xff);
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        u64 target = extra_address(w, in, 0, lane), source = extra_address(w, in, 2, lane) & ~kWindowMask;
        u32 size = w.row<u32>(w.extra(in, 4))[lane];
        u32 mask = in.mode & kByteMask ? w.row<u32>(w.extra(in, 5))[lane] : 0xffff;
        check_aligned(w, target, size);
        check_aligned(w, source, size);
        SharedPlace from = shared_place(w, source, size);
        u8* to = machine.memory.check(target, size, true);
        count_global(w, target, size, true);
        ++machine.counters.bulk_copies;
        auto op = new_op(w, "a bulk copy out of shared memory");
        op->group = open_group(w.bulk_groups, lane);
        note_async(w, *op, from.cta->shared.data() + from.offset, size, false);
        note_async(w, *op, to, size, reduce == ReduceOp::None);
        auto data = std::make_shared<std::vector<u8>>(size);
        op->read = [=] { std::memcpy(data->data(), from.cta->shared.data() + from.offset, size); };
        op->write = [=] {
            if (reduce != ReduceOp::None)
                return reduce_bytes(to, data->data(), size, reduce, type);
            if (mask == 0xffff)
                std::memcpy(to, data->data(), size);
            else
                for (u32 i = 0; i < size; ++i)
                    if (mask >> (i & 15) & 1)
                        to[i] = (*data)[i];
        };
        machine.submit(std::move(op));
    }
    ++w.effects;
}

// cp.reduce.async.bulk into shared memory of the cluster; extras as for loads, reduction in imm
void exec_bulk_reduce_shared(Warp& w, const Inst& in, u32 m) {
    Machine& machine = *w.machine;
    ReduceOp reduce = static_cast<ReduceOp>(in.imm & 0xff);
    Type type = static_cast<Type>(in.imm >> 8 & 0xff);
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        u32 size = w.row<u32>(w.extra(in, 4))[lane];
        u64 target = extra_address(w, in, 0, lane) & ~kWindowMask,
            source = extra_address(w, in, 2, lane) & ~kWindowMask;
        check_aligned(w, target, size);
        check_aligned(w, source, size);
        SharedPlace to = shared_place(w, target, size), from = shared_place(w, source, size),
                    bar = mbarrier_place(w, extra_address(w, in, 5, lane), false);
        auto op = new_op(w, "a bulk reduction into shared memory");
        op->to_shared = true;
        note_async(w, *op, to.cta->shared.data() + to.offset, size, false);
        note_async(w, *op, from.cta->shared.data() + from.offset, size, false);
        auto data = std::make_shared<std::vector<u8>>(size);
        op->read = [=] { std::memcpy(data->data(), from.cta->shared.data() + from.offset, size); };
        op->write = [=, &machine] {
            reduce_bytes(to.cta->shared.data() + to.offset, data->data(), size, reduce, type);
            mbarrier_transactions(machine, *bar.cta, bar.offset, -static_cast<s32>(size));
        };
        machine.submit(std::move(op));
    }
    ++w.effects;
}

void exec_bulk_commit(Warp& w, const Inst&, u32 m) {
    commit_groups(w.bulk_groups, m);
}
void exec_bulk_wait(Warp& w, const Inst& in, u32 m) {
    wait_groups(w, w.bulk_groups, m, static_cast<u32>(in.imm), in.mode, "waits for a group of bulk copies");
}

void exec_nothing(Warp&, const Inst&, u32) {}

void build_bulk_copy(Builder& b, bool reduces) {
    std::string to = b.take_of({"shared::cluster", "shared::cta", "global"});
    std::string from = b.take_of({"shared::cta", "global", "shared::cluster"});
    if (to.empty() || from.empty() || (to == "global" && from != "shared::cta"))
        b.fail("unknown state spaces");
    if (to == "shared::cta" && from == "shared::cluster")
        std::swap(to, from);
    bool to_global = to == "global";
    if (!b.take(to_global ? "bulk_group" : "mbarrier::complete_tx::bytes"))
        b.fail("unknown completion mechanism");
    bool multicast = b.take("multicast::cluster"), mask = b.take("cp_mask");
    bool hint = b.take("L2::cache_hint");
    u64 reduction = 0;
    if (reduces) {
        ReduceOp op = take_reduce(b);
        bool noftz = b.take("noftz");
        Type type = b.take_type();
        if (!reduce_exists(op, type) || noftz != (op == ReduceOp::Add && (type == Type::F16 || type == Type::BF16)))
            b.fail("this operation does not exist for this type");
        reduction = u64{static_cast<u8>(op)} | u64{static_cast<u8>(type)} << 8;
    }
    size_t count = (to_global ? 3 : 4) + (multicast ? 1 : 0) + (hint ? 1 : 0) + (mask ? 1 : 0);
    b.want(count, count);
    b.address_extra(b.at(0));
    b.address_extra(b.at(1));
    b.use_extra(b.at(2), Type::B32);
    b.in.imm = static_cast<s64>(reduction);
    if (to_global) {
        if (mask)
            b.use_extra(b.at(count - 1), Type::B16);
        b.in.mode = static_cast<u16>(kToGlobal | (mask ? kByteMask : 0));
        return b.emit(exec_bulk_store);
    }
    b.address_extra(b.at(3));
    if (multicast)
        b.use_extra(b.at(4), Type::B16);
    b.in.mode = static_cast<u16>((multicast ? kMulticast : 0) | (from != "global" ? kFromShared : 0));
    b.emit(reduces ? exec_bulk_reduce_shared : exec_bulk_load);
}

void build_bulk_prefetch(Builder& b) {
    if (!b.take("L2") || !b.take("global"))
        b.fail("wanted .L2.global");
    size_t count = b.take("L2::cache_hint") ? 3 : 2;
    b.want(count, count);
    b.address_extra(b.at(0));
    b.use_extra(b.at(1), Type::B32);
    b.emit(exec_nothing);
}

void build_bulk(Builder& b) {
    if (b.take("commit_group"))
        return b.emit(exec_bulk_commit);
    if (b.take("wait_group")) {
        b.in.mode = b.take("read");
        b.in.imm = static_cast<s64>(b.constant(b.at(0)));
        return b.emit(exec_bulk_wait);
    }
    if (b.take("prefetch"))
        return b.take("tensor") ? build_tensor_prefetch(b) : build_bulk_prefetch(b);
    if (b.take("tensor"))
        return build_tensor(b, false);
    build_bulk_copy(b, false);
}

// ---- cp.async of 4, 8 or 16 bytes

struct SmallCopy {
    Cta* cta;
    u32 offset;
    const u8* from;
    u32 size, source_size;
};

// extras: dst (2), src (2), [source size]; imm the size; mode 1: source size given, 2: predicate that ignores the
// source
void exec_copy(Warp& w, const Inst& in, u32 m) {
    u32 size = static_cast<u32>(in.imm);
    std::map<std::shared_ptr<AsyncGroup>, std::vector<SmallCopy>> batches;
    std::shared_ptr<AsyncGroup> fresh;
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        u64 target = extra_address(w, in, 0, lane), source = extra_address(w, in, 2, lane);
        u32 given = in.mode == 1 ? std::min(size, w.row<u32>(w.extra(in, 4))[lane]) : size;
        if (in.mode == 2 && (w.predicate(w.extra(in, 4)) >> lane & 1))
            given = 0;
        if ((target | source) & (size - 1))
            fault_misaligned(w, (target & (size - 1)) ? target : source, size);
        SharedPlace to = shared_place(w, target & ~kWindowMask, size);
        const u8* from = given ? w.machine->memory.check(source, given, false) : nullptr;
        LaneGroups& mine = w.copy_groups[static_cast<u32>(lane)];
        if (!mine.open) {
            if (!fresh)
                fresh = std::make_shared<AsyncGroup>();
            mine.open = fresh;
        }
        batches[mine.open].push_back({to.cta, to.offset, from, size, given});
        count_global(w, source, given, false);
    }
    for (auto& [group, list] : batches) {
        auto op = new_op(w, "an asynchronous copy", true);
        op->group = group;
        op->to_shared = true;
        for (const SmallCopy& copy : list) {
            note_async(w, *op, copy.cta->shared.data() + copy.offset, copy.size, true);
            note_async(w, *op, copy.from, copy.source_size, false);
        }
        op->write = [copies = list] {
            for (const SmallCopy& copy : copies) {
                u8 data[16] = {};
                if (copy.source_size)
                    std::memcpy(data, copy.from, copy.source_size);
                write_shared(*copy.cta, copy.offset, data, copy.size);
            }
        };
        w.machine->submit(std::move(op));
    }
    ++w.effects;
}

void exec_copy_commit(Warp& w, const Inst&, u32 m) {
    commit_groups(w.copy_groups, m);
}

void exec_copy_wait(Warp& w, const Inst& in, u32 m) {
    if (in.mode) // wait_all: what is not committed as well
        for (u32 left = m; left; left &= left - 1)
            if (w.copy_groups[static_cast<u32>(first_lane(left))].open) {
                commit_groups(w.copy_groups, 1u << first_lane(left));
            }
    wait_groups(w, w.copy_groups, m, static_cast<u32>(in.imm), false, "waits for asynchronous copies");
}

// an arrival once all earlier copies of the thread are done
void exec_copy_arrive(Warp& w, const Inst& in, u32 m) {
    Machine& machine = *w.machine;
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        SharedPlace bar =
            mbarrier_place(w, w.address(in.a, lane) + static_cast<u64>(in.imm), in.space == Space::Generic);
        if (!in.mode) {
            u64 word;
            std::memcpy(&word, bar.cta->shared.data() + bar.offset, 8);
            MbarrierWord state = MbarrierWord::load(word);
            ++state.pending;
            word = state.store();
            std::memcpy(bar.cta->shared.data() + bar.offset, &word, 8);
        }
        auto op = new_op(w, "an arrival after asynchronous copies");
        LaneGroups& mine = w.copy_groups[static_cast<u32>(lane)];
        op->after.assign(mine.committed.begin(), mine.committed.end());
        if (mine.open)
            op->after.push_back(mine.open);
        op->write = [=, &machine] { mbarrier_arrive(machine, *bar.cta, bar.offset, 1, 0, false); };
        machine.submit(std::move(op));
    }
    ++w.effects;
}

void build_copy(Builder& b) {
    if (b.take("commit_group"))
        return b.emit(exec_copy_commit);
    if (b.take("wait_all")) {
        b.in.mode = 1;
        return b.emit(exec_copy_wait);
    }
    if (b.take("wait_group")) {
        b.in.imm = static_cast<s64>(b.constant(b.at(0)));
        return b.emit(exec_copy_wait);
    }
    if (b.take("mbarrier")) {
        if (!b.take("arrive"))
            b.fail("unknown form");
        b.in.mode = b.take("noinc");
        b.in.space = b.take_any({"shared", "shared::cta"}) ? Space::Shared : Space::Generic;
        if (b.take_type() != Type::B64)
            b.fail("wanted .b64");
        b.address(&Inst::a, b.at(0));
        return b.emit(exec_copy_arrive);
    }
    bool ca = b.take("ca");
    if (!ca && !b.take("cg"))
        b.fail("wanted .ca or .cg");
    if (!b.take_any({"shared", "shared::cta"}) || !b.take("global"))
        b.fail("wanted .shared.global");
    b.take_any({"L2::64B", "L2::128B", "L2::256B"});
    bool hint = b.take("L2::cache_hint");
    u64 size = b.constant(b.at(2));
    if (size != 16 && (!ca || (size != 4 && size != 8)))
        b.fail("a copy of " + std::to_string(size) + " bytes does not exist");
    b.want(3, hint ? 5 : 4);
    b.address_extra(b.at(0));
    b.address_extra(b.at(1));
    if (b.count() > (hint ? 4u : 3u)) {
        bool is_predicate = b.register_type(b.at(3)) == Type::Pred;
        b.in.mode = is_predicate ? 2 : 1;
        b.use_extra(b.at(3), is_predicate ? Type::Pred : Type::B32);
    }
    b.in.imm = static_cast<s64>(size);
    b.emit(exec_copy);
}

void build_cp(Builder& b) {
    if (b.take("reduce")) {
        if (!b.take("async") || !b.take("bulk"))
            b.fail("unknown form");
        if (b.take("tensor"))
            return build_tensor(b, true);
        return build_bulk_copy(b, true);
    }
    if (!b.take("async"))
        b.fail("unknown form");
    b.take("bulk") ? build_bulk(b) : build_copy(b);
}

} // namespace

void register_async(Table& table) {
    table["cp"] = build_cp;
}

} // namespace deep_gemm_k3::emulator
