// Who waits for whom when nobody can go on: lanes that may go on without the others of their warp, clusters that
// nothing can help any more, and the report.
#include <algorithm>

#include "exec.hpp"
#include "mbarrier.hpp"

namespace deep_gemm_k3::emulator {

namespace {

bool is_waiting(const Split& split) {
    return split.state == SplitState::Blocked || split.state == SplitState::Parked;
}

std::string wait_text(const Warp& w, const Split& split) {
    if (split.state == SplitState::Parked)
        return "polls memory that does not change";
    if (!split.wait.what)
        return "waits";
    std::string what = split.wait.what;
    if (what == kWaitsForMbarrier) {
        Cta* cta = w.cta->cluster->ctas[split.wait.object >> 24];
        return "waits for phase " + std::to_string(split.wait.token) + " of " +
               mbarrier_text(*cta, static_cast<u32>(split.wait.object & 0xffffff));
    }
    return split.wait.object ? what + " " + hex(split.wait.object) : what;
}

// The lanes that have arrived go on alone, as a split that is ready.
void leave_meeting_point(Machine& machine, Warp& w, Node& node) {
    const u32 lanes = node.arrived;
    node.expected &= ~lanes;
    node.arrived = 0;
    Split* split = w.new_split(node.rpc, lanes, node.parent);
    split->state = SplitState::Blocked;
    machine.wake(&w, split);
}

bool is_gathering(const Node& node) {
    return node.arrived && node.arrived != node.expected;
}

} // namespace

bool Machine::release_crossed(Warp& w) {
    bool released = false;
    for (auto& node : w.nodes) {
        const u32 missing = node->expected & ~node->arrived;
        for (const Meeting& meeting : w.meetings)
            if (is_gathering(*node) && (meeting.arrived & missing) &&
                (meeting.want & ~meeting.arrived & node->arrived)) {
                leave_meeting_point(*this, w, *node);
                released = true;
            }
    }
    return released;
}

bool Machine::release_meetings_softly(const Cluster* of) {
    bool released = false;
    for (auto& launch : launches)
        for (auto& cta : launch->ctas)
            for (auto& warp : cta->warps)
                for (auto& node : warp->nodes)
                    if ((!of || cta->cluster == of) && is_gathering(*node)) {
                        leave_meeting_point(*this, *warp, *node);
                        released = true;
                    }
    return released;
}

// Memory, and with it the rest of the world, ends polls; time ends waits that have a limit. What is left are barriers
// and lanes of the cluster itself.
Cluster* Machine::dead_end() {
    const auto is_helpless = [](const Cta* cta) {
        for (auto& warp : cta->warps)
            for (auto& split : warp->splits)
                if (warp->live && split->state != SplitState::Dead &&
                    (split->state != SplitState::Blocked || split->wait.timed))
                    return false;
        return true;
    };
    for (auto& launch : launches)
        for (auto& cluster : launch->clusters)
            if (cluster->live_ctas && std::all_of(cluster->ctas.begin(), cluster->ctas.end(), is_helpless))
                return cluster.get();
    return nullptr;
}

u64 Launch::count_effects() const {
    u64 count = 0;
    for (auto& cta : ctas)
        for (auto& warp : cta->warps)
            count += warp->effects + !warp->live;
    return count;
}

std::string Machine::deadlock_text(const Cluster* of) {
    std::string out = "no warp can go on\n";
    u32 shown = 0, hidden = 0;
    auto show = [&](Warp& w, const Split& split) {
        if (!is_waiting(split) || !w.live)
            return;
        if (++shown > 64) {
            ++hidden;
            return;
        }
        w.mask = split.mask;
        w.pc = split.pc + (split.state == SplitState::Blocked ? 1 : 0);
        out += "  " + who(w) + ": " + wait_text(w, split) + "\n";
    };
    for (auto& launch : launches)
        for (auto& cta : launch->ctas)
            for (auto& warp : cta->warps)
                for (auto& split : warp->splits)
                    if (!of || cta->cluster == of)
                        show(*warp, *split);
    if (hidden)
        out += "  and " + std::to_string(hidden) + " more\n";
    return out;
}

} // namespace deep_gemm_k3::emulator
