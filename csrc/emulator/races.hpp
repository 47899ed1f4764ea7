// Happens-before: vector clocks of warps and of their asynchronous operations, and what they say about every byte.
//
// Three components per warp: its own program order (3 * id), the reads of its asynchronous operations (+ 1) and their
// writes (+ 2). The last two become known to anybody, the warp itself included, only by waiting for the operations.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "ordering.hpp"

namespace deep_gemm_k3::emulator {

using ClockVector = std::vector<u32>;

// What a warp knows: `all` is ordered before it; `fenced_shared` and `fenced_global` also across the generic and the
// asynchronous proxy, for the memory that the fence named; `tensor`
// is what tcgen05.fence::before_thread_sync and commits have published, `ready` what the warp's own fences have taken
// of it.
struct Knowledge {
    ClockVector all, fenced_shared, fenced_global, tensor, ready;
    u32 messages = 0; // of the longest chain of messages between ranks, each sent after the one before was received
    void join(const Knowledge& other);
};

// Where a warp runs, in plain numbers: launches and their CTAs may be gone when something that they did is compared.
struct Residence {
    u64 cta = 0, cluster = 0; // counted from 1 over all launches
    u32 rank = 0;
};

struct AsyncStamp { // of one asynchronous operation
    u32 warp = 0, count = 0;
    Knowledge at_issue;
    bool is_generic = false;    // through the generic proxy: cp.async, st.async, red.async
    bool follows_issue = false; // it completes what its thread issued before, so all that the thread knew then
};

class Races {
  public:
    explicit Races(Machine& machine) : machine_(machine) {}

    void access(Warp& w, const u8* memory, u32 bytes, Access kind, u16 mode, int lane);
    void order_lanes(Warp& w, u32 lanes); // what any of the warp's lanes did comes before what these do from now on
    std::shared_ptr<AsyncStamp> issue(Warp& w);
    void async_access(Warp& w, const AsyncStamp& stamp, const u8* memory, u64 bytes, bool is_write);
    void tensor_access(Warp& w, const AsyncStamp& stamp, const u8* order, u64 bytes, bool is_write, bool in_order);
    void tensor_free(Warp& w, const u8* order, u64 bytes);
    void forget_tensor(const u8* order, u64 bytes);
    void tensor_fence(Warp& w, bool after); // tcgen05.fence::before_thread_sync or ::after_thread_sync
    void async_done(Warp& w, u32 of, u32 count, bool reads_only); // w has waited for operations up to `count`

    // Barriers, by address and round: arrivals release, those who pass acquire.
    void release(Warp& w, const void* object, u64 round);
    void acquire(Warp& w, const void* object, u64 round);
    void release_async(const AsyncStamp& stamp, const void* object, u64 round);
    void forget(const void* object, u64 round);
    void forget_memory(const u8* memory, u64 bytes); // it is about to be freed
    void finish(const Launch& launch); // later launches of its rank come after all that it did; barriers are forgotten

    // Strong accesses to memory and fences.
    void synchronise(Warp& w, const u8* memory, Access kind, u16 mode);
    void fence(Warp& w, u16 mode);
    void proxy_fence(Warp& w, bool of_shared, bool of_global);
    u32 longest_chain = 0;

  private:
    struct Mark {
        u32 who = 0, clock = 0, site = 0;
        u32 step = 0;                             // of the warp's `State`
        u8 lane = 0;                              // kManyLanes: of several
        Scope scope = Scope::None;                // None: weak
        bool is_async = false, is_generic = true; // is_generic: through the generic proxy
    };
    struct Shadow {
        Mark write, read;
        std::vector<Mark> more_reads; // of other warps than `read`'s
    };
    struct Release {
        Scope scope;
        Residence from;
        Knowledge known;
    };
    struct State {
        Knowledge known, before_fence, after_load;
        Scope fence_scope = Scope::None;
        u32 issued = 0;
        Residence place;
        u32 step = 1;                // counts the instructions that order lanes of the warp
        u32 lane_steps[kLanes] = {}; // the last one that ordered each
    };

    struct TensorMark {
        u32 who = 0, clock = 0, site = 0;
        bool in_order = false; // of a chain: mma, cp, shift
    };
    struct TensorShadow {
        TensorMark write;
        std::vector<TensorMark> reads;
    };

    Machine& machine_;
    std::unordered_map<const u8*, TensorShadow> tensor_; // per column and quarter of the lanes
    void check_tensor_order(
        Warp& w, const TensorMark& old, const TensorMark& now, const Knowledge& known, const char* what);
    std::unordered_map<u64, std::unique_ptr<Shadow[]>> shadows_; // per 64 bytes of memory
    std::map<std::pair<const void*, u64>, Knowledge> objects_;
    std::unordered_map<u64, std::vector<Release>> releases_;
    struct Message { // the newest strong write of system scope
        u32 rank, messages;
    };
    std::unordered_map<u64, Message> sent_;
    void send(State& mine, u64 address);
    void receive(State& mine, u64 address);
    std::vector<State> warps_;
    std::unordered_map<u32, Knowledge> ended_; // by rank: what launches that have ended did
    std::vector<std::string> sites_;
    std::map<std::pair<const void*, u32>, u32> site_index_;
    std::pair<const void*, u32> last_place_{nullptr, 0};
    u32 last_site_ = 0;
    u64 touched_ = 0; // address in the block that is being compared

    State& state(Warp& w);
    Shadow* shadow_block(u64 address);
    u32 site(Warp& w);
    static bool covers(Scope scope, const Residence& from, const Residence& to);
    bool strong_pair(const Mark& old, const Mark& now) const;
    void check_lanes(Warp& w, const Mark& old, const Mark& now, const char* what);
    bool is_shared(const Warp& w) const;
    void check(Warp& w, const Mark& old, const Mark& now, const Knowledge& known, const char* what);
    void touch(Warp& w, u64 address, u64 bytes, const Mark& now, bool is_write, const Knowledge& known);
    void read_byte(Warp& w, Shadow& at, const Mark& now, const Knowledge& known);
    void write_byte(Warp& w, Shadow& at, const Mark& now, const Knowledge& known);
};

} // namespace deep_gemm_k3::emulator
