// Life of clusters, CTAs and warps: admission to the device, initial state, exit; divergence bookkeeping of a warp.
#include <algorithm>

#include "races.hpp"
#include "tensor_memory.hpp"

namespace deep_gemm_k3::emulator {

void Machine::admit(Launch& launch) {
    launch.is_started = true;
    u32 per_cluster = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
    launch.total_clusters = u64{launch.grid[0]} * launch.grid[1] * launch.grid[2] / per_cluster;
    while (launch.next_cluster < launch.total_clusters &&
           launch.live_clusters < std::max<u64>(1, launch.resident_limit / per_cluster))
        start_cluster(launch, launch.next_cluster++);
}

void Machine::start_cluster(Launch& launch, u64 number) {
    auto cluster = std::make_unique<Cluster>();
    cluster->launch = &launch;
    const u32* size = launch.cluster;
    u32 nx = launch.grid[0] / size[0], ny = launch.grid[1] / size[1];
    cluster->id[0] = static_cast<u32>(number % nx);
    cluster->id[1] = static_cast<u32>(number / nx % ny);
    cluster->id[2] = static_cast<u32>(number / nx / ny);
    u32 count = size[0] * size[1] * size[2], threads = launch.block[0] * launch.block[1] * launch.block[2];
    ++launch.live_clusters;
    cluster->live_ctas = count;
    for (u32 rank = 0; rank < count; ++rank) {
        auto cta = std::make_unique<Cta>();
        cta->launch = &launch;
        cta->serial = next_cta++;
        if (!rank)
            cluster->serial = cta->serial;
        cta->cluster = cluster.get();
        cta->rank = rank;
        u32 at[3] = {rank % size[0], rank / size[0] % size[1], rank / size[0] / size[1]};
        for (int i = 0; i < 3; ++i)
            cta->id[i] = cluster->id[i] * size[i] + at[i];
        u32 bytes = launch.program->dynamic_base + launch.dynamic_shared;
        cta->shared.resize(bytes, 0);
        cta->written.resize(bytes, 0);
        cta->local.resize(size_t{launch.program->local_bytes} * ((threads + 31) / 32 * 32), 0);
        cta->live_threads = threads;
        cluster->ctas.push_back(cta.get());
        launch.ctas.push_back(std::move(cta));
    }
    for (Cta* cta : cluster->ctas)
        for (u32 i = 0; i * 32 < threads; ++i)
            start_warp(*cta, i, threads);
    launch.clusters.push_back(std::move(cluster));
}

void Machine::start_warp(Cta& cta, u32 index, u32 threads) {
    auto warp = std::make_unique<Warp>();
    Warp& w = *warp;
    w.machine = this;
    w.cta = &cta;
    w.program = cta.launch->program.get();
    w.index = index;
    w.id = next_warp_id++;
    w.role = observer.role_of(index);
    u32 lanes = std::min<u32>(32, threads - index * 32);
    w.exists = w.live = lanes == 32 ? kFullMask : (1u << lanes) - 1;
    w.registers.assign(w.program->register_bytes / 8 + 64, 0);
    w.base[0] = reinterpret_cast<u8*>(w.registers.data());
    w.base[1] = reinterpret_cast<u8*>(const_cast<u64*>(w.program->constants.data()));
    fill_specials(w);
    w.new_split(0, w.live, nullptr);
    w.queued = true;
    runnable.push_back(&w);
    ++live_warps;
    cta.warps.push_back(std::move(warp));
}

namespace {

u64 special_value(const Warp& w, Special what, u32 lane) {
    const Cta& cta = *w.cta;
    const Launch& launch = *cta.launch;
    const u32* block = launch.block;
    u32 thread = w.index * 32 + lane, bit = 1u << lane;
    auto index = [&](Special base) { return static_cast<int>(what) - static_cast<int>(base); };
    u32 tid[3] = {thread % block[0], thread / block[0] % block[1], thread / block[0] / block[1]};
    if (what <= Special::TidZ)
        return tid[index(Special::TidX)];
    if (what <= Special::NtidZ)
        return block[index(Special::NtidX)];
    if (what <= Special::CtaidZ)
        return cta.id[index(Special::CtaidX)];
    if (what <= Special::NctaidZ)
        return launch.grid[index(Special::NctaidX)];
    if (what >= Special::ClusterIdX && what <= Special::ClusterIdZ)
        return cta.cluster->id[index(Special::ClusterIdX)];
    if (what >= Special::NclusterIdX && what <= Special::NclusterIdZ)
        return launch.grid[index(Special::NclusterIdX)] / launch.cluster[index(Special::NclusterIdX)];
    if (what >= Special::ClusterCtaidX && what <= Special::ClusterCtaidZ)
        return cta.id[index(Special::ClusterCtaidX)] % launch.cluster[index(Special::ClusterCtaidX)];
    if (what >= Special::ClusterNctaidX && what <= Special::ClusterNctaidZ)
        return launch.cluster[index(Special::ClusterNctaidX)];
    u32 cluster_size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
    switch (what) {
    case Special::LaneId:
        return lane;
    case Special::WarpId:
        return w.index;
    case Special::NwarpId:
        return (block[0] * block[1] * block[2] + 31) / 32;
    case Special::SmId:
        return (cta.id[0] + cta.id[1] * launch.grid[0]) % launch.num_sms;
    case Special::NsmId:
        return launch.num_sms;
    case Special::LaneMaskEq:
        return bit;
    case Special::LaneMaskLt:
        return bit - 1;
    case Special::LaneMaskLe:
        return bit | (bit - 1);
    case Special::LaneMaskGe:
        return ~(bit - 1);
    case Special::LaneMaskGt:
        return ~(bit | (bit - 1));
    case Special::ClusterCtaRank:
        return cta.rank;
    case Special::ClusterNctaRank:
        return cluster_size;
    case Special::IsExplicitCluster:
        return cluster_size > 1 ? kFullMask : 0; // a predicate: one bit per lane
    case Special::DynamicSmem:
        return launch.dynamic_shared;
    case Special::TotalSmem:
        return cta.shared.size();
    case Special::ReservedHalf: // the system's part of shared memory may be named, but is not there
        return kSharedReserved / 2;
    case Special::ReservedEnd:
        return kSharedReserved;
    case Special::SharedBase:
        return u64{cta.rank} << 24;
    case Special::ParamBase:
        return launch.param_base;
    case Special::GlobalBase:
        return launch.instance->base;
    default:
        return 0;
    }
}

} // namespace

void Machine::fill_specials(Warp& w) {
    for (const SpecialRow& row : w.program->specials)
        for (u32 lane = 0; lane < 32; ++lane) {
            u64 value = special_value(w, row.what, lane) + row.addend;
            if (row.wide)
                w.row<u64>(row.offset)[lane] = value;
            else
                w.row<u32>(row.offset)[lane] = static_cast<u32>(value);
        }
}

void Machine::retire(Warp& w) {
    Cta& cta = *w.cta;
    Launch& launch = *cta.launch;
    --live_warps;
    std::vector<u64>().swap(w.registers);
    cta.live_threads -= static_cast<u32>(std::popcount(w.exists));
    ++epoch;
    for (NamedBarrier& barrier : cta.barriers)
        wake_all(barrier.waiters); // a barrier of all threads counts the living
    wake_all(cta.cluster->waiters);
    if (cta.live_threads)
        return;
    cta.exited = true;
    cta_exit_check(w);
    if (--cta.cluster->live_ctas)
        return;
    bool is_used = false;
    for (auto& op : async)
        is_used |= op->cta->cluster == cta.cluster;
    for (Cta* member : cta.cluster->ctas) {
        if (is_used)
            break;
        if (races) {
            races->forget_memory(member->shared.data(), member->shared.size());
            races->forget_memory(member->local.data(), member->local.size());
            if (member->tensor)
                races->forget_tensor(member->tensor->order.data(), member->tensor->order.size());
        }
        for (auto* bytes : {&member->local, &member->shared, &member->written})
            std::vector<u8>().swap(*bytes);
        member->tensor = nullptr;
    }
    --launch.live_clusters;
    if (launch.next_cluster < launch.total_clusters)
        start_cluster(launch, launch.next_cluster++);
    launch_ended |= is_finished(launch);
}

void Machine::cta_exit_check(Warp& w) {
    tensor_exit_check(*this, *w.cta);
    auto is_used = [&](const AsyncOp& op) {
        bool is_named = std::find(op.uses.begin(), op.uses.end(), w.cta) != op.uses.end();
        return (op.cta == w.cta && (op.read || op.to_shared)) || is_named;
    };
    for (auto& op : async)
        if (is_used(*op))
            report("exit-in-flight", std::string(op->what) +
                                         " still uses shared memory when its CTA exits\n  issued at " +
                                         w.program->where(op->pc));
}

void Warp::block(const char* what, u64 object, u64 token, bool timed) {
    --pc;
    stop = Stop::Blocked;
    wait.what = what, wait.object = object, wait.token = token, wait.timed = timed, wait.timed_out = false;
}

Node* Warp::new_node(u32 rpc, u32 expected, Node* parent) {
    Node* node;
    if (free_nodes.empty()) {
        nodes.push_back(std::make_unique<Node>());
        node = nodes.back().get();
    } else {
        node = free_nodes.back();
        free_nodes.pop_back();
    }
    *node = {rpc, expected, 0, parent};
    return node;
}

Split* Warp::new_split(u32 at, u32 lanes, Node* parent) {
    Split* split = nullptr;
    for (auto& old : splits)
        if (old->state == SplitState::Dead)
            split = old.get();
    if (!split) {
        splits.push_back(std::make_unique<Split>());
        split = splits.back().get();
    }
    *split = Split{};
    split->pc = at, split->mask = lanes, split->node = parent;
    return split;
}

void Warp::exit_lanes(u32 m) {
    live &= ~m;
    mask &= ~m;
    for (Node* at = node; at; at = at->parent) {
        at->expected &= ~m;
        if (at->expected && at->expected == at->arrived) {
            new_split(at->rpc, 0, at->parent)->mask = at->arrived;
            at->arrived = 0;
            at->expected = 0;
        }
    }
    for (Meeting& meeting : meetings) {
        meeting.want &= live;
        if (meeting.want == meeting.arrived && !meeting.waiting.empty())
            machine->wake(this, meeting.waiting.front());
    }
}

} // namespace deep_gemm_k3::emulator
