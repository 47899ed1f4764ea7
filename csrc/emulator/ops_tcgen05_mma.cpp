// tcgen05.mma: its operands, and its issue to the tensor core.
#include "tensor_product.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr u16 kPair = 1, kInTensor = 2, kStationary = 4, kDisable = 8;

// imm: kind, scale blocks << 8, input shift << 16
struct Layout { // of the extras: d (2), a (1 or 2), b, descriptor, [mask words], [scales (4)], accumulate
    u32 a = 2, b, descriptor, mask, scales, accumulate;
    explicit Layout(const Inst& in) {
        b = a + (in.mode & kInTensor ? 2 : 1);
        descriptor = b + 1;
        mask = descriptor + 1;
        scales = mask + (in.mode & kDisable ? (in.mode & kPair ? 8 : 4) : 0);
        accumulate = scales + ((in.imm >> 8 & 0xff) ? 4 : 0);
    }
};

TensorProduct read_operands(Warp& w, const Inst& in, int lane) {
    TensorProduct p;
    Layout at(in);
    p.kind = static_cast<TensorKind>(in.imm & 0xff);
    p.scale_blocks = static_cast<u32>(in.imm >> 8 & 0xff);
    p.input_shift = static_cast<u32>(in.imm >> 16 & 0xff);
    p.pair = in.mode & kPair, p.a_in_tensor = in.mode & kInTensor, p.weight_stationary = in.mode & kStationary;
    p.d = static_cast<u32>(extra_address(w, in, 0, lane));
    if (p.a_in_tensor)
        p.a_tensor = static_cast<u32>(extra_address(w, in, at.a, lane));
    else
        p.a_shared = w.row<u64>(w.extra(in, at.a))[lane];
    p.b_shared = w.row<u64>(w.extra(in, at.b))[lane];
    if (in.mode & kDisable)
        for (u32 i = 0; i < (p.pair ? 8u : 4u); ++i)
            p.disabled[i] = w.row<u32>(w.extra(in, at.mask + i))[lane];
    if (p.scale_blocks) {
        // the two highest bits may repeat the number of the scale factor that the instruction descriptor gives
        p.scale_a = static_cast<u32>(extra_address(w, in, at.scales, lane)) & 0x3fffffff;
        p.scale_b = static_cast<u32>(extra_address(w, in, at.scales + 2, lane)) & 0x3fffffff;
    }
    p.accumulate = w.predicate(w.extra(in, at.accumulate)) >> lane & 1;
    p.ctas[0] = w.cta;
    if (p.pair) {
        Cta& peer = peer_cta(w);
        p.ctas[0] = w.cta->rank & 1 ? &peer : w.cta;
        p.ctas[1] = w.cta->rank & 1 ? w.cta : &peer;
    }
    read_instruction_descriptor(p, w.row<u32>(w.extra(in, at.descriptor))[lane]);
    return p;
}

struct Use {
    LaneRange lanes, columns;
    bool is_write;
};

// The tensor memory that a product touches in each of its CTAs.
std::vector<Use> tensor_uses(const TensorProduct& p) {
    TensorAddress d(p.d), a(p.a_tensor), sa(p.scale_a), sb(p.scale_b);
    u32 columns = p.n / p.parts();
    std::vector<Use> out{{{d.lane, p.lanes()}, {d.column, columns}, true}};
    if (p.a_in_tensor)
        out.push_back({{a.lane, p.spread() ? 112 : p.parts() * p.rows()}, {a.column, 8}, false});
    if (p.scale_blocks) {
        out.push_back({{0, kTensorLanes}, {sa.column, p.rows() / 32}, false});
        out.push_back({{0, kTensorLanes}, {sb.column, (columns + 31) / 32}, false});
    }
    return out;
}

void check_lanes(const TensorProduct& p) {
    u32 lane = p.d >> 16;
    bool fits = lane == 0 || (p.spread() && lane == 16);
    if (!fits)
        throw Fault("tensor-memory",
            "D of tcgen05.mma at lane " + std::to_string(lane) + ": wanted lane 0" + (p.spread() ? " or 16" : ""));
    if ((p.scale_a | p.scale_b) >> 16)
        throw Fault("tensor-memory", "scale factors of tcgen05.mma must begin at lane 0");
}

