#include "syntax.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cxxabi.h>

namespace deep_gemm_k3::emulator {

namespace {

// Numbers among template arguments as one digit each: the library refuses names of more than 1024 bytes.
std::string with_short_numbers(const std::string& mangled) {
    std::string out;
    for (size_t at = 0; at < mangled.size();) {
        const size_t end = mangled.compare(at, 2, "Li") == 0 ? mangled.find_first_not_of("0123456789", at + 2) : at;
        const bool is_number = end != std::string::npos && end > at + 2 && mangled[end] == 'E';
        out += is_number ? "Li0" : std::string(1, mangled[at]);
        at = is_number ? end : at + 1;
    }
    return out;
}

// "void a::wait<7>(int)::{lambda()#1}::operator()() const" -> "wait"
std::string short_name(const std::string& mangled) {
    int status = 0;
    char* text = abi::__cxa_demangle(with_short_numbers(mangled).c_str(), nullptr, nullptr, &status);
    std::string full = status == 0 ? text : mangled, out;
    std::free(text);
    int depth = 0;
    for (char c : full) {
        if (c == '(' && depth == 0)
            break;
        if (c == '>' || c == '}')
            --depth;
        if (depth == 0)
            out += c;
        if (c == '<' || c == '{')
            ++depth;
    }
    std::erase_if(out, [](char c) { return c == '<' || c == '>' || c == '{' || c == '}'; });
    size_t cut = out.find_last_of(" :");
    return cut == std::string::npos ? out : out.substr(cut + 1);
}

} // namespace

std::vector<std::string> Syntax::call_chain(u32 location) const {
    std::vector<std::string> out;
    for (u32 at = location; at; at = locations[at].parent) {
        auto found = strings.find(locations[at].function);
        std::string name = found == strings.end() ? "" : short_name(found->second);
        if (!name.empty() && (out.empty() || out.back() != name))
            out.push_back(name);
        if (locations[at].parent >= at)
            break;
    }
    std::reverse(out.begin(), out.end());
    return out;
}

namespace {

struct TypeInfo {
    const char* name;
    Type type;
    int size;
    bool is_signed, is_float;
};

constexpr TypeInfo kTypes[] = {
    {"pred", Type::Pred, 0, false, false},
    {"b8", Type::B8, 1, false, false},
    {"b16", Type::B16, 2, false, false},
    {"b32", Type::B32, 4, false, false},
    {"b64", Type::B64, 8, false, false},
    {"b128", Type::B128, 16, false, false},
    {"u8", Type::U8, 1, false, false},
    {"u16", Type::U16, 2, false, false},
    {"u32", Type::U32, 4, false, false},
    {"u64", Type::U64, 8, false, false},
    {"s8", Type::S8, 1, true, false},
    {"s16", Type::S16, 2, true, false},
    {"s32", Type::S32, 4, true, false},
    {"s64", Type::S64, 8, true, false},
    {"f16", Type::F16, 2, true, true},
    {"f16x2", Type::F16x2, 4, true, true},
    {"bf16", Type::BF16, 2, true, true},
    {"bf16x2", Type::BF16x2, 4, true, true},
    {"f32", Type::F32, 4, true, true},
    {"f64", Type::F64, 8, true, true},
    {"f32x2", Type::F32x2, 8, true, true},
    {"tf32", Type::TF32, 4, true, true},
    {"e4m3", Type::E4M3, 1, true, true},
    {"e5m2", Type::E5M2, 1, true, true},
    {"e4m3x2", Type::E4M3x2, 2, true, true},
    {"e5m2x2", Type::E5M2x2, 2, true, true},
    {"e2m1x2", Type::E2M1x2, 1, true, true},
    {"e2m3x2", Type::E2M3x2, 2, true, true},
    {"e3m2x2", Type::E3M2x2, 2, true, true},
    {"ue8m0x2", Type::UE8M0x2, 2, false, true},
};

const TypeInfo* info(Type type) {
    for (const TypeInfo& entry : kTypes)
        if (entry.type == type)
            return &entry;
    return nullptr;
}

} // namespace

Type type_from_name(const std::string& name) {
    for (const TypeInfo& entry : kTypes)
        if (name == entry.name)
            return entry.type;
    return Type::None;
}

int type_size(Type type) {
    const TypeInfo* found = info(type);
    return found ? found->size : 0;
}

bool type_is_signed(Type type) {
    const TypeInfo* found = info(type);
    return found && found->is_signed;
}

bool type_is_float(Type type) {
    const TypeInfo* found = info(type);
    return found && found->is_float;
}

const char* type_name(Type type) {
    const TypeInfo* found = info(type);
    return found ? found->name : "none";
}

std::string Statement::text() const {
    std::string out = op;
    for (const std::string& mod : mods)
        out += "." + mod;
    return out;
}

std::string hex(u64 value) {
    char buffer[32];
    std::snprintf(buffer, sizeof(buffer), "0x%llx", static_cast<unsigned long long>(value));
    return buffer;
}

} // namespace deep_gemm_k3::emulator
