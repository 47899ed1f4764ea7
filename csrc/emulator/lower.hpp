// Turns what the decoder does not know into what it knows: calls of functions become their bodies, `brx.idx` a chain of
// branches.
#pragma once

#include <set>

#include "syntax.hpp"

namespace deep_gemm_k3::emulator {

// The function with every call of a function that has a body in the module replaced by that body. Recursion is an
// error.
std::unique_ptr<Function> lower(const Syntax& syntax, const Function& function);

} // namespace deep_gemm_k3::emulator
