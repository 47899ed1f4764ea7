// tcgen05: dispatch, allocation of tensor memory, fences, waits and commits.
#include "races.hpp"
#include "tensor_memory.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr u16 kPair = 1, kMulticast = 2, kForLoads = 1, kAfter = 1;

void exec_alloc(Warp& w, const Inst& in, u32 m);

s32 find_free(const TensorMemory& memory, const TensorMemory* peer, u32 count) {
    u32 run = 0;
    for (u32 c = 0; c < kTensorColumns; ++c) {
        bool is_taken = memory.columns[c] == TensorMemory::Column::Allocated ||
                        (peer && peer->columns[c] == TensorMemory::Column::Allocated);
        run = is_taken ? 0 : run + 1;
        if (run == count)
            return static_cast<s32>(c + 1 - count);
    }
    return -1;
}

void take_columns(TensorMemory& memory, u32 first, u32 count) {
    memory.allocations[first] = count;
    for (u32 c = first; c < first + count; ++c) {
        memory.columns[c] = TensorMemory::Column::Allocated;
        std::memset(memory.written.data() + c * kTensorLanes, 0, kTensorLanes);
    }
}

void wake_pair(Warp& w, bool is_pair) {
    ++w.machine->epoch;
    w.machine->wake_all(tensor_memory(*w.cta).waiters);
    if (is_pair)
        w.machine->wake_all(tensor_memory(peer_cta(w)).waiters);
}

void check_column_count(u32 count) {
    if (count < 32 || count > kTensorColumns || !std::has_single_bit(count))
        throw Fault("tensor-memory", std::to_string(count) + " columns: wanted a power of two from 32 to 512");
}

// First column, or -1 after blocking. A pair allocates the same columns once a warp of each CTA asks for them.
s32 try_alloc(Warp& w, bool is_pair, u32 count) {
    TensorMemory& mine = tensor_memory(*w.cta);
    TensorMemory* peer = is_pair ? &tensor_memory(peer_cta(w)) : nullptr;
    if (mine.granted >= 0) {
        s32 first = mine.granted;
        mine.granted = -1;
        return first;
    }
    if (mine.relinquished)
        throw Fault("tensor-memory", "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    mine.wanted = count;
    bool peer_is_here = !peer || peer->wanted;
    if (peer_is_here && peer && peer->wanted != count)
        throw Fault("tensor-memory", "the CTAs of a pair allocate " + std::to_string(count) + " and " +
                                         std::to_string(peer->wanted) + " columns");
    s32 first = peer_is_here ? find_free(mine, peer, count) : -1;
    if (first < 0) {
        mine.waiters.emplace_back(&w, w.current);
        w.block(peer_is_here ? "waits for free columns of tensor memory"
                             : "waits for its peer CTA to allocate tensor memory",
            0, count);
        return -1;
    }
    take_columns(mine, static_cast<u32>(first), count);
    mine.wanted = 0;
    if (peer) {
        take_columns(*peer, static_cast<u32>(first), count);
        peer->wanted = 0;
        peer->granted = first;
        w.machine->wake_all(peer->waiters);
    }
    return first;
}

void exec_alloc(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    int lane = first_lane(together);
    u32 count = w.row<u32>(in.b)[lane];
    check_column_count(count);
    s32 first = try_alloc(w, in.mode & kPair, count);
    if (first < 0)
        return;
    u8* to = resolve(w, in.space, w.address(in.a, lane) + static_cast<u64>(in.imm), 4, Access::Write, lane);
    std::memcpy(to, &first, 4);
    note_access(w, 0, to, 4, Access::Write, kManyLanes);
    w.machine->touch(w);
}

void exec_dealloc(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    int lane = first_lane(together);
    u32 address = w.row<u32>(in.a)[lane], count = w.row<u32>(in.b)[lane];
    check_column_count(count);
    TensorMemory& memory = tensor_memory(*w.cta);
    auto found = memory.allocations.find(address);
    if (found == memory.allocations.end() || found->second != count)
        throw Fault("tensor-memory", "tcgen05.dealloc of " + std::to_string(count) + " columns at " + hex(address) +
                                         (memory.columns[address & (kTensorColumns - 1)] == TensorMemory::Column::Freed
                                                 ? ", which have been freed"
                                                 : ", which no tcgen05.alloc has given"));
    if (memory.in_flight)
        w.machine->report_at(w, "free-in-flight",
            "tensor memory is freed while " + std::to_string(memory.in_flight) + " operations still use it");
    memory.allocations.erase(found);
    for (u32 quarter = 0; w.machine->races && !memory.order.empty() && quarter < 4; ++quarter)
        w.machine->races->tensor_free(w, memory.order.data() + quarter * kTensorColumns + address, count);
    for (u32 c = address; c < address + count; ++c)
        memory.columns[c] = TensorMemory::Column::Freed;
    wake_pair(w, in.mode & kPair);
    ++w.effects;
}

void exec_relinquish(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    tensor_memory(*w.cta).relinquished = true;
    ++w.effects;
}

void exec_fence(Warp& w, const Inst& in, u32) {
    if (w.machine->races)
        w.machine->races->tensor_fence(w, in.mode & kAfter);
}

void exec_wait(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    if (in.mode & kForLoads) {
        w.tensor_loads.clear();
        if (w.machine->races)
            w.machine->races->async_done(w, w.id, w.tensor_load_stamp, true);
        return;
    }
    if (w.wait.stage == 0)
        commit_groups(w.tensor_stores, 1);
    w.wait.stage = 1;
    if (wait_groups(w, w.tensor_stores, 1, 0, false, "waits for tcgen05.st"))
        w.wait.stage = 0;
}

// extras: mbarrier (2), mask
void exec_commit(Warp& w, const Inst& in, u32 m) {
    Machine& machine = *w.machine;
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        SharedPlace bar = mbarrier_place(w, extra_address(w, in, 0, lane), in.space == Space::Generic);
        std::vector<Cta*> targets{bar.cta};
        if (in.mode & kMulticast)
            targets = multicast_targets(w, w.row<u32>(w.extra(in, 2))[lane] & 0xffff);
        auto op = new_tensor_op(w, lane, "a tcgen05.commit");
        op->to_shared = true;
        op->uses.assign(targets.begin(), targets.end());
        if (op->stamp)
            op->stamp->follows_issue = true;
        u32 offset = bar.offset;
        op->write = [=, &machine] {
            for (Cta* cta : targets)
                mbarrier_arrive(machine, *cta, offset, 1, 0, false);
        };
        machine.submit(std::move(op));
    }
    ++w.effects;
}

