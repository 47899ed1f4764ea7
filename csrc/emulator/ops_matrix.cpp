// ldmatrix, stmatrix and movmatrix.
#include "ops.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr u16 kTranspose = 1, kFrom4 = 2, kFrom6 = 4;

// The 16 bytes that a lane names, of which the first `used` are read.
u8* matrix_row(Warp& w, const Inst& in, int lane, Access access, u32 used = 16) {
    u64 address = w.address(in.a, lane) + static_cast<u64>(in.imm);
    if (in.space == Space::Generic && (address & kWindowMask) != kSharedWindow)
        throw Fault("out-of-bounds", "matrix row at " + hex(address) + " is not in shared memory");
    u8* p = resolve(w, in.space, address, 16, access, lane);
    if (access == Access::Read) {
        size_t offset = static_cast<size_t>(p - w.cta->shared.data());
        if (offset < w.cta->shared.size() && std::memchr(w.cta->written.data() + offset, 0, used))
            check_initialised(w, p, used, address);
    }
    if (w.machine->races)
        note_access(w, 0, p, 16, access, kManyLanes);
    return p;
}

void exec_ldmatrix(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    u16 matrix[4][8][8];
    for (u32 k = 0; k < in.n; ++k)
        for (int row = 0; row < 8; ++row)
            std::memcpy(matrix[k][row], matrix_row(w, in, static_cast<int>(k) * 8 + row, Access::Read), 16);
    for (u32 k = 0; k < in.n; ++k)
        write_lanes(w.row<u32>(w.extra(in, k)), together, [&](int lane) {
            int r = lane / 4, c = lane % 4 * 2;
            u32 low = in.mode & kTranspose ? matrix[k][c][r] : matrix[k][r][c],
                high = in.mode & kTranspose ? matrix[k][c + 1][r] : matrix[k][r][c + 1];
            return low | high << 16;
        });
    w.machine->counters.shared_read += 128 * in.n;
}

void exec_stmatrix(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    for (u32 k = 0; k < in.n; ++k) {
        u16 matrix[8][8];
        const u32* source = w.row<u32>(w.extra(in, k));
        for (int lane = 0; lane < kLanes; ++lane) {
            int r = lane / 4, c = lane % 4 * 2;
            u16 low = static_cast<u16>(source[lane]), high = static_cast<u16>(source[lane] >> 16);
            if (in.mode & kTranspose)
                matrix[c][r] = low, matrix[c + 1][r] = high;
            else
                matrix[r][c] = low, matrix[r][c + 1] = high;
        }
        for (int row = 0; row < 8; ++row)
            std::memcpy(matrix_row(w, in, static_cast<int>(k) * 8 + row, Access::Write), matrix[row], 16);
    }
    w.machine->counters.shared_written += 128 * in.n;
    w.machine->touch(w);
}

// Bytes of a register in the transposed shapes: byte i of lane has this row among its two, and this column of sixteen.
inline int byte_row(int i) {
    return i & 1;
}
inline int byte_column(int lane, int i) {
    return lane / 4 + 8 * (i >> 1);
}

// Sixteen elements of 4 or 6 bits at the beginning of 16 bytes become bytes.
void expand_row(u8* row, u16 mode) {
    u8 from[16];
    std::memcpy(from, row, 16);
    for (u32 i = 0; i < 16; ++i) {
        u32 bit = (mode & kFrom4 ? 4 : 6) * i, two = from[bit / 8] | static_cast<u32>(from[bit / 8 + 1]) << 8;
        row[i] = two >> (bit & 7) & (mode & kFrom4 ? 15 : 63);
    }
}

// .m16n16.trans and .m8n16 of bytes, or of elements that become bytes
void exec_ldmatrix_bytes(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    bool square = in.mode & kTranspose;
    int rows = square ? 16 : 8, registers = square ? 2 : 1, count = in.n / registers;
    u32 used = in.mode & kFrom4 ? 8 : in.mode & kFrom6 ? 12 : 16;
    u8 matrix[4][16][16];
    for (int k = 0; k < count; ++k)
        for (int row = 0; row < rows; ++row) {
            std::memcpy(matrix[k][row], matrix_row(w, in, k * rows + row, Access::Read, used), 16);
            if (in.mode & (kFrom4 | kFrom6))
                expand_row(matrix[k][row], in.mode);
        }
    for (int r = 0; r < in.n; ++r)
        write_lanes(w.row<u32>(w.extra(in, static_cast<u32>(r))), together, [&](int lane) {
            u32 value = 0;
            for (int i = 0; i < 4; ++i) {
                int row = square ? lane % 4 * 4 + r % 2 * 2 + byte_row(i) : lane / 4;
                int column = square ? byte_column(lane, i) : lane % 4 * 4 + i;
                value |= u32{matrix[r / registers][row][column]} << (8 * i);
            }
            return value;
        });
    w.machine->counters.shared_read += static_cast<u64>(16 * rows * count);
}

