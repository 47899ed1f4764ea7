// What the files of cvt share: the conversion an instruction stands for, packed into Inst::imm.
#pragma once

#include "ops.hpp"

namespace deep_gemm_k3::emulator {

struct Conversion {
    Type to, from;
    Round round = Round::Nearest;
    bool to_integer = false; // .rni .rzi .rmi .rpi
    bool ftz = false, sat = false, satfinite = false, relu = false;
};

Conversion unpack_conversion(const Inst& in);
void pack_conversion(Inst& in, const Conversion& c);

bool is_narrow(Type type); // formats of 8 bits and less, in pairs
void build_narrow(Builder& b, const Conversion& c);
void build_pack(Builder& b, Conversion c);
Handler pair_handler(); // two singles to f16x2 or bf16x2

} // namespace deep_gemm_k3::emulator
