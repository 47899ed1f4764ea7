// Control flow of a decoded kernel: blocks, reconvergence points, liveness, and the renaming of registers to rows.
#include <algorithm>
#include <functional>
#include <queue>

#include "decode.hpp"
#include "exec.hpp"

namespace deep_gemm_k3::emulator {

void Decoder::build_blocks() {
    std::vector<Inst>& code = program_->code;
    std::vector<bool> leader(code.size() + 1, false);
    leader[0] = true;
    for (u32 i = 0; i < code.size(); ++i) {
        bool is_jump = code[i].target != kNoPc, is_end = code[i].run == exec_exit;
        if (is_jump)
            leader[code[i].target] = true;
        if (is_jump || is_end)
            leader[i + 1] = true;
    }
    block_of_.assign(code.size(), 0);
    for (u32 i = 0; i < code.size(); ++i) {
        if (leader[i]) {
            blocks_.emplace_back();
            blocks_.back().first = i;
        }
        blocks_.back().last = i + 1;
        block_of_[i] = static_cast<u32>(blocks_.size() - 1);
    }
    for (u32 b = 0; b < blocks_.size(); ++b) {
        const Inst& end = code[blocks_[b].last - 1];
        bool is_guarded = end.pred != 0;
        bool is_jump = end.target != kNoPc, is_exit = end.run == exec_exit;
        if (is_jump)
            blocks_[b].successors.push_back(block_of_[end.target]);
        blocks_[b].has_exit = is_exit;
        bool falls = is_guarded || !(is_jump || is_exit);
        if (falls && b + 1 < blocks_.size())
            blocks_[b].successors.push_back(b + 1);
        for (u32 next : blocks_[b].successors)
            blocks_[next].predecessors.push_back(b);
    }
}

// Immediate post-dominators (Cooper, Harvey, Kennedy on the reversed graph with a virtual end).
void Decoder::find_reconvergence() {
    u32 count = static_cast<u32>(blocks_.size()), end = count;
    std::vector<u32> order;
    std::vector<bool> seen(count + 1, false);
    std::vector<std::pair<u32, size_t>> stack;
    auto reversed = [&](u32 b) -> const std::vector<u32>& { return blocks_[b].predecessors; };
    std::vector<u32> exits;
    for (u32 b = 0; b < count; ++b)
        if (blocks_[b].has_exit)
            exits.push_back(b);
    stack.emplace_back(end, 0);
    seen[end] = true;
    while (!stack.empty()) {
        auto& [node, at] = stack.back();
        const std::vector<u32>& next = node == end ? exits : reversed(node);
        if (at < next.size()) {
            u32 to = next[at++];
            if (!seen[to])
                seen[to] = true, stack.emplace_back(to, 0);
        } else {
            order.push_back(node);
            stack.pop_back();
        }
    }
    std::vector<u32> rank(count + 1, kNoPc), idom(count + 1, kNoPc);
    for (u32 i = 0; i < order.size(); ++i)
        rank[order[i]] = i;
    idom[end] = end;
    auto meet = [&](u32 x, u32 y) {
        while (x != y) {
            while (rank[x] < rank[y])
                x = idom[x];
            while (rank[y] < rank[x])
                y = idom[y];
        }
        return x;
    };
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = order.size() - 1; i-- > 0;) {
            u32 node = order[i], best = blocks_[node].has_exit ? end : kNoPc;
            for (u32 next : blocks_[node].successors)
                if (idom[next] != kNoPc)
                    best = best == kNoPc ? next : meet(best, next);
            if (best != idom[node])
                idom[node] = best, changed = true;
        }
    }
    for (u32 b = 0; b < count; ++b) {
        Inst& last = program_->code[blocks_[b].last - 1];
        if (last.target == kNoPc || last.pred == 0 || idom[b] == kNoPc || idom[b] == end)
            continue;
        last.reconverge = blocks_[idom[b]].first;
        Inst& meeting = program_->code[last.reconverge];
        if (meeting.run == exec_label)
            meeting.run = exec_reconverge;
        else if (meeting.run != exec_reconverge)
            last.reconverge = kNoPc;
    }
}