void issue(Warp& w, const Inst& in, int lane) {
    Machine& machine = *w.machine;
    TensorProduct p = read_operands(w, in, lane);
    check_lanes(p);
    auto op = new_tensor_op(w, lane, "a tcgen05.mma");
    op->to_shared = true; // as a reader of it: its CTA must not exit
    std::vector<Use> uses = tensor_uses(p);
    for (u32 c = 0; c < p.count(); ++c) {
        Cta& cta = *p.ctas[c];
        op->uses.push_back(&cta);
        for (const Use& use : uses)
            check_tensor(cta, TensorAddress(use.lanes.first << 16 | use.columns.first), use.lanes.count,
                use.columns.count, use.is_write ? "D of tcgen05.mma" : "operand of tcgen05.mma");
        hold_shared(w, *op, cta, shared_pieces(p, c));
        for (const Use& use : uses)
            note_tensor(w, *op, cta, use.lanes, use.columns, use.is_write);
        ++tensor_memory(cta).in_flight;
    }
    Warp* warp = &w;
    u32 pc = w.pc - 1;
    op->write = [=] {
        run_product(*warp, pc, p);
        for (u32 c = 0; c < p.count(); ++c)
            --tensor_memory(*p.ctas[c]).in_flight;
    };
    machine.submit(std::move(op));
}

void exec_product(Warp& w, const Inst& in, u32 m) {
    for (u32 left = m; left; left &= left - 1)
        issue(w, in, first_lane(left));
    ++w.effects;
}

TensorKind take_kind(Builder& b) {
    constexpr const char* kNames[] = {
        "kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8", "kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4"};
    for (u8 i = 0; i < 7; ++i)
        if (b.take(kNames[i]))
            return static_cast<TensorKind>(i);
    b.fail("unknown kind");
}

u32 take_scale_blocks(Builder& b, TensorKind kind) {
    std::string name = b.take_of({"scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32"});
    u32 blocks = name == "scale_vec::1X" ? 1 : name == "scale_vec::2X" ? 2 : name == "scale_vec::4X" ? 4 : 0;
    u32 only = kind == TensorKind::MXF8F6F4 ? 1 : kind == TensorKind::MXF4 ? 2 : 0;
    if (name == "block32")
        blocks = kind == TensorKind::MXF8F6F4 ? 1 : 2;
    if (name == "block16")
        blocks = 4;
    if (!blocks)
        blocks = only;
    bool fits = only ? blocks == only : blocks == 2 || blocks == 4;
    if (!fits)
        b.fail("this kind has no such number of scale factors");
    return blocks;
}

// Hints: the content of the collector has no effect on results. Weight-stationary products name those of B.
void take_collector(Builder& b, bool stationary) {
    if (b.take("ashift"))
        b.fail("A in tensor memory that is shifted is not modelled");
    for (const char* buffer : {"a", "b0", "b1", "b2", "b3"})
        for (const char* use : {"fill", "use", "lastuse", "discard"})
            if ((buffer[0] == 'b') == stationary)
                b.take(std::string("collector::") + buffer + "::" + use);
}

} // namespace

void build_tensor_product(Builder& b) {
    if (b.take("sp"))
        b.fail("sparse products are not modelled");
    u16 mode = b.take("ws") ? kStationary : 0;
    mode |= take_cta_group(b) ? kPair : 0;
    TensorKind kind = take_kind(b);
    u32 blocks = 0;
    bool scaled = b.take("block_scale");
    if (scaled != (kind >= TensorKind::MXF8F6F4))
        b.fail(scaled ? "this kind has no block scales" : "wanted .block_scale");
    if (scaled)
        blocks = take_scale_blocks(b, kind);
    take_collector(b, mode & kStationary);
    b.want(5, 8);
    b.address_extra(b.at(0));
    const Operand& a = b.at(1);
    if (a.kind == Operand::Kind::Address) {
        mode |= kInTensor;
        b.address_extra(a);
    } else {
        b.use_extra(a, Type::B64);
    }
    b.use_extra(b.at(2), Type::B64);
    b.use_extra(b.at(3), Type::B32);
    size_t at = 4;
    if (b.at(at).kind == Operand::Kind::Vector) {
        const Operand& mask = b.at(at++);
        if (mask.parts.size() != (mode & kPair ? 8u : 4u))
            b.fail("wanted a mask of 4 words per CTA");
        mode |= kDisable;
        for (const Operand& part : mask.parts)
            b.use_extra(part, Type::B32);
    }
    if (scaled) {
        b.address_extra(b.at(at));
        b.address_extra(b.at(at + 1));
        at += 2;
    }
    b.use_extra(b.at(at++), Type::Pred);
    u64 shift = 0;
    if (b.count() > at) {
        if (mode & kStationary)
            b.fail("a mask of zero columns is not modelled");
        shift = b.constant(b.at(at++));
        if (shift > 15 || (kind != TensorKind::F16 && kind != TensorKind::TF32))
            b.fail("scale-input-d is 0 to 15, for kind::f16 and kind::tf32");
    }
    b.want(at, at);
    b.in.mode = mode;
    b.in.imm = static_cast<s64>(u64{static_cast<u8>(kind)} | u64{blocks} << 8 | shift << 16);
    b.emit(exec_product);
}

} // namespace deep_gemm_k3::emulator
