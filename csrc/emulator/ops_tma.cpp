// cp.async.bulk.tensor and cp.reduce.async.bulk.tensor: tiled loads, stores and reductions of 1 to 5 dimensions.
#include "async.hpp"
#include "jit/tensor_map.hpp"

namespace deep_gemm_k3::emulator {

namespace {

using Map = jit::EmulatedTensorMap;
using Swizzle = jit::TensorMapSwizzle;

int element_bits(u8 type) {
    constexpr int kBits[16] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
    return kBits[type & 15];
}

constexpr u32 kBoxAlignment = 128;

// Shared-memory address after the swizzle.
u32 swizzle_address(u32 address, Swizzle swizzle) {
    switch (swizzle) {
    case Swizzle::k32B:
        return address ^ (address >> 3 & 0x10);
    case Swizzle::k64B:
        return address ^ (address >> 3 & 0x30);
    case Swizzle::k128B:
        return address ^ (address >> 3 & 0x70);
    case Swizzle::k128BAtom32B:
        return address ^ (address >> 2 & 0x60);
    case Swizzle::k128BAtom32BFlip8B:
        return (address ^ (address >> 2 & 0x60)) ^ (address >> 4 & 0x8);
    case Swizzle::k128BAtom64B:
        return address ^ (address >> 1 & 0x40);
    default:
        return address;
    }
}

constexpr u16 kMulticast = 1, kPair = 2;

struct Tile {
    Map map;
    s64 start[5];
    u32 count[5]; // elements of the box per dimension, after the traversal strides
    u32 element;  // bytes in global memory; of sixteen elements of a packed type that expands, of two of one that does
                  // not
    u32 shared;   // bytes of the same in shared memory
    u64 bytes;    // of the whole box in shared memory
    // What is read, and what a load counts at its barrier: the gaps of expanding types are no bytes of it.
    u64 global_bytes() const { return bytes / shared * element; }
};

using PackedType = jit::TensorMapType;

// Elements of 4 and 6 bits are handled in units of whole bytes.
void pack_units(Tile& tile, s64* start, u32 bits) {
    PackedType type = static_cast<PackedType>(tile.map.type);
    bool expands = type != PackedType::k16U4Align8B;
    u32 unit = expands ? 16 : 2, aligned = expands ? 128 : 32;
    if (start[0] % aligned)
        throw Fault("tensor-map", "a first coordinate of " + std::to_string(start[0]) +
                                      " with a packed type: wanted a multiple of " + std::to_string(aligned));
    if (tile.map.element_strides[0] != 1)
        throw Fault("tensor-map", "a packed type with an element stride in its first dimension");
    tile.element = unit * bits / 8;
    tile.shared = expands ? 16 : 1;
    start[0] /= unit;
    tile.map.dims[0] /= unit;
    tile.map.box[0] = static_cast<u16>(tile.map.box[0] / unit);
}

Swizzle swizzle_of(const Tile& tile) {
    return static_cast<Swizzle>(tile.map.swizzle);
}

Tile read_tile(Warp& w, u64 descriptor, const s64* start, u32 rank) {
    Tile tile{};
    if (descriptor & 63)
        fault_misaligned(w, descriptor, 64);
    std::memcpy(reinterpret_cast<u8*>(&tile.map), resolve(w, Space::Generic, descriptor, 64, Access::Read, 0), 64);
    std::memcpy(
        reinterpret_cast<u8*>(&tile.map) + 64, resolve(w, Space::Generic, descriptor + 64, 64, Access::Read, 0), 64);
    if (tile.map.magic != Map::kMagic)
        throw Fault("tensor-map", "what lies at " + hex(descriptor) + " is no tensor map of the emulator");
    if (tile.map.rank != rank)
        throw Fault("tensor-map",
            "an instruction of " + std::to_string(rank) + " dimensions with a map of " + std::to_string(tile.map.rank));
    if (tile.map.interleave)
        throw Fault("tensor-map", "interleaved layouts are not modelled");
    int bits = element_bits(tile.map.type);
    tile.element = tile.shared = static_cast<u32>(bits / 8);
    for (u32 i = 0; i < 5; ++i)
        tile.start[i] = i < rank ? start[i] : 0;
    if (bits < 8)
        pack_units(tile, tile.start, static_cast<u32>(bits));
    tile.bytes = tile.shared;
    for (u32 i = 0; i < 5; ++i) {
        tile.count[i] =
            i < rank ? (u32{tile.map.box[i]} + tile.map.element_strides[i] - 1) / tile.map.element_strides[i] : 1;
        tile.bytes *= tile.count[i];
    }
    return tile;
}

// Calls f(shared offset of the row within the box, global address, first, last) for every row of the box;
// [first, last) are the elements of the row that exist in the tensor (none when the row is outside).
template <class F>
void for_rows(const Tile& tile, F f) {
    u32 rows = tile.count[1] * tile.count[2] * tile.count[3] * tile.count[4];
    s64 step = tile.map.element_strides[0], size = static_cast<s64>(tile.map.dims[0]);
    s64 first = tile.start[0] >= 0 ? 0 : (-tile.start[0] + step - 1) / step;
    s64 last = tile.start[0] >= size ? 0 : (size - tile.start[0] + step - 1) / step;
    first = std::min<s64>(first, tile.count[0]);
    last = std::max(first, std::min<s64>(last, tile.count[0]));
    for (u32 row = 0; row < rows; ++row) {
        u32 at[5] = {0, row % tile.count[1], row / tile.count[1] % tile.count[2],
            row / tile.count[1] / tile.count[2] % tile.count[3], row / tile.count[1] / tile.count[2] / tile.count[3]};
        bool inside = true;
        u64 address = tile.map.address + static_cast<u64>(tile.start[0]) * tile.element;
        for (u32 i = 1; i < tile.map.rank; ++i) {
            s64 where = tile.start[i] + static_cast<s64>(at[i]) * tile.map.element_strides[i];
            inside &= where >= 0 && where < static_cast<s64>(tile.map.dims[i]);
            address += static_cast<u64>(where) * tile.map.strides[i - 1];
        }
        f(u64{row} * tile.count[0] * tile.shared, address, inside ? static_cast<u32>(first) : 0,
            inside ? static_cast<u32>(last) : 0);
    }
}

void fill(const Tile& tile, u8* to, u64 bytes) {
    std::memset(to, 0, bytes);
    if (!tile.map.fill)
        return;
    u64 nan = tile.element == 2 ? 0x7fff : tile.element == 8 ? 0x7fffffffffffffffull : 0x7fffffff;
    for (u64 i = 0; i < bytes; i += tile.element)
        std::memcpy(to + i, &nan, tile.element);
}

// The box as it lies in shared memory before the swizzle.
void gather_box(MemoryMap& memory, const Tile& tile, u8* box) {
    u64 row_bytes = u64{tile.count[0]} * tile.shared;
    u32 step = tile.map.element_strides[0];
    for_rows(tile, [&](u64 offset, u64 address, u32 first, u32 last) {
        if (first > 0 || last < tile.count[0])
            fill(tile, box + offset, row_bytes);
        if (first >= last)
            return;
        const u8* from = memory.check(
            address + u64{first} * step * tile.element, (u64{last - first - 1} * step + 1) * tile.element, false);
        if (step == 1 && tile.element == tile.shared)
            std::memcpy(box + offset + first * tile.element, from, u64{last - first} * tile.element);
        else
            for (u32 i = first; i < last; ++i)
                std::memcpy(box + offset + i * tile.shared, from + u64{i - first} * step * tile.element, tile.element);
    });
}

// Tells the race detector which global memory a box is read from or written to.
void note_global(Warp& w, AsyncOp& op, const Tile& tile, bool is_write) {
    if (!op.stamp)
        return;
    u64 step = tile.map.element_strides[0];
    for_rows(tile, [&](u64, u64 address, u32 first, u32 last) {
        if (first < last)
            note_async(w, op, reinterpret_cast<const u8*>(address + first * step * tile.element),
                ((last - first - 1) * step + 1) * tile.element, is_write);
    });
}

template <class F>
void for_chunks(u32 offset, u64 bytes, Swizzle swizzle, F f) { // swizzles move pieces of 16 bytes (8 with the flip)
    u32 piece = swizzle == Swizzle::k128BAtom32BFlip8B ? 8 : 16;
    for (u64 i = 0; i < bytes; i += piece)
        f(swizzle_address(offset + static_cast<u32>(i), swizzle), i, std::min<u64>(piece, bytes - i));
}

void scatter_box(Cta& cta, u32 offset, const Tile& tile, const u8* box) {
    if (swizzle_of(tile) == Swizzle::kNone && tile.element == tile.shared)
        return write_shared(cta, offset, box, tile.bytes);
    for_chunks(offset, tile.bytes, swizzle_of(tile),
        [&](u32 to, u64 from, u64 size) { std::memcpy(cta.shared.data() + to, box + from, size); });
    note_shared_write(cta, offset, tile.bytes);
    for (u64 i = 0; tile.element < tile.shared && i < tile.bytes; i += tile.shared) { // what pads has no value
        std::memset(cta.shared.data() + offset + i + tile.element, 0xa5, tile.shared - tile.element);
        std::memset(cta.written.data() + offset + i + tile.element, 0, tile.shared - tile.element);
    }
}

// Sixteen bytes with six bits each become twelve: how elements of 6 bits are stored.
void compact_box(const Tile& tile, u8* box) {
    for (u64 unit = 0; unit * tile.shared < tile.bytes; ++unit) {
        const u8* from = box + unit * 16;
        u8 packed[12] = {};
        for (u32 i = 0; i < 16; ++i)
            for (u32 bit = 0; bit < 6; ++bit)
                packed[(6 * i + bit) / 8] |= static_cast<u8>((from[i] >> bit & 1) << ((6 * i + bit) % 8));
        std::memcpy(box + unit * tile.shared, packed, 12);
    }
}

void read_box(const Cta& cta, u32 offset, const Tile& tile, u8* box) {
    for_chunks(offset, tile.bytes, swizzle_of(tile),
        [&](u32 from, u64 to, u64 size) { std::memcpy(box + to, cta.shared.data() + from, size); });
}

bool is_for_integers(ReduceOp op) {
    return op >= ReduceOp::Inc;
}

Type element_type(u8 type) {
    constexpr Type kTypes[] = {Type::U8, Type::U16, Type::U32, Type::S32, Type::U64, Type::S64, Type::F16, Type::F32,
        Type::F64, Type::BF16, Type::F32, Type::F32, Type::F32};
    return kTypes[type];
}

void store_box(MemoryMap& memory, const Tile& tile, const u8* box, ReduceOp reduce) {
    u32 step = tile.map.element_strides[0];
    for_rows(tile, [&](u64 offset, u64 address, u32 first, u32 last) {
        for (u32 i = first; i < last;) {
            u32 run = step == 1 && tile.element == tile.shared ? last - first : 1;
            u64 bytes = u64{run} * tile.element;
            u8* to = memory.check(address + u64{i} * step * tile.element, bytes, true);
            const u8* from = box + offset + i * tile.shared;
            if (reduce == ReduceOp::None)
                std::memcpy(to, from, bytes);
            else
                reduce_bytes(to, from, bytes, reduce, element_type(tile.map.type));
            i += run;
        }
    });
}

// extras: shared address (2), map (2), coordinates (n), for loads mbarrier (2) and mask
struct Operands {
    u64 shared, map;
    s64 start[5];
};

Operands read_operands(Warp& w, const Inst& in, int lane) {
    Operands out{};
    out.shared = extra_address(w, in, 0, lane) & ~kWindowMask;
    out.map = extra_address(w, in, 2, lane);
    for (u32 i = 0; i < in.n; ++i)
        out.start[i] = static_cast<s32>(w.row<u32>(w.extra(in, 4 + i))[lane]);
    return out;
}

void check_place(Warp& w, u64 shared) {
    if (shared & (kBoxAlignment - 1))
        fault_misaligned(w, shared, kBoxAlignment);
}

void exec_load(Warp& w, const Inst& in, u32 m) {
    Machine& machine = *w.machine;
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        Operands at = read_operands(w, in, lane);
        Tile tile = read_tile(w, at.map, at.start, in.n);
        check_place(w, at.shared);
        SharedPlace to = shared_place(w, at.shared, static_cast<u32>(tile.bytes));
        SharedPlace bar = mbarrier_place(w, extra_address(w, in, 4 + in.n, lane) & ~kWindowMask, false);
        bool multicast = in.mode & kMulticast, pair = in.mode & kPair;
        std::vector<Cta*> targets{to.cta};
        if (multicast)
            targets = multicast_targets(w, w.row<u32>(w.extra(in, 6 + in.n))[lane] & 0xffff);
        ++machine.counters.tma_loads;
        machine.counters.tma_bytes += tile.bytes;
        count_global(w, tile.map.address, tile.global_bytes(), false);
        auto op = new_op(w, "a tensor load");
        op->to_shared = true;
        for (Cta* cta : targets)
            note_async(w, *op, cta->shared.data() + to.offset, tile.bytes, true);
        note_global(w, *op, tile, false);
        auto box = std::make_shared<std::vector<u8>>(tile.bytes);
        op->read = [=, &machine] { gather_box(machine.memory, tile, box->data()); };
        op->write = [=, &machine] {
            for (Cta* cta : targets) {
                scatter_box(*cta, to.offset, tile, box->data());
                Cta& told = !multicast ? *bar.cta
                            : pair     ? *cta->cluster->ctas[(cta->rank & ~1u) | (bar.cta->rank & 1)]
                                       : *cta;
                mbarrier_transactions(machine, told, bar.offset, -static_cast<s32>(tile.global_bytes()));
            }
        };
        machine.submit(std::move(op));
    }
    ++w.effects;
}

void exec_store(Warp& w, const Inst& in, u32 m) {
    Machine& machine = *w.machine;
    ReduceOp reduce = static_cast<ReduceOp>(in.imm);
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        Operands at = read_operands(w, in, lane);
        Tile tile = read_tile(w, at.map, at.start, in.n);
        check_place(w, at.shared);
        SharedPlace from = shared_place(w, at.shared, static_cast<u32>(tile.bytes));
        ++machine.counters.tma_stores;
        machine.counters.tma_bytes += tile.bytes;
        count_global(w, tile.map.address, tile.global_bytes(), true);
        bool is_six = static_cast<PackedType>(tile.map.type) == PackedType::k16U6Align16B;
        if (tile.element < tile.shared && (!is_six || reduce != ReduceOp::None))
            throw Fault("tensor-map", "elements of this packed type cannot be stored");
        if (is_for_integers(reduce) && type_is_float(element_type(tile.map.type)))
            throw Fault(
                "tensor-map", std::string(".") + reduce_name(reduce) + " does not exist for elements that are floats");
        auto op = new_op(w, "a tensor store");
        op->group = open_group(w.bulk_groups, lane);
        note_async(w, *op, from.cta->shared.data() + from.offset, tile.bytes, false);
        note_global(w, *op, tile, reduce == ReduceOp::None);
        auto box = std::make_shared<std::vector<u8>>(tile.bytes);
        op->read = [=] {
            read_box(*from.cta, from.offset, tile, box->data());
            if (is_six)
                compact_box(tile, box->data());
        };
        op->write = [=, &machine] { store_box(machine.memory, tile, box->data(), reduce); };
        machine.submit(std::move(op));
    }
    ++w.effects;
}

