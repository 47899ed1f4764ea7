// Turns a parsed function into a Program. Builders (one per opcode) translate single statements through `Builder`.
#pragma once

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "inst.hpp"

namespace deep_gemm_k3::emulator {

struct ModuleLayout {
    std::vector<u64> address; // per .global or .const variable of the module: offset
    u64 global_bytes = 0;     // .global and .const together
};

enum class RowClass : u8 { Pred, Word, Double, Quad };
RowClass row_class(Type type);

class Decoder;

// What a builder sees of one statement: consumable modifiers, operands, and the instruction being made.
class Builder {
  public:
    Builder(Decoder& decoder, const Statement& statement);
    const Statement& s;
    Inst in;

    [[noreturn]] void fail(const std::string& text) const;

    // modifiers, each consumed once; the decoder refuses a statement with any left over
    bool take(const std::string& mod);
    bool take_any(std::initializer_list<const char*> mods);
    std::string take_of(std::initializer_list<const char*> mods); // the one present, or ""
    std::string take_next();                                      // the first unconsumed modifier
    Type take_type();                                             // the first unconsumed type, an error when none
    Type take_any_type();                                         // also one of matrices and conversions only
    Type take_type_or(Type fallback);
    bool done() const;

    // operands
    size_t count() const { return s.operands.size(); }
    const Operand& at(size_t i) const;
    void want(size_t low, size_t high) const;
    bool is_register(const Operand& operand) const;
    Type register_type(const Operand& operand) const; // None when it is no register
    u64 constant(const Operand& operand) const;       // an integer immediate
    void use(Ref Inst::* field, const Operand& operand, Type type);
    void def(Ref Inst::* field, const Operand& operand, Type type);
    void use_any(Ref Inst::* field, const Operand& operand, Type type); // register of any width, width by its class
    void def_any(Ref Inst::* field, const Operand& operand, Type type);
    void use_extra(const Operand& operand, Type type);
    void def_extra(const Operand& operand, Type type);
    void update_extra(const Operand& operand, Type type); // read and written
    void constant_extra(u32 value);
    void address(Ref Inst::* field, const Operand& operand); // base row into field (| 2 when 64-bit), offset into imm
    void address_extra(const Operand& operand);              // base row and offset: two extras
    u32 local_offset(const Operand& operand) const;          // of a .local or .param variable of the body
    void require_cta_group(u32 group);                       // all tcgen05 instructions of a kernel agree
    void emit(Handler run);
    void emit_unguarded(Handler run); // the same without the statement's guard

  private:
    friend class Decoder;
    Decoder& decoder_;
    std::vector<bool> consumed_;
    bool has_extra_ = false;
    void begin_extra();
    void touch(Ref Inst::* field, bool is_extra, u32 vreg, bool is_use, bool is_def);
    Ref address_row(const Operand& operand, s64& offset, s32& vreg);
    Ref source_row(const Operand& operand, Type type, RowClass cls, s32& vreg);
};

using BuildFunction = void (*)(Builder&);
struct BuildEntry {
    const char* op;
    BuildFunction build;
};
// every opcode the emulator has a model for
const std::unordered_map<std::string, BuildFunction>& build_table();

// A PtxError when the target has no such instruction.
void check_target(const Statement& statement, const std::string& target);

class Decoder {
  public:
    Decoder(const Syntax& syntax, const ModuleLayout& layout, const Function& function)
        : syntax_(syntax), layout_(layout), function_(function) {}
    std::unique_ptr<Program> run();

  private:
    friend class Builder;
    struct Touch { // one mention of a virtual register
        u32 inst;
        u32 extra_index; // kNoPc when it is a field
        Ref Inst::* field;
        u32 vreg;
        bool is_use, is_def;
    };
    struct Block {
        u32 first = 0, last = 0; // instructions, last exclusive
        std::vector<u32> successors, predecessors;
        std::vector<u64> use, def, in, out;
        bool has_exit = false;
    };

    const Syntax& syntax_;
    const ModuleLayout& layout_;
    const Function& function_;
    std::unique_ptr<Program> program_;
    std::vector<Touch> touches_;
    std::vector<u32> label_pc_;         // per statement: pc of the label
    std::vector<u64> variable_address_; // per function variable
    std::map<u32, u64> shared_address_; // per static shared variable of the module that the function names
    std::map<std::pair<u8, std::pair<u64, u64>>, Ref> constant_rows_;
    std::map<std::pair<std::pair<Special, bool>, u64>, Ref> special_rows_;
    u32 fixed_bytes_ = 64; // registers start after the fixed rows; offset 0 stays unused
    std::vector<Block> blocks_;
    std::vector<u32> block_of_;
    Ref sink_[4] = {0, 0, 0, 0};

    void layout_variables();
    void decode_statement(u32 index);
    Ref constant_row(RowClass cls, u64 lo, u64 hi = 0);
    Ref special_row(Special what, bool wide, u64 addend = 0);
    Ref sink(RowClass cls);
    u32 fixed(u32 bytes);
    s32 find_register(u32 scope, const std::string& name) const;
    const Variable* find_variable(u32 scope, const std::string& name, u64& address, bool& is_module) const;
    u32 find_label(const Statement& statement, const std::string& name) const;
    void build_blocks();
    void find_reconvergence();
    void liveness();
    void watch_registers();
    void find_load_hazards();
    void allocate();
    void compact();
};

struct SpecialName {
    const char* name;
    Special what;
    bool wide;
};
const SpecialName* find_special(const std::string& name);

} // namespace deep_gemm_k3::emulator
