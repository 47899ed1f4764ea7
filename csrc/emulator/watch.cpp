#include "watch.hpp"

#include <algorithm>

namespace deep_gemm_k3::emulator {

namespace {

WatchedRegisters& registers_of(Warp& w) {
    WatchedRegisters& mine = w.watched;
    if (mine.state.empty()) {
        mine.state.resize(w.program->watched_registers);
        for (u32 i = 0; i < mine.state.size(); ++i)
            mine.state[i].origin = i;
    }
    return mine;
}

bool in_flight(const WatchedRegisters& all, const WatchedRegisters::Register& one) {
    return one.group > all.complete;
}

void report(Warp& w, const char* what, const WatchedRegisters& all, const WatchedRegisters::Register& one) {
    w.machine->report_at(w, "wgmma-registers",
        std::string("a register that a wgmma still uses is ") + what + " before wgmma.wait_group: group " +
            std::to_string(one.group) + " of the warp, of which " + std::to_string(all.complete) + " are waited for");
}

// Any instruction but wgmma that mentions a watched register.
void exec_watched(Warp& w, const Inst& in, u32 m) {
    const Watch& watch = w.program->watches[w.program->watch_at[w.pc - 1]];
    WatchedRegisters& all = registers_of(w);
    if (watch.is_copy) {
        const auto source = all.state[watch.uses[0]];
        auto& target = all.state[watch.defs[0]];
        if (in_flight(all, target) && target.origin == watch.defs[0] && source.origin != target.origin)
            report(w, "written", all, target);
        target = source;
        return watch.run(w, in, m);
    }
    for (u32 v : watch.uses)
        if (in_flight(all, all.state[v]))
            report(w, "read", all, all.state[v]);
    for (u32 v : watch.defs) {
        auto& target = all.state[v];
        if (in_flight(all, target) && target.origin == v)
            report(w, "written", all, target);
        target = {0, v, true};
    }
    watch.run(w, in, m);
}

} // namespace

void watch_product(Warp& w) {
    const Watch& watch = w.program->watches[w.program->watch_at[w.pc - 1]];
    WatchedRegisters& all = registers_of(w);
    bool is_fenced = true;
    for (u32 v : watch.uses) {
        is_fenced &= !all.state[v].is_dirty;
        all.state[v] = {w.wgmma_committed + 1, v, false};
    }
    if (!is_fenced)
        w.machine->report_at(w, "wgmma-fence",
            "wgmma uses registers that were written, or are used for the first time, with no wgmma.fence since");
}

void watch_fence(Warp& w) {
    for (auto& one : registers_of(w).state)
        one.is_dirty = false;
}

void watch_wait(Warp& w, u64 groups) {
    w.watched.complete = std::max(w.watched.complete, groups);
}

// Finds the registers of wgmma and their copies, and puts watches before the instructions that mention them.
void Decoder::watch_registers() {
    std::vector<u32> number(function_.registers.size(), kNoPc); // among the watched
    std::vector<std::vector<const Touch*>> mentions(program_->code.size());
    for (const Touch& touch : touches_)
        if (row_class(function_.registers[touch.vreg].type) == RowClass::Word)
            mentions[touch.inst].push_back(&touch);
    u32 count = 0;
    auto add = [&](u32 vreg) {
        bool is_new = number[vreg] == kNoPc;
        if (is_new)
            number[vreg] = count++;
        return is_new;
    };
    auto statement_of = [&](u32 i) -> const Statement& { return function_.statements[program_->code[i].statement]; };
    auto is_product = [&](u32 i) {
        const Statement& s = statement_of(i);
        return s.op == "wgmma" && std::find(s.mods.begin(), s.mods.end(), "mma_async") != s.mods.end();
    };
    auto is_copy = [&](u32 i) {
        return statement_of(i).op == "mov" && mentions[i].size() == 2 && mentions[i][0]->is_def &&
               mentions[i][1]->is_use;
    };
    u32 size = static_cast<u32>(program_->code.size());
    for (u32 i = 0; i < size; ++i)
        if (!mentions[i].empty() && is_product(i))
            for (const Touch* touch : mentions[i])
                add(touch->vreg);
    for (bool grows = count != 0; grows;) {
        grows = false;
        for (u32 i = 0; i < size; ++i)
            if (is_copy(i) && (number[mentions[i][0]->vreg] != kNoPc) != (number[mentions[i][1]->vreg] != kNoPc))
                grows |= add(mentions[i][0]->vreg) | add(mentions[i][1]->vreg);
    }
    program_->watched_registers = count;
    for (u32 i = 0; count && i < size; ++i) {
        Watch watch;
        bool product = !mentions[i].empty() && is_product(i);
        for (const Touch* touch : mentions[i]) {
            u32 v = number[touch->vreg];
            if (v == kNoPc)
                continue;
            if (touch->is_use || product)
                watch.uses.push_back(v);
            if (touch->is_def && !product)
                watch.defs.push_back(v);
        }
        if (watch.uses.empty() && watch.defs.empty())
            continue;
        watch.inst = i;
        watch.is_copy = is_copy(i) && program_->code[i].pred == 0;
        watch.run = program_->code[i].run;
        if (!product)
            program_->code[i].run = exec_watched;
        program_->watches.push_back(std::move(watch));
    }
}

} // namespace deep_gemm_k3::emulator