void tensor_operand(Builder& b, const Operand& operand, u32 rank) {
    if (operand.kind != Operand::Kind::Address || operand.parts.size() != 2)
        b.fail("wanted [map, {coordinates}]");
    const Operand& coordinates = operand.parts[1];
    if (coordinates.parts.size() != rank)
        b.fail("wanted " + std::to_string(rank) + " coordinates");
    b.address_extra(operand);
    for (const Operand& part : coordinates.parts)
        b.use_extra(part, Type::B32);
}

u32 take_rank(Builder& b) {
    std::string name = b.take_of({"1d", "2d", "3d", "4d", "5d"});
    if (name.empty())
        b.fail("no dimension count");
    return static_cast<u32>(name[0] - '0');
}

} // namespace

// The map must be one and fit; nothing is copied.
void exec_prefetch(Warp& w, const Inst& in, u32 m) {
    for (u32 left = m; left; left &= left - 1) {
        s64 start[5] = {};
        read_tile(w, extra_address(w, in, 0, first_lane(left)), start, in.n);
    }
}

void build_tensor_prefetch(Builder& b) {
    u32 rank = take_rank(b);
    b.in.n = static_cast<u8>(rank);
    if (!b.take("L2") || !b.take("global"))
        b.fail("wanted .L2.global");
    b.take("tile");
    size_t count = b.take("L2::cache_hint") ? 2 : 1;
    b.want(count, count);
    tensor_operand(b, b.at(0), rank);
    b.emit(exec_prefetch);
}

