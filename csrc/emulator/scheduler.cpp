// The scheduler: which warp runs next, when asynchronous work completes, and what to do when nobody can go on.
#include <algorithm>

#include "exec.hpp"
#include "races.hpp"

namespace deep_gemm_k3::emulator {

namespace {

// Rounds without any effect before it is a deadlock. A program may look at what would end its wait at every hundredth
// poll only, and a poll may be several loads.
constexpr u32 kQuietRounds = 1024;
constexpr u32 kTimeRounds = kQuietRounds + 368; // the same, when virtual time may run on
constexpr u32 kSleepRounds = 20;                // further rounds, each of twice the time, while somebody only sleeps
constexpr u32 kStretchApart = 24;               // instructions after which the lanes that run may part
constexpr u64 kLivelockInstructions = 1000000000;

} // namespace

void Machine::wake(Warp* warp, Split* split) {
    if (split->state != SplitState::Blocked && split->state != SplitState::Parked)
        return;
    split->state = SplitState::Ready;
    if (!warp->queued) {
        warp->queued = true;
        runnable.push_back(warp);
    }
}

void Machine::wake_all(std::vector<std::pair<Warp*, Split*>>& waiters) {
    auto list = std::move(waiters);
    waiters.clear();
    for (auto& [warp, split] : list)
        wake(warp, split);
}

void Machine::submit(std::unique_ptr<AsyncOp> op) {
    if (op->group) {
        ++op->group->pending;
        op->group->pending_reads += op->read != nullptr;
    }
    async.push_back(std::move(op));
    if (options.adversary == Adversary::Earliest)
        complete_async(async.size() - 1);
}

// Performs the reading half, or all of it when both halves come at once.
void Machine::complete_async(size_t index) {
    const void* chain = async[index]->chain;
    for (size_t first = 0; chain && first < index; ++first)
        if (async[first]->chain == chain)
            index = first;
    for (auto& group : async[index]->after) {
        if (!group->pending)
            continue;
        for (size_t other = 0; other < async.size(); ++other)
            if (async[other]->group == group)
                return complete_async(other);
    }
    AsyncOp& op = *async[index];
    note_schedule(index, op.pc);
    const Counters before = counters;
    const u8 charged = current_role == 0xff ? op.role : 0xff; // else it counts with the warp that runs
    bool both = options.adversary != Adversary::Random || (random() & 1);
    std::shared_ptr<AsyncGroup> group = op.group;
    bool had_read = op.read != nullptr;
    if (had_read) {
        op.read();
        op.read = nullptr;
        ++epoch;
        if (group && --group->pending_reads == 0)
            wake_all(group->waiters);
        if (!both) {
            observer.charge(charged, before, counters);
            return;
        }
    }
    std::unique_ptr<AsyncOp> done = std::move(async[index]);
    async.erase(async.begin() + static_cast<std::ptrdiff_t>(index));
    ++epoch;
    completing = done->stamp;
    done->write();
    completing = nullptr;
    observer.charge(charged, before, counters);
    for (auto& [cta, pieces] : done->holds) {
        for (u32 piece : pieces)
            --cta->readers[piece];
        cta->reader_count -= pieces.size();
    }
    if (group && --group->pending == 0)
        wake_all(group->waiters);
}

void Machine::unpark_all(bool by_time) {
    auto list = std::move(parked);
    parked.clear();
    for (auto& [warp, split] : list)
        if (split->state == SplitState::Parked)
            wake(warp, split);
    if (!by_time)
        return;
    list = std::move(timed);
    timed.clear();
    for (auto& [warp, split] : list)
        if (split->state == SplitState::Blocked && split->wait.timed) {
            split->wait.timed_out = true;
            wake(warp, split);
        }
}

bool Machine::quiet_round(u32& rounds) {
    if (epoch != quiet_epoch)
        rounds = 0;
    quiet_epoch = epoch;
    ++rounds;
    bool nobody = parked.empty() && timed.empty();
    bool somebody_sleeps =
        std::any_of(parked.begin(), parked.end(), [](const auto& entry) { return entry.second->wait.what == kSleeps; });
    u32 limit = options.time_on_deadlock ? kTimeRounds : kQuietRounds + (somebody_sleeps ? kSleepRounds : 0);
    if (nobody || rounds > limit) {
        if (!release_meetings_softly())
            return false;
        rounds = 0;
        return true;
    }
    if (rounds > kQuietRounds)
        virtual_ns += u64{1000} << std::min<u32>(rounds - kQuietRounds, 40);
    virtual_ns += 100;
    unpark_all(true);
    return true;
}

Split* Machine::pick_split(Warp& w) {
    Split* found = nullptr;
    u32 ready = 0;
    for (auto& split : w.splits)
        if (split->state == SplitState::Ready && (++ready == 1 || random() % ready == 0))
            found = split.get();
    return found;
}

void Machine::run_warp(Warp& w) {
    Split* split = pick_split(w);
    if (!split)
        return;
    const Counters before = counters;
    current_role = w.role;
    if (observer.is_tracing)
        observer.begin(w, virtual_ns);
    w.current = split;
    w.pc = split->pc, w.mask = split->mask, w.node = split->node, w.wait = split->wait;
    w.stop = Stop::None;
    const Inst* code = w.program->code.data();
    u8* reached_code = nullptr;
    if (options.coverage) {
        auto& bytes = reached[w.program];
        bytes.resize(w.program->code.size());
        reached_code = bytes.data();
    }
    u32 stretch = options.lanes_apart ? std::min(options.quantum, kStretchApart) : options.quantum;
    u32 budget = 1 + static_cast<u32>(random() % stretch), left = budget;
    while (left) {
        --left;
        const Inst& in = code[w.pc];
        u32 m = w.mask;
        ++w.pc;
        if (in.is_aligned && options.lanes_apart && w.mask != w.live) {
            if (!come_together(w, in))
                break;
            m = w.mask;
        }
        if (in.pred) {
            m &= w.predicate(in.pred);
            if (!m)
                continue;
        }
        if (reached_code)
            reached_code[&in - code] = 1;
        in.run(w, in, m);
        if (w.stop != Stop::None)
            break;
    }
    u32 executed = budget - left;
    note_schedule(w.id, u64{w.pc} << 16 ^ executed);
    w.executed += executed;
    counters.instructions += executed;
    virtual_ns += executed / 8 + 1;
    if (options.lanes_apart && w.stop == Stop::None)
        part_lanes(w);
    split = w.current;
    split->pc = w.pc, split->mask = w.mask, split->node = w.node, split->wait = w.wait;
    if (w.stop == Stop::Blocked) {
        split->state = SplitState::Blocked;
        if (w.wait.timed)
            timed.emplace_back(&w, split);
    } else if (w.stop == Stop::Parked) {
        split->state = SplitState::Parked;
        parked.emplace_back(&w, split);
    }
    observer.charge(w.role, before, counters);
    current_role = 0xff;
    if (observer.is_tracing)
        w.live ? observer.wait(w, *split, virtual_ns) : observer.end(w, virtual_ns);
    if (!w.live)
        retire(w);
}

void Machine::reset() {
    launch_ended = true;
    runnable.clear(), parked.clear(), timed.clear(), async.clear();
    launches.clear();
    live_warps = 0;
}

void Machine::run() {
    random.seed(options.seed);
    races = options.races ? std::make_shared<Races>(*this) : nullptr;
    u32 rounds = 0;
    while (admit_next())
        if (!step() && !quiet_round(rounds))
            throw Fault("deadlock", deadlock_text());
    while (!async.empty())
        complete_async(0);
}

bool Machine::admit_next() {
    if (!launch_ended)
        return true;
    launch_ended = false;
    std::set<u32> busy;
    for (auto& launch : launches) {
        if (busy.count(launch->rank))
            continue;
        if (!launch->is_started)
            admit(*launch);
        if (is_finished(*launch))
            finish(*launch);
        else
            busy.insert(launch->rank);
    }
    return !busy.empty();
}

// One stretch of one warp, or one asynchronous completion; false when nobody is ready.
bool Machine::step() {
    u64 dice = random();
    bool is_random = options.adversary == Adversary::Random;
    if (!async.empty() && is_random && (dice & 3) == 0)
        complete_async((dice >> 8) % async.size());
    if (runnable.empty()) {
        if (async.empty())
            return false;
        complete_async((dice >> 8) % async.size());
        return true;
    }
    if (!parked.empty() && epoch != parked_epoch && (dice & 0x30) == 0) {
        parked_epoch = epoch;
        unpark_all(false);
    }
    size_t at = (dice >> 32) % runnable.size();
    Warp* warp = runnable[at];
    try {
        run_warp(*warp);
    } catch (const Fault& fault) {
        throw Fault(fault.kind, std::string(fault.what()) + "\n  by " + who(*warp));
    }
    bool is_ready = false;
    for (auto& split : warp->splits)
        is_ready |= split->state == SplitState::Ready;
    if (!is_ready && !warp->meetings.empty() && release_crossed(*warp))
        is_ready = true;
    if (!is_ready) {
        for (at = std::min(at, runnable.size() - 1); runnable[at] != warp;)
            at = (at + 1) % runnable.size();
        runnable[at] = runnable.back();
        runnable.pop_back();
        warp->queued = false;
    }
    if (epoch != progress_epoch ||
        counters.instructions < progress_instructions) // counters may be cleared between calls
        progress_epoch = epoch, progress_instructions = counters.instructions;
    if (counters.instructions - progress_instructions > kLivelockInstructions)
        throw Fault("livelock", "a thousand million instructions without any effect, by " + who(*warp));
    if (options.max_instructions && counters.instructions > options.max_instructions)
        throw Fault("limit", "more than " + std::to_string(options.max_instructions) + " warp instructions");
    return true;
}

bool Machine::is_finished(const Launch& launch) const {
    return launch.is_started && launch.live_clusters == 0 && launch.next_cluster == launch.total_clusters;
}

void Machine::finish(Launch& launch) {
    if (launch.is_ended)
        return;
    launch.is_ended = true;
    for (size_t i = 0; i < async.size();) {
        if (async[i]->cta->launch == &launch)
            complete_async(i), i = 0;
        else
            ++i;
    }
    if (races)
        races->finish(launch);
}

// Takes a launch that has ended away.
void Machine::remove(Launch* launch) {
    finish(*launch);
    auto is_gone = [&](const std::pair<Warp*, Split*>& entry) { return entry.first->cta->launch == launch; };
    std::erase_if(parked, is_gone);
    std::erase_if(timed, is_gone);
    std::erase_if(launches, [&](const auto& item) { return item.get() == launch; });
}

std::string Machine::who(const Warp& w) const {
    const Cta& cta = *w.cta;
    auto triple = [](const u32* v) {
        return "(" + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) + ")";
    };
    std::string out =
        "rank " + std::to_string(cta.launch->rank) + " CTA " + triple(cta.id) + " warp " + std::to_string(w.index) +
        (w.role < observer.roles().size() ? " (" + observer.roles()[w.role] + ")" : "") + " lanes " + hex(w.mask);
    return out + " at " + w.program->where(w.pc ? w.pc - 1 : 0);
}

void Machine::report(const std::string& kind, const std::string& text) {
    for (Finding& finding : findings)
        if (finding.kind == kind && finding.text == text) {
            ++finding.count;
            return;
        }
    if (findings.size() < 200)
        findings.push_back({kind, text, 1});
}

void Machine::report_at(Warp& w, const std::string& kind, const std::string& text) {
    std::string place = w.program->where(w.pc ? w.pc - 1 : 0);
    if (!finding_keys.emplace(kind, place).second) {
        for (Finding& finding : findings)
            if (finding.kind == kind && finding.text.find(place) != std::string::npos)
                ++finding.count;
        return;
    }
    report(kind, text + "\n  by " + who(w));
}

} // namespace deep_gemm_k3::emulator
