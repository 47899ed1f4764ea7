// Named barriers, the cluster barrier, and fences.
#include "races.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr u16 kArrive = 1, kReduce = 2, kAligned = 4, kHasCount = 8, kPopc = 16, kAnd = 32;

bool is_complete(Cta& cta, const NamedBarrier& barrier) {
    u32 count = 0;
    bool everyone = true;
    for (auto& warp : cta.warps) {
        u32 arrived = barrier.arrived[warp->index], live = warp->live;
        bool whole = (arrived & live) == live;
        everyone &= whole;
        if (arrived)
            count += whole ? 32 : static_cast<u32>(std::popcount(arrived));
    }
    return barrier.expected ? count >= barrier.expected : everyone;
}

void finish_round(Machine& machine, NamedBarrier& barrier) {
    if (machine.races && barrier.generation)
        machine.races->forget(&barrier, barrier.generation - 1);
    ++barrier.generation;
    ++machine.epoch;
    barrier.last_popc = barrier.popc, barrier.last_all = barrier.all, barrier.last_any = barrier.any;
    barrier.popc = 0, barrier.all = 1, barrier.any = 0;
    barrier.in_use = false;
    std::fill(barrier.arrived.begin(), barrier.arrived.end(), 0);
    machine.wake_all(barrier.waiters);
}

void arrive(Warp& w, const Inst& in, u32 m, NamedBarrier& barrier, u32 expected) {
    if (barrier.arrived.empty())
        barrier.arrived.resize(w.cta->warps.size(), 0);
    bool diverged = (in.mode & kAligned) && m != w.live;
    if (diverged)
        w.machine->report_at(
            w, "diverged-barrier", "an aligned barrier executed by lanes " + hex(m) + " of " + hex(w.live) + " only");
    if (barrier.in_use && barrier.expected != expected)
        w.machine->report_at(w, "barrier-count",
            "arrival with a thread count of " + std::to_string(expected) + " where " +
                std::to_string(barrier.expected) + " is gathered");
    if (barrier.arrived[w.index] & m)
        throw Fault("barrier", "a thread arrives twice in one round of a named barrier");
    barrier.in_use = true;
    barrier.expected = expected;
    barrier.arrived[w.index] |= m;
    ++w.effects;
    if (w.machine->races)
        w.machine->races->release(w, &barrier, barrier.generation);
    if (!(in.mode & kReduce))
        return;
    u32 p = w.predicate(in.c);
    barrier.popc += static_cast<u32>(std::popcount(p & m));
    if ((p & m) != m)
        barrier.all = 0;
    if (p & m)
        barrier.any = 1;
}

void exec_bar(Warp& w, const Inst& in, u32 m) {
    u32 number = w.row<u32>(in.a)[first_lane(m)];
    if (number >= 16)
        throw Fault("barrier", "named barrier " + std::to_string(number) + " does not exist");
    NamedBarrier& barrier = w.cta->barriers[number];
    u32 expected = in.mode & kHasCount ? w.row<u32>(in.b)[first_lane(m)] : 0;
    if (expected % 32)
        throw Fault("barrier", "thread count " + std::to_string(expected) + " is no multiple of 32");
    bool passed = false;
    if (w.wait.stage == 0) {
        ++w.machine->counters.barrier_waits;
        arrive(w, in, m, barrier, expected);
        if (in.mode & kArrive) {
            if (is_complete(*w.cta, barrier))
                finish_round(*w.machine, barrier);
            return;
        }
        w.wait.stage = 1;
        w.wait.token = barrier.generation;
    } else {
        passed = barrier.generation != w.wait.token;
    }
    if (!passed && is_complete(*w.cta, barrier)) {
        finish_round(*w.machine, barrier);
        passed = true;
    }
    if (!passed) {
        barrier.waiters.emplace_back(&w, w.current);
        w.block("waits for a named barrier", number, w.wait.token);
        return;
    }
    w.wait.stage = 0;
    if (w.machine->races)
        w.machine->races->acquire(w, &barrier, w.wait.token);
    if (!(in.mode & kReduce))
        return;
    if (in.mode & kPopc)
        return write_lanes(w.row<u32>(in.dst), m, [&](int) { return barrier.last_popc; });
    w.set_predicate(in.dst, m, (in.mode & kAnd ? barrier.last_all : barrier.last_any) ? kFullMask : 0);
}

