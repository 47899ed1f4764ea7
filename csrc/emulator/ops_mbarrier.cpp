// The mbarrier instructions.
#include "mbarrier.hpp"
#include "races.hpp"

namespace deep_gemm_k3::emulator {

namespace {

// Inst::mode above the ordering bits
constexpr u16 kExpect = 1 << 8, kDrop = 1 << 9, kHasOperand = 1 << 10, kReturns = 1 << 11, kParity = 1 << 12,
              kTry = 1 << 13, kNoComplete = 1 << 14;

SharedPlace place(Warp& w, const Inst& in, int lane) {
    return mbarrier_place(w, w.address(in.a, lane) + static_cast<u64>(in.imm), in.space == Space::Generic);
}

void exec_init(Warp& w, const Inst& in, u32 m) {
    const u32* count = w.row<u32>(in.b);
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        SharedPlace at = place(w, in, i);
        if (count[i] == 0 || count[i] > 0xfffff)
            throw Fault("mbarrier", "mbarrier.init with a count of " + std::to_string(count[i]));
        auto old = at.cta->mbarriers.find(at.offset);
        if (old != at.cta->mbarriers.end() && !old->second.waiters.empty())
            w.machine->report_at(
                w, "mbarrier-reinit", "re-initialised while in use: " + mbarrier_text(*at.cta, at.offset));
        at.cta->mbarriers[at.offset].line_pc = w.pc - 1;
        u64 word = MbarrierWord{count[i], count[i], 0, false}.store();
        std::memcpy(at.cta->shared.data() + at.offset, &word, 8);
        std::memset(at.cta->written.data() + at.offset, 1, 8);
    }
    w.machine->touch(w);
}

void exec_inval(Warp& w, const Inst& in, u32 m) {
    for (u32 left = m; left; left &= left - 1) {
        SharedPlace at = place(w, in, first_lane(left));
        auto old = at.cta->mbarriers.find(at.offset);
        if (old == at.cta->mbarriers.end())
            throw Fault(
                "mbarrier", "mbarrier.inval of what is no mbarrier, shared offset " + std::to_string(at.offset));
        if (!old->second.waiters.empty())
            w.machine->report_at(
                w, "mbarrier-reinit", "invalidated while in use: " + mbarrier_text(*at.cta, at.offset));
        at.cta->mbarriers.erase(old);
    }
    w.machine->touch(w);
}

void exec_arrive(Warp& w, const Inst& in, u32 m) {
    const u32* operand = in.mode & kHasOperand ? w.row<u32>(in.b) : nullptr;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        SharedPlace at = place(w, in, i);
        bool expects = in.mode & kExpect;
        if (w.machine->races && order_of(in.mode) == Order::Release)
            w.machine->races->release(
                w, &mbarrier_info(*at.cta, at.offset), mbarrier_phase(*w.machine, *at.cta, at.offset));
        u32 count = expects || !operand ? 1 : operand[i];
        u64 state = mbarrier_arrive(
            *w.machine, *at.cta, at.offset, count, expects ? static_cast<s32>(operand[i]) : 0, in.mode & kDrop);
        if ((in.mode & kNoComplete) && mbarrier_phase(*w.machine, *at.cta, at.offset) != ((state >> 63) != 0))
            throw Fault("mbarrier", "an arrival with .noComplete ends the phase: " + mbarrier_text(*at.cta, at.offset));
        if (in.mode & kReturns)
            w.row<u64>(in.dst)[i] = state;
    }
    ++w.effects;
}

void exec_tx(Warp& w, const Inst& in, u32 m) {
    const u32* bytes = w.row<u32>(in.b);
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        SharedPlace at = place(w, in, i);
        mbarrier_transactions(*w.machine, *at.cta, at.offset,
            in.mode & kExpect ? static_cast<s32>(bytes[i]) : -static_cast<s32>(bytes[i]));
    }
    ++w.effects;
}

void exec_wait(Warp& w, const Inst& in, u32 m) {
    u32 passed = 0;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        SharedPlace at = place(w, in, i);
        bool waited = in.mode & kParity ? w.row<u32>(in.b)[i] & 1 : (w.row<u64>(in.b)[i] >> 63) != 0;
        if (mbarrier_phase(*w.machine, *at.cta, at.offset) != waited) {
            passed |= 1u << i;
            if (w.machine->races && order_of(in.mode) == Order::Acquire)
                w.machine->races->acquire(w, &mbarrier_info(*at.cta, at.offset), waited);
        }
    }
    bool is_try = in.mode & kTry, timed_out = w.wait.timed_out;
    if (!passed && is_try && !timed_out) {
        if (w.wait.stage == 0)
            ++w.machine->counters.mbarrier_waits;
        w.wait.stage = 1;
        int i = first_lane(m);
        SharedPlace at = place(w, in, i);
        at.cta->mbarriers.at(at.offset).waiters.emplace_back(&w, w.current);
        bool phase = in.mode & kParity ? w.row<u32>(in.b)[i] & 1 : (w.row<u64>(in.b)[i] >> 63) != 0;
        w.block(kWaitsForMbarrier, u64{at.cta->rank} << 24 | at.offset, phase, true);
        return;
    }
    w.wait.stage = 0;
    w.wait.timed_out = false;
    w.set_predicate(in.dst, m, passed);
    if (!passed && !is_try)
        note_poll(w, 0);
}

