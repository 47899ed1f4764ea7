#include "races.hpp"

#include "async.hpp"

#include <algorithm>

namespace deep_gemm_k3::emulator {

namespace {

u32 get(const ClockVector& clock, u32 i) {
    return i < clock.size() ? clock[i] : 0;
}

void raise(ClockVector& clock, u32 i, u32 value) {
    if (clock.size() <= i)
        clock.resize(i + 1, 0);
    clock[i] = std::max(clock[i], value);
}

void join_clock(ClockVector& to, const ClockVector& from) {
    if (to.size() < from.size())
        to.resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); ++i)
        to[i] = std::max(to[i], from[i]);
}

} // namespace

void Knowledge::join(const Knowledge& other) {
    join_clock(all, other.all);
    join_clock(fenced_shared, other.fenced_shared);
    join_clock(fenced_global, other.fenced_global);
    join_clock(tensor, other.tensor);
    messages = std::max(messages, other.messages);
}

Races::State& Races::state(Warp& w) {
    if (warps_.size() <= w.id)
        warps_.resize(w.id + 1);
    State& mine = warps_[w.id];
    if (!mine.place.cta) {
        u32 rank = w.cta->launch->rank;
        mine.place = {w.cta->serial, w.cta->cluster->serial, rank};
        auto before = ended_.find(rank);
        if (before != ended_.end())
            mine.known = before->second;
        raise(mine.known.all, 3 * w.id, 1);
    }
    return mine;
}

// The shadows of the 64 bytes around an address.
Races::Shadow* Races::shadow_block(u64 address) {
    auto& block = shadows_[address / 64];
    if (!block)
        block = std::make_unique<Shadow[]>(64);
    return block.get();
}

u32 Races::site(Warp& w) {
    std::pair<const void*, u32> place{w.program, w.pc};
    if (place == last_place_)
        return last_site_;
    auto [found, is_new] = site_index_.try_emplace(place, static_cast<u32>(sites_.size()));
    if (is_new)
        sites_.push_back(w.program->where(w.pc ? w.pc - 1 : 0));
    last_place_ = place, last_site_ = found->second;
    return last_site_;
}

// Whether threads of `to` lie within the scope as a thread of `from` sees it.
bool Races::covers(Scope scope, const Residence& from, const Residence& to) {
    switch (scope) {
    case Scope::None:
        return false;
    case Scope::Cta:
        return from.cta == to.cta;
    case Scope::Cluster:
        return from.cluster == to.cluster;
    case Scope::Gpu:
        return from.rank == to.rank;
    default:
        return true;
    }
}

bool Races::strong_pair(const Mark& old, const Mark& now) const {
    const Residence &from = warps_[old.who / 3].place, &to = warps_[now.who / 3].place;
    return covers(old.scope, from, to) && covers(now.scope, to, from);
}

// Whether what is being touched is shared memory of the warp's cluster.
bool Races::is_shared(const Warp& w) const {
    for (const Cta* cta : w.cta->cluster->ctas) {
        u64 first = reinterpret_cast<u64>(cta->shared.data());
        if (touched_ >= first && touched_ < first + cta->shared.size())
            return true;
    }
    return false;
}

void Races::check(Warp& w, const Mark& old, const Mark& now, const Knowledge& known, const char* what) {
    bool is_own = old.who == now.who && !now.is_async; // asynchronous operations of one warp do not order each other
    if (old.clock == 0 || strong_pair(old, now))
        return;
    if (is_own)
        return check_lanes(w, old, now, what);
    bool is_ordered = get(known.all, old.who) >= old.clock;
    if (!is_ordered) {
        std::string scope =
            old.scope != Scope::None && now.scope != Scope::None ? " (their scopes do not include each other)" : "";
        machine_.report_at(w, "race", std::string(what) + " nothing orders" + scope + ", after " + sites_[old.site]);
        return;
    }
    bool crosses = old.is_generic && !now.is_generic;
    if (!crosses)
        return;
    bool in_shared = get(known.fenced_shared, old.who) >= old.clock,
         in_global = get(known.fenced_global, old.who) >= old.clock;
    if (in_shared != in_global ? in_shared != is_shared(w) : !in_shared)
        machine_.report_at(w, "proxy", std::string(what) + " no proxy fence separates, after " + sites_[old.site]);
}

// Lanes of a warp are threads of their own: what one of them wrote or read another may use only behind an instruction
// that orders memory among them. An acquisition by the later one is taken for it, whatever it acquired.
void Races::check_lanes(Warp& w, const Mark& old, const Mark& now, const char* what) {
    if (old.lane == now.lane && now.lane != kManyLanes)
        return;
    const u32* steps = state(w).lane_steps;
    const u32 last = now.lane == kManyLanes ? *std::min_element(steps, steps + kLanes) : steps[now.lane];
    if (last <= old.step)
        machine_.report_at(
            w, "race", std::string(what) + " nothing orders among the lanes of the warp, after " + sites_[old.site]);
}