void build_cluster(Builder& b);

void build_bar(Builder& b) {
    if (b.take("warp")) {
        if (!b.take("sync"))
            b.fail("wanted .sync");
        b.want(1, 1);
        b.use(&Inst::b, b.at(0), Type::B32);
        return b.emit(exec_warp_barrier);
    }
    if (b.take("cluster"))
        return build_cluster(b);
    b.take("cta");
    std::string kind = b.take_of({"sync", "arrive", "red"});
    bool aligned = b.take("aligned") || b.s.op == "bar";
    u16 mode = aligned ? kAligned : 0;
    size_t at = 0;
    if (kind == "red") {
        std::string op = b.take_of({"popc", "and", "or"});
        Type type = b.take_type();
        if (op.empty() || type != (op == "popc" ? Type::U32 : Type::Pred))
            b.fail("unknown reduction");
        mode |= kReduce | (op == "popc" ? kPopc : op == "and" ? kAnd : 0);
        b.def(&Inst::dst, b.at(at++), type);
    } else if (kind == "arrive") {
        mode |= kArrive;
    } else if (kind.empty()) {
        b.fail("unknown form");
    }
    b.use(&Inst::a, b.at(at++), Type::B32);
    size_t rest = b.count() - at - (mode & kReduce ? 1 : 0);
    if (rest > 1)
        b.fail("too many operands");
    if (rest == 1) {
        mode |= kHasCount;
        b.use(&Inst::b, b.at(at++), Type::B32);
    }
    if (mode & kReduce)
        b.use(&Inst::c, b.at(at), Type::Pred);
    b.in.mode = mode;
    b.emit(exec_bar);
}

bool cluster_complete(Cluster& cluster) {
    u32 live = 0;
    for (Cta* cta : cluster.ctas)
        live += cta->live_threads;
    return cluster.arrived >= live;
}

void exec_cluster_arrive(Warp& w, const Inst& in, u32 m) {
    Cluster& cluster = *w.cta->cluster;
    if (w.cluster_arrived && w.cluster_phase == cluster.phase && m == w.live)
        throw Fault("barrier", "barrier.cluster.arrive twice without a wait between");
    w.cluster_arrived = true;
    w.cluster_phase = cluster.phase;
    if (w.machine->races && !in.mode)
        w.machine->races->release(w, &cluster, cluster.phase);
    cluster.arrived += m == w.live ? static_cast<u32>(std::popcount(w.exists)) : static_cast<u32>(std::popcount(m));
    w.machine->touch(w);
    if (!cluster_complete(cluster))
        return;
    cluster.arrived = 0;
    ++cluster.phase;
    w.machine->wake_all(cluster.waiters);
}

void exec_cluster_wait(Warp& w, const Inst&, u32 m) {
    (void)m;
    Cluster& cluster = *w.cta->cluster;
    if (!w.cluster_arrived)
        throw Fault("barrier", "barrier.cluster.wait without an arrive");
    if (cluster.phase == w.cluster_phase && cluster_complete(cluster)) { // the rest has exited
        cluster.arrived = 0;
        ++cluster.phase;
        w.machine->wake_all(cluster.waiters);
    }
    if (cluster.phase != w.cluster_phase) {
        w.cluster_arrived = false;
        if (w.machine->races)
            w.machine->races->acquire(w, &cluster, w.cluster_phase);
        return;
    }
    cluster.waiters.emplace_back(&w, w.current);
    w.block("waits for the cluster barrier", 0, cluster.phase);
}

