#include "wgmma_operand.hpp"

namespace deep_gemm_k3::emulator {

namespace {

// A shared-memory matrix descriptor.
struct Descriptor {
    u32 start, leading, stride, span_shift; // bytes; span: 16 << span_shift bytes of a swizzle row
    bool swizzled;
    explicit Descriptor(u64 x) {
        start = static_cast<u32>(x & 0x3fff) << 4;
        leading = static_cast<u32>(x >> 16 & 0x3fff) << 4;
        stride = static_cast<u32>(x >> 32 & 0x3fff) << 4;
        u32 mode = static_cast<u32>(x >> 62);
        if (x >> 49 & 7)
            throw Fault("descriptor", "a matrix descriptor with a base offset is not modelled");
        span_shift = mode == 1 ? 3 : mode == 2 ? 2 : mode == 3 ? 1 : 0;
        swizzled = mode != 0;
    }
    u32 swizzle(u32 address) const {
        return swizzled ? address ^ (address >> 3 & (((1u << span_shift) - 1) << 4)) : address;
    }
    // The first byte, before the swizzle, of row `row` (8 rows to a group).
    u32 k_row(u32 row) const { return start + (row & 7) * (16u << span_shift) + (row >> 3) * stride; }
    u32 k_step() const { return swizzled ? 16 : leading; } // from a piece along k to the next
    // 16 bytes along m or n, piece `piece`, of k index `k`
    u32 mn_major(u32 piece, u32 k) const {
        u32 per = 1u << span_shift;
        u32 outer = swizzled ? leading : stride, deeper = swizzled ? stride : leading;
        return swizzle(
            start + (piece % per) * 16 + (piece / per) * outer + (k & 7) * (16u << span_shift) + (k >> 3) * deeper);
    }
};

// Reads pieces of 16 bytes, each checked and noted.
class Reader {
  public:
    Reader(Warp& w, std::vector<u32>& reads, size_t pieces)
        : w_(w), shared_(w.cta->shared.data()), written_(w.cta->written.data()),
          size_(static_cast<u32>(w.cta->shared.size())),
          places_(size_ < kSharedReserved + 16 ? 0 : size_ - kSharedReserved - 15) {
        size_t before = reads.size();
        reads.resize(before + pieces);
        next_ = reads.data() + before;
    }
    const u8* at(u32 address) {
        if (address - kSharedReserved >= places_)
            refuse(address);
        u64 written[2]; // a byte per byte, 0 or 1
        std::memcpy(written, written_ + address, sizeof(written));
        if ((written[0] & written[1]) != 0x0101010101010101u)
            report(address);
        *next_++ = address >> 4;
        return shared_ + address;
    }

  private:
    Warp& w_;
    const u8 *shared_, *written_;
    u32 size_, places_; // where a piece may begin, from kSharedReserved on
    u32* next_;

    [[noreturn, gnu::cold]] void refuse(u32 address) const {
        throw Fault("out-of-bounds", "wgmma reads shared memory at offset " + std::to_string(address) +
                                         "; the CTA has " + std::to_string(kSharedReserved) + ".." +
                                         std::to_string(size_));
    }
    [[gnu::cold, gnu::noinline]] void report(u32 address) const {
        w_.machine->report_at(w_, "uninitialised-shared",
            "wgmma reads shared memory that nobody has written, offset " + std::to_string(address));
    }
};

// Sixteen bytes as singles.
inline void widen_piece(const u8* from, float* to, Type type) {
    if (type == Type::BF16)
        return widen_bf16x8(from, to);
    widen(from, to, 16 / type_size(type), type);
}

// A row: its two pieces along k, kPer elements each.
template <int kPer>
inline void load_row(Reader& reader, const Descriptor& d, u32 row, float* to, Type type) {
    u32 address = d.k_row(row);
    widen_piece(reader.at(d.swizzle(address)), to, type);
    widen_piece(reader.at(d.swizzle(address + d.k_step())), to + kPer, type);
}

template <int kPer>
void load_along_k(Reader& reader, const Descriptor& d, const OperandPart& p) {
    u32 first = static_cast<u32>(p.first);
    if (p.k_step == 1) {
        for (int row = 0; row < p.count; ++row)
            load_row<kPer>(reader, d, first + static_cast<u32>(row), p.out + row * p.row_step, p.type);
        return;
    }
    alignas(32) float rows[4][2 * kPer]; // rows become columns: four at a time
    for (int row = 0; row < p.count; row += 4) {
        for (u32 r = 0; r < 4; ++r)
            load_row<kPer>(reader, d, first + static_cast<u32>(row) + r, rows[r], p.type);
        for (int k = 0; k < 2 * kPer; k += 4)
            transpose_four(&rows[0][k], 2 * kPer, p.out + row + k * p.k_step, p.k_step);
    }
}

} // namespace

void load_operand(Warp& w, u64 descriptor, const OperandPart& p, std::vector<u32>& reads) {
    Descriptor d(descriptor);
    int per = 16 / type_size(p.type);
    Reader reader(w, reads, static_cast<size_t>(p.count * p.k / per));
    if (!p.transposed)
        return per == 8   ? load_along_k<8>(reader, d, p)
               : per == 4 ? load_along_k<4>(reader, d, p)
                          : load_along_k<16>(reader, d, p);
    float value[16];
    for (int at = 0; at < p.k; ++at)
        for (int piece = 0; piece < p.count / per; ++piece) {
            u32 address = d.mn_major(static_cast<u32>(p.first / per + piece), static_cast<u32>(at));
            widen_piece(reader.at(address), value, p.type);
            for (int j = 0; j < per; ++j)
                p.out[(piece * per + j) * p.row_step + at * p.k_step] = value[j];
        }
}

// Four lanes hold 16 bytes of a row.
void load_fragment(const u32* const rows[4], Type type, float* a) {
    int per = 16 / type_size(type);
    for (int r = 0; r < 4; ++r)
        for (int group = 0; group < 8; ++group)
            widen_piece(reinterpret_cast<const u8*>(rows[r] + 4 * group),
                a + (group + 8 * (r & 1)) * 2 * per + (r >> 1) * per, type);
}

} // namespace deep_gemm_k3::emulator
