// Which instructions a .target has. ptxas decides it for a GPU; here a table does, of what differs between the targets
// from sm_90 on. Instructions that exist on all of them are not listed.
#include <algorithm>

#include "decode.hpp"

namespace deep_gemm_k3::emulator {

namespace {

enum class Needs : u8 {
    kSm90a,
    kTensorMemory, // sm_100 to sm_110, of an architecture or a family: 'a' or 'f'
    kSm100To103,   // of those, up to sm_103
    kSpecific90,   // 'a' or 'f' from sm_90 on
    kSpecific100,  // 'a' or 'f' from sm_100 on
    kSpecific120,
    kFrom100
};

struct Rule {
    const char* op;
    const char* modifier; // "": every form
    const char* other;    // a second modifier that must be there too, or ""
    Needs needs;
};

constexpr Rule kRules[] = {
    {"wgmma", "", "", Needs::kSm90a},
    {"tcgen05", "", "", Needs::kTensorMemory},
    {"setmaxnreg", "", "", Needs::kSpecific90},
    {"cp", "cta_group::1", "", Needs::kTensorMemory},
    {"cp", "cta_group::2", "", Needs::kTensorMemory},
    {"cp", "tile::gather4", "", Needs::kTensorMemory},
    {"cp", "tile::scatter4", "", Needs::kTensorMemory},
    {"cp", "cp_mask", "", Needs::kFrom100},
    {"ld", "v8", "", Needs::kFrom100},
    {"ld", "v4", "b64", Needs::kFrom100},
    {"ld", "v4", "u64", Needs::kFrom100},
    {"ld", "v4", "s64", Needs::kFrom100},
    {"ld", "v4", "f64", Needs::kFrom100},
    {"st", "v8", "", Needs::kFrom100},
    {"st", "v4", "b64", Needs::kFrom100},
    {"st", "v4", "u64", Needs::kFrom100},
    {"st", "v4", "s64", Needs::kFrom100},
    {"st", "v4", "f64", Needs::kFrom100},
    {"add", "f32x2", "", Needs::kFrom100},
    {"sub", "f32x2", "", Needs::kFrom100},
    {"mul", "f32x2", "", Needs::kFrom100},
    {"fma", "f32x2", "", Needs::kFrom100},
    {"redux", "f32", "", Needs::kSm100To103},
    {"ldmatrix", "m16n16", "", Needs::kSpecific100},
    {"ldmatrix", "m8n16", "", Needs::kSpecific100},
    {"stmatrix", "m16n8", "", Needs::kSpecific100},
    {"cvt", "e2m1x2", "", Needs::kSpecific100},
    {"cvt", "e2m3x2", "", Needs::kSpecific100},
    {"cvt", "e3m2x2", "", Needs::kSpecific100},
    {"cvt", "ue8m0x2", "", Needs::kSpecific100},
    {"cvt", "rs", "", Needs::kSpecific100},
    {"mma", "kind::f8f6f4", "", Needs::kSpecific120},
    {"mma", "kind::mxf8f6f4", "", Needs::kSpecific120},
    {"mma", "kind::mxf4", "", Needs::kSpecific120},
    {"mma", "kind::mxf4nvf4", "", Needs::kSpecific120},
};

bool has(const Statement& statement, const std::string& modifier) {
    return modifier.empty() ||
           std::find(statement.mods.begin(), statement.mods.end(), modifier) != statement.mods.end();
}

bool satisfies(Needs needs, const std::string& target) {
    bool is_specific = !target.empty() && (target.back() == 'a' || target.back() == 'f');
    int number = target.rfind("sm_", 0) == 0 ? std::atoi(target.c_str() + 3) : 0;
    switch (needs) {
    case Needs::kSm90a:
        return target == "sm_90a";
    case Needs::kTensorMemory:
        return is_specific && number >= 100 && number <= 110;
    case Needs::kSm100To103:
        return is_specific && number >= 100 && number <= 103;
    case Needs::kSpecific90:
        return is_specific && number >= 90;
    case Needs::kSpecific100:
        return is_specific && number >= 100;
    case Needs::kSpecific120:
        return is_specific && number >= 120;
    default:
        return number >= 100;
    }
}

} // namespace

void check_target(const Statement& statement, const std::string& target) {
    bool of_three = (statement.op == "min" || statement.op == "max") && statement.operands.size() == 4;
    if (of_three && !satisfies(Needs::kFrom100, target))
        throw PtxError(statement.line, "'" + statement.text() + "' of three does not exist on .target " + target);
    for (const Rule& rule : kRules)
        if (statement.op == rule.op && has(statement, rule.modifier) && has(statement, rule.other) &&
            !satisfies(rule.needs, target))
            throw PtxError(statement.line, "'" + statement.text() + "' does not exist on .target " + target);
}

} // namespace deep_gemm_k3::emulator