void build_cluster(Builder& b) {
    bool arrives = b.take("arrive");
    if (!arrives && !b.take("wait"))
        b.fail("wanted .arrive or .wait");
    if (arrives)
        b.in.mode = b.take_of({"release", "relaxed"}) == "relaxed"; // orders nothing
    else
        b.take("acquire");
    b.take("aligned");
    b.want(0, 0);
    b.emit(arrives ? exec_cluster_arrive : exec_cluster_wait);
}

void exec_fence(Warp& w, const Inst& in, u32) {
    if (scope_of(in.mode) == Scope::Sys)
        ++w.machine->counters.system_operations;
    if (w.machine->races)
        w.machine->races->fence(w, in.mode);
}

constexpr u16 kOfShared = 1, kOfGlobal = 2;

void exec_proxy_fence(Warp& w, const Inst& in, u32) {
    if (w.machine->races)
        w.machine->races->proxy_fence(w, in.mode & kOfShared, in.mode & kOfGlobal);
}

void exec_other_fence(Warp&, const Inst&, u32) {}

void build_fence(Builder& b) {
    if (b.take("proxy")) {
        std::string kind = b.take_of({"async", "alias", "async::generic", "tensormap::generic"});
        if (kind.empty())
            b.fail("unknown proxy");
        std::string where = kind == "async" ? b.take_of({"global", "shared::cta", "shared::cluster"}) : "";
        std::string order = kind.find("::") != std::string::npos ? b.take_of({"release", "acquire"}) : "";
        if (!order.empty() && !b.take_any({"cta", "cluster", "gpu", "sys"}))
            b.fail("wanted a scope");
        bool restricts = kind == "async::generic" &&
                         b.take(order == "acquire" ? "sync_restrict::shared::cluster" : "sync_restrict::shared::cta");
        if ((kind == "async::generic" && !restricts) || (kind == "tensormap::generic" && order.empty()))
            b.fail("unknown form");
        size_t operands = kind == "tensormap::generic" && order == "acquire" ? 2 : 0;
        b.want(operands, operands);
        if (operands)
            b.address_extra(b.at(0)), b.constant(b.at(1));
        if (kind != "async" && kind != "async::generic")
            return b.emit(exec_other_fence);
        bool only_shared = kind != "async" || (!where.empty() && where != "global");
        b.in.mode = only_shared ? kOfShared : where.empty() ? kOfShared | kOfGlobal : kOfGlobal;
        return b.emit(exec_proxy_fence);
    }
    if (b.take("mbarrier_init")) {
        if (!b.take("release") || !b.take("cluster"))
            b.fail("wanted .release.cluster");
        return b.emit(exec_other_fence);
    }
    bool sc = b.take("sc");
    b.in.mode = take_ordering(b, Order::AcqRel, Scope::None);
    want_order(b, b.in.mode, {Order::AcqRel, Order::Acquire, Order::Release});
    b.take_any({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"});
    if (sc && order_of(b.in.mode) != Order::AcqRel)
        b.fail("unknown form");
    b.want(0, 0);
    b.emit(exec_fence);
}

void build_membar(Builder& b) {
    if (b.take("proxy")) {
        std::string kind = b.take_of({"alias", "async"});
        if (kind.empty())
            b.fail("unknown proxy");
        b.in.mode = kOfShared | kOfGlobal;
        return b.emit(kind == "async" ? exec_proxy_fence : exec_other_fence);
    }
    std::string level = b.take_of({"cta", "gl", "sys"});
    if (level.empty())
        b.fail("unknown level");
    Scope scope = level == "cta" ? Scope::Cta : level == "gl" ? Scope::Gpu : Scope::Sys;
    b.in.mode = static_cast<u16>(static_cast<u16>(Order::AcqRel) | static_cast<u16>(scope) << kScopeShift);
    b.emit(exec_fence);
}

} // namespace

void register_barriers(Table& table) {
    table["bar"] = table["barrier"] = build_bar;
    table["fence"] = build_fence;
    table["membar"] = build_membar;
}

} // namespace deep_gemm_k3::emulator
