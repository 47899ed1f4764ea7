// What a run is measured by: counters per role, whose memory is whose, and a trace of every warp's waits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base.hpp"

namespace deep_gemm_k3::emulator {

struct Warp;
struct Split;
struct Machine;
struct Program;

struct Counters {
    u64 instructions = 0, macs = 0, mma = 0, wgmma = 0, tma_loads = 0, tma_stores = 0, bulk_copies = 0;
    u64 tma_bytes = 0, global_read = 0, global_written = 0, shared_read = 0, shared_written = 0, peer_written = 0,
        peer_read = 0;
    u64 tensor_products = 0, tensor_read = 0, tensor_written = 0;
    u64 barrier_waits = 0, mbarrier_waits = 0, system_operations = 0, atomics = 0;

    // adds what `now` has more than `before`
    void add(const Counters& before, const Counters& now);
};

// Name and value of each counter, in the order of reports.
std::vector<std::pair<const char*, u64>> listed(const Counters& counters);

class Observer {
  public:
    // "name*count,name,...": roles of a CTA's warps, by index; later warps have none. An empty text: no roles.
    void set_roles(const std::string& text);
    u8 role_of(u32 warp_index) const;
    const std::vector<std::string>& roles() const { return names_; }
    std::vector<Counters> counters; // per role

    // Memory that belongs to a rank: accesses of other ranks are counted as accesses to a peer.
    void own(u64 low, u64 bytes, u32 rank);
    void disown(u64 low);
    bool is_peers(u64 address, u32 rank);

    void clear(); // counters and trace

    bool is_tracing = false;
    void begin(Warp& w, u64 now);                    // the warp runs
    void wait(Warp& w, const Split& split, u64 now); // the warp waits: the split is the one that ran last
    void end(Warp& w, u64 now);                      // it has ended
    std::string trace_json();                        // and forgets the trace
    void charge(u8 role, const Counters& before, const Counters& now) {
        if (role < counters.size())
            counters[role].add(before, now);
    }

  private:
    struct Owned {
        u64 low, high;
        u32 rank;
    };
    struct Wait {
        u64 begin, end;
        u32 track, pc;
        const char* what;
        u64 object;
        bool polls;
    };
    struct Track {
        u32 rank, cta, warp;
        u8 role;
        std::shared_ptr<const Program> program;
        u64 begin, end;
        u32 open; // wait not yet over: index + 1
    };

    std::vector<std::string> names_;
    std::vector<u8> role_of_warp_;
    std::vector<Owned> owned_;
    size_t last_owned_ = 0;
    std::vector<Track> tracks_;
    std::vector<Wait> waits_;
    u64 dropped_ = 0;
    void write_track(std::string& out, size_t number, const std::vector<std::vector<u32>>& by_track) const;
};

} // namespace deep_gemm_k3::emulator
