#include "observer.hpp"

#include <algorithm>
#include <stdexcept>

#include "device.hpp"
#include "mbarrier.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr size_t kMaxWaits = 500000; // a trace beyond that is of no use to a viewer
constexpr size_t kCounters = sizeof(Counters) / sizeof(u64);
constexpr u8 kNoRole = 0xff;

std::string microseconds(u64 ns) {
    std::string fraction = std::to_string(1000 + ns % 1000);
    return std::to_string(ns / 1000) + "." + fraction.substr(1);
}

} // namespace

void Counters::add(const Counters& before, const Counters& now) {
    u64 sum[kCounters], old[kCounters], fresh[kCounters];
    std::memcpy(sum, this, sizeof(sum)), std::memcpy(old, &before, sizeof(old)),
        std::memcpy(fresh, &now, sizeof(fresh));
    for (size_t i = 0; i < kCounters; ++i)
        sum[i] += fresh[i] - old[i];
    std::memcpy(this, sum, sizeof(sum));
}

std::vector<std::pair<const char*, u64>> listed(const Counters& c) {
    return {{"instructions", c.instructions}, {"macs", c.macs}, {"mma", c.mma}, {"wgmma", c.wgmma},
        {"tensor_products", c.tensor_products}, {"tensor_read", c.tensor_read}, {"tensor_written", c.tensor_written},
        {"tma_loads", c.tma_loads}, {"tma_stores", c.tma_stores}, {"tma_bytes", c.tma_bytes},
        {"bulk_copies", c.bulk_copies}, {"global_read", c.global_read}, {"global_written", c.global_written},
        {"peer_read", c.peer_read}, {"peer_written", c.peer_written}, {"shared_read", c.shared_read},
        {"shared_written", c.shared_written}, {"atomics", c.atomics}, {"barrier_waits", c.barrier_waits},
        {"mbarrier_waits", c.mbarrier_waits}, {"system_operations", c.system_operations}};
}

void Observer::set_roles(const std::string& text) {
    std::vector<std::string> names;
    std::vector<u8> of_warp;
    for (size_t at = 0; at < text.size();) {
        size_t comma = std::min(text.find(',', at), text.size());
        std::string part = text.substr(at, comma - at);
        size_t star = part.find('*');
        int count = star == std::string::npos ? 1 : std::atoi(part.c_str() + star + 1);
        std::string name = part.substr(0, star);
        if (name.empty() || count < 1 || count > 32)
            throw std::invalid_argument("roles: wanted name*count,name,..., given " + text);
        size_t index = static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
        if (index == names.size())
            names.push_back(name);
        of_warp.insert(of_warp.end(), static_cast<size_t>(count), static_cast<u8>(index));
        at = comma + 1;
    }
    names_ = names, role_of_warp_ = of_warp;
    counters.assign(names.size(), Counters{});
}

void Observer::clear() {
    counters.assign(names_.size(), Counters{});
    tracks_.clear(), waits_.clear();
    dropped_ = 0;
}

u8 Observer::role_of(u32 warp_index) const {
    return warp_index < role_of_warp_.size() ? role_of_warp_[warp_index] : kNoRole;
}

void Observer::own(u64 low, u64 bytes, u32 rank) {
    disown(low);
    owned_.push_back({low, low + bytes, rank});
}

void Observer::disown(u64 low) {
    std::erase_if(owned_, [&](const Owned& item) { return item.low == low; });
    last_owned_ = 0;
}

bool Observer::is_peers(u64 address, u32 rank) {
    auto holds = [&](const Owned& item) { return address - item.low < item.high - item.low; };
    if (last_owned_ < owned_.size() && holds(owned_[last_owned_]))
        return owned_[last_owned_].rank != rank;
    auto found = std::find_if(owned_.begin(), owned_.end(), holds);
    if (found == owned_.end())
        return false;
    last_owned_ = static_cast<size_t>(found - owned_.begin());
    return found->rank != rank;
}

void Observer::begin(Warp& w, u64 now) {
    if (!w.track) {
        const Cta& cta = *w.cta;
        const u32* grid = cta.launch->grid;
        u32 number = cta.id[0] + grid[0] * (cta.id[1] + grid[1] * cta.id[2]);
        tracks_.push_back({cta.launch->rank, number, w.index, w.role, cta.launch->program, now, 0, 0});
        w.track = static_cast<u32>(tracks_.size());
    }
    Track& track = tracks_[w.track - 1];
    if (track.open)
        waits_[track.open - 1].end = now;
    track.open = 0;
}