void build_tensor(Builder& b, bool reduces) {
    u32 rank = take_rank(b);
    b.in.n = static_cast<u8>(rank);
    std::string to = b.take_of({"global", "shared::cluster", "shared::cta"}),
                from = b.take_of({"global", "shared::cta"});
    bool to_global = to == "global";
    if (to.empty() || from != (to_global ? "shared::cta" : "global"))
        b.fail("unknown state spaces");
    ReduceOp op = reduces ? take_reduce(b) : ReduceOp::None;
    b.take("tile");
    bool hint = b.take("L2::cache_hint");
    if (to_global) {
        if (!b.take("bulk_group"))
            b.fail("unknown completion mechanism");
        b.want(hint ? 3 : 2, hint ? 3 : 2);
        b.address_extra(b.at(1));
        tensor_operand(b, b.at(0), rank);
        b.in.imm = static_cast<s64>(op);
        return b.emit(exec_store);
    }
    if (!b.take("mbarrier::complete_tx::bytes"))
        b.fail("unknown completion mechanism");
    bool multicast = b.take("multicast::cluster");
    bool pair = b.take("cta_group::2");
    b.take("cta_group::1");
    size_t count = 3 + (multicast ? 1 : 0) + (hint ? 1 : 0);
    b.want(count, count);
    b.address_extra(b.at(0));
    tensor_operand(b, b.at(1), rank);
    b.address_extra(b.at(2));
    if (multicast)
        b.use_extra(b.at(3), Type::B16);
    b.in.mode = static_cast<u16>((multicast ? kMulticast : 0) | (pair ? kPair : 0));
    b.emit(exec_load);
}

} // namespace deep_gemm_k3::emulator
