// The instruction descriptor of tcgen05.mma, and which shared memory a product reads.
#include "tensor_product.hpp"

namespace deep_gemm_k3::emulator {

namespace {

[[noreturn]] void refuse(u32 descriptor, const std::string& text) {
    throw Fault("descriptor", "instruction descriptor " + hex(descriptor) + ": " + text);
}

TensorElement element_of(TensorKind kind, u32 code, u32 descriptor) {
    using E = TensorElement;
    switch (kind) {
    case TensorKind::F16:
        if (code < 2)
            return code ? E::BF16 : E::F16;
        break;
    case TensorKind::TF32:
        if (code == 2)
            return E::TF32;
        break;
    case TensorKind::I8:
        if (code < 2)
            return code ? E::S8 : E::U8;
        break;
    case TensorKind::MXF4:
    case TensorKind::MXF4NVF4:
        if (code == 1)
            return E::E2M1;
        break;
    default:
        constexpr E kTypes[] = {E::E4M3, E::E5M2, E::E4M3, E::E2M3, E::E3M2, E::E2M1};
        if (code < 6 && code != 2)
            return kTypes[code];
    }
    refuse(descriptor, "no type has the code " + std::to_string(code) + " in this kind");
}

bool is_block_scaled(TensorKind kind) {
    return kind >= TensorKind::MXF8F6F4;
}

void check_shape(const TensorProduct& p, u32 descriptor) {
    bool fits;
    if (p.weight_stationary)
        fits = (p.m == 32 || p.m == 64 || p.m == 128) && (p.n == 64 || p.n == 128 || p.n == 256);
    else if (p.pair)
        fits = (p.m == 128 || p.m == 256) && p.n % 16 == 0;
    else if (is_block_scaled(p.kind))
        fits = p.m == 128 && p.n % 8 == 0;
    else
        fits = p.m == 128 ? p.n % 16 == 0 : p.m == 64 && p.n % 8 == 0;
    if (p.kind == TensorKind::I8 && !p.weight_stationary) // 8, 16, 24 and 32, then in steps of 16
        fits = fits && (p.n % (p.pair ? 32 : 16) == 0 || (!p.pair && p.n <= 32));
    if (!fits || p.n < 8 || p.n > 256)
        refuse(descriptor, "no shape of M " + std::to_string(p.m) + " and N " + std::to_string(p.n) + " with " +
                               (p.pair ? "cta_group::2" : "cta_group::1"));
}

void read_plain(TensorProduct& p, u32 x) {
    u32 d = x >> 4 & 3;
    bool half_allowed = p.kind == TensorKind::F16 || p.kind == TensorKind::F8F6F4;
    if (p.kind == TensorKind::I8 ? d != 2 : d != 1 && !(d == 0 && half_allowed))
        refuse(x, "no type of D has the code " + std::to_string(d) + " in this kind");
    p.integer_result = d == 2, p.half_result = d == 0;
    p.saturate = p.integer_result && (x >> 3 & 1);
    p.m = (x >> 24 & 31) << 4;
    if (p.half_result && p.kind == TensorKind::F16 && (p.a == TensorElement::BF16 || p.b == TensorElement::BF16))
        refuse(x, "BF16 operands need a D of F32");
}

void read_scaled(TensorProduct& p, u32 x) {
    p.m = (x >> 27 & 3) << 7;
    p.ue4m3 = !(x >> 23 & 1);
    p.scale_b_id = x >> 4 & 3, p.scale_a_id = x >> 29 & 3;
    if (p.ue4m3 && (p.kind != TensorKind::MXF4NVF4 || p.scale_blocks != 4))
        refuse(x, "UE4M3 scales exist in kind::mxf4nvf4 with scale_vec::4X only");
    bool step = p.scale_blocks == 2 ? (p.scale_a_id | p.scale_b_id) & 1 : p.scale_a_id | p.scale_b_id;
    if (p.scale_blocks != 1 && step)
        refuse(x, "the scale factors of one row must begin at a multiple of their number");
    if (p.kind != TensorKind::MXF8F6F4 && (x >> 31))
        refuse(x, "K 96 does not exist on sm_100");
}

} // namespace

void read_instruction_descriptor(TensorProduct& p, u32 x) {
    if (x >> 2 & 1)
        refuse(x, "sparse products are not modelled");
    bool scaled = is_block_scaled(p.kind);
    p.a = element_of(p.kind, x >> 7 & 7, x);
    p.b = element_of(p.kind, x >> 10 & 7, x);
    p.negate_a = x >> 13 & 1, p.negate_b = x >> 14 & 1;
    p.a_by_m = x >> 15 & 1, p.b_by_n = x >> 16 & 1;
    p.n = (x >> 17 & 63) << 3;
    p.k = p.kind == TensorKind::F16                                      ? 16
          : p.kind == TensorKind::TF32                                   ? 8
          : p.kind == TensorKind::MXF4 || p.kind == TensorKind::MXF4NVF4 ? 64
                                                                         : 32;
    scaled ? read_scaled(p, x) : read_plain(p, x);
    if (p.k == 64 && (p.a_by_m || p.b_by_n))
        refuse(x, "packed 4-bit operands must lie along K");
    if (p.a_in_tensor && p.a_by_m)
        refuse(x, "A in tensor memory cannot be transposed");
    if (p.integer_result && (p.negate_a || p.negate_b))
        refuse(x, "integers cannot be negated");
    check_shape(p, x);
}

u32 TensorProduct::parts() const {
    if (weight_stationary)
        return 128 / m;
    return pair && m == 128 ? 2 : 1;
}

u32 TensorProduct::lane_of(u32 row, u32 part) const {
    return spread() ? row / 16 * 32 + row % 16 : part * rows() + row;
}

u32 elements_per_piece(TensorElement type, TensorKind kind) {
    if (kind == TensorKind::MXF4 || kind == TensorKind::MXF4NVF4)
        return 32;
    return type <= TensorElement::BF16 ? 8 : type == TensorElement::TF32 ? 4 : 16;
}

namespace {

void operand_pieces(u64 descriptor, bool transposed, u32 rows, u32 k, u32 per, std::vector<u32>& out) {
    TensorDescriptor d(descriptor);
    if (!transposed)
        for (u32 row = 0; row < rows; ++row)
            for (u32 piece = 0; piece < k / per; ++piece)
                out.push_back(d.k_major(row, piece) >> 4);
    else
        for (u32 i = 0; i < k; ++i)
            for (u32 piece = 0; piece < (rows + per - 1) / per; ++piece)
                out.push_back(d.mn_major(piece, i) >> 4);
}

} // namespace

std::vector<u32> shared_pieces(const TensorProduct& p, u32 c) {
    std::vector<u32> out;
    if (!p.a_in_tensor)
        operand_pieces(p.a_shared, p.a_by_m, p.rows(), p.k, elements_per_piece(p.a, p.kind), out);
    operand_pieces(p.b_shared, p.b_by_n, p.n / p.count(), p.k, elements_per_piece(p.b, p.kind), out);
    const Cta& cta = *p.ctas[c];
    for (u32 piece : out)
        if (piece * 16 < kSharedReserved || u64{piece} * 16 + 16 > cta.shared.size())
            throw Fault("out-of-bounds", "tcgen05.mma reads shared memory at offset " + std::to_string(piece * 16) +
                                             " of CTA rank " + std::to_string(cta.rank) + "; the CTA has " +
                                             std::to_string(kSharedReserved) + ".." +
                                             std::to_string(cta.shared.size()));
    return out;
}

} // namespace deep_gemm_k3::emulator