void want_aligned(Builder& b) {
    if (!b.take("sync") || !b.take("aligned"))
        b.fail("wanted .sync.aligned");
}

void build_tcgen05(Builder& b) {
    std::string what = b.take_of({"alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "wait::ld", "wait::st",
        "fence::before_thread_sync", "fence::after_thread_sync", "commit", "mma", "cp", "shift"});
    if (what == "alloc" || what == "dealloc" || what == "relinquish_alloc_permit")
        return build_tensor_memory(b, what);
    if (what == "ld" || what == "st")
        return build_tensor_move(b, what == "ld");
    if (what == "wait::ld" || what == "wait::st")
        return build_tensor_wait(b, what == "wait::ld");
    if (what == "commit")
        return build_tensor_commit(b);
    if (what == "mma")
        return build_tensor_product(b);
    if (what == "cp")
        return build_tensor_copy(b);
    if (what == "shift")
        return build_tensor_shift(b);
    if (what.empty())
        b.fail("unknown form");
    b.want(0, 0);
    b.in.mode = what == "fence::after_thread_sync" ? kAfter : 0;
    b.emit(exec_fence);
}

} // namespace

bool take_cta_group(Builder& b) {
    std::string group = b.take_of({"cta_group::1", "cta_group::2"});
    if (group.empty())
        b.fail("wanted .cta_group::1 or .cta_group::2");
    bool is_pair = group.back() == '2';
    b.require_cta_group(is_pair ? 2 : 1);
    return is_pair;
}

void build_tensor_memory(Builder& b, const std::string& what) {
    bool is_pair = take_cta_group(b);
    want_aligned(b);
    b.in.mode = is_pair ? kPair : 0;
    if (what == "relinquish_alloc_permit") {
        b.want(0, 0);
        return b.emit(exec_relinquish);
    }
    b.want(2, 2);
    bool is_alloc = what == "alloc";
    if (is_alloc)
        b.in.space = b.take_any({"shared::cta", "shared"}) ? Space::Shared : Space::Generic;
    if (b.take_type() != Type::B32)
        b.fail("wanted .b32");
    u16 mode = b.in.mode;
    if (is_alloc)
        b.address(&Inst::a, b.at(0));
    else
        b.use(&Inst::a, b.at(0), Type::B32);
    b.use(&Inst::b, b.at(1), Type::B32);
    b.in.mode = mode;
    b.emit(is_alloc ? exec_alloc : exec_dealloc);
}

void build_tensor_wait(Builder& b, bool for_loads) {
    want_aligned(b);
    b.want(0, 0);
    b.in.mode = for_loads ? kForLoads : 0;
    b.emit(exec_wait);
}

void build_tensor_commit(Builder& b) {
    take_cta_group(b);
    if (!b.take("mbarrier::arrive::one"))
        b.fail("wanted .mbarrier::arrive::one");
    b.in.space = b.take_any({"shared::cluster"}) ? Space::Shared : Space::Generic;
    bool multicast = b.take("multicast::cluster");
    if (b.take_type() != Type::B64)
        b.fail("wanted .b64");
    b.want(multicast ? 2 : 1, multicast ? 2 : 1);
    b.address_extra(b.at(0));
    if (multicast)
        b.use_extra(b.at(1), Type::B16);
    b.in.mode = multicast ? kMulticast : 0;
    b.emit(exec_commit);
}

void register_tcgen05(Table& table) {
    table["tcgen05"] = build_tcgen05;
}

} // namespace deep_gemm_k3::emulator
