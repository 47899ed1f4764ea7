#include "tensor_memory.hpp"

#include "races.hpp"

namespace deep_gemm_k3::emulator {

TensorMemory& tensor_memory(Cta& cta) {
    if (!cta.tensor) {
        cta.tensor = std::make_shared<TensorMemory>();
        cta.tensor->cells.resize(kTensorLanes * kTensorColumns, 0);
        cta.tensor->written.resize(kTensorLanes * kTensorColumns, 0);
    }
    return *cta.tensor;
}

Cta& peer_cta(Warp& w) {
    Cluster& cluster = *w.cta->cluster;
    u32 rank = w.cta->rank ^ 1;
    if (rank >= cluster.ctas.size())
        throw Fault(
            "tensor-memory", "cta_group::2 in a cluster of " + std::to_string(cluster.ctas.size()) + ": no CTA pair");
    return *cluster.ctas[rank];
}

void check_tensor(Cta& cta, TensorAddress at, u32 lanes, u32 columns, const char* what) {
    auto place = [&] {
        return std::string(what) + " of lanes " + std::to_string(at.lane) + ".." + std::to_string(at.lane + lanes - 1) +
               ", columns " + std::to_string(at.column) + ".." + std::to_string(at.column + columns - 1) +
               " of the tensor memory of CTA rank " + std::to_string(cta.rank);
    };
    if (at.lane + lanes > kTensorLanes || at.column + columns > kTensorColumns)
        throw Fault("out-of-bounds", place() + ", which has 128 lanes and 512 columns");
    TensorMemory& memory = tensor_memory(cta);
    for (u32 i = 0; i < columns; ++i) {
        TensorMemory::Column state = memory.columns[at.column + i];
        if (state == TensorMemory::Column::Allocated)
            continue;
        bool freed = state == TensorMemory::Column::Freed;
        throw Fault(freed ? "use-after-free" : "out-of-bounds",
            place() + ": column " + std::to_string(at.column + i) + (freed ? " has been freed" : " is not allocated"));
    }
}

void report_issued(Warp& w, u32 pc, const std::string& kind, const std::string& text) {
    u32 here = w.pc;
    w.pc = pc + 1;
    w.machine->report_at(w, kind, text);
    w.pc = here;
}

void check_tensor_written(Warp& w, u32 pc, Cta& cta, LaneRange lanes, LaneRange columns) {
    const TensorMemory& memory = tensor_memory(cta);
    for (u32 c = columns.first; c < columns.first + columns.count; ++c) {
        const u8* from = memory.written.data() + c * kTensorLanes + lanes.first;
        const void* hole = std::memchr(from, 0, lanes.count);
        if (!hole)
            continue;
        u32 lane = lanes.first + static_cast<u32>(static_cast<const u8*>(hole) - from);
        report_issued(w, pc, "uninitialised-tensor",
            "read of tensor memory that nobody has written, lane " + std::to_string(lane) + ", column " +
                std::to_string(c) + " of CTA rank " + std::to_string(cta.rank));
        return;
    }
}

void tensor_exit_check(Machine& machine, const Cta& cta) {
    if (!cta.tensor)
        return;
    for (auto& [first, count] : cta.tensor->allocations)
        machine.report("tensor-leak", "a CTA of " + cta.launch->label +
                                          " ends and has not freed its tensor memory, columns " +
                                          std::to_string(first) + ".." + std::to_string(first + count - 1));
}

void note_tensor(Warp& w, AsyncOp& op, Cta& cta, LaneRange lanes, LaneRange columns, bool is_write) {
    if (!op.stamp)
        return;
    TensorMemory& memory = tensor_memory(cta);
    if (memory.order.empty())
        memory.order.resize(kTensorColumns * 4, 0);
    for (u32 quarter = lanes.first / 32; quarter * 32 < lanes.first + lanes.count; ++quarter)
        w.machine->races->tensor_access(w, *op.stamp, memory.order.data() + quarter * kTensorColumns + columns.first,
            columns.count, is_write, op.chain != nullptr);
}

std::unique_ptr<AsyncOp> new_tensor_op(Warp& w, int lane, const char* what) {
    auto op = new_op(w, what);
    op->chain = &w.tensor_chain[lane];
    return op;
}

void hold_shared(Warp& w, AsyncOp& op, Cta& cta, std::vector<u32> pieces) {
    if (cta.readers.empty())
        cta.readers.resize(cta.shared.size() / 16 + 1, 0);
    for (u32 piece : pieces)
        ++cta.readers[piece];
    cta.reader_count += pieces.size();
    if (op.stamp)
        for (u32 piece : pieces)
            w.machine->races->async_access(w, *op.stamp, cta.shared.data() + piece * 16, 16, false);
    op.holds.emplace_back(&cta, std::move(pieces));
}

TensorDescriptor::TensorDescriptor(u64 x) {
    start = static_cast<u32>(x & 0x3fff) << 4;
    leading = static_cast<u32>(x >> 16 & 0x3fff) << 4;
    stride = static_cast<u32>(x >> 32 & 0x3fff) << 4;
    base = static_cast<u32>(x >> 49 & 7);
    mode = static_cast<u32>(x >> 61);
    if ((x >> 46 & 7) != 1)
        throw Fault("descriptor",
            "matrix descriptor " + hex(x) + ": bits 46-48 must be 1 on sm_100, found " + std::to_string(x >> 46 & 7));
    if (x >> 52 & 1)
        throw Fault("descriptor", "matrix descriptor " + hex(x) + ": absolute leading addresses do not exist here");
    if (mode != 0 && mode != 1 && mode != 2 && mode != 4 && mode != 6)
        throw Fault("descriptor", "matrix descriptor " + hex(x) + ": unknown swizzle " + std::to_string(mode));
    span_shift = mode == 1 || mode == 2 ? 3 : mode == 4 ? 2 : mode == 6 ? 1 : 0;
}

// The row of the pattern counts from its base, which need not be aligned.
u32 TensorDescriptor::swizzle(u32 address) const {
    u32 row = (address >> 7) - base;
    if (mode == 0)
        return address;
    if (mode == 1) // pieces of 32 bytes, exchanged by two bits of the row
        return address ^ ((row & 3) << 5);
    if (mode == 2)
        return address ^ ((row & 7) << 4);
    return mode == 4 ? address ^ ((row & 3) << 4) : address ^ ((row & 1) << 4);
}

u32 TensorDescriptor::k_major(u32 row, u32 piece) const {
    return swizzle(start + (row & 7) * (16u << span_shift) + (row >> 3) * stride + piece * (mode ? 16 : leading));
}

u32 TensorDescriptor::mn_major(u32 piece, u32 k) const {
    u32 per = 1u << span_shift, rows = mode == 1 ? 4 : 8;
    u32 outer = mode ? leading : stride, deeper = mode ? stride : leading;
    return swizzle(
        start + (piece % per) * 16 + (piece / per) * outer + (k % rows) * (16u << span_shift) + (k / rows) * deeper);
}

const u8* tensor_piece(Warp& w, u32 pc, Cta& cta, u32 address, u32 bytes) {
    if (std::memchr(cta.written.data() + address, 0, bytes))
        report_issued(w, pc, "uninitialised-shared",
            "a tensor core reads shared memory that nobody has written, offset " + std::to_string(address) +
                " of CTA rank " + std::to_string(cta.rank));
    return cta.shared.data() + address;
}

} // namespace deep_gemm_k3::emulator
