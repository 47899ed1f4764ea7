// wgmma: products of a warpgroup. Each warp computes its own 16 rows when it issues the instruction; a group counts as
// complete for a waiting warp once all four warps have issued it, as the hardware's collective operation does.
#include "races.hpp"
#include "watch.hpp"
#include "wgmma_operand.hpp"

namespace deep_gemm_k3::emulator {

namespace {

struct Shape {
    Type a, b, d;
    int n, k;
    bool a_in_registers, negate_a, negate_b, transpose_a, transpose_b;
};

void pack(Inst& in, const Shape& s) {
    in.imm = static_cast<s64>(u64{static_cast<u8>(s.a)} | u64{static_cast<u8>(s.b)} << 8 |
                              u64{static_cast<u8>(s.d)} << 16 | static_cast<u64>(s.n) << 24 |
                              static_cast<u64>(s.k) << 36 | u64{s.a_in_registers} << 44 | u64{s.negate_a} << 45 |
                              u64{s.negate_b} << 46 | u64{s.transpose_a} << 47 | u64{s.transpose_b} << 48);
}

Shape unpack(const Inst& in) {
    u64 x = static_cast<u64>(in.imm);
    return {static_cast<Type>(x & 0xff), static_cast<Type>(x >> 8 & 0xff), static_cast<Type>(x >> 16 & 0xff),
        static_cast<int>(x >> 24 & 0xfff), static_cast<int>(x >> 36 & 0xff), (x >> 44 & 1) != 0, (x >> 45 & 1) != 0,
        (x >> 46 & 1) != 0, (x >> 47 & 1) != 0, (x >> 48 & 1) != 0};
}

// register r, lane -> position in the 16 x n tile, for two neighbouring columns
inline int tile_at(int n, int r, int lane) {
    return (lane / 4 + 8 * (r & 1)) * n + 8 * (r >> 1) + lane % 4 * 2;
}

// Four lanes of two registers, a row's eight neighbouring columns: lane by lane in registers, column by column in
// tiles.
typedef float Four __attribute__((vector_size(16)));
typedef s32 Order __attribute__((vector_size(16)));

void to_tile(const float* even, const float* odd, float* out, int n) {
    for (int row = 0; row < 8; ++row, even += 4, odd += 4, out += n) {
        Four a, b;
        std::memcpy(&a, even, sizeof(a)), std::memcpy(&b, odd, sizeof(b));
        Four first = __builtin_shuffle(a, b, Order{0, 4, 1, 5}), second = __builtin_shuffle(a, b, Order{2, 6, 3, 7});
        std::memcpy(out, &first, sizeof(first)), std::memcpy(out + 4, &second, sizeof(second));
    }
}

void from_tile(const float* tile, float* even, float* odd, int n) {
    for (int row = 0; row < 8; ++row, even += 4, odd += 4, tile += n) {
        Four first, second;
        std::memcpy(&first, tile, sizeof(first)), std::memcpy(&second, tile + 4, sizeof(second));
        Four a = __builtin_shuffle(first, second, Order{0, 2, 4, 6}),
             b = __builtin_shuffle(first, second, Order{1, 3, 5, 7});
        std::memcpy(even, &a, sizeof(a)), std::memcpy(odd, &b, sizeof(b));
    }
}

void load_accumulator(Warp& w, const Inst& in, const Shape& s, float* out) {
    if (s.d != Type::F16) {
        for (u32 r = 0; r < static_cast<u32>(s.n) / 4; ++r)
            to_tile(w.row<float>(w.extra(in, 2 * r)), w.row<float>(w.extra(in, 2 * r + 1)),
                out + tile_at(s.n, static_cast<int>(r), 0), s.n);
        return;
    }
    for (int r = 0; r < s.n / 4; ++r)
        for (int i = 0; i < 2; ++i) {
            const u32* row = w.row<u32>(w.extra(in, static_cast<u32>(r)));
            for (int lane = 0; lane < kLanes; ++lane)
                out[tile_at(s.n, r, lane) + i] = f16_to_float(row[lane] >> (16 * i) & 0xffff);
        }
}

void store_accumulator(Warp& w, const Inst& in, const Shape& s, const float* out) {
    for (int r = 0; r < s.n / 4; ++r) {
        if (s.d == Type::F16) {
            u32* row = w.row<u32>(w.extra(in, static_cast<u32>(r)));
            for (int lane = 0; lane < kLanes; ++lane)
                row[lane] = float_to_f16(out[tile_at(s.n, r, lane)]) | float_to_f16(out[tile_at(s.n, r, lane) + 1])
                                                                           << 16;
            continue;
        }
        u32 even = static_cast<u32>(2 * r);
        from_tile(out + tile_at(s.n, r, 0), w.row<float>(w.extra(in, even)), w.row<float>(w.extra(in, even + 1)), s.n);
    }
}

void note_reads(Warp& w, const std::vector<u32>& reads) {
    Cta& cta = *w.cta;
    if (cta.readers.empty())
        cta.readers.resize(cta.shared.size() / 16 + 1, 0);
    for (u32 piece : reads)
        ++cta.readers[piece];
    cta.reader_count += reads.size();
    if (w.machine->races) {
        auto stamp = w.machine->races->issue(w);
        for (u32 piece : reads)
            w.machine->races->async_access(w, *stamp, cta.shared.data() + piece * 16, 16, false);
        w.wgmma_stamp = stamp->count;
    }
    w.wgmma_open.insert(w.wgmma_open.end(), reads.begin(), reads.end());
}

void require_warp(Warp& w, u32 m) {
    if (m != kFullMask)
        throw Fault("wgmma", "wgmma executed by lanes " + hex(m) + " only");
}

// extras: accumulator registers, [4 registers of a | descriptor a], descriptor b, scale-d
void exec_mma(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    require_warp(w, together);
    Shape s = unpack(in);
    u32 at = static_cast<u32>(s.d == Type::F16 ? s.n / 4 : s.n / 2);
    alignas(64) float a[16 * 32], b[256 * 32], out[16 * 256];
    static thread_local std::vector<u32> reads;
    reads.clear();
    int first_row = static_cast<int>(w.index % 4) * 16;
    if (s.a_in_registers) {
        const u32* rows[4];
        for (u32 r = 0; r < 4; ++r)
            rows[r] = w.row<u32>(w.extra(in, at + r));
        load_fragment(rows, s.a, a);
    } else {
        load_operand(w, w.row<u64>(w.extra(in, at))[0], {s.a, s.transpose_a, first_row, 16, s.k, a, s.k, 1}, reads);
    }
    at += s.a_in_registers ? 4 : 1;
    load_operand(w, w.row<u64>(w.extra(in, at))[0], {s.b, s.transpose_b, 0, s.n, s.k, b, 1, s.n}, reads);
    if (s.negate_a != s.negate_b)
        for (int i = 0; i < 16 * s.k; ++i)
            a[i] = -a[i];
    bool accumulate = w.predicate(w.extra(in, at + 1)) & 1;
    if (accumulate)
        load_accumulator(w, in, s, out);
    else
        std::memset(out, 0, sizeof(float) * static_cast<size_t>(16 * s.n));
    product_add(w, out, a, b, {16, s.n, s.k, s.a, false});
    store_accumulator(w, in, s, out);
    watch_product(w);
    note_reads(w, reads);
    ++w.machine->counters.wgmma;
    w.machine->counters.macs += static_cast<u64>(16 * s.n * s.k);
}

void exec_fence(Warp& w, const Inst&, u32) {
    watch_fence(w);
}

void exec_commit(Warp& w, const Inst& in, u32 m) {
    u32 together;
    if (!meet(w, in, m, w.live, together))
        return;
    w.wgmma_reads.push_back(std::move(w.wgmma_open));
    w.wgmma_open.clear();
    w.wgmma_stamps.push_back(w.wgmma_stamp);
    ++w.wgmma_committed;
    ++w.machine->epoch;
    w.machine->wake_all(w.cta->wgmma_waiters);
}

// `w` has waited: groups before `target` are complete, those of the other warps of its warpgroup as well.
void complete_groups(Warp& w, Warp& other, u64 target) {
    Cta& cta = *w.cta;
    while (other.wgmma_committed - other.wgmma_reads.size() < target && !other.wgmma_reads.empty()) {
        for (u32 piece : other.wgmma_reads.front())
            --cta.readers[piece];
        cta.reader_count -= other.wgmma_reads.front().size();
        other.wgmma_reads.pop_front();
    }
    if (!w.machine->races)
        return;
    u64 first = other.wgmma_committed - other.wgmma_stamps.size();
    u32 stamp = other.wgmma_done_stamp;
    for (u64 i = 0; i < other.wgmma_stamps.size() && first + i < target; ++i)
        stamp = std::max(stamp, other.wgmma_stamps[i]);
    w.machine->races->async_done(w, other.id, stamp, true);
    if (&w != &other)
        return;
    w.wgmma_done_stamp = stamp;
    while (w.wgmma_committed - w.wgmma_stamps.size() < target && !w.wgmma_stamps.empty())
        w.wgmma_stamps.pop_front();
}

void exec_wait(Warp& w, const Inst& in, u32 m) {
    if (m != w.live) {
        u32 together;
        if (!meet(w, in, m, w.live, together))
            return;
    }
    u64 keep = static_cast<u64>(in.imm), target = w.wgmma_committed > keep ? w.wgmma_committed - keep : 0;
    Cta& cta = *w.cta;
    for (u32 i = w.index / 4 * 4; i < w.index / 4 * 4 + 4 && i < cta.warps.size(); ++i) {
        if (!cta.warps[i]->live || cta.warps[i]->wgmma_committed >= target)
            continue;
        cta.wgmma_waiters.emplace_back(&w, w.current);
        return w.block("waits for the other warps of its warpgroup to issue wgmma", 0, target);
    }
    watch_wait(w, target);
    for (u32 i = w.index / 4 * 4; i < w.index / 4 * 4 + 4 && i < cta.warps.size(); ++i)
        complete_groups(w, *cta.warps[i], target);
}

void build_product(Builder& b) {
    Shape s{};
    std::string shape = b.take_next();
    size_t at_n = shape.find('n'), at_k = shape.find('k');
    if (shape.rfind("m64n", 0) != 0 || at_k == std::string::npos)
        b.fail("unknown shape " + shape);
    s.n = std::atoi(shape.c_str() + at_n + 1), s.k = std::atoi(shape.c_str() + at_k + 1);
    s.d = b.take_type(), s.a = b.take_any_type(), s.b = b.take_any_type();
    int size = type_size(s.a);
    bool types_fit = size == 2   ? s.a == s.b && (s.a == Type::BF16 || s.a == Type::F16)
                     : size == 4 ? s.a == Type::TF32 && s.b == s.a
                                 : (s.a == Type::E4M3 || s.a == Type::E5M2) && (s.b == Type::E4M3 || s.b == Type::E5M2);
    bool result_fits = s.d == Type::F32 || (s.d == Type::F16 && (s.a == Type::F16 || size == 1));
    if (!types_fit || !result_fits)
        b.fail("this combination of types is not modelled");
    if (s.n < 8 || s.n > 256 || s.n % 8 || s.k * size != 32)
        b.fail("unknown shape " + shape);
    const Operand& a = b.at(1);
    s.a_in_registers = a.kind == Operand::Kind::Vector;
    size_t scales = 6, transposes = size == 2 ? (s.a_in_registers ? 1 : 2) : 0;
    b.want(scales + transposes, scales + transposes);
    const Operand& d = b.at(0);
    size_t registers = static_cast<size_t>(s.d == Type::F16 ? s.n / 4 : s.n / 2);
    if (d.parts.size() != registers)
        b.fail(
            "wanted " + std::to_string(registers) + " accumulator registers, found " + std::to_string(d.parts.size()));
    for (const Operand& part : d.parts)
        b.update_extra(part, Type::B32);
    if (s.a_in_registers) {
        if (a.parts.size() != 4)
            b.fail("wanted 4 registers of A");
        for (const Operand& part : a.parts)
            b.use_extra(part, Type::B32);
    } else {
        b.use_extra(a, Type::B64);
    }
    b.use_extra(b.at(2), Type::B64);
    b.use_extra(b.at(3), Type::Pred);
    for (size_t i = 4; i < 6; ++i)
        if (b.constant(b.at(i)) != 1 && b.constant(b.at(i)) != ~u64{0})
            b.fail("the factors of A and B are 1 or -1");
    s.negate_a = static_cast<s64>(b.constant(b.at(4))) < 0, s.negate_b = static_cast<s64>(b.constant(b.at(5))) < 0;
    if (transposes == 2)
        s.transpose_a = b.constant(b.at(6)) != 0;
    if (transposes)
        s.transpose_b = b.constant(b.at(5 + transposes)) != 0;
    pack(b.in, s);
    b.emit(exec_mma);
}

void build_wgmma(Builder& b) {
    std::string kind = b.take_of({"fence", "mma_async", "commit_group", "wait_group"});
    if (!b.take("sync") || !b.take("aligned"))
        b.fail("wanted .sync.aligned");
    if (kind == "mma_async")
        return build_product(b);
    if (kind == "fence")
        return b.emit(exec_fence);
    if (kind == "commit_group")
        return b.emit(exec_commit);
    if (kind != "wait_group")
        b.fail("unknown form");
    b.in.imm = static_cast<s64>(b.constant(b.at(0)));
    b.emit(exec_wait);
}

} // namespace

void register_wgmma(Table& table) {
    table["wgmma"] = build_wgmma;
}

} // namespace deep_gemm_k3::emulator
