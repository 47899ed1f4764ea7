#include "lower.hpp"

namespace deep_gemm_k3::emulator {

namespace {

Operand name_operand(const std::string& name) {
    Operand out;
    out.kind = Operand::Kind::Name;
    out.name = name;
    return out;
}

class Lowering {
  public:
    Lowering(const Syntax& syntax, std::set<std::string> callers) : syntax_(syntax), callers_(std::move(callers)) {}

    std::unique_ptr<Function> run(const Function& function) {
        out_ = std::make_unique<Function>(function);
        out_->statements.clear();
        source_ = &function;
        std::vector<u32> moved;
        for (const Statement& statement : function.statements) {
            moved.push_back(here());
            if (statement.op == "call" && callee(statement))
                inline_call(statement, *callee(statement));
            else if (statement.op == "brx")
                branch_table(statement);
            else
                out_->statements.push_back(statement);
        }
        moved.push_back(here());
        for (size_t i = 0; i < function.scopes.size(); ++i)
            for (auto& [name, index] : function.scopes[i].labels)
                out_->scopes[i].labels[name] = moved[index];
        return std::move(out_);
    }

  private:
    const Syntax& syntax_;
    std::set<std::string> callers_;
    std::unique_ptr<Function> out_;
    const Function* source_ = nullptr;
    u32 ends_ = 0;

    u32 here() const { return static_cast<u32>(out_->statements.size()); }

    // The function with a body that a statement calls; null for others.
    const Function* callee(const Statement& statement) const {
        for (const Operand& operand : statement.operands) {
            if (operand.kind != Operand::Kind::Name)
                continue;
            auto found = syntax_.function_index.find(operand.name);
            if (found == syntax_.function_index.end())
                return nullptr;
            const Function& function = *syntax_.functions[found->second];
            return function.has_body && !function.is_entry ? &function : nullptr;
        }
        return nullptr;
    }

    Statement& add(const Statement& like, const std::string& op, u32 scope) {
        Statement fresh;
        fresh.line = like.line, fresh.location = like.location;
        fresh.source_file = like.source_file, fresh.source_line = like.source_line;
        fresh.scope = scope;
        fresh.op = op;
        out_->statements.push_back(fresh);
        return out_->statements.back();
    }

    // Where several statements take the place of a guarded one: the guard jumps over them, to the label that comes
    // back.
    std::string guard(const Statement& s) {
        std::string end = "$end$" + std::to_string(ends_++);
        if (!s.predicate.empty()) {
            Statement& skip = add(s, "bra", s.scope);
            skip.predicate = s.predicate, skip.predicate_negated = !s.predicate_negated;
            skip.operands.push_back(name_operand(end));
        }
        return end;
    }
    void finish(const Statement& s, const std::string& end) {
        out_->scopes[s.scope].labels[end] = here();
        add(s, "", s.scope).label = end;
    }

    u32 find_variable(const Statement& at, const std::string& name) const {
        for (s32 scope = static_cast<s32>(at.scope); scope >= 0;
            scope = out_->scopes[static_cast<size_t>(scope)].parent) {
            auto& table = out_->scopes[static_cast<size_t>(scope)].variables;
            auto found = table.find(name);
            if (found != table.end())
                return found->second;
        }
        throw PtxError(at.line, "the call passes '" + name + "'; only .param variables of the body are modelled");
    }

    void bind(NameScope& inner, const Statement& call, const std::vector<Variable>& formal, const Operand* actual) {
        size_t given = actual ? actual->parts.size() : 0;
        if (given != formal.size())
            throw PtxError(call.line, "the call passes " + std::to_string(given) + " of " +
                                          std::to_string(formal.size()) + " parameters (in '" + call.text() + "')");
        for (size_t i = 0; i < given; ++i) {
            if (formal[i].space != Space::Param)
                throw PtxError(call.line, "parameters of functions that are registers are not modelled");
            inner.variables[formal[i].name] = find_variable(call, actual->parts[i].name);
        }
    }

    void inline_call(const Statement& call, const Function& function) {
        if (callers_.count(function.name))
            throw PtxError(call.line, "recursive calls of '" + function.name + "' are not modelled");
        std::set<std::string> callers = callers_;
        callers.insert(function.name);
        std::unique_ptr<Function> body = Lowering(syntax_, callers).run(function);
        u32 scopes = static_cast<u32>(out_->scopes.size()), registers = static_cast<u32>(out_->registers.size()),
            variables = static_cast<u32>(out_->variables.size());
        std::string end = guard(call);
        out_->registers.insert(out_->registers.end(), body->registers.begin(), body->registers.end());
        out_->variables.insert(out_->variables.end(), body->variables.begin(), body->variables.end());
        for (NameScope scope : body->scopes) {
            scope.parent = scope.parent < 0 ? -1 : scope.parent + static_cast<s32>(scopes);
            for (auto& [name, index] : scope.registers)
                index += registers;
            for (auto& [name, index] : scope.variables)
                index += variables;
            for (auto& [name, index] : scope.labels)
                index += here();
            out_->scopes.push_back(scope);
        }
        const Operand* results = nullptr;
        const Operand* arguments = nullptr;
        bool named = false;
        for (const Operand& operand : call.operands) {
            if (operand.kind == Operand::Kind::Vector)
                (named ? arguments : results) = &operand;
            named |= operand.kind == Operand::Kind::Name;
        }
        NameScope& outermost = out_->scopes[scopes];
        bind(outermost, call, function.returns, results);
        bind(outermost, call, function.params, arguments);
        for (Statement statement : body->statements) {
            statement.scope += scopes;
            if (statement.op == "ret") {
                statement.op = "bra", statement.mods.clear();
                statement.operands.push_back(name_operand(end));
            }
            out_->statements.push_back(statement);
        }
        out_->scopes[scopes].labels[end] = here();
        finish(call, end);
    }

    // brx.idx index, table: one comparison and branch per entry; an index beyond the table traps
    void branch_table(const Statement& s) {
        if (s.operands.size() != 2 || s.mods.empty() || s.mods[0] != "idx")
            throw PtxError(s.line, "unknown form '" + s.text() + "'");
        auto table = source_->branch_tables.find(s.operands[1].name);
        if (table == source_->branch_tables.end())
            throw PtxError(s.line, "unknown table '" + s.operands[1].name + "'");
        std::string end = guard(s), flag = "%brx$" + std::to_string(out_->registers.size());
        out_->scopes[s.scope].registers[flag] = static_cast<u32>(out_->registers.size());
        out_->registers.push_back({flag, Type::Pred});
        for (size_t i = 0; i < table->second.size(); ++i) {
            Operand number;
            number.kind = Operand::Kind::Integer;
            number.bits = i;
            Statement& compare = add(s, "setp", s.scope);
            compare.mods = {"eq", "u32"};
            compare.operands = {name_operand(flag), s.operands[0], number};
            Statement& branch = add(s, "bra", s.scope);
            branch.predicate = flag;
            branch.operands = {name_operand(table->second[i])};
        }
        add(s, "trap", s.scope);
        finish(s, end);
    }
};

} // namespace

std::unique_ptr<Function> lower(const Syntax& syntax, const Function& function) {
    return Lowering(syntax, {function.name}).run(function);
}

} // namespace deep_gemm_k3::emulator
