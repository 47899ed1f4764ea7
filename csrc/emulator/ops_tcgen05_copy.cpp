// tcgen05.cp from shared to tensor memory, and tcgen05.shift.
#include "tensor_memory.hpp"

namespace deep_gemm_k3::emulator {

namespace {

enum class Spread : u8 { Once, FourRows, AllQuarters, Halves02, Halves01 };
enum class Expand : u8 { None, From4, From6 };

struct CopyShape {
    const char* name;
    u32 rows, pieces; // of 16 bytes each
};
constexpr CopyShape kShapes[] = {
    {"128x256b", 128, 2}, {"4x256b", 4, 2}, {"128x128b", 128, 1}, {"64x128b", 64, 1}, {"32x128b", 32, 1}};

constexpr u16 kPair = 1;

struct Copy { // imm: shape, spread << 8, expansion << 16
    u32 rows, pieces;
    Spread spread;
    Expand expand;
    explicit Copy(const Inst& in)
        : rows(kShapes[in.imm & 0xff].rows), pieces(kShapes[in.imm & 0xff].pieces),
          spread(static_cast<Spread>(in.imm >> 8 & 0xff)), expand(static_cast<Expand>(in.imm >> 16 & 0xff)) {}
    u32 lanes() const { return spread == Spread::FourRows ? 97 : 128; }
    // the lanes that row `row` goes to; how many
    u32 targets(u32 row, u32* lane) const {
        switch (spread) {
        case Spread::FourRows: // one lane of every quarter
            return lane[0] = row * 32, 1;
        case Spread::AllQuarters:
            for (u32 i = 0; i < 4; ++i)
                lane[i] = row + 32 * i;
            return 4;
        case Spread::Halves02: // quarters 0 and 2 have the first 32 rows
            return lane[0] = row, lane[1] = row + 64, 2;
        case Spread::Halves01: // quarters 0 and 1 have the first 32 rows
            return lane[0] = row % 32 + row / 32 * 64, lane[1] = lane[0] + 32, 2;
        default:
            return lane[0] = row, 1;
        }
    }
};

// Sixteen elements of 4 or 6 bits at the beginning of 16 bytes become sixteen bytes; those of 4 bits in bits 2 to 5.
void expand_piece(const u8* from, Expand expand, u8* to) {
    for (u32 i = 0; i < 16; ++i) {
        if (expand == Expand::From4) {
            to[i] = static_cast<u8>((from[i / 2] >> (4 * (i & 1)) & 15) << 2);
            continue;
        }
        u32 bit = 6 * i, two = from[bit / 8] | static_cast<u32>(from[bit / 8 + 1]) << 8;
        to[i] = two >> (bit & 7) & 63;
    }
}

void run_copy(Warp& w, u32 pc, Cta& cta, const Copy& copy, u32 address, u64 descriptor) {
    TensorDescriptor d(descriptor);
    TensorAddress at(address);
    TensorMemory& memory = tensor_memory(cta);
    for (u32 row = 0; row < copy.rows; ++row)
        for (u32 piece = 0; piece < copy.pieces; ++piece) {
            const u8* from = tensor_piece(w, pc, cta, d.k_major(row, piece),
                copy.expand == Expand::From4   ? 8
                : copy.expand == Expand::From6 ? 12
                                               : 16);
            u8 bytes[16];
            if (copy.expand == Expand::None)
                std::memcpy(bytes, from, 16);
            else
                expand_piece(from, copy.expand, bytes);
            u32 lane[4], count = copy.targets(row, lane);
            for (u32 i = 0; i < count; ++i)
                for (u32 c = 0; c < 4; ++c) {
                    u32 index = (at.column + piece * 4 + c) * kTensorLanes + at.lane + lane[i];
                    std::memcpy(&memory.cells[index], bytes + 4 * c, 4);
                    memory.written[index] = 1;
                }
        }
}

std::vector<u32> copy_pieces(const Cta& cta, const Copy& copy, u64 descriptor) {
    TensorDescriptor d(descriptor);
    std::vector<u32> out;
    for (u32 row = 0; row < copy.rows; ++row)
        for (u32 piece = 0; piece < copy.pieces; ++piece) {
            u32 address = d.k_major(row, piece);
            if (address < kSharedReserved || u64{address} + 16 > cta.shared.size())
                throw Fault("out-of-bounds", "tcgen05.cp reads shared memory at offset " + std::to_string(address) +
                                                 " of CTA rank " + std::to_string(cta.rank));
            out.push_back(address >> 4);
        }
    return out;
}

std::vector<Cta*> ctas_of(Warp& w, const Inst& in) {
    if (in.mode & kPair)
        return {w.cta, &peer_cta(w)};
    return {w.cta};
}

// extras: address (2), descriptor
void exec_copy(Warp& w, const Inst& in, u32 m) {
    Copy copy(in);
    std::vector<Cta*> ctas = ctas_of(w, in);
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        u32 address = static_cast<u32>(extra_address(w, in, 0, lane));
        u64 descriptor = w.row<u64>(w.extra(in, 2))[lane];
        TensorAddress at(address);
        auto op = new_tensor_op(w, lane, "a tcgen05.cp");
        op->to_shared = true;
        op->uses = ctas;
        for (Cta* cta : ctas) {
            check_tensor(*cta, at, copy.lanes(), copy.pieces * 4, "tcgen05.cp");
            hold_shared(w, *op, *cta, copy_pieces(*cta, copy, descriptor));
            note_tensor(w, *op, *cta, {at.lane, copy.lanes()}, {at.column, copy.pieces * 4}, true);
            ++tensor_memory(*cta).in_flight;
        }
        Warp* warp = &w;
        u32 pc = w.pc - 1;
        op->write = [=] {
            for (Cta* cta : ctas) {
                run_copy(*warp, pc, *cta, copy, address, descriptor);
                --tensor_memory(*cta).in_flight;
            }
        };
        w.machine->submit(std::move(op));
    }
    ++w.effects;
}

// Rows of 32 bytes move one lane down within the 31 lanes below each quarter's last.
void exec_shift(Warp& w, const Inst& in, u32 m) {
    std::vector<Cta*> ctas = ctas_of(w, in);
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        TensorAddress at(static_cast<u32>(extra_address(w, in, 0, lane)));
        if (at.lane % 32)
            throw Fault(
                "tensor-memory", "tcgen05.shift at lane " + std::to_string(at.lane) + ": wanted one aligned to 32");
        auto op = new_tensor_op(w, lane, "a tcgen05.shift");
        op->uses = ctas;
        u32 lanes = kTensorLanes - at.lane;
        for (Cta* cta : ctas) {
            check_tensor(*cta, at, lanes, 8, "tcgen05.shift");
            note_tensor(w, *op, *cta, {at.lane, lanes}, {at.column, 8}, true);
            ++tensor_memory(*cta).in_flight;
        }
        op->write = [=] {
            for (Cta* cta : ctas) {
                TensorMemory& memory = tensor_memory(*cta);
                for (u32 column = at.column; column < at.column + 8; ++column)
                    for (u32 to = at.lane; to + 1 < kTensorLanes; ++to)
                        if (to % 32 != 31) {
                            memory.cells[column * kTensorLanes + to] = memory.cells[column * kTensorLanes + to + 1];
                            memory.written[column * kTensorLanes + to] = memory.written[column * kTensorLanes + to + 1];
                        }
                --memory.in_flight;
            }
        };
        w.machine->submit(std::move(op));
    }
    ++w.effects;
}

} // namespace

