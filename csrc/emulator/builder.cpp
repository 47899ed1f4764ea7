#include "decode.hpp"

namespace deep_gemm_k3::emulator {

RowClass row_class(Type type) {
    if (type == Type::Pred)
        return RowClass::Pred;
    int size = type_size(type);
    return size == 16 ? RowClass::Quad : size == 8 ? RowClass::Double : RowClass::Word;
}

Builder::Builder(Decoder& decoder, const Statement& statement)
    : s(statement), decoder_(decoder), consumed_(statement.mods.size(), false) {
    in.n = 1;
}

void Builder::fail(const std::string& text) const {
    throw PtxError(s.line, text + " (in '" + s.text() + "')");
}

bool Builder::take(const std::string& mod) {
    for (size_t i = 0; i < s.mods.size(); ++i)
        if (!consumed_[i] && s.mods[i] == mod)
            return consumed_[i] = true;
    return false;
}

bool Builder::take_any(std::initializer_list<const char*> mods) {
    return !take_of(mods).empty();
}

std::string Builder::take_of(std::initializer_list<const char*> mods) {
    for (size_t i = 0; i < s.mods.size(); ++i)
        for (const char* mod : mods)
            if (!consumed_[i] && s.mods[i] == mod) {
                consumed_[i] = true;
                return mod;
            }
    return "";
}

std::string Builder::take_next() {
    for (size_t i = 0; i < s.mods.size(); ++i)
        if (!consumed_[i]) {
            consumed_[i] = true;
            return s.mods[i];
        }
    return "";
}

Type Builder::take_type_or(Type fallback) {
    for (size_t i = 0; i < s.mods.size(); ++i) {
        if (consumed_[i])
            continue;
        Type type = type_from_name(s.mods[i]);
        if (type == Type::None)
            continue;
        consumed_[i] = true;
        return type;
    }
    return fallback;
}

Type Builder::take_any_type() {
    Type type = take_type_or(Type::None);
    if (type == Type::None)
        fail("no type");
    return type;
}

Type Builder::take_type() {
    Type type = take_any_type();
    switch (type) {
    case Type::TF32:
    case Type::E4M3:
    case Type::E5M2:
    case Type::E4M3x2:
    case Type::E5M2x2:
    case Type::E2M1x2:
    case Type::E2M3x2:
    case Type::E3M2x2:
    case Type::UE8M0x2:
        fail(std::string("this instruction has no type .") + type_name(type));
    default:
        return type;
    }
}

bool Builder::done() const {
    for (bool consumed : consumed_)
        if (!consumed)
            return false;
    return true;
}

const Operand& Builder::at(size_t i) const {
    if (i >= s.operands.size())
        fail("too few operands");
    return s.operands[i];
}

void Builder::want(size_t low, size_t high) const {
    if (count() < low || count() > high)
        fail("wanted " + std::to_string(low) + (high > low ? ".." + std::to_string(high) : "") + " operands, found " +
             std::to_string(count()));
}

Type Builder::register_type(const Operand& operand) const {
    if (operand.kind != Operand::Kind::Name)
        return Type::None;
    s32 vreg = decoder_.find_register(s.scope, operand.name);
    return vreg < 0 ? Type::None : decoder_.function_.registers[static_cast<size_t>(vreg)].type;
}

bool Builder::is_register(const Operand& operand) const {
    return register_type(operand) != Type::None;
}

u64 Builder::constant(const Operand& operand) const {
    if (operand.kind != Operand::Kind::Integer)
        fail("wanted an integer constant");
    return operand.bits;
}

void Builder::touch(Ref Inst::* field, bool is_extra, u32 vreg, bool is_use, bool is_def) {
    u32 inst = static_cast<u32>(decoder_.program_->code.size());
    u32 extra = is_extra ? static_cast<u32>(decoder_.program_->extra.size()) : kNoPc;
    decoder_.touches_.push_back({inst, extra, field, vreg, is_use, is_def});
}

// The row of a source that is no register: immediate, special register, symbol address. For a register sets vreg.
Ref Builder::source_row(const Operand& operand, Type type, RowClass cls, s32& vreg) {
    vreg = -1;
    if (operand.kind == Operand::Kind::Integer || operand.kind == Operand::Kind::Float) {
        u64 value = operand.bits;
        bool is_float = operand.kind == Operand::Kind::Float;
        if (is_float && cls == RowClass::Double && operand.is_single)
            value = bits<u64>(static_cast<double>(bits<float>(static_cast<u32>(value))));
        if (is_float && cls == RowClass::Word && !operand.is_single)
            value = bits<u32>(static_cast<float>(bits<double>(value)));
        if (!is_float && type_is_float(type) && type_size(type) >= 4 && value != 0)
            fail("integer immediate for a float operand");
        if (cls == RowClass::Pred)
            return decoder_.constant_row(cls, value ? kFullMask : 0);
        if (type_size(type) == 2)
            value &= 0xffff;
        if (type_size(type) == 1)
            value &= 0xff;
        if (cls == RowClass::Word)
            value &= 0xffffffffu;
        return decoder_.constant_row(cls, value);
    }
    if (operand.kind == Operand::Kind::Sink)
        return decoder_.constant_row(cls, 0);
    if (operand.kind != Operand::Kind::Name)
        fail("unexpected operand form");
    vreg = decoder_.find_register(s.scope, operand.name);
    if (vreg >= 0)
        return 0;
    if (const SpecialName* special = find_special(operand.name)) {
        if ((cls == RowClass::Pred) != (special->what == Special::IsExplicitCluster))
            fail("'" + operand.name + "' is of another type");
        return decoder_.special_row(special->what, cls == RowClass::Double);
    }
    u64 address = 0;
    bool is_module = false;
    const Variable* variable = decoder_.find_variable(s.scope, operand.name, address, is_module);
    if (!variable && decoder_.syntax_.function_index.count(operand.name))
        fail("the address of function '" + operand.name + "': calls through pointers are not modelled");
    if (!variable)
        fail("unknown operand '" + operand.name + "'");
    u64 addend = address + static_cast<u64>(operand.offset);
    bool wide = cls == RowClass::Double;
    switch (variable->space) {
    case Space::Shared:
        return decoder_.special_row(Special::SharedBase, wide, addend);
    case Space::Global:
    case Space::Const:
        return decoder_.special_row(Special::GlobalBase, wide, addend);
    case Space::Param:
        if (is_module)
            return decoder_.special_row(Special::ParamBase, wide, addend);
        return decoder_.constant_row(cls, kLocalWindow + addend);
    default:
        return decoder_.constant_row(cls, addend);
    }
}

void Builder::use(Ref Inst::* field, const Operand& operand, Type type) {
    s32 vreg;
    RowClass cls = row_class(type);
    in.*field = source_row(operand, type, cls, vreg);
    if (vreg < 0)
        return;
    Type actual = decoder_.function_.registers[static_cast<size_t>(vreg)].type;
    if (row_class(actual) != cls)
        fail("operand '" + operand.name + "' has type ." + type_name(actual) + ", wanted ." + type_name(type));
    if (operand.negated)
        in.*field = 2;
    touch(field, false, static_cast<u32>(vreg), true, false);
}

void Builder::use_any(Ref Inst::* field, const Operand& operand, Type type) {
    Type actual = register_type(operand);
    use(field, operand, actual == Type::None ? type : actual);
}

void Builder::def(Ref Inst::* field, const Operand& operand, Type type) {
    RowClass cls = row_class(type);
    if (operand.kind == Operand::Kind::Sink) {
        in.*field = decoder_.sink(cls);
        return;
    }
    Type actual = register_type(operand);
    if (actual == Type::None)
        fail("destination '" + operand.name + "' is no register");
    if (row_class(actual) != cls)
        fail("destination '" + operand.name + "' has type ." + type_name(actual) + ", wanted ." + type_name(type));
    touch(field, false, static_cast<u32>(decoder_.find_register(s.scope, operand.name)), false, true);
}

void Builder::def_any(Ref Inst::* field, const Operand& operand, Type type) {
    Type actual = register_type(operand);
    def(field, operand, actual == Type::None ? type : actual);
}

void Builder::begin_extra() {
    if (!has_extra_)
        in.extra = static_cast<u32>(decoder_.program_->extra.size());
    has_extra_ = true;
}

void Builder::use_extra(const Operand& operand, Type type) {
    begin_extra();
    s32 vreg;
    RowClass cls = row_class(type);
    Ref ref = source_row(operand, type, cls, vreg);
    if (vreg >= 0) {
        Type actual = decoder_.function_.registers[static_cast<size_t>(vreg)].type;
        if (row_class(actual) != cls)
            fail("operand '" + operand.name + "' has type ." + type_name(actual) + ", wanted ." + type_name(type));
        if (operand.negated)
            ref = 2;
        touch(nullptr, true, static_cast<u32>(vreg), true, false);
    }
    decoder_.program_->extra.push_back(ref);
}

void Builder::def_extra(const Operand& operand, Type type) {
    begin_extra();
    RowClass cls = row_class(type);
    Ref ref = 0;
    if (operand.kind == Operand::Kind::Sink) {
        ref = decoder_.sink(cls);
    } else {
        Type actual = register_type(operand);
        if (actual == Type::None)
            fail("destination '" + operand.name + "' is no register");
        if (row_class(actual) != cls)
            fail("destination '" + operand.name + "' has type ." + type_name(actual) + ", wanted ." + type_name(type));
        touch(nullptr, true, static_cast<u32>(decoder_.find_register(s.scope, operand.name)), false, true);
    }
    decoder_.program_->extra.push_back(ref);
}

void Builder::update_extra(const Operand& operand, Type type) {
    begin_extra();
    Type actual = register_type(operand);
    if (actual == Type::None || row_class(actual) != row_class(type))
        fail("operand '" + operand.name + "' is no register of the wanted width");
    touch(nullptr, true, static_cast<u32>(decoder_.find_register(s.scope, operand.name)), true, true);
    decoder_.program_->extra.push_back(0);
}

void Builder::constant_extra(u32 value) {
    begin_extra();
    decoder_.program_->extra.push_back(value);
}

Ref Builder::address_row(const Operand& operand, s64& offset, s32& vreg) {
    if (operand.kind != Operand::Kind::Address)
        fail("wanted an address in brackets");
    const Operand& base = operand.parts.at(0);
    offset = operand.offset;
    vreg = -1;
    if (base.kind == Operand::Kind::Integer)
        return decoder_.constant_row(RowClass::Double, base.bits) | 2;
    vreg = decoder_.find_register(s.scope, base.name);
    if (vreg >= 0) {
        Type type = decoder_.function_.registers[static_cast<size_t>(vreg)].type;
        if (row_class(type) == RowClass::Double)
            return 2;
        if (row_class(type) != RowClass::Word || type_size(type) != 4)
            fail("address register '" + base.name + "' must have 32 or 64 bits");
        return 0;
    }
    return source_row(base, Type::B64, RowClass::Double, vreg) | 2;
}

void Builder::address(Ref Inst::* field, const Operand& operand) {
    s64 offset;
    s32 vreg;
    in.*field = address_row(operand, offset, vreg);
    in.imm = offset;
    if (vreg >= 0)
        touch(field, false, static_cast<u32>(vreg), true, false);
}

void Builder::address_extra(const Operand& operand) {
    begin_extra();
    s64 offset;
    s32 vreg;
    Ref ref = address_row(operand, offset, vreg);
    if (vreg >= 0)
        touch(nullptr, true, static_cast<u32>(vreg), true, false);
    decoder_.program_->extra.push_back(ref);
    decoder_.program_->extra.push_back(static_cast<u32>(static_cast<s32>(offset)));
}

u32 Builder::local_offset(const Operand& operand) const {
    u64 address = 0;
    bool is_module = false;
    const Variable* variable = decoder_.find_variable(s.scope, operand.name, address, is_module);
    if (!variable || is_module)
        fail("'" + operand.name + "' is no variable of this function");
    return static_cast<u32>(address);
}

void Builder::require_cta_group(u32 group) {
    u32& of_kernel = decoder_.program_->cta_group;
    if (of_kernel && of_kernel != group)
        fail("a kernel uses one .cta_group only, and another instruction has .cta_group::" + std::to_string(of_kernel));
    of_kernel = group;
}

void Builder::emit(Handler run) {
    u32 index = static_cast<u32>(decoder_.program_->code.size());
    if (!s.predicate.empty()) {
        s32 vreg = decoder_.find_register(s.scope, s.predicate);
        if (vreg < 0)
            fail("unknown predicate '" + s.predicate + "'");
        if (decoder_.function_.registers[static_cast<size_t>(vreg)].type != Type::Pred)
            fail("guard '" + s.predicate + "' is no predicate");
        in.pred = s.predicate_negated ? 3 : 1; // bit 0 only says that there is a guard, until rows are known
        // a guarded write keeps the old value in the other lanes: it is a use as well
        for (size_t i = decoder_.touches_.size(); i-- > 0 && decoder_.touches_[i].inst == index;)
            decoder_.touches_[i].is_use |= decoder_.touches_[i].is_def;
        touch(&Inst::pred, false, static_cast<u32>(vreg), true, false);
    }
    emit_unguarded(run);
}

void Builder::emit_unguarded(Handler run) {
    in.run = run;
    in.statement = static_cast<u32>(&s - decoder_.function_.statements.data());
    decoder_.program_->code.push_back(in);
    Inst fresh;
    in = fresh;
    has_extra_ = false;
}

} // namespace deep_gemm_k3::emulator
