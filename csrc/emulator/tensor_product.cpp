// Executes one tcgen05.mma: operands as doubles, one exact sum for the K of the instruction, one rounding.
#include "tensor_product.hpp"

#include "numeric.hpp"

namespace deep_gemm_k3::emulator {

namespace {

struct Tables {
    double e4m3[256], e5m2[256], e2m3[64], e3m2[64], e2m1[16], ue8m0[256], ue4m3[256];
    Tables() {
        for (u32 i = 0; i < 256; ++i) {
            e4m3[i] = decode(i, kE4M3), e5m2[i] = decode(i, kE5M2);
            ue8m0[i] = decode_ue8m0(i), ue4m3[i] = decode(i & 0x7f, kE4M3);
        }
        for (u32 i = 0; i < 64; ++i)
            e2m3[i] = decode(i, kE2M3), e3m2[i] = decode(i, kE3M2);
        for (u32 i = 0; i < 16; ++i)
            e2m1[i] = decode(i, kE2M1);
    }
};

const Tables& tables() {
    static const Tables made;
    return made;
}

void widen_bytes(const u8* piece, TensorElement type, double* out, u32 step) {
    const Tables& t = tables();
    const double* table = type == TensorElement::E4M3 ? t.e4m3 : t.e5m2;
    for (u32 i = 0; i < 16; ++i)
        out[i * step] = type == TensorElement::U8   ? piece[i]
                        : type == TensorElement::S8 ? static_cast<s8>(piece[i])
                                                    : table[piece[i]];
}

// Sixteen elements of 4 or 6 bits, packed at the beginning of the 16 bytes.
void widen_padded(const u8* piece, TensorElement type, double* out, u32 step) {
    const Tables& t = tables();
    for (u32 i = 0; i < 16; ++i) {
        if (type == TensorElement::E2M1) {
            out[i * step] = t.e2m1[piece[i / 2] >> (4 * (i & 1)) & 15];
            continue;
        }
        u32 bit = 6 * i, two = piece[bit / 8] | static_cast<u32>(piece[bit / 8 + 1]) << 8;
        out[i * step] = (type == TensorElement::E2M3 ? t.e2m3 : t.e3m2)[two >> (bit & 7) & 63];
    }
}

} // namespace

void widen_piece(const u8* piece, TensorElement type, TensorKind kind, double* out, u32 step) {
    switch (type) {
    case TensorElement::F16:
    case TensorElement::BF16:
        for (u32 i = 0; i < 8; ++i) {
            u16 x;
            std::memcpy(&x, piece + 2 * i, 2);
            out[i * step] = static_cast<double>(type == TensorElement::F16 ? f16_to_float(x) : bf16_to_float(x));
        }
        return;
    case TensorElement::TF32:
        for (u32 i = 0; i < 4; ++i) {
            u32 x;
            std::memcpy(&x, piece + 4 * i, 4);
            out[i * step] = static_cast<double>(bits<float>(x & 0xffffe000u));
        }
        return;
    case TensorElement::E2M1:
        if (kind == TensorKind::MXF4 || kind == TensorKind::MXF4NVF4) {
            for (u32 i = 0; i < 32; ++i)
                out[i * step] = tables().e2m1[piece[i / 2] >> (4 * (i & 1)) & 15];
            return;
        }
        return widen_padded(piece, type, out, step);
    case TensorElement::E2M3:
    case TensorElement::E3M2:
        return widen_padded(piece, type, out, step);
    default:
        return widen_bytes(piece, type, out, step);
    }
}

namespace {

using Quad = double __attribute__((vector_size(32)));

inline Quad load_quad(const double* p) {
    Quad x;
    std::memcpy(&x, p, sizeof(x));
    return x;
}

inline Quad fused(Quad x, double y, Quad z) {
    Quad out;
    for (int i = 0; i < 4; ++i)
        out[i] = __builtin_fma(x[i], y, z[i]);
    return out;
}

} // namespace

// Tiles of 4 x 8 whose sums stay in registers.
void multiply(double* sums, const double* a, const double* b, u32 m, u32 n, u32 k) {
    for (u32 i = 0; i < m; i += 8)
        for (u32 j = 0; j < n; j += 4) {
            Quad sum[4][2] = {};
            for (u32 t = 0; t < k; ++t) {
                Quad low = load_quad(a + t * m + i), high = load_quad(a + t * m + i + 4);
                for (u32 r = 0; r < 4; ++r) {
                    double y = b[(j + r) * k + t];
                    sum[r][0] = fused(low, y, sum[r][0]);
                    sum[r][1] = fused(high, y, sum[r][1]);
                }
            }
            for (u32 r = 0; r < 4; ++r)
                std::memcpy(sums + (j + r) * m + i, sum[r], sizeof(sum[r]));
        }
}

namespace {

// rows x k elements from shared memory: row r, index t to out[r * row_step + t * k_step]
struct Target {
    double* out;
    u32 row_step, k_step;
};

// the rest of the 16 bytes pads
u32 bytes_per_piece(TensorElement type) {
    return type == TensorElement::E2M1 ? 8 : type == TensorElement::E2M3 || type == TensorElement::E3M2 ? 12 : 16;
}

struct Source {
    u64 descriptor;
    bool transposed;
    TensorElement type;
    u32 rows;
};

void load_shared(Warp& w, u32 pc, Cta& cta, const TensorProduct& p, const Source& s, Target to) {
    TensorDescriptor d(s.descriptor);
    u32 per = elements_per_piece(s.type, p.kind), used = per == 32 ? 16 : bytes_per_piece(s.type);
    double value[32];
    u32 first = s.transposed ? p.k : s.rows, second = s.transposed ? (s.rows + per - 1) / per : p.k / per;
    for (u32 i = 0; i < first; ++i)
        for (u32 piece = 0; piece < second; ++piece) {
            u32 address = s.transposed ? d.mn_major(piece, i) : d.k_major(i, piece);
            const u8* from = tensor_piece(w, pc, cta, address, used);
            if (!s.transposed) {
                widen_piece(from, s.type, p.kind, to.out + i * to.row_step + piece * per * to.k_step, to.k_step);
                continue;
            }
            widen_piece(from, s.type, p.kind, value, 1);
            for (u32 e = 0; e < per && piece * per + e < s.rows; ++e)
                to.out[(piece * per + e) * to.row_step + i * to.k_step] = value[e];
        }
}

// A in tensor memory: 32 bytes of a row in eight columns of its lane; elements of 4 and 6 bits in bytes
void load_tensor(Warp& w, u32 pc, Cta& cta, const TensorProduct& p, Target to) {
    TensorAddress at(p.a_tensor);
    const TensorMemory& memory = tensor_memory(cta);
    bool in_bytes = p.kind != TensorKind::MXF4 && p.kind != TensorKind::MXF4NVF4 && p.a >= TensorElement::E2M3;
    for (u32 row = 0; row < p.rows(); ++row) {
        u32 lane = at.lane + p.lane_of(row, 0);
        u8 bytes[32];
        for (u32 c = 0; c < 8; ++c)
            std::memcpy(bytes + 4 * c, &memory.cells[(at.column + c) * kTensorLanes + lane], 4);
        double* out = to.out + row * to.row_step;
        if (in_bytes) {
            const double* table = p.a == TensorElement::E2M1   ? tables().e2m1
                                  : p.a == TensorElement::E2M3 ? tables().e2m3
                                                               : tables().e3m2;
            bool four = p.a == TensorElement::E2M1; // in bits 2 to 5, where the byte is the same number in E2M3
            for (u32 i = 0; i < 32; ++i)
                out[i * to.k_step] = table[four ? bytes[i] >> 2 & 15 : bytes[i] & 63];
            continue;
        }
        u32 per = elements_per_piece(p.a, p.kind);
        for (u32 piece = 0; piece < 2; ++piece)
            widen_piece(bytes + 16 * piece, p.a, p.kind, out + piece * per * to.k_step, to.k_step);
    }
    check_tensor_written(w, pc, cta, {at.lane, p.spread() ? 16 : p.rows()}, {at.column, 8});
}

// The scale of row `row`, block `block`: rows count along the 32 lanes of a quarter, then along columns.
double scale_at(const TensorMemory& memory, const TensorProduct& p, u32 address, u32 quarter, u32 row, u32 byte) {
    TensorAddress at(address);
    u32 cell = memory.cells[(at.column + row / 32) * kTensorLanes + quarter * 32 + row % 32];
    u32 code = cell >> (8 * byte) & 0xff;
    return p.ue4m3 ? tables().ue4m3[code] : tables().ue8m0[code];
}

void scale_a(Warp& w, u32 pc, Cta& cta, const TensorProduct& p, double* a) {
    const TensorMemory& memory = tensor_memory(cta);
    u32 rows = p.rows(), per = p.k / p.scale_blocks;
    check_tensor_written(w, pc, cta, {0, kTensorLanes}, {TensorAddress(p.scale_a).column, rows / 32});
    for (u32 block = 0; block < p.scale_blocks; ++block)
        for (u32 row = 0; row < rows; ++row) {
            double s = scale_at(memory, p, p.scale_a, row / 32, row, p.scale_a_id + block);
            for (u32 t = block * per; t < block * per + per; ++t)
                a[t * rows + row] *= s;
        }
}

// The scales of B stand in every quarter; of a pair with M 128 each half of the quarters has its half of N.
void scale_b(Warp& w, u32 pc, Cta& cta, const TensorProduct& p, double* b) {
    const TensorMemory& memory = tensor_memory(cta);
    u32 per = p.k / p.scale_blocks, parts = p.parts(), columns = p.n / parts;
    check_tensor_written(
        w, pc, cta, {0, std::min<u32>(32, columns)}, {TensorAddress(p.scale_b).column, (columns + 31) / 32});
    for (u32 j = 0; j < p.n; ++j)
        for (u32 block = 0; block < p.scale_blocks; ++block) {
            u32 quarter = j / columns * 2;
            double s = scale_at(memory, p, p.scale_b, quarter, j % columns, p.scale_b_id + block);
            for (u32 t = block * per; t < block * per + per; ++t)
                b[j * p.k + t] *= s;
        }
}

u32 round_result(const TensorProduct& p, u32 old, double sum, double factor) {
    if (p.integer_result) {
        s64 total = static_cast<s64>(sum) + (p.accumulate ? static_cast<s32>(old) : 0);
        if (p.saturate)
            total = total > INT32_MAX ? INT32_MAX : total < INT32_MIN ? INT32_MIN : total;
        return static_cast<u32>(total);
    }
    float before = p.accumulate ? f16_to_float(old & 0xffff) : 0.0f;
    return float_to_f16(static_cast<float>(static_cast<double>(before) * factor + sum));
}

// Adds the sums of one column to D, `count` rows in neighbouring lanes.
void add_run(const TensorProduct& p, u32* cells, const double* sums, u32 count, double factor) {
    if (p.integer_result || p.half_result) {
        for (u32 i = 0; i < count; ++i)
            cells[i] = round_result(p, cells[i], sums[i], factor);
        return;
    }
    if (!p.accumulate) {
        for (u32 i = 0; i < count; ++i)
            cells[i] = bits<u32>(static_cast<float>(sums[i]));
        return;
    }
    for (u32 i = 0; i < count; ++i)
        cells[i] = bits<u32>(static_cast<float>(static_cast<double>(bits<float>(cells[i])) * factor + sums[i]));
}

void store_sums(const TensorProduct& p, u32 c, const double* sums) {
    TensorMemory& memory = tensor_memory(*p.ctas[c]);
    TensorAddress at(p.d);
    u32 rows = p.rows(), columns = p.n / p.parts(), run = p.spread() ? 16 : 32;
    double factor = std::ldexp(1.0, -static_cast<int>(p.input_shift));
    for (u32 j = 0; j < p.n; ++j)
        for (u32 row = 0; row < rows; row += run) {
            u32 lane = at.lane + p.lane_of(row, j / columns), column = at.column + j % columns;
            u32 index = column * kTensorLanes + lane, skip = p.disabled[4 * c + lane / 32] >> (lane % 32);
            const double* from = sums + j * rows + row;
            if (!skip) {
                add_run(p, memory.cells.data() + index, from, run, factor);
                std::memset(memory.written.data() + index, 1, run);
                continue;
            }
            for (u32 i = 0; i < run; ++i)
                if (!(skip >> i & 1)) {
                    add_run(p, memory.cells.data() + index + i, from + i, 1, factor);
                    memory.written[index + i] = 1;
                }
        }
}

void check_accumulator(Warp& w, u32 pc, const TensorProduct& p, Cta& cta) {
    TensorAddress at(p.d);
    u32 columns = p.n / p.parts();
    if (!p.spread())
        return check_tensor_written(w, pc, cta, {at.lane, p.lanes()}, {at.column, columns});
    for (u32 quarter = 0; quarter < 4; ++quarter)
        check_tensor_written(w, pc, cta, {at.lane + quarter * 32, 16}, {at.column, columns});
}

bool any_disabled(const TensorProduct& p) {
    u32 any = 0;
    for (u32 word : p.disabled)
        any |= word;
    return any;
}

} // namespace

void run_product(Warp& w, u32 pc, const TensorProduct& p) {
    u32 rows = p.rows();
    static thread_local std::vector<double> a, b, scaled, sums;
    a.resize(rows * p.k), b.resize(p.n * p.k), sums.resize(p.n * rows);
    for (u32 c = 0; c < p.count(); ++c) {
        u32 share = p.n / p.count();
        load_shared(w, pc, *p.ctas[c], p, {p.b_shared, p.b_by_n, p.b, share}, {b.data() + c * share * p.k, p.k, 1});
    }
    for (u32 c = 0; c < p.count(); ++c) {
        Cta& cta = *p.ctas[c];
        if (p.a_in_tensor)
            load_tensor(w, pc, cta, p, {a.data(), 1, rows});
        else
            load_shared(w, pc, cta, p, {p.a_shared, p.a_by_m, p.a, rows}, {a.data(), 1, rows});
        const double* right = b.data();
        if (p.scale_blocks) {
            scaled = b;
            scale_a(w, pc, cta, p, a.data());
            scale_b(w, pc, cta, p, scaled.data());
            right = scaled.data();
        }
        if (p.negate_a != p.negate_b)
            for (double& x : a)
                x = -x;
        multiply(sums.data(), a.data(), right, rows, p.n, p.k);
        if (p.accumulate && !any_disabled(p))
            check_accumulator(w, pc, p, cta);
        store_sums(p, c, sums.data());
    }
    ++w.machine->counters.tensor_products;
    w.machine->counters.macs += u64{p.m} * p.n * p.k;
}

} // namespace deep_gemm_k3::emulator
