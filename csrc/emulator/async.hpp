// Asynchronous copies: groups of a thread, and what the bulk-copy and tensor instructions have in common.
#pragma once

#include "mbarrier.hpp"
#include "ordering.hpp"

namespace deep_gemm_k3::emulator {

using Bytes = std::shared_ptr<std::vector<u8>>;
using Groups = std::map<u32, LaneGroups>;

std::shared_ptr<AsyncGroup> open_group(Groups& groups, int lane);
void commit_groups(Groups& groups, u32 m);
// true when all but the newest `keep` groups of the lanes are done; else the warp is blocked
bool wait_groups(Warp& w, Groups& groups, u32 m, u32 keep, bool reads_only, const char* what);

enum class ReduceOp : u8 { None, Add, Min, Max, Inc, Dec, And, Or, Xor };
ReduceOp take_reduce(Builder& b);
const char* reduce_name(ReduceOp op);
bool reduce_exists(ReduceOp op, Type type); // of bulk copies
// memory[0..bytes) op= values, elements of a type
void reduce_bytes(u8* memory, const u8* values, u64 bytes, ReduceOp op, Type type);

// Stores bytes into shared memory (already checked) and marks them as written.
void note_shared_write(Cta& cta, u32 offset, u64 bytes); // by an asynchronous unit
void write_shared(Cta& cta, u32 offset, const u8* from, u64 bytes);
void note_async(Warp& w, AsyncOp& op, const u8* p, u64 bytes, bool is_write);        // for the race detector
std::unique_ptr<AsyncOp> new_op(Warp& w, const char* what, bool is_generic = false); // through the generic proxy
std::vector<Cta*> multicast_targets(Warp& w, u32 mask);

inline u64 extra_address(Warp& w, const Inst& in, u32 at, int lane) {
    return w.address(w.extra(in, at), lane) + static_cast<u64>(static_cast<s64>(static_cast<s32>(w.extra(in, at + 1))));
}

void build_tensor(Builder& b, bool reduces); // cp.async.bulk.tensor and cp.reduce.async.bulk.tensor
void build_tensor_prefetch(Builder& b);
void build_st_async(Builder& b);

} // namespace deep_gemm_k3::emulator
