// The machine: launches of grids of clusters of CTAs of warps, the units that work beside them, and the scheduler.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "inst.hpp"
#include "memory.hpp"
#include "observer.hpp"

namespace deep_gemm_k3::emulator {

struct Machine;
class Races;
struct AsyncStamp;
struct TensorMemory;
struct Launch;
struct Cta;
struct Warp;
struct Split;

enum class Adversary : u8 { Random, Earliest, Latest };

struct Options {
    u64 seed = 0;
    Adversary adversary = Adversary::Random;
    bool races = false;
    bool time_on_deadlock =
        false;                // advance virtual time instead of reporting, so that the program's own time-outs fire
    bool lanes_apart = false; // part lanes wherever no instruction needs them together
    bool coverage = false;    // note which instructions are executed
    u32 quantum = 400;        // instructions a warp runs at a stretch, at most
    u64 max_instructions = 0; // 0: no limit
};

// Lanes that diverged from a branch and meet again at one pc.
struct Node {
    u32 rpc, expected, arrived;
    Node* parent;
};

enum class SplitState : u8 { Ready, Blocked, Parked, Dead };

struct Wait {
    const char* what = nullptr; // for the deadlock report
    u64 object = 0, token = 0;
    u8 stage = 0;       // a blocked instruction is executed again; it sees how far it had come
    bool timed = false; // may be woken by time alone
    bool timed_out = false;
};

// A place that polls memory, and what it saw.
struct Poll {
    u32 pc = kNoPc, last = 0; // `last`: when it did, counted in the split's polls
    u64 hash = 0, effects = 0;
};

// A set of lanes of one warp at one pc.
struct Split {
    u32 pc = 0, mask = 0;
    Node* node = nullptr;
    SplitState state = SplitState::Ready;
    Wait wait;
    Poll polls[4];
    u32 num_polls = 0;
};

// One commit group of asynchronous copies of a thread.
struct AsyncGroup {
    u32 pending = 0, pending_reads = 0;
    u32 last_stamp = 0; // of its operations, for race detection
    std::vector<std::pair<Warp*, Split*>> waiters;
};

struct AsyncOp {
    Cta* cta = nullptr;                // whose program issued it; kept alive by it
    std::function<void()> read, write; // read may be empty; both run once, in this order
    std::shared_ptr<AsyncGroup> group;
    std::vector<std::shared_ptr<AsyncGroup>> after; // only once these are complete
    std::shared_ptr<AsyncStamp> stamp;              // with race detection
    const char* what = "";
    u32 pc = 0;
    u8 role = 0xff;              // of the warp that issued it
    bool to_shared = false;      // writes shared memory of its cluster
    const void* chain = nullptr; // operations of one chain are done in the order of their issue
    std::vector<Cta*> uses;      // whose memory it uses besides its own CTA's
    std::vector<std::pair<Cta*, std::vector<u32>>> holds; // 16-byte pieces of shared memory that it still reads
};

struct LaneGroups {
    std::shared_ptr<AsyncGroup> open;
    std::deque<std::shared_ptr<AsyncGroup>> committed;
    u32 done_stamp = 0; // of groups that are complete and forgotten
};

// Lanes that have reached a warp-synchronous instruction and wait for the others named in its mask.
struct Meeting {
    u32 pc, want, arrived;
    std::vector<Split*> waiting;
    bool anywhere = false; // whatever the others' pc
};

// What a warp knows of its program's watched registers.
struct WatchedRegisters {
    struct Register {
        u64 group = 0;        // commit group, from 1, of the last wgmma that uses it
        u32 origin = 0;       // the register whose content it holds
        bool is_dirty = true; // written since the last wgmma.fence
    };
    std::vector<Register> state;
    u64 complete = 0; // groups that have been waited for
};

enum class Stop : u8 { None, Blocked, Parked, Yield, Switch };

struct Warp {
    u8* base[2] = {nullptr, nullptr}; // register file, constant pool
    u32 pc = 0, mask = 0;             // of the running split
    Node* node = nullptr;
    Wait wait;
    Stop stop = Stop::None;
    Split* current = nullptr;
    Machine* machine = nullptr;
    Cta* cta = nullptr;
    const Program* program = nullptr;
    u32 index = 0;            // within the CTA
    u32 exists = 0, live = 0; // lanes
    u64 effects = 0, executed = 0;
    bool queued = false;
    std::vector<u64> registers;
    std::vector<std::unique_ptr<Split>> splits;
    std::vector<std::unique_ptr<Node>> nodes;
    std::vector<Node*> free_nodes;
    std::vector<Meeting> meetings;
    std::map<u32, LaneGroups> bulk_groups, copy_groups; // per lane
    u64 cluster_phase = 0;                              // the phase this warp arrived in
    bool cluster_arrived = false;
    u64 wgmma_committed = 0;                  // groups
    std::deque<std::vector<u32>> wgmma_reads; // per group not yet waited for: 16-byte pieces of shared memory it reads
    std::vector<u32> wgmma_open;              // the same, not yet committed
    WatchedRegisters watched;
    u32 carry = 0;                // the condition-code bit of each lane
    std::deque<u32> wgmma_stamps; // per group not yet waited for, with race detection
    u32 wgmma_stamp = 0, wgmma_done_stamp = 0;
    u8 tensor_chain[kLanes] = {};            // its addresses name the chains of tcgen05 operations, one per lane
    std::map<u32, LaneGroups> tensor_stores; // tcgen05.st, in the entry of lane 0
    std::vector<u32> tensor_loads;           // pcs of tcgen05.ld not yet waited for
    u32 tensor_load_stamp = 0;
    u8 role = 0xff; // the observer's
    u32 track = 0;  // of the trace, 0: none yet
    u32 id = 0;     // global number, for vector clocks and traces