void Races::order_lanes(Warp& w, u32 lanes) {
    State& mine = state(w);
    ++mine.step;
    for (u32 left = lanes; left; left &= left - 1)
        mine.lane_steps[first_lane(left)] = mine.step;
}

void Races::read_byte(Warp& w, Shadow& at, const Mark& now, const Knowledge& known) {
    if (at.write.clock)
        check(w, at.write, now, known, "a read after a write that");
    if (at.read.clock == 0 || at.read.who == now.who) {
        at.read = now;
        return;
    }
    auto same =
        std::find_if(at.more_reads.begin(), at.more_reads.end(), [&](const Mark& old) { return old.who == now.who; });
    if (same != at.more_reads.end())
        *same = now;
    else
        at.more_reads.push_back(now);
}

void Races::write_byte(Warp& w, Shadow& at, const Mark& now, const Knowledge& known) {
    if (at.write.clock && (at.write.who != now.who || now.is_async)) // lanes of a warp often write the same value
        check(w, at.write, now, known, "two writes that");
    auto check_reader = [&](Mark reader) {
        reader.is_generic = false; // a proxy fence orders writes; reads need the ordering only
        check(w, reader, now, known, "a write after a read that");
    };
    if (at.read.clock)
        check_reader(at.read);
    for (const Mark& reader : at.more_reads)
        check_reader(reader);
    at.read = Mark{};
    at.more_reads.clear();
    at.write = now;
}

void Races::touch(Warp& w, u64 address, u64 bytes, const Mark& now, bool is_write, const Knowledge& known) {
    while (bytes) {
        Shadow* block = shadow_block(address);
        u64 first = address % 64, last = std::min<u64>(64, first + bytes);
        touched_ = address;
        for (u64 i = first; i < last; ++i)
            is_write ? write_byte(w, block[i], now, known) : read_byte(w, block[i], now, known);
        address += last - first, bytes -= last - first;
    }
}

void Races::access(Warp& w, const u8* memory, u32 bytes, Access kind, u16 mode, int lane) {
    State& mine = state(w);
    bool is_strong = order_of(mode) != Order::Weak || kind == Access::Atomic;
    Mark now{3 * w.id, get(mine.known.all, 3 * w.id), site(w), mine.step, static_cast<u8>(lane),
        is_strong ? scope_of(mode) : Scope::None};
    u64 address = reinterpret_cast<u64>(memory);
    if (is_strong && kind != Access::Write)
        synchronise(w, memory, Access::Read, mode); // what is acquired orders this access too
    touch(w, address, bytes, now, kind != Access::Read, mine.known);
    if (is_strong && kind != Access::Read)
        synchronise(w, memory, Access::Write, mode);
}

void Races::send(State& mine, u64 address) {
    sent_[address] = {mine.place.rank, mine.known.messages};
}

void Races::receive(State& mine, u64 address) {
    auto found = sent_.find(address);
    if (found == sent_.end() || found->second.rank == mine.place.rank)
        return;
    mine.known.messages = std::max(mine.known.messages, found->second.messages + 1);
    longest_chain = std::max(longest_chain, mine.known.messages);
}

void Races::synchronise(Warp& w, const u8* memory, Access kind, u16 mode) {
    State& mine = state(w);
    Order order = order_of(mode);
    Scope scope = scope_of(mode);
    if (scope == Scope::Sys)
        kind == Access::Read ? receive(mine, reinterpret_cast<u64>(memory)) : send(mine, reinterpret_cast<u64>(memory));
    auto& list = releases_[reinterpret_cast<u64>(memory)];
    if (kind == Access::Read) {
        bool acquires = order == Order::Acquire || order == Order::AcqRel;
        for (const Release& entry : list) {
            bool fits = covers(entry.scope, entry.from, mine.place) && covers(scope, mine.place, entry.from);
            if (fits)
                (acquires ? mine.known : mine.after_load).join(entry.known);
        }
        if (acquires)
            order_lanes(w, w.mask);
        return;
    }
    bool releases = order == Order::Release || order == Order::AcqRel;
    if (!releases && mine.fence_scope == Scope::None)
        return;
    Scope effective = releases ? scope : mine.fence_scope;
    const Knowledge& what = releases ? mine.known : mine.before_fence;
    auto same = std::find_if(list.begin(), list.end(),
        [&](const Release& r) { return r.from.cta == mine.place.cta && r.scope == effective; });
    if (same == list.end())
        list.push_back({effective, mine.place, what});
    else
        same->known.join(what);
    raise(mine.known.all, 3 * w.id, get(mine.known.all, 3 * w.id) + 1);
}