void Observer::wait(Warp& w, const Split& split, u64 now) {
    for (auto& other : w.splits)
        if (other->state == SplitState::Ready)
            return;
    if (waits_.size() >= kMaxWaits) {
        ++dropped_;
        return;
    }
    bool polls = split.state == SplitState::Parked;
    waits_.push_back({now, now, w.track - 1, split.pc, split.wait.what, split.wait.object, polls});
    tracks_[w.track - 1].open = static_cast<u32>(waits_.size());
}

void Observer::end(Warp& w, u64 now) {
    tracks_[w.track - 1].end = now;
}

// One event of the trace format: a slice with a beginning and a length.
static std::string slice(const char* category, const std::string& name, u64 begin, u64 end, const std::string& more) {
    return std::string(",\n{\"ph\":\"X\",\"cat\":\"") + category + "\",\"name\":" + json_text(name) +
           ",\"ts\":" + microseconds(begin) + ",\"dur\":" + microseconds(end - begin) + more + "}";
}

void Observer::write_track(std::string& out, size_t number, const std::vector<std::vector<u32>>& by_track) const {
    const Track& track = tracks_[number];
    std::string where = ",\"pid\":" + std::to_string(track.rank) + ",\"tid\":" + std::to_string(number + 1);
    std::string role = track.role < names_.size() ? names_[track.role] : "warp";
    std::string name = role + ", CTA " + std::to_string(track.cta) + " warp " + std::to_string(track.warp);
    u64 order = u64{track.role} * 1000000 + track.cta * 64 + track.warp;
    out += ",\n{\"ph\":\"M\",\"name\":\"process_name\"" + where + ",\"args\":{\"name\":\"rank " +
           std::to_string(track.rank) + "\"}},\n{\"ph\":\"M\",\"name\":\"thread_name\"" + where +
           ",\"args\":{\"name\":" + json_text(name) + "}},\n{\"ph\":\"M\",\"name\":\"thread_sort_index\"" + where +
           ",\"args\":{\"sort_index\":" + std::to_string(order) + "}}";
    u64 at = track.begin;
    const Syntax& syntax = *track.program->syntax;
    for (u32 index : by_track[number]) {
        const Wait& w = waits_[index];
        if (w.begin > at)
            out += slice("run", role, at, w.begin, where);
        const Statement& s = track.program->function->statements[track.program->code[w.pc].statement];
        std::vector<std::string> chain = syntax.call_chain(s.location);
        std::string calls;
        for (const std::string& call : chain)
            calls += (calls.empty() ? "" : " > ") + call;
        std::string what = w.polls ? "polls memory" : w.what ? w.what : "waits";
        std::string shown = chain.empty()      ? what
                            : chain.size() > 1 ? chain[chain.size() - 2] + " > " + chain.back()
                                               : calls;
        std::string more = ",\"args\":{\"what\":" + json_text(what) + ",\"object\":" + json_text(hex(w.object)) +
                           ",\"calls\":" + json_text(calls) + ",\"at\":" + json_text(track.program->where(w.pc)) + "}";
        out += slice("wait", shown, w.begin, w.end, where + more);
        at = w.end;
    }
    if (track.end > at)
        out += slice("run", role, at, track.end, where);
}

std::string Observer::trace_json() {
    std::string out =
        "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"dropped_waits\":" + std::to_string(dropped_) +
        ",\"time\":\"a nanosecond for about eight instructions of all warps together\"},\"traceEvents\":[";
    std::vector<std::vector<u32>> by_track(tracks_.size());
    for (size_t i = 0; i < waits_.size(); ++i)
        by_track[waits_[i].track].push_back(static_cast<u32>(i));
    out += "{\"ph\":\"M\",\"name\":\"trace\",\"args\":{}}";
    for (size_t i = 0; i < tracks_.size(); ++i)
        write_track(out, i, by_track);
    tracks_.clear(), waits_.clear();
    dropped_ = 0;
    return out + "\n]}\n";
}

} // namespace deep_gemm_k3::emulator