    template <class T>
    T* row(Ref ref) {
        return reinterpret_cast<T*>(base[ref & 1] + (ref & ~3u));
    }
    u32 predicate(Ref ref) { return *row<u32>(ref) ^ ((ref & 2) ? kFullMask : 0u); }
    void set_predicate(Ref ref, u32 m, u32 value) {
        u32* p = row<u32>(ref);
        *p = (*p & ~m) | (value & m);
    }
    u64 address(Ref ref, int lane) { return (ref & 2) ? row<u64>(ref)[lane] : row<u32>(ref)[lane]; }
    u32 extra(const Inst& in, u32 i) const { return program->extra[in.extra + i]; }
    void block(const char* what, u64 object, u64 token, bool timed = false); // run this instruction again when woken
    Node* new_node(u32 rpc, u32 expected, Node* parent);
    void free_node(Node* node) { free_nodes.push_back(node); }
    Split* new_split(u32 pc, u32 mask, Node* node);
    void exit_lanes(u32 m);
};

struct NamedBarrier {
    u32 expected = 0; // threads; 0: all that live
    u64 generation = 0;
    std::vector<u32> arrived;       // lanes, per warp
    u32 popc = 0, all = 1, any = 0; // of the round being gathered
    u32 last_popc = 0, last_all = 0, last_any = 0;
    bool in_use = false;
    std::vector<std::pair<Warp*, Split*>> waiters;
};

struct MbarrierInfo {
    u32 line_pc = 0;
    std::vector<std::pair<Warp*, Split*>> waiters;
};

struct Cluster {
    Launch* launch = nullptr;
    u64 serial = 0; // of its first CTA
    u32 id[3] = {0, 0, 0};
    std::vector<Cta*> ctas;
    u32 live_ctas = 0, arrived = 0;
    u64 phase = 0;
    std::vector<std::pair<Warp*, Split*>> waiters;
};

struct Cta {
    Launch* launch = nullptr;
    u64 serial = 0; // counted from 1 over all launches
    Cluster* cluster = nullptr;
    u32 id[3] = {0, 0, 0}, rank = 0; // rank in the cluster
    std::vector<u8> shared, written; // written: one byte per byte of shared memory
    std::vector<u8> local;           // per thread
    std::vector<std::unique_ptr<Warp>> warps;
    NamedBarrier barriers[16];
    std::map<u32, MbarrierInfo> mbarriers; // by shared offset
    std::vector<u16> readers; // per 16 bytes of shared memory: tensor-core operations that may still read it
    u64 reader_count = 0;
    std::vector<std::pair<Warp*, Split*>> wgmma_waiters;
    std::shared_ptr<TensorMemory> tensor; // made when it is first used
    u32 live_threads = 0;
    bool exited = false;
};

struct ModuleInstance {
    const Syntax* syntax = nullptr;
    std::vector<u64> storage; // .global and .const variables, from `base` on
    u64 base = 0;
};

struct Launch {
    std::shared_ptr<const Program> program;
    std::shared_ptr<ModuleInstance> instance;
    u32 grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
    u32 dynamic_shared = 0, num_sms = 4, rank = 0, resident_limit = 1;
    std::vector<u64> params; // from `param_base` on
    u64 param_base = 0;
    std::string label;
    u64 next_cluster = 0, total_clusters = 0, live_clusters = 0;
    bool is_started = false, is_ended = false;
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::vector<std::unique_ptr<Cta>> ctas;
    u64 count_effects() const; // changes whenever one of its warps does more than look
};

struct Finding {
    std::string kind, text;
    u64 count = 1;
};

struct Machine {
    Options options;
    MemoryMap memory;
    std::mt19937_64 random;
    std::vector<std::unique_ptr<Launch>> launches;
    std::vector<Warp*> runnable;
    std::vector<std::pair<Warp*, Split*>> parked, timed;
    std::vector<std::unique_ptr<AsyncOp>> async;
    std::vector<Finding> findings;
    std::set<std::pair<std::string, std::string>> finding_keys;
    Counters counters;
    Observer observer;
    u8 current_role = 0xff; // of the warp that runs
    u64 epoch = 1, virtual_ns = 1000000, live_warps = 0;
    u64 schedule = 0; // digest of which warp ran how far when, and of what completed when
    u32 next_warp_id = 0;
    u64 next_cta = 1;
    std::string printed;
    std::unordered_map<const Program*, std::vector<u8>> reached; // with coverage: one byte per instruction

