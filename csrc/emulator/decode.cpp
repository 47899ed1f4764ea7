#include <algorithm>
#include <set>

#include "decode.hpp"

namespace deep_gemm_k3::emulator {

namespace {

constexpr SpecialName kSpecials[] = {
    {"%tid.x", Special::TidX, false},
    {"%tid.y", Special::TidY, false},
    {"%tid.z", Special::TidZ, false},
    {"%ntid.x", Special::NtidX, false},
    {"%ntid.y", Special::NtidY, false},
    {"%ntid.z", Special::NtidZ, false},
    {"%ctaid.x", Special::CtaidX, false},
    {"%ctaid.y", Special::CtaidY, false},
    {"%ctaid.z", Special::CtaidZ, false},
    {"%nctaid.x", Special::NctaidX, false},
    {"%nctaid.y", Special::NctaidY, false},
    {"%nctaid.z", Special::NctaidZ, false},
    {"%laneid", Special::LaneId, false},
    {"%warpid", Special::WarpId, false},
    {"%nwarpid", Special::NwarpId, false},
    {"%smid", Special::SmId, false},
    {"%nsmid", Special::NsmId, false},
    {"%gridid", Special::GridId, true},
    {"%lanemask_eq", Special::LaneMaskEq, false},
    {"%lanemask_le", Special::LaneMaskLe, false},
    {"%lanemask_lt", Special::LaneMaskLt, false},
    {"%lanemask_ge", Special::LaneMaskGe, false},
    {"%lanemask_gt", Special::LaneMaskGt, false},
    {"%clusterid.x", Special::ClusterIdX, false},
    {"%clusterid.y", Special::ClusterIdY, false},
    {"%clusterid.z", Special::ClusterIdZ, false},
    {"%nclusterid.x", Special::NclusterIdX, false},
    {"%nclusterid.y", Special::NclusterIdY, false},
    {"%nclusterid.z", Special::NclusterIdZ, false},
    {"%cluster_ctaid.x", Special::ClusterCtaidX, false},
    {"%cluster_ctaid.y", Special::ClusterCtaidY, false},
    {"%cluster_ctaid.z", Special::ClusterCtaidZ, false},
    {"%cluster_nctaid.x", Special::ClusterNctaidX, false},
    {"%cluster_nctaid.y", Special::ClusterNctaidY, false},
    {"%cluster_nctaid.z", Special::ClusterNctaidZ, false},
    {"%cluster_ctarank", Special::ClusterCtaRank, false},
    {"%cluster_nctarank", Special::ClusterNctaRank, false},
    {"%is_explicit_cluster", Special::IsExplicitCluster, false},
    {"%dynamic_smem_size", Special::DynamicSmem, false},
    {"%total_smem_size", Special::TotalSmem, false},
    {"%reserved_smem_offset_begin", Special::ReservedBegin, false},
    {"%reserved_smem_offset_end", Special::ReservedEnd, false},
    {"%reserved_smem_offset_cap", Special::ReservedEnd, false},
    {"%reserved_smem_offset_0", Special::ReservedBegin, false},
    {"%reserved_smem_offset_1", Special::ReservedHalf, false},
};

bool is_aligned(const Statement& statement) {
    const std::vector<std::string>& mods = statement.mods;
    auto has = [&](const char* mod) { return std::find(mods.begin(), mods.end(), mod) != mods.end(); };
    return has("aligned") || (statement.op == "bar" && !has("warp"));
}

u64 round_up(u64 value, u64 to) {
    return (value + to - 1) / to * to;
}

} // namespace

const SpecialName* find_special(const std::string& name) {
    for (const SpecialName& entry : kSpecials)
        if (name == entry.name)
            return &entry;
    return nullptr;
}

std::string Program::where(u32 pc) const {
    if (pc >= code.size())
        return function->name;
    const Statement& statement = function->statements[code[pc].statement];
    std::string out = function->name + ", PTX line " + std::to_string(statement.line);
    auto file = syntax->files.find(statement.source_file);
    if (statement.source_line && file != syntax->files.end())
        out += " (" + file->second + ":" + std::to_string(statement.source_line) + ")";
    return out + ": " + (statement.label.empty() ? statement.text() : "label " + statement.label);
}

u32 Decoder::fixed(u32 bytes) {
    if (bytes >= 32)
        fixed_bytes_ = static_cast<u32>(round_up(fixed_bytes_, 32));
    u32 offset = fixed_bytes_;
    fixed_bytes_ += bytes;
    return offset;
}

Ref Decoder::constant_row(RowClass cls, u64 lo, u64 hi) {
    auto key = std::make_pair(static_cast<u8>(cls), std::make_pair(lo, hi));
    auto found = constant_rows_.find(key);
    if (found != constant_rows_.end())
        return found->second;
    std::vector<u64>& pool = program_->constants;
    if (pool.empty())
        pool.resize(8, 0);
    while (pool.size() % 8)
        pool.push_back(0);
    Ref ref = static_cast<u32>(pool.size() * 8) | 1;
    if (cls == RowClass::Pred)
        pool.push_back(lo);
    if (cls == RowClass::Word)
        pool.insert(pool.end(), 16, lo | lo << 32);
    if (cls == RowClass::Double)
        pool.insert(pool.end(), 32, lo);
    for (int i = 0; cls == RowClass::Quad && i < 32; ++i)
        pool.push_back(lo), pool.push_back(hi);
    return constant_rows_[key] = ref;
}

Ref Decoder::special_row(Special what, bool wide, u64 addend) {
    auto key = std::make_pair(std::make_pair(what, wide), addend);
    auto found = special_rows_.find(key);
    if (found != special_rows_.end())
        return found->second;
    u32 offset = fixed(wide ? 256 : 128);
    program_->specials.push_back({what, offset, wide, addend});
    return special_rows_[key] = offset;
}

Ref Decoder::sink(RowClass cls) {
    Ref& ref = sink_[static_cast<int>(cls)];
    constexpr u32 kBytes[] = {32, 128, 256, 512};
    if (!ref)
        ref = fixed(kBytes[static_cast<int>(cls)]);
    return ref;
}

s32 Decoder::find_register(u32 scope, const std::string& name) const {
    for (s32 at = static_cast<s32>(scope); at >= 0; at = function_.scopes[static_cast<size_t>(at)].parent) {
        const auto& table = function_.scopes[static_cast<size_t>(at)].registers;
        auto found = table.find(name);
        if (found != table.end())
            return static_cast<s32>(found->second);
    }
    return -1;
}

// `is_module` comes back true for what is addressed from a base of the launch: module variables and kernel parameters.
const Variable* Decoder::find_variable(u32 scope, const std::string& name, u64& address, bool& is_module) const {
    is_module = false;
    for (s32 at = static_cast<s32>(scope); at >= 0; at = function_.scopes[static_cast<size_t>(at)].parent) {
        const auto& table = function_.scopes[static_cast<size_t>(at)].variables;
        auto found = table.find(name);
        if (found == table.end())
            continue;
        address = variable_address_[found->second];
        return &function_.variables[found->second];
    }
    is_module = true;
    for (const Variable& parameter : function_.params)
        if (parameter.name == name) {
            address = parameter.address;
            return &parameter;
        }
    auto found = syntax_.variable_index.find(name);
    if (found == syntax_.variable_index.end())
        return nullptr;
    const Variable& variable = syntax_.variables[found->second];
    address = variable.space != Space::Shared ? layout_.address[found->second]
              : variable.is_external          ? program_->dynamic_base
                                              : shared_address_.at(found->second);
    return &variable;
}

u32 Decoder::find_label(const Statement& statement, const std::string& name) const {
    for (s32 at = static_cast<s32>(statement.scope); at >= 0; at = function_.scopes[static_cast<size_t>(at)].parent) {
        const auto& table = function_.scopes[static_cast<size_t>(at)].labels;
        auto found = table.find(name);
        if (found != table.end())
            return found->second;
    }
    throw PtxError(statement.line, "unknown label '" + name + "'");
}

namespace {

void collect_names(const Operand& operand, std::set<std::string>& names) {
    if (!operand.name.empty())
        names.insert(operand.name);
    for (const Operand& part : operand.parts)
        collect_names(part, names);
}

} // namespace

// A CTA holds the module's shared variables that its kernel names, then those of the body, then dynamic shared memory,
// where the strictest of the kernel's external arrays puts it.
void Decoder::layout_variables() {
    std::set<std::string> names;
    for (const Statement& statement : function_.statements)
        for (const Operand& operand : statement.operands)
            collect_names(operand, names);
    u64 shared = kSharedReserved, local = 0, dynamic_align = 16;
    for (u32 i = 0; i < syntax_.variables.size(); ++i) {
        const Variable& variable = syntax_.variables[i];
        if (variable.space != Space::Shared || !names.count(variable.name))
            continue;
        if (variable.is_external) {
            dynamic_align = std::max<u64>(dynamic_align, variable.align);
            continue;
        }
        shared = round_up(shared, std::max<u64>(variable.align, 1));
        shared_address_[i] = shared;
        shared += variable.size;
    }
    for (const Variable& variable : function_.variables) {
        u64& offset = variable.space == Space::Shared ? shared : local;
        offset = round_up(offset, variable.align);
        variable_address_.push_back(offset);
        offset += variable.size;
        if (variable.space == Space::Global || variable.space == Space::Const)
            throw PtxError(variable.line, "a .global or .const variable inside a function is not modelled");
    }
    program_->static_shared = static_cast<u32>(shared);
    program_->dynamic_base = static_cast<u32>(round_up(shared, dynamic_align));
    program_->local_bytes = static_cast<u32>(round_up(local, 16));
    if (!function_.params.empty())
        program_->param_bytes = static_cast<u32>(function_.params.back().address + function_.params.back().size);
}

void Decoder::decode_statement(u32 index) {
    const Statement& statement = function_.statements[index];
    Builder builder(*this, statement);
    if (!statement.label.empty()) {
        label_pc_[index] = static_cast<u32>(program_->code.size());
        builder.in.mode = 1;
        build_table().at("label")(builder);
        return;
    }
    auto found = build_table().find(statement.op);
    if (found == build_table().end() || statement.op == "label")
        throw PtxError(statement.line, "unknown opcode '" + statement.text() + "'");
    check_target(statement, syntax_.target);
    const size_t first = program_->code.size();
    found->second(builder);
    for (size_t i = first; i < program_->code.size(); ++i)
        program_->code[i].is_aligned = is_aligned(statement);
    for (size_t i = 0; i < statement.mods.size(); ++i)
        if (!builder.consumed_[i])
            throw PtxError(
                statement.line, "modifier '." + statement.mods[i] + "' of '" + statement.text() + "' is not modelled");
}

std::unique_ptr<Program> Decoder::run() {
    program_ = std::make_unique<Program>();
    program_->syntax = &syntax_;
    program_->function = &function_;
    program_->extra.push_back(0);
    layout_variables();
    label_pc_.assign(function_.statements.size(), kNoPc);
    for (u32 i = 0; i < function_.statements.size(); ++i)
        decode_statement(i);
    Statement end;
    Builder builder(*this, end);
    build_table().at("exit")(builder);
    program_->code.back().statement =
        function_.statements.empty() ? 0 : static_cast<u32>(function_.statements.size() - 1);
    for (Inst& inst : program_->code) {
        if (inst.target == kNoPc)
            continue;
        const Statement& statement = function_.statements[inst.statement];
        inst.target = label_pc_[find_label(statement, statement.operands.back().name)];
    }
    build_blocks();
    find_reconvergence();
    liveness();
    watch_registers();
    find_load_hazards();
    compact();
    return std::move(program_);
}

} // namespace deep_gemm_k3::emulator
