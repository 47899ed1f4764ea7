#include "parser.hpp"

namespace deep_gemm_k3::emulator {

void Parser::body() {
    function_->scopes.clear();
    scope_stack_.clear();
    loc_file_ = loc_line_ = 0, location_ = 0;
    places_.clear();
    expect("{");
    function_->scopes.emplace_back();
    scope_stack_.push_back(0);
    while (!scope_stack_.empty())
        body_item();
}

void Parser::body_item() {
    if (peek().kind == Token::Kind::End)
        fail("function '" + function_->name + "' without an end");
    if (accept("{")) {
        NameScope inner;
        inner.parent = static_cast<s32>(scope());
        function_->scopes.push_back(inner);
        scope_stack_.push_back(static_cast<u32>(function_->scopes.size() - 1));
    } else if (accept("}")) {
        scope_stack_.pop_back();
    } else if (!accept(";") && !body_directive()) {
        statement();
    }
}

bool Parser::body_directive() {
    if (peek().kind != Token::Kind::Name || peek().text[0] != '.')
        return false;
    std::string word = name();
    Space space;
    if (word == ".reg") {
        registers();
    } else if (word == ".loc") {
        location();
    } else if (word == ".branchtargets") {
        if (function_->statements.empty() || function_->statements.back().label.empty())
            fail(".branchtargets without a label");
        auto& table = function_->branch_tables[function_->statements.back().label];
        do
            table.push_back(name());
        while (accept(","));
        expect(";");
    } else if (word == ".callprototype") { // of a call through a pointer, which is an error when it is decoded
        while (!accept(";"))
            next();
    } else if (word == ".pragma") {
        next();
        expect(";");
    } else if (space_of(word, space)) {
        do {
            Variable parsed = variable(space, false, false);
            function_->scopes[scope()].variables[parsed.name] = static_cast<u32>(function_->variables.size());
            function_->variables.push_back(std::move(parsed));
        } while (accept(","));
        expect(";");
    } else {
        --pos_;
        fail("unknown directive '" + word + "' in a function");
    }
    return true;
}

void Parser::registers() {
    std::string word = name();
    Type type = type_from_name(word.substr(1));
    if (type == Type::None)
        fail("unknown register type '" + word + "'");
    do {
        std::string base = name();
        auto add = [&](const std::string& full) {
            auto& table = function_->scopes[scope()].registers;
            if (table.count(full))
                fail("register '" + full + "' declared twice");
            table[full] = static_cast<u32>(function_->registers.size());
            function_->registers.push_back({full, type});
        };
        if (accept("<")) {
            u64 count = integer();
            expect(">");
            for (u64 i = 0; i < count; ++i)
                add(base + std::to_string(i));
        } else {
            add(base);
        }
    } while (accept(","));
    expect(";");
}

// .loc file line [column] [, function_name label [+ offset], inlined_at file line column]
void Parser::location() {
    int line = tokens_[pos_ - 1].line;
    auto on_line = [&] { return peek().line == line && peek().kind != Token::Kind::End; };
    auto number = [&] { return on_line() && peek().kind == Token::Kind::Integer ? integer() : 0; };
    Location found;
    std::array<u64, 3> place{number(), number(), number()};
    loc_file_ = found.file = static_cast<int>(place[0]), loc_line_ = found.line = static_cast<int>(place[1]);
    while (on_line()) {
        if (accept("function_name")) {
            found.function = name();
        } else if (accept("inlined_at")) {
            std::array<u64, 3> at{number(), number(), number()};
            auto caller = places_.find(at);
            found.parent = caller == places_.end() ? 0 : caller->second;
        } else {
            next();
        }
    }
    location_ = static_cast<u32>(syntax_->locations.size());
    syntax_->locations.push_back(found);
    places_[place] = location_;
}

void Parser::statement() {
    Statement out;
    out.location = location_;
    out.line = peek().line;
    out.source_file = loc_file_, out.source_line = loc_line_;
    out.scope = scope();
    if (peek().kind == Token::Kind::Name && peek(1).text == ":" && peek(1).kind == Token::Kind::Symbol) {
        out.label = name();
        expect(":");
        auto& labels = function_->scopes[scope()].labels;
        if (labels.count(out.label))
            fail("label '" + out.label + "' defined twice in one block");
        labels[out.label] = static_cast<u32>(function_->statements.size());
        function_->statements.push_back(std::move(out));
        return;
    }
    if (accept("@")) {
        out.predicate_negated = accept("!");
        out.predicate = name();
    }
    out.line = peek().line;
    opcode(out);
    while (!accept(";")) {
        if (peek().kind == Token::Kind::End)
            fail("statement without ';'");
        out.operands.push_back(operand());
        if (!accept(",") && !is(";"))
            fail("expected ',' or ';', found '" + peek().text + "'");
    }
    function_->statements.push_back(std::move(out));
}

void Parser::opcode(Statement& statement) {
    statement.op = name();
    if (statement.op[0] == '%' || statement.op[0] == '$')
        fail("expected an opcode, found '" + statement.op + "'");
    while (peek().kind == Token::Kind::Name && peek().text[0] == '.')
        statement.mods.push_back(next().text.substr(1));
}

s64 Parser::signed_offset() {
    s64 total = 0;
    while (is("+") || is("-")) {
        bool is_negative = next().text == "-";
        s64 value = static_cast<s64>(integer());
        total += is_negative ? -value : value;
    }
    return total;
}

Operand Parser::list(const char* close) {
    Operand out;
    out.kind = Operand::Kind::Vector;
    while (!accept(close)) {
        out.parts.push_back(operand());
        if (!accept(",") && !is(close))
            fail(std::string("expected ',' or '") + close + "', found '" + peek().text + "'");
    }
    return out;
}

Operand Parser::address() {
    Operand out;
    out.kind = Operand::Kind::Address;
    Operand base = simple_operand();
    out.offset = base.kind == Operand::Kind::Name ? base.offset : 0;
    base.offset = 0;
    out.parts.push_back(std::move(base));
    while (accept(","))
        out.parts.push_back(operand());
    expect("]");
    return out;
}

Operand Parser::operand() {
    if (accept("{"))
        return list("}");
    if (accept("("))
        return list(")");
    if (accept("["))
        return address();
    Operand out = simple_operand();
    if (accept("|")) {
        Operand pair;
        pair.kind = Operand::Kind::Pair;
        pair.parts.push_back(std::move(out));
        pair.parts.push_back(simple_operand());
        return pair;
    }
    return out;
}

Operand Parser::simple_operand() {
    Operand out;
    if (accept("!"))
        out.negated = true;
    if (peek().kind == Token::Kind::Float) {
        out.kind = Operand::Kind::Float;
        out.is_single = peek().is_single;
        out.bits = next().bits;
    } else if (peek().kind == Token::Kind::Integer || is("-")) {
        out.kind = Operand::Kind::Integer;
        out.bits = integer();
    } else {
        std::string word = name();
        if (word == "_") {
            out.kind = Operand::Kind::Sink;
            return out;
        }
        out.kind = Operand::Kind::Name;
        out.name = word;
        bool has_component = peek().glued && (is(".x") || is(".y") || is(".z") || is(".w"));
        if (has_component)
            out.name += next().text;
        out.offset = signed_offset();
    }
    return out;
}

} // namespace deep_gemm_k3::emulator