    std::shared_ptr<Races> races;           // null without race detection
    std::shared_ptr<AsyncStamp> completing; // the operation whose writing half runs

    explicit Machine(const Options& chosen) : options(chosen), random(chosen.seed) {}
    void run();                  // all launches, to completion; those of one rank one after the other
    void reset();                // forgets the launches; findings and counters stay
    bool step();                 // some progress; false when nobody is ready
    void admit(Launch& launch);  // starts what fits
    void finish(Launch& launch); // it has ended: what it left in flight is completed first
    bool is_finished(const Launch& launch) const;
    void remove(Launch* launch);
    void unpark_all(bool by_time); // pollers look again; by time also those who wait with a limit
    void touch(Warp& w) { ++epoch, ++w.effects; }
    void wake(Warp* warp, Split* split);
    void wake_all(std::vector<std::pair<Warp*, Split*>>& waiters);
    void submit(std::unique_ptr<AsyncOp> op); // an asynchronous operation, done now or later as the adversary likes
    void note_schedule(u64 a, u64 b) {
        schedule = (schedule ^ (a << 32 | b)) * 0x9e3779b97f4a7c15ull + (schedule >> 29);
    }
    void report(const std::string& kind, const std::string& text);
    void report_at(Warp& w, const std::string& kind, const std::string& text);
    std::string who(const Warp& w) const;
    void cta_exit_check(Warp& w);
    // Nobody is ready and no asynchronous work is left: lets pollers look once more; false when that has not helped.
    bool quiet_round(u32& rounds);
    void part_lanes(Warp& w);
    bool come_together(Warp& w, const Inst& in);
    // A cluster whose warps wait for each other alone, so that nothing outside it can ever help them; null: there is
    // none. To be asked when nobody is ready and no asynchronous work is left.
    Cluster* dead_end();
    // Who waits, and on what: of the cluster, or of all.
    std::string deadlock_text(const Cluster* of = nullptr);
    // Lanes that wait for diverged lanes of their own warp go on alone: independent thread scheduling promises them
    // progress. Of the cluster, or of all; false when there are none.
    bool release_meetings_softly(const Cluster* of = nullptr);
    std::string reached_lines(); // of PTX, as numbers with spaces between them

  private:
    bool launch_ended = true; // or none has begun yet
    u64 quiet_epoch = 0, parked_epoch = 0, progress_epoch = 0, progress_instructions = 0;
    void start_cluster(Launch& launch, u64 number);
    void start_warp(Cta& cta, u32 index, u32 threads);
    void fill_specials(Warp& w);
    void run_warp(Warp& w);
    Split* pick_split(Warp& w);
    void complete_async(size_t index);
    bool release_crossed(Warp& w); // lanes that wait where they diverged for lanes that wait for them elsewhere
    void retire(Warp& w);
    bool admit_next(); // the first launch of every rank that has none running; false when all have ended
};

} // namespace deep_gemm_k3::emulator