// .m16n8.trans of bytes: eight rows of sixteen in shared memory
void exec_stmatrix_bytes(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    for (int k = 0; k < in.n; ++k) {
        u8 matrix[8][16];
        const u32* source = w.row<u32>(w.extra(in, static_cast<u32>(k)));
        for (int lane = 0; lane < kLanes; ++lane)
            for (int i = 0; i < 4; ++i)
                matrix[lane % 4 * 2 + byte_row(i)][byte_column(lane, i)] = static_cast<u8>(source[lane] >> (8 * i));
        for (int row = 0; row < 8; ++row)
            std::memcpy(matrix_row(w, in, k * 8 + row, Access::Write), matrix[row], 16);
    }
    w.machine->counters.shared_written += 128 * in.n;
    w.machine->touch(w);
}

void matrix_registers(Builder& b, bool is_load, u32 n) {
    b.want(2, 2);
    b.in.n = static_cast<u8>(n);
    b.address(&Inst::a, b.at(is_load ? 1 : 0));
    const Operand& data = b.at(is_load ? 0 : 1);
    bool is_vector = data.kind == Operand::Kind::Vector;
    if ((is_vector ? data.parts.size() : 1) != n)
        b.fail("wanted " + std::to_string(n) + " registers");
    for (u32 k = 0; k < n; ++k) {
        const Operand& one = is_vector ? data.parts[k] : data;
        is_load ? b.def_extra(one, Type::B32) : b.use_extra(one, Type::B32);
    }
}

u32 take_count(Builder& b) {
    std::string count = b.take_of({"x1", "x2", "x4"});
    if (count.empty())
        b.fail("unknown number of matrices");
    return static_cast<u32>(count[1] - '0');
}

void build_byte_matrix(Builder& b, bool is_load, const std::string& shape) {
    u32 count = take_count(b);
    bool trans = b.take("trans"), square = shape == "m16n16";
    b.in.space = b.take_any({"shared", "shared::cta"}) ? Space::Shared : Space::Generic;
    if (trans != (shape != "m8n16"))
        b.fail(trans ? "this shape has no .trans" : "wanted .trans");
    u16 mode = square ? kTranspose : 0;
    if (b.take("b8x16"))
        mode |= b.take("b4x16_p64") ? kFrom4 : b.take("b6x16_p32") ? kFrom6 : 0;
    else if (shape == "m8n16" || b.take_type() != Type::B8)
        b.fail("unknown type for this shape");
    if (square && count > 2)
        b.fail("unknown number of matrices");
    b.in.mode = mode;
    matrix_registers(b, is_load, square ? 2 * count : count);
    b.emit(is_load ? exec_ldmatrix_bytes : exec_stmatrix_bytes);
}

void build_ldst_matrix(Builder& b) {
    bool is_load = b.s.op == "ldmatrix";
    if (!b.take("sync") || !b.take("aligned"))
        b.fail("wanted .sync.aligned");
    std::string wide = is_load ? b.take_of({"m16n16", "m8n16"}) : b.take_of({"m16n8"});
    if (!wide.empty())
        return build_byte_matrix(b, is_load, wide);
    if (!b.take("m8n8"))
        b.fail("unknown shape");
    u32 count = take_count(b);
    if (b.take("trans"))
        b.in.mode |= kTranspose;
    b.in.space = b.take_any({"shared", "shared::cta"}) ? Space::Shared : Space::Generic;
    if (b.take_type() != Type::B16)
        b.fail("only .b16 is modelled");
    matrix_registers(b, is_load, count);
    b.emit(is_load ? exec_ldmatrix : exec_stmatrix);
}

void exec_movmatrix(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    u16 matrix[8][8];
    const u32* a = w.row<u32>(in.a);
    for (int lane = 0; lane < kLanes; ++lane)
        matrix[lane / 4][lane % 4 * 2] = static_cast<u16>(a[lane]),
                                    matrix[lane / 4][lane % 4 * 2 + 1] = static_cast<u16>(a[lane] >> 16);
    write_lanes(w.row<u32>(in.dst), together,
        [&](int lane) { return matrix[lane % 4 * 2][lane / 4] | u32{matrix[lane % 4 * 2 + 1][lane / 4]} << 16; });
}

void build_movmatrix(Builder& b) {
    for (const char* word : {"sync", "aligned", "m8n8", "trans", "b16"})
        if (!b.take(word))
            b.fail(std::string("wanted .") + word);
    operands_unary(b, Type::B32);
    b.emit(exec_movmatrix);
}

} // namespace

void register_matrix(Table& table) {
    table["ldmatrix"] = table["stmatrix"] = build_ldst_matrix;
    table["movmatrix"] = build_movmatrix;
}

} // namespace deep_gemm_k3::emulator
