// Recursive-descent parser of PTX; used only by parse_ptx.
#pragma once

#include <array>
#include <map>

#include "lexer.hpp"
#include "syntax.hpp"

namespace deep_gemm_k3::emulator {

class Parser {
  public:
    explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
    std::unique_ptr<Syntax> parse();

  private:
    std::vector<Token> tokens_;
    size_t pos_ = 0;
    std::unique_ptr<Syntax> syntax_;
    Function* function_ = nullptr;
    std::vector<u32> scope_stack_;
    int loc_file_ = 0, loc_line_ = 0;
    u32 location_ = 0;
    std::map<std::array<u64, 3>, u32> places_; // file, line, column -> newest location

    const Token& peek(size_t ahead = 0) const { return tokens_[std::min(pos_ + ahead, tokens_.size() - 1)]; }
    const Token& next() { return tokens_[pos_ < tokens_.size() - 1 ? pos_++ : pos_]; }
    bool is(const char* text) const { return peek().text == text && peek().kind != Token::Kind::Text; }
    bool accept(const char* text);
    void expect(const char* text);
    [[noreturn]] void fail(const std::string& text) const;
    std::string name();
    u64 integer();
    void skip_line();
    void skip_braces();
    void strings_section();

    // parser.cpp: module level
    void module_item();
    void directive_file();
    void function(bool is_entry);
    void function_attributes();
    std::vector<Variable> parameter_list();
    Variable variable(Space space, bool is_external, bool is_parameter);
    void initializer(Variable& variable);
    void initializer_value(Variable& variable, int size, bool is_float);
    static bool space_of(const std::string& name, Space& space);

    // parser_body.cpp: function bodies
    void body();
    void body_item();
    bool body_directive();
    void location();
    void registers();
    void statement();
    void opcode(Statement& statement);
    Operand operand();
    Operand simple_operand();
    Operand address();
    Operand list(const char* close);
    s64 signed_offset();
    u32 scope() const { return scope_stack_.back(); }
};

} // namespace deep_gemm_k3::emulator
