#include "parser.hpp"

namespace deep_gemm_k3::emulator {

bool Parser::accept(const char* text) {
    if (!is(text))
        return false;
    next();
    return true;
}

void Parser::expect(const char* text) {
    if (!accept(text))
        fail(std::string("expected '") + text + "', found '" + peek().text + "'");
}

void Parser::fail(const std::string& text) const {
    throw PtxError(peek().line, text);
}

std::string Parser::name() {
    if (peek().kind != Token::Kind::Name)
        fail("expected a name, found '" + peek().text + "'");
    return next().text;
}

u64 Parser::integer() {
    bool is_negative = accept("-");
    if (peek().kind != Token::Kind::Integer)
        fail("expected an integer, found '" + peek().text + "'");
    u64 value = next().bits;
    return is_negative ? 0 - value : value;
}

void Parser::skip_line() {
    int line = peek().line;
    while (peek().line == line && peek().kind != Token::Kind::End)
        next();
}

void Parser::skip_braces() {
    expect("{");
    for (int depth = 1; depth > 0;) {
        if (peek().kind == Token::Kind::End)
            fail("'{' without an end");
        if (is("{"))
            ++depth;
        if (is("}"))
            --depth;
        next();
    }
}

bool Parser::space_of(const std::string& name, Space& space) {
    if (name == ".global")
        space = Space::Global;
    else if (name == ".const")
        space = Space::Const;
    else if (name == ".shared")
        space = Space::Shared;
    else if (name == ".local")
        space = Space::Local;
    else if (name == ".param")
        space = Space::Param;
    else
        return false;
    return true;
}

std::unique_ptr<Syntax> Parser::parse() {
    syntax_ = std::make_unique<Syntax>();
    while (peek().kind != Token::Kind::End)
        module_item();
    if (syntax_->version.empty())
        throw PtxError(1, "no .version directive: this is not PTX");
    if (syntax_->target.empty())
        throw PtxError(1, "no .target directive");
    return std::move(syntax_);
}

void Parser::directive_file() {
    int index = static_cast<int>(integer());
    if (peek().kind == Token::Kind::Text)
        syntax_->files[index] = next().text;
    while (accept(","))
        next();
}

// Labels of bytes: the names that .loc refers to.
void Parser::strings_section() {
    expect("{");
    std::string label;
    while (!accept("}")) {
        if (peek(1).text == ":") {
            label = name();
            expect(":");
        } else if (accept(".b8")) {
            do {
                if (u64 byte = integer())
                    syntax_->strings[label] += static_cast<char>(byte);
            } while (accept(","));
        } else {
            fail("unknown item in a section of strings");
        }
    }
}

void Parser::module_item() {
    bool is_external = false;
    while (is(".visible") || is(".extern") || is(".weak") || is(".common"))
        is_external |= next().text == ".extern";
    std::string word = name();
    Space space;
    if (word == ".version") {
        syntax_->version = std::to_string(0);
        syntax_->version =
            peek().kind == Token::Kind::Float ? std::to_string(bits<double>(next().bits)) : std::to_string(integer());
    } else if (word == ".target") {
        syntax_->target = name();
        while (accept(","))
            name();
    } else if (word == ".address_size") {
        if (integer() != 64)
            fail(".address_size must be 64");
    } else if (word == ".file") {
        directive_file();
    } else if (word == ".section") {
        next().text == ".debug_str" ? strings_section() : skip_braces();
    } else if (word == ".pragma") {
        next();
        expect(";");
    } else if (word == ".entry" || word == ".func") {
        function(word == ".entry");
    } else if (word == ".alias") {
        fail(".alias is not modelled");
    } else if (space_of(word, space)) {
        do {
            Variable parsed = variable(space, is_external, false);
            syntax_->variable_index[parsed.name] = static_cast<u32>(syntax_->variables.size());
            syntax_->variables.push_back(std::move(parsed));
        } while (accept(","));
        expect(";");
    } else {
        --pos_;
        fail("unknown directive '" + word + "'");
    }
}

std::vector<Variable> Parser::parameter_list() {
    std::vector<Variable> list;
    expect("(");
    while (!accept(")")) {
        std::string word = name();
        if (word != ".param" && word != ".reg")
            fail("expected .param, found '" + word + "'");
        list.push_back(variable(word == ".reg" ? Space::Reg : Space::Param, false, true));
        accept(",");
    }
    u64 offset = 0;
    for (Variable& item : list) {
        offset = (offset + item.align - 1) / item.align * item.align;
        item.address = offset;
        offset += item.size;
    }
    return list;
}

void Parser::function(bool is_entry) {
    auto parsed = std::make_unique<Function>();
    function_ = parsed.get();
    function_->is_entry = is_entry;
    function_->line = peek().line;
    if (is("("))
        function_->returns = parameter_list();
    function_->name = name();
    if (is("("))
        function_->params = parameter_list();
    function_attributes();
    if (!accept(";")) {
        function_->has_body = true;
        body();
    }
    bool is_known = syntax_->function_index.count(function_->name) != 0;
    if (!is_known || function_->has_body)
        syntax_->function_index[function_->name] = static_cast<u32>(syntax_->functions.size());
    syntax_->functions.push_back(std::move(parsed));
    function_ = nullptr;
}

void Parser::function_attributes() {
    auto triple = [&](u32* out) {
        out[0] = static_cast<u32>(integer()), out[1] = out[2] = 1;
        for (int i = 1; i < 3 && accept(","); ++i)
            out[i] = static_cast<u32>(integer());
    };
    while (!is("{") && !is(";")) {
        std::string word = name();
        if (word == ".maxntid" || word == ".reqntid") {
            triple(function_->max_threads);
            function_->required_threads = word == ".reqntid";
        } else if (word == ".reqnctapercluster") {
            triple(function_->cluster);
        } else if (word == ".minnctapersm") {
            function_->min_ctas = static_cast<u32>(integer());
        } else if (word == ".maxnreg") {
            function_->max_registers = static_cast<u32>(integer());
        } else if (word == ".maxclusterrank" || word == ".maxnctapersm") {
            integer();
        } else if (word == ".pragma") {
            next();
            expect(";");
        } else if (word != ".noreturn" && word != ".explicitcluster" && word != ".blocksareclusters") {
            fail("unknown function attribute '" + word + "'");
        }
    }
}

Variable Parser::variable(Space space, bool is_external, bool is_parameter) {
    Variable out;
    out.space = space;
    out.line = peek().line;
    out.is_external = is_external && space == Space::Shared;
    u64 vector = 1;
    while (peek().kind == Token::Kind::Name && peek().text[0] == '.') {
        std::string word = name();
        Space ignored;
        if (word == ".align")
            out.align = integer();
        else if (word == ".v2" || word == ".v4" || word == ".v8")
            vector = static_cast<u64>(word[2] - '0');
        else if (word == ".attribute") {
            expect("(");
            while (!accept(")"))
                next();
        } else if (word == ".ptr") {
            while (space_of(peek().text, ignored))
                next();
            if (accept(".align"))
                integer();
        } else {
            out.type = type_from_name(word.substr(1));
            if (out.type == Type::None)
                fail("unknown type '" + word + "'");
        }
    }
    if (out.type == Type::None)
        fail("variable without a type");
    out.name = name();
    u64 count = vector;
    bool is_open = false;
    while (accept("[")) {
        if (accept("]")) {
            is_open = true;
            continue;
        }
        count *= integer();
        expect("]");
    }
    u64 element = static_cast<u64>(type_size(out.type));
    out.align = std::max<u64>(out.align, element);
    out.size = is_open ? 0 : element * count;
    if (!is_parameter && accept("="))
        initializer(out);
    if (is_open && out.size == 0)
        out.size = out.init.size();
    return out;
}

void Parser::initializer(Variable& variable) {
    int size = type_size(variable.type);
    bool is_float = type_is_float(variable.type);
    int depth = 0;
    do {
        if (accept("{"))
            ++depth;
        else if (accept("}"))
            --depth;
        else if (!accept(","))
            initializer_value(variable, size, is_float);
    } while (depth > 0);
    if (variable.size)
        variable.init.resize(variable.size, 0);
}

void Parser::initializer_value(Variable& variable, int size, bool is_float) {
    u64 value = 0;
    if (peek().kind == Token::Kind::Float) {
        const Token& token = next();
        if (token.is_single)
            value = token.bits;
        else
            value = size == 4 ? bits<u32>(static_cast<float>(bits<double>(token.bits))) : token.bits;
    } else if (peek().kind == Token::Kind::Name) {
        std::string symbol = name();
        bool is_generic = symbol == "generic";
        if (is_generic) {
            expect("(");
            symbol = name();
            expect(")");
        }
        if (accept("+"))
            value = integer();
        variable.init_symbols.emplace_back(variable.init.size(), symbol);
    } else {
        value = integer();
        if (is_float && size == 4 && value)
            value = bits<u32>(static_cast<float>(static_cast<s64>(value)));
    }
    for (int i = 0; i < size; ++i)
        variable.init.push_back(static_cast<u8>(value >> (8 * i)));
}

std::unique_ptr<Syntax> parse_ptx(const std::string& text) {
    return Parser(tokenize(text)).parse();
}

} // namespace deep_gemm_k3::emulator