void build_tensor_copy(Builder& b) {
    b.in.mode = take_cta_group(b) ? kPair : 0;
    std::string name = b.take_of({"128x256b", "4x256b", "128x128b", "64x128b", "32x128b"});
    u64 shape = 0;
    while (shape < 5 && name != kShapes[shape].name)
        ++shape;
    std::string multicast = b.take_of({"warpx2::02_13", "warpx2::01_23", "warpx4"});
    bool fits = name == "64x128b"   ? multicast.rfind("warpx2", 0) == 0
                : name == "32x128b" ? multicast == "warpx4"
                                    : multicast.empty();
    if (shape == 5 || !fits)
        b.fail("unknown shape, or a shape without its multicast");
    Spread spread = name == "4x256b"               ? Spread::FourRows
                    : multicast == "warpx4"        ? Spread::AllQuarters
                    : multicast == "warpx2::02_13" ? Spread::Halves02
                    : multicast == "warpx2::01_23" ? Spread::Halves01
                                                   : Spread::Once;
    Expand expand = Expand::None;
    if (b.take("b8x16")) {
        expand = b.take("b4x16_p64") ? Expand::From4 : b.take("b6x16_p32") ? Expand::From6 : Expand::None;
        if (expand == Expand::None)
            b.fail("wanted the format to expand from");
    }
    b.want(2, 2);
    b.address_extra(b.at(0));
    b.use_extra(b.at(1), Type::B64);
    b.in.imm = static_cast<s64>(shape | u64{static_cast<u8>(spread)} << 8 | u64{static_cast<u8>(expand)} << 16);
    b.emit(exec_copy);
}

void build_tensor_shift(Builder& b) {
    b.in.mode = take_cta_group(b) ? kPair : 0;
    if (!b.take("down"))
        b.fail("wanted .down");
    b.want(1, 1);
    b.address_extra(b.at(0));
    b.emit(exec_shift);
}

} // namespace deep_gemm_k3::emulator
