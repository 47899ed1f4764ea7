// Splits PTX text into tokens; comments are dropped, lines are counted.
#pragma once

#include <string>
#include <vector>

#include "base.hpp"

namespace deep_gemm_k3::emulator {

struct Token {
    enum class Kind : u8 { Name, Integer, Float, Text, Symbol, End };
    Kind kind = Kind::End;
    std::string text; // Name: with leading '.', '%' or '$'; Symbol: one character
    u64 bits = 0;
    bool is_single = false;
    bool glued = false; // no white space before it
    int line = 0;
};

std::vector<Token> tokenize(const std::string& text);

} // namespace deep_gemm_k3::emulator