void Races::fence(Warp& w, u16 mode) {
    State& mine = state(w);
    mine.known.join(mine.after_load);
    mine.before_fence = mine.known;
    order_lanes(w, w.mask);
    mine.fence_scope = std::max(mine.fence_scope, scope_of(mode));
    raise(mine.known.all, 3 * w.id, get(mine.known.all, 3 * w.id) + 1);
}

void Races::proxy_fence(Warp& w, bool of_shared, bool of_global) {
    State& mine = state(w);
    if (of_shared)
        join_clock(mine.known.fenced_shared, mine.known.all);
    if (of_global)
        join_clock(mine.known.fenced_global, mine.known.all);
    raise(mine.known.all, 3 * w.id, get(mine.known.all, 3 * w.id) + 1);
}

std::shared_ptr<AsyncStamp> Races::issue(Warp& w) {
    State& mine = state(w);
    auto stamp = std::make_shared<AsyncStamp>();
    stamp->warp = w.id;
    stamp->count = ++mine.issued;
    stamp->at_issue = mine.known;
    return stamp;
}

void Races::async_access(Warp& w, const AsyncStamp& stamp, const u8* memory, u64 bytes, bool is_write) {
    Mark now{3 * stamp.warp + (is_write ? 2u : 1u), stamp.count, site(w), 0, 0, Scope::None, true, stamp.is_generic};
    touch(w, reinterpret_cast<u64>(memory), bytes, now, is_write, stamp.at_issue);
}

void Races::async_done(Warp& w, u32 of, u32 count, bool reads_only) {
    State& mine = state(w);
    raise(mine.known.all, 3 * of + 1, count);
    if (!reads_only)
        raise(mine.known.all, 3 * of + 2, count);
}

void Races::release(Warp& w, const void* object, u64 round) {
    State& mine = state(w);
    objects_[{object, round}].join(mine.known);
    raise(mine.known.all, 3 * w.id, get(mine.known.all, 3 * w.id) + 1);
}

void Races::acquire(Warp& w, const void* object, u64 round) {
    order_lanes(w, w.mask);
    const auto found = objects_.find({object, round});
    if (found != objects_.end())
        state(w).known.join(found->second);
}

void Races::release_async(const AsyncStamp& stamp, const void* object, u64 round) {
    Knowledge done;
    raise(done.all, 3 * stamp.warp + 1, stamp.count);
    raise(done.all, 3 * stamp.warp + 2, stamp.count);
    if (stamp.follows_issue)
        join_clock(done.all, stamp.at_issue.all), done.tensor = done.all;
    objects_[{object, round}].join(done);
}

void Races::forget_memory(const u8* memory, u64 bytes) {
    u64 low = reinterpret_cast<u64>(memory);
    for (u64 block = low / 64; block <= (low + bytes) / 64; ++block) {
        auto found = shadows_.find(block);
        for (u64 i = 0; i < 64; ++i) {
            u64 address = block * 64 + i;
            if (address < low || address >= low + bytes)
                continue;
            if (found != shadows_.end())
                found->second[i] = Shadow{};
            if (!releases_.empty())
                releases_.erase(address);
        }
    }
}

void Races::finish(const Launch& launch) {
    Knowledge& all = ended_[launch.rank];
    for (auto& cta : launch.ctas) {
        for (auto& warp : cta->warps) {
            State& mine = state(*warp);
            all.join(mine.known);
            raise(all.all, 3 * warp->id + 1, mine.issued);
            raise(all.all, 3 * warp->id + 2, mine.issued);
        }
        auto drop = [&](const void* first, const void* last) {
            objects_.erase(objects_.lower_bound({first, 0}), objects_.lower_bound({last, 0}));
        };
        drop(cta->barriers, cta->barriers + std::size(cta->barriers));
        for (auto& [offset, info] : cta->mbarriers)
            drop(&info, &info + 1);
    }
    for (auto& cluster : launch.clusters)
        objects_.erase(objects_.lower_bound({cluster.get(), 0}), objects_.lower_bound({cluster.get() + 1, 0}));
    all.fenced_shared = all.fenced_global = all.all; // the end of a kernel orders every proxy
}

void Races::forget(const void* object, u64 round) {
    objects_.erase({object, round});
}

void note_access(Warp& w, u16 mode, u8* p, u32 bytes, Access access, int lane) {
    if (w.machine->races)
        w.machine->races->access(w, p, bytes, access, mode, lane);
}

void note_async(Warp& w, AsyncOp& op, const u8* p, u64 bytes, bool is_write) {
    if (!op.stamp)
        return;
    w.machine->races->async_access(w, *op.stamp, p, bytes, is_write);
    if (op.group)
        op.group->last_stamp = std::max(op.group->last_stamp, op.stamp->count);
}

} // namespace deep_gemm_k3::emulator