void Decoder::liveness() {
    size_t words = (function_.registers.size() + 63) / 64;
    for (Block& block : blocks_)
        block.use.assign(words, 0), block.def.assign(words, 0), block.in.assign(words, 0), block.out.assign(words, 0);
    auto get = [](const std::vector<u64>& set, u32 i) { return (set[i / 64] >> (i % 64)) & 1; };
    auto put = [](std::vector<u64>& set, u32 i) { set[i / 64] |= u64{1} << (i % 64); };
    for (size_t i = 0; i < touches_.size();) { // touches are in instruction order
        size_t j = i;
        Block& block = blocks_[block_of_[touches_[i].inst]];
        for (; j < touches_.size() && touches_[j].inst == touches_[i].inst; ++j)
            if (touches_[j].is_use && !get(block.def, touches_[j].vreg))
                put(block.use, touches_[j].vreg);
        for (; i < j; ++i)
            if (touches_[i].is_def)
                put(block.def, touches_[i].vreg);
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t b = blocks_.size(); b-- > 0;) {
            Block& block = blocks_[b];
            for (size_t w = 0; w < words; ++w) {
                u64 out = 0;
                for (u32 next : block.successors)
                    out |= blocks_[next].in[w];
                u64 in = block.use[w] | (out & ~block.def[w]);
                changed |= in != block.in[w];
                block.out[w] = out, block.in[w] = in;
            }
        }
    }
    allocate();
}

void Decoder::allocate() {
    size_t count = function_.registers.size();
    std::vector<u32> first(count, kNoPc), last(count, 0);
    auto extend = [&](u32 vreg, u32 from, u32 to) {
        first[vreg] = std::min(first[vreg], from);
        last[vreg] = std::max(last[vreg], to);
    };
    for (const Touch& touch : touches_)
        extend(touch.vreg, touch.inst, touch.inst);
    for (const Block& block : blocks_)
        for (size_t w = 0; w < block.in.size(); ++w) {
            for (u64 set = block.in[w]; set; set &= set - 1)
                extend(static_cast<u32>(w * 64 + static_cast<size_t>(std::countr_zero(set))), block.first, block.first);
            for (u64 set = block.out[w]; set; set &= set - 1)
                extend(
                    static_cast<u32>(w * 64 + static_cast<size_t>(std::countr_zero(set))), block.last - 1, block.last);
        }
    std::vector<u32> order;
    for (u32 v = 0; v < count; ++v)
        if (first[v] != kNoPc)
            order.push_back(v);
    std::sort(
        order.begin(), order.end(), [&](u32 x, u32 y) { return first[x] != first[y] ? first[x] < first[y] : x < y; });
    using Busy = std::pair<u32, u32>; // last instruction, row
    std::priority_queue<Busy, std::vector<Busy>, std::greater<>> busy[4];
    std::vector<u32> free_rows[4];
    std::vector<u32> row(count, 0);
    constexpr u32 kBytes[] = {4, 128, 256, 512};
    for (u32 v : order) {
        int cls = static_cast<int>(row_class(function_.registers[v].type));
        while (!busy[cls].empty() && busy[cls].top().first < first[v]) {
            free_rows[cls].push_back(busy[cls].top().second);
            busy[cls].pop();
        }
        if (free_rows[cls].empty())
            free_rows[cls].push_back(fixed(kBytes[cls]));
        row[v] = free_rows[cls].back();
        free_rows[cls].pop_back();
        busy[cls].emplace(last[v], row[v]);
    }
    for (const Touch& touch : touches_) {
        if (touch.extra_index != kNoPc)
            program_->extra[touch.extra_index] |= row[touch.vreg];
        else
            program_->code[touch.inst].*(touch.field) |= row[touch.vreg];
    }
    for (Inst& inst : program_->code)
        inst.pred &= ~1u;
    program_->register_bytes = (fixed_bytes_ + 63) / 64 * 64;
}

// Drops the labels where no lanes meet.
void Decoder::compact() {
    std::vector<Inst>& code = program_->code;
    std::vector<u32> moved(code.size() + 1, 0);
    u32 kept = 0;
    for (u32 i = 0; i < code.size(); ++i) {
        moved[i] = kept;
        if (code[i].run != exec_label)
            code[kept++] = code[i];
    }
    code.resize(kept);
    if (!program_->watches.empty())
        program_->watch_at.assign(kept, kNoPc);
    for (u32 i = 0; i < program_->watches.size(); ++i)
        program_->watch_at[moved[program_->watches[i].inst]] = i;
    std::map<u32, LoadHazard> hazards;
    for (auto& [i, hazard] : program_->load_hazards)
        hazards[moved[i]] = {moved[hazard.load], hazard.run};
    program_->load_hazards = std::move(hazards);
    for (Inst& inst : code) {
        if (inst.target != kNoPc)
            inst.target = moved[inst.target];
        if (inst.reconverge != kNoPc)
            inst.reconverge = moved[inst.reconverge];
    }
}

} // namespace deep_gemm_k3::emulator
