// One tcgen05.mma: what its descriptors say, and its execution.
#pragma once

#include "tensor_memory.hpp"

namespace deep_gemm_k3::emulator {

enum class TensorKind : u8 { F16, TF32, F8F6F4, I8, MXF8F6F4, MXF4, MXF4NVF4 };
enum class TensorElement : u8 { F16, BF16, TF32, U8, S8, E4M3, E5M2, E2M3, E3M2, E2M1 };

struct TensorProduct {
    // what the instruction says
    TensorKind kind;
    bool weight_stationary = false, pair = false, a_in_tensor = false, accumulate = false;
    u32 scale_blocks = 0; // per K; 0: no block scales
    u32 input_shift = 0;  // D is scaled by 2^-input_shift first
    u32 d = 0, a_tensor = 0, scale_a = 0, scale_b = 0;
    u64 a_shared = 0, b_shared = 0;
    u32 disabled[8] = {}; // lanes of D not to be written, four words per CTA
    // what the instruction descriptor says
    TensorElement a = TensorElement::BF16, b = TensorElement::BF16;
    u32 m = 0, n = 0, k = 0;
    bool half_result = false, integer_result = false, saturate = false;
    bool negate_a = false, negate_b = false, a_by_m = false, b_by_n = false; // operands along m or n
    bool ue4m3 = false;
    u32 scale_a_id = 0, scale_b_id = 0;
    Cta* ctas[2] = {nullptr, nullptr}; // the even one first

    u32 count() const { return pair ? 2 : 1; }
    u32 rows() const { return pair ? m / 2 : m; } // of A and D per CTA
    // D of a CTA: parts of columns side by side in lanes, each part with rows() lanes
    u32 parts() const;
    bool spread() const { return !pair && m == 64 && !weight_stationary; } // 16 rows per quarter of the lanes
    u32 lane_of(u32 row, u32 part) const;
    u32 lanes() const { return spread() ? 112 : parts() * rows(); }
};

// Reads the instruction descriptor; a Fault when the shape or a type does not exist for the kind.
void read_instruction_descriptor(TensorProduct& p, u32 descriptor);
u32 elements_per_piece(TensorElement type, TensorKind kind); // of 16 bytes
// The 16-byte pieces of shared memory of CTA `c` that the product reads.
std::vector<u32> shared_pieces(const TensorProduct& p, u32 c);
void run_product(Warp& w, u32 pc, const TensorProduct& p);

// sums[j][i] = sum over t of a[t][i] * b[j][t]; m and n are multiples of 8
void multiply(double* sums, const double* a, const double* b, u32 m, u32 n, u32 k);

// 16 bytes as numbers, `step` apart
void widen_piece(const u8* piece, TensorElement type, TensorKind kind, double* out, u32 step);

} // namespace deep_gemm_k3::emulator
