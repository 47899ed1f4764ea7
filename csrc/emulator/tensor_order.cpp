// The order of tcgen05 operations: happens-before over tensor memory with the fences it wants, and registers of
// tcgen05.ld that are touched before tcgen05.wait::ld.
#include <algorithm>

#include "decode.hpp"
#include "exec.hpp"
#include "races.hpp"

namespace deep_gemm_k3::emulator {

namespace {

u32 at(const ClockVector& clock, u32 i) {
    return i < clock.size() ? clock[i] : 0;
}

void join(ClockVector& to, const ClockVector& from) {
    if (to.size() < from.size())
        to.resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); ++i)
        to[i] = std::max(to[i], from[i]);
}

} // namespace

// Operations that a thread issues in a chain follow each other. Others of the same warp must have been waited for, and
// those of other warps published by a fence before, or a commit, and taken by a fence after.
void Races::check_tensor_order(
    Warp& w, const TensorMark& old, const TensorMark& now, const Knowledge& known, const char* what) {
    u32 from = old.who / 3, to = now.who / 3;
    if (old.clock == 0 || (from == to && old.in_order && now.in_order))
        return;
    std::string text = std::string(what) + " of tensor memory that ";
    if (at(known.all, old.who) < old.clock)
        machine_.report_at(w, "race", text + "nothing orders, after " + sites_[old.site]);
    else if (from != to && at(known.ready, old.who) < old.clock)
        machine_.report_at(w, "tensor-fence",
            text + "no tcgen05.fence::" + (at(known.tensor, old.who) < old.clock ? "before" : "after") +
                "_thread_sync orders, after " + sites_[old.site]);
}

void Races::tensor_access(Warp& w, const AsyncStamp& stamp, const u8* order, u64 bytes, bool is_write, bool in_order) {
    TensorMark now{3 * stamp.warp + (is_write ? 2u : 1u), stamp.count, site(w), in_order};
    for (u64 i = 0; i < bytes; ++i) {
        TensorShadow& shadow = tensor_[order + i];
        check_tensor_order(w, shadow.write, now, stamp.at_issue, is_write ? "two writes" : "a read after a write");
        auto same = std::find_if(
            shadow.reads.begin(), shadow.reads.end(), [&](const TensorMark& old) { return old.who == now.who; });
        if (!is_write) {
            if (same != shadow.reads.end())
                *same = now;
            else
                shadow.reads.push_back(now);
            continue;
        }
        for (const TensorMark& old : shadow.reads)
            check_tensor_order(w, old, now, stamp.at_issue, "a write after a read");
        shadow.reads.clear();
        shadow.write = now;
    }
}

// tcgen05.dealloc: all that used the columns must be ordered before it.
void Races::tensor_free(Warp& w, const u8* order, u64 bytes) {
    const Knowledge& known = state(w).known;
    auto check = [&](const TensorMark& old) {
        if (old.clock && at(known.all, old.who) < old.clock)
            machine_.report_at(
                w, "race", "a use of tensor memory that nothing orders before it is freed, after " + sites_[old.site]);
    };
    for (u64 i = 0; i < bytes; ++i) {
        auto found = tensor_.find(order + i);
        if (found == tensor_.end())
            continue;
        check(found->second.write);
        for (const TensorMark& old : found->second.reads)
            check(old);
        tensor_.erase(found);
    }
}

void Races::forget_tensor(const u8* order, u64 bytes) {
    for (u64 i = 0; i < bytes; ++i)
        tensor_.erase(order + i);
}

void Races::tensor_fence(Warp& w, bool after) {
    Knowledge& known = state(w).known;
    if (after)
        join(known.ready, known.tensor);
    else
        join(known.tensor, known.all);
}

namespace {

// An instruction that mentions a register which a tcgen05.ld on some path before it fills.
void exec_hazard(Warp& w, const Inst& in, u32 m) {
    const LoadHazard& hazard = w.program->load_hazards.at(w.pc - 1);
    if (std::find(w.tensor_loads.begin(), w.tensor_loads.end(), hazard.load) != w.tensor_loads.end())
        w.machine->report_at(w, "load-in-flight",
            "a register of a tcgen05.ld is touched before tcgen05.wait::ld, loaded at " +
                w.program->where(hazard.load));
    hazard.run(w, in, m);
}

} // namespace

// Loads in flight at every instruction, along all paths.
void Decoder::find_load_hazards() {
    std::vector<Inst>& code = program_->code;
    if (function_.statements.empty())
        return;
    auto is = [&](u32 i, const char* what) {
        const Statement& s = function_.statements[code[i].statement];
        return s.op == "tcgen05" && !s.mods.empty() && s.mods[0] == what;
    };
    std::vector<std::vector<u32>> mentions(code.size());
    for (const Touch& touch : touches_)
        mentions[touch.inst].push_back(touch.vreg);
    std::vector<std::set<u32>> in(blocks_.size());
    std::map<u32, std::set<u32>> registers; // per load
    for (u32 i = 0; i < code.size(); ++i)
        if (is(i, "ld"))
            for (const Touch& touch : touches_)
                if (touch.inst == i && touch.is_def)
                    registers[i].insert(touch.vreg);
    if (registers.empty())
        return;
    auto walk = [&](u32 b, bool marks) {
        std::set<u32> flying = in[b];
        for (u32 i = blocks_[b].first; i < blocks_[b].last; ++i) {
            if (is(i, "wait::ld") && code[i].pred == 0)
                flying.clear();
            for (u32 load : marks ? flying : std::set<u32>{})
                for (u32 v : mentions[i])
                    if (load != i && registers[load].count(v) && !program_->load_hazards.count(i))
                        program_->load_hazards[i] = {load, code[i].run};
            if (is(i, "ld"))
                flying.insert(i);
        }
        return flying;
    };
    for (bool changes = true; changes;) {
        changes = false;
        for (u32 b = 0; b < blocks_.size(); ++b) {
            std::set<u32> out = walk(b, false);
            for (u32 next : blocks_[b].successors)
                for (u32 load : out)
                    changes |= in[next].insert(load).second;
        }
    }
    for (u32 b = 0; b < blocks_.size(); ++b)
        walk(b, true);
    for (auto& [i, hazard] : program_->load_hazards)
        code[i].run = exec_hazard;
}

} // namespace deep_gemm_k3::emulator