void exec_pending(Warp& w, const Inst& in, u32 m) {
    const u64* state = w.row<u64>(in.a);
    write_lanes(w.row<u32>(in.dst), m, [&](int i) { return static_cast<u32>(state[i] & 0xfffff); });
}

void take_place(Builder& b) {
    b.in.space = b.take_any({"shared", "shared::cta", "shared::cluster"}) ? Space::Shared : Space::Generic;
    if (b.take_type() != Type::B64)
        b.fail("wanted .b64");
}

void build_arrive(Builder& b, bool drop) {
    u16 mode = drop ? kDrop : 0;
    if (b.take("expect_tx"))
        mode |= kExpect;
    if (b.take("noComplete"))
        mode |= kNoComplete;
    u16 order = take_ordering(b, Order::Release, Scope::Cta);
    want_order(b, order, {Order::Release, Order::Relaxed});
    mode |= order;
    take_place(b);
    bool has_state = b.at(0).kind != Operand::Kind::Address;
    size_t at = has_state ? 1 : 0;
    if (has_state && b.at(0).kind != Operand::Kind::Sink) {
        mode |= kReturns;
        b.def(&Inst::dst, b.at(0), Type::B64);
    }
    b.address(&Inst::a, b.at(at));
    if (b.count() > at + 1) {
        mode |= kHasOperand;
        b.use(&Inst::b, b.at(at + 1), Type::B32);
    } else if (mode & kExpect) {
        b.fail("wanted a transaction count");
    }
    b.want(1, at + 2);
    b.in.mode = mode;
    b.emit(exec_arrive);
}

void build_wait(Builder& b, bool is_try) {
    u16 mode = is_try ? kTry : 0;
    if (b.take("parity"))
        mode |= kParity;
    u16 order = take_ordering(b, Order::Acquire, Scope::Cta);
    want_order(b, order, {Order::Acquire, Order::Relaxed});
    mode |= order;
    take_place(b);
    b.want(3, is_try ? 4 : 3);
    b.def(&Inst::dst, b.at(0), Type::Pred);
    b.address(&Inst::a, b.at(1));
    b.use(&Inst::b, b.at(2), mode & kParity ? Type::B32 : Type::B64);
    if (b.count() == 4)
        b.use(&Inst::c, b.at(3), Type::B32);
    b.in.mode = mode;
    b.emit(exec_wait);
}

void build_mbarrier(Builder& b) {
    if (b.take("init")) {
        take_place(b);
        b.want(2, 2);
        b.address(&Inst::a, b.at(0));
        b.use(&Inst::b, b.at(1), Type::B32);
        return b.emit(exec_init);
    }
    if (b.take("inval")) {
        take_place(b);
        b.want(1, 1);
        b.address(&Inst::a, b.at(0));
        return b.emit(exec_inval);
    }
    if (b.take("pending_count")) {
        if (b.take_type() != Type::B64)
            b.fail("wanted .b64");
        b.want(2, 2);
        b.def(&Inst::dst, b.at(0), Type::B32);
        b.use(&Inst::a, b.at(1), Type::B64);
        return b.emit(exec_pending);
    }
    if (b.take("arrive"))
        return build_arrive(b, false);
    if (b.take("arrive_drop"))
        return build_arrive(b, true);
    if (b.take("test_wait"))
        return build_wait(b, false);
    if (b.take("try_wait"))
        return build_wait(b, true);
    bool expects = b.take("expect_tx");
    if (!expects && !b.take("complete_tx"))
        b.fail("unknown operation");
    u16 order = take_ordering(b, Order::Relaxed, Scope::Cta);
    want_order(b, order, {Order::Relaxed});
    u16 mode = static_cast<u16>(order | (expects ? kExpect : 0));
    take_place(b);
    b.want(2, 2);
    b.address(&Inst::a, b.at(0));
    b.use(&Inst::b, b.at(1), Type::B32);
    b.in.mode = mode;
    b.emit(exec_tx);
}

} // namespace

void register_mbarrier(Table& table) {
    table["mbarrier"] = build_mbarrier;
}

} // namespace deep_gemm_k3::emulator
