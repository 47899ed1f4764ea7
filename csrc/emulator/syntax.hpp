// The parsed form of a PTX module: scopes with registers, variables and labels; statements with operands.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base.hpp"

namespace deep_gemm_k3::emulator {

enum class Type : u8 {
    None,
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    F32,
    F64,
    F32x2,
    TF32,
    E4M3,
    E5M2,
    E4M3x2,
    E5M2x2,
    E2M1x2,
    E2M3x2,
    E3M2x2,
    UE8M0x2
};

Type type_from_name(const std::string& name);
int type_size(Type type); // bytes; 0 for Pred and None
bool type_is_signed(Type type);
bool type_is_float(Type type);
const char* type_name(Type type);

enum class Space : u8 { Generic, Global, Const, Shared, Local, Param, Reg };

struct Operand {
    enum class Kind : u8 { Name, Integer, Float, Vector, Address, Sink, Pair };
    Kind kind = Kind::Sink;
    std::string name;           // Name: register, symbol, label or special register
    u64 bits = 0;               // Integer: value; Float: the bits of the double, or of the single when is_single
    bool is_single = false;     // Float given as 0fXXXXXXXX
    bool negated = false;       // !p
    s64 offset = 0;             // Address: constant part; Name: "symbol+offset"
    std::vector<Operand> parts; // Vector: elements; Address: base first, then coordinates; Pair: d|p
};

// One .loc: a place in the source, the function it belongs to (a label of a string; none: the kernel itself), and the
// location that this function was inlined at.
struct Location {
    int file = 0, line = 0;
    std::string function;
    u32 parent = 0; // index in Syntax::locations, 0: none
};

struct Statement {
    int line = 0;
    u32 location = 0;                     // index in Syntax::locations, 0: none
    int source_file = 0, source_line = 0; // from .loc, 0 when absent
    u32 scope = 0;
    std::string predicate;
    bool predicate_negated = false;
    std::string op;                // "add", "cp", ...
    std::vector<std::string> mods; // "async", "bulk", "shared::cluster", ...
    std::vector<Operand> operands;
    std::string label;        // a label statement has only this
    std::string text() const; // opcode with modifiers, for messages
};

struct Variable {
    std::string name;
    Space space = Space::Reg;
    Type type = Type::None;
    u64 align = 1, size = 0;  // size in bytes
    u64 address = 0;          // offset within its space, given by the layout
    bool is_external = false; // extern .shared x[]: dynamic
    std::vector<u8> init;
    std::vector<std::pair<u64, std::string>> init_symbols; // offset -> symbol whose address goes there
    int line = 0;
};

struct Register {
    std::string name;
    Type type = Type::None;
};

struct NameScope {
    s32 parent = -1;
    std::map<std::string, u32> registers; // name -> index in Function::registers
    std::map<std::string, u32> variables; // name -> index in Function::variables
    std::map<std::string, u32> labels;    // name -> statement index
};

struct Function {
    std::string name;
    bool is_entry = false, has_body = false;
    int line = 0;
    std::vector<Variable> params, returns;
    std::vector<NameScope> scopes;
    std::vector<Register> registers;
    std::vector<Variable> variables; // .shared, .local and .param of the body
    std::vector<Statement> statements;
    std::map<std::string, std::vector<std::string>> branch_tables; // labels by the name of their .branchtargets
    u32 max_threads[3] = {0, 0, 0};
    bool required_threads = false;
    u32 cluster[3] = {0, 0, 0};
    u32 min_ctas = 0, max_registers = 0;
};

struct Syntax {
    std::string version, target;
    std::vector<Variable> variables; // module scope: .global .const .shared
    std::map<std::string, u32> variable_index;
    std::vector<std::unique_ptr<Function>> functions;
    std::map<std::string, u32> function_index;
    std::map<int, std::string> files;
    std::vector<Location> locations{1};
    std::map<std::string, std::string> strings; // by label: mangled names of functions
    // Functions around a location, the outermost first, without namespaces and arguments.
    std::vector<std::string> call_chain(u32 location) const;
};

std::unique_ptr<Syntax> parse_ptx(const std::string& text);

} // namespace deep_gemm_k3::emulator
