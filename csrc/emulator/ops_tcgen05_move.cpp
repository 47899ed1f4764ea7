// tcgen05.ld and tcgen05.st: how the registers of a warp lie in its 32 lanes of tensor memory.
#include "races.hpp"
#include "tensor_memory.hpp"

namespace deep_gemm_k3::emulator {

namespace {

enum class Layout : u8 { k32x32b, k16x64b, k16x128b, k16x256b, k16x32bx2 };

constexpr u16 kPacked = 8; // mode: layout, kPacked

struct Cell {
    u32 lane, column; // relative to the address
};

// Where register r of a thread lies. A packed register stands for two columns, so the columns count half.
Cell place_of(Layout layout, u32 lane, u32 r, u32 split) {
    switch (layout) {
    case Layout::k16x64b: // neighbours lie eight lanes apart, pairs one column apart
        return {(lane >> 2) + 8 * (lane & 1), 2 * r + ((lane >> 1) & 1)};
    case Layout::k16x128b: // as fragments of eight lanes by four columns
        return {(lane >> 2) + 8 * (r & 1), (r >> 1) * 4 + (lane & 3)};
    case Layout::k16x256b: // a thread holds two neighbouring columns of a lane and of the lane eight further
        return {(lane >> 2) + 8 * (r >> 1 & 1), (r >> 2) * 8 + (lane & 3) * 2 + (r & 1)};
    case Layout::k16x32bx2: // the second half of the warp continues in the same lanes at another column
        return {lane & 15, r + (lane >= 16 ? split : 0)};
    default:
        return {lane, r};
    }
}

struct Move {
    Layout layout;
    u32 registers, split; // split in 32-bit columns as the instruction counts them
    bool packed;
    u32 lanes, columns; // the extent of one piece; with a split there are two pieces
};

Move unpack(const Inst& in) {
    Move move{};
    move.layout = static_cast<Layout>(in.mode & 7);
    move.packed = in.mode & kPacked;
    move.registers = static_cast<u32>(in.imm & 0xff);
    move.split = static_cast<u32>(in.imm >> 8 & 0xffff);
    move.lanes = move.layout == Layout::k32x32b ? 32 : 16;
    u32 per_register =
        move.layout == Layout::k16x64b || move.layout == Layout::k16x128b || move.layout == Layout::k16x256b ? 2 : 1;
    move.columns = move.registers * per_register * (move.packed ? 2 : 1);
    return move;
}

// extras: address (2), registers
TensorAddress place(Warp& w, const Inst& in, u32 m, const Move& move, const char* what) {
    int lane = first_lane(m);
    u32 address = static_cast<u32>(extra_address(w, in, 0, lane));
    for (u32 left = m; left; left &= left - 1)
        if (static_cast<u32>(extra_address(w, in, 0, first_lane(left))) != address)
            throw Fault("tensor-memory", std::string(what) + " with different addresses in one warp");
    TensorAddress at(address);
    u32 quarter = w.index % 4;
    bool reaches = at.lane >= quarter * 32 && at.lane + move.lanes <= quarter * 32 + 32;
    bool is_aligned = at.lane % (move.lanes == 32 ? 32 : 16) == 0;
    if (!reaches || !is_aligned)
        throw Fault("tensor-memory", std::string(what) + " at lane " + std::to_string(at.lane) + ": warp " +
                                         std::to_string(w.index) + " reaches lanes " + std::to_string(quarter * 32) +
                                         ".." + std::to_string(quarter * 32 + 31) + " only");
    check_tensor(*w.cta, at, move.lanes, move.columns, what);
    if (move.layout == Layout::k16x32bx2) {
        at.column += move.split;
        check_tensor(*w.cta, at, move.lanes, move.columns, what);
        at.column -= move.split;
    }
    return at;
}

template <class F>
void for_pieces(const TensorAddress& at, const Move& move, F f) {
    f(LaneRange{at.lane, move.lanes}, LaneRange{at.column, move.columns});
    if (move.layout == Layout::k16x32bx2)
        f(LaneRange{at.lane, move.lanes}, LaneRange{at.column + move.split, move.columns});
}

inline u32 cell_index(const TensorAddress& at, const Move& move, u32 lane, u32 r) {
    u32 split = move.packed ? 0 : move.split;
    Cell cell = place_of(move.layout, lane, r, split);
    u32 column = move.packed ? 2 * cell.column : cell.column;
    if (move.packed && move.layout == Layout::k16x32bx2 && lane >= 16)
        column += move.split;
    return (at.column + column) * kTensorLanes + at.lane + cell.lane;
}

void exec_load(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    Move move = unpack(in);
    TensorAddress at = place(w, in, together, move, "tcgen05.ld");
    TensorMemory& memory = tensor_memory(*w.cta);
    for_pieces(at, move,
        [&](LaneRange lanes, LaneRange columns) { check_tensor_written(w, w.pc - 1, *w.cta, lanes, columns); });
    const u32* cells = memory.cells.data();
    for (u32 r = 0; r < move.registers; ++r)
        write_lanes(w.row<u32>(w.extra(in, 2 + r)), together, [&](int lane) {
            u32 index = cell_index(at, move, static_cast<u32>(lane), r);
            return move.packed ? (cells[index] & 0xffff) | cells[index + kTensorLanes] << 16 : cells[index];
        });
    w.tensor_loads.push_back(w.pc - 1);
    w.machine->counters.tensor_read += u64{move.registers} * 128;
    if (!w.machine->races)
        return;
    AsyncOp op;
    op.stamp = w.machine->races->issue(w);
    for_pieces(
        at, move, [&](LaneRange lanes, LaneRange columns) { note_tensor(w, op, *w.cta, lanes, columns, false); });
    w.tensor_load_stamp = op.stamp->count;
}

void exec_store(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    Move move = unpack(in);
    TensorAddress at = place(w, in, together, move, "tcgen05.st");
    TensorMemory& memory = tensor_memory(*w.cta);
    auto op = new_op(w, "a tcgen05.st");
    op->group = open_group(w.tensor_stores, 0);
    for_pieces(
        at, move, [&](LaneRange lanes, LaneRange columns) { note_tensor(w, *op, *w.cta, lanes, columns, true); });
    if (op->stamp)
        op->group->last_stamp = std::max(op->group->last_stamp, op->stamp->count);
    auto data = std::make_shared<std::vector<u32>>(move.registers * kLanes);
    for (u32 r = 0; r < move.registers; ++r)
        std::memcpy(data->data() + r * kLanes, w.row<u32>(w.extra(in, 2 + r)), sizeof(u32) * kLanes);
    ++memory.in_flight;
    op->write = [=, &memory] {
        --memory.in_flight;
        for (u32 r = 0; r < move.registers; ++r)
            for (u32 lane = 0; lane < kLanes; ++lane) {
                u32 index = cell_index(at, move, lane, r), value = (*data)[r * kLanes + lane];
                memory.cells[index] = move.packed ? value & 0xffff : value;
                memory.written[index] = 1;
                if (!move.packed)
                    continue;
                memory.cells[index + kTensorLanes] = value >> 16;
                memory.written[index + kTensorLanes] = 1;
            }
    };
    w.machine->counters.tensor_written += u64{move.registers} * 128;
    w.machine->submit(std::move(op));
    ++w.effects;
}

} // namespace

void build_tensor_move(Builder& b, bool is_load) {
    if (!b.take("sync") || !b.take("aligned"))
        b.fail("wanted .sync.aligned");
    constexpr const char* kShapes[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"};
    constexpr u32 kRegisters[] = {1, 1, 2, 4, 1};
    std::string shape = b.take_of({"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"});
    std::string count = b.take_of({"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128"});
    if (shape.empty() || count.empty())
        b.fail("unknown shape");
    u16 layout = 0;
    while (shape != kShapes[layout])
        ++layout;
    bool packed = b.take(is_load ? "pack::16b" : "unpack::16b");
    if (b.take_type() != Type::B32)
        b.fail("wanted .b32");
    u32 registers = kRegisters[layout] * static_cast<u32>(std::stoi(count.substr(1)));
    if (registers > 128)
        b.fail("a shape of more than 128 registers does not exist");
    bool split = static_cast<Layout>(layout) == Layout::k16x32bx2;
    b.want(split ? 3 : 2, split ? 3 : 2);
    const Operand &data = b.at(is_load ? 0 : b.count() - 1), &address = b.at(is_load ? 1 : 0);
    bool is_vector = data.kind == Operand::Kind::Vector;
    if ((is_vector ? data.parts.size() : 1) != registers)
        b.fail("wanted " + std::to_string(registers) + " registers");
    u64 offset = split ? b.constant(b.at(is_load ? 2 : 1)) : 0;
    b.address_extra(address);
    for (u32 r = 0; r < registers; ++r) {
        const Operand& one = is_vector ? data.parts[r] : data;
        is_load ? b.def_extra(one, Type::B32) : b.use_extra(one, Type::B32);
    }
    b.in.imm = static_cast<s64>(u64{registers} | (offset & 0xffff) << 8);
    b.in.mode = static_cast<u16>(layout | (packed ? kPacked : 0));
    b.emit(is_load ? exec_load : exec_store);
}

} // namespace deep_gemm_k3::emulator
