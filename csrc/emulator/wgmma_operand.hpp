// Operands of wgmma: from shared memory through a matrix descriptor, or from registers; as singles.
#pragma once

#include "matrix.hpp"

namespace deep_gemm_k3::emulator {

// A part of an operand and where its elements go: row r, k index i to out[r * row_step + i * k_step].
struct OperandPart {
    Type type;
    bool transposed;     // rows are contiguous in shared memory instead of k
    int first, count, k; // rows, and elements of each: 32 bytes
    float* out;
    int row_step, k_step; // one of them is 1
};

// Appends the number of every 16-byte piece of shared memory that is read.
void load_operand(Warp& w, u64 descriptor, const OperandPart& part, std::vector<u32>& reads);

// A's four registers of a warp as 16 rows.
void load_fragment(const u32* const rows[4], Type type, float* a);

} // namespace deep_gemm_k3::emulator
