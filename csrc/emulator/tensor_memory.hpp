// Tensor memory of a CTA: 128 lanes of 512 columns of 32 bits, its allocator, and the order of the units that use it.
#pragma once

#include "async.hpp"

namespace deep_gemm_k3::emulator {

constexpr u32 kTensorLanes = 128, kTensorColumns = 512;

struct TensorMemory {
    enum class Column : u8 { Never, Allocated, Freed };
    std::vector<u32> cells;  // column * kTensorLanes + lane
    std::vector<u8> written; // the same
    Column columns[kTensorColumns] = {};
    std::map<u32, u32> allocations; // first column -> count
    bool relinquished = false;
    u32 wanted = 0;        // columns that a warp of this CTA waits for together with the peer CTA
    s32 granted = -1;      // what the peer has allocated for it
    u32 in_flight = 0;     // operations that use it
    std::vector<u8> order; // one byte per column and quarter of the lanes, for race detection
    std::vector<std::pair<Warp*, Split*>> waiters;
};

struct TensorAddress {
    u32 lane, column;
    explicit TensorAddress(u32 address) : lane(address >> 16), column(address & 0xffff) {}
};

struct LaneRange {
    u32 first, count;
};

TensorMemory& tensor_memory(Cta& cta); // made when it is first needed
Cta& peer_cta(Warp& w);                // of a pair; a Fault when the cluster has none

// A Fault unless all columns are allocated and the lanes exist; `what` names the access.
void check_tensor(Cta& cta, TensorAddress at, u32 lanes, u32 columns, const char* what);
// A finding when a cell that is read has never been written; pc is that of the instruction.
void check_tensor_written(Warp& w, u32 pc, Cta& cta, LaneRange lanes, LaneRange columns);
void report_issued(Warp& w, u32 pc, const std::string& kind, const std::string& text);
void tensor_exit_check(Machine& machine, const Cta& cta);

// Order of accesses, for race detection; nothing without it.
void note_tensor(Warp& w, AsyncOp& op, Cta& cta, LaneRange lanes, LaneRange columns, bool is_write);

// An operation of the tensor core: executed after those its thread has issued before.
std::unique_ptr<AsyncOp> new_tensor_op(Warp& w, int lane, const char* what);
// The 16-byte pieces of a CTA's shared memory that `op` reads: nobody may write them before it is done.
void hold_shared(Warp& w, AsyncOp& op, Cta& cta, std::vector<u32> pieces);

// The matrix descriptor of sm_100.
struct TensorDescriptor {
    u32 start, leading, stride, span_shift, base; // bytes; a swizzle row has 16 << span_shift bytes
    u32 mode;
    explicit TensorDescriptor(u64 x);
    u32 swizzle(u32 address) const;
    // 16 bytes of row `row`, piece `piece` along k
    u32 k_major(u32 row, u32 piece) const;
    // 16 bytes along m or n, piece `piece`, of k index `k`
    u32 mn_major(u32 piece, u32 k) const;
};

// 16 bytes of shared memory for a unit that runs at its own time.
// Only the first `bytes` of them must have been written.
const u8* tensor_piece(Warp& w, u32 pc, Cta& cta, u32 address, u32 bytes);

void build_tensor_memory(Builder& b, const std::string& what); // alloc, dealloc, relinquish_alloc_permit
void build_tensor_move(Builder& b, bool is_load);              // ld, st
void build_tensor_wait(Builder& b, bool for_loads);            // wait::ld, wait::st
void build_tensor_copy(Builder& b);                            // cp
void build_tensor_shift(Builder& b);
void build_tensor_product(Builder& b); // mma
void build_tensor_commit(Builder& b);
bool take_cta_group(Builder& b); // true for ::2

} // namespace deep_gemm_k3::emulator
