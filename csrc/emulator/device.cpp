#include "device.hpp"
#include "lower.hpp"
#include "races.hpp"

#include <algorithm>

namespace deep_gemm_k3::emulator {

namespace {

u64 round_up(u64 value, u64 to) {
    return (value + to - 1) / to * to;
}

[[noreturn]] void refuse(const std::string& name, const std::string& wanted, const std::string& given) {
    throw std::invalid_argument(name + ": wanted " + wanted + ", given " + given);
}

std::string triple(const u32* v) {
    return std::to_string(v[0]) + " x " + std::to_string(v[1]) + " x " + std::to_string(v[2]);
}

} // namespace

std::string json_text(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\')
            out += '\\', out += c;
        else if (c == '\n')
            out += "\\n";
        else if (static_cast<unsigned char>(c) < 0x20)
            out += ' ';
        else
            out += c;
    }
    return out + "\"";
}

Module::Module(const std::string& text) : syntax_(parse_ptx(text)) {
    for (const Variable& variable : syntax_->variables) {
        u64 offset = round_up(layout_.global_bytes, std::max<u64>(variable.align, 1));
        layout_.address.push_back(offset);
        if (variable.space != Space::Shared && !variable.is_external) // a kernel lays out shared variables itself
            layout_.global_bytes = offset + variable.size;
    }
}

std::shared_ptr<const Program> Module::program(const std::string& kernel) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto known = programs_.find(kernel);
    if (known != programs_.end())
        return known->second;
    auto found = syntax_->function_index.find(kernel);
    if (found == syntax_->function_index.end()) {
        std::string names;
        for (auto& function : syntax_->functions)
            if (function->is_entry)
                names += (names.empty() ? "" : ", ") + function->name;
        refuse("kernel", "one of " + names, kernel);
    }
    const Function& function = *syntax_->functions[found->second];
    if (!function.is_entry)
        refuse("kernel", "an .entry", kernel + ", a .func");
    lowered_.push_back(lower(*syntax_, function));
    return programs_[kernel] = Decoder(*syntax_, layout_, *lowered_.back()).run();
}

std::shared_ptr<ModuleInstance> Module::instantiate() const {
    auto instance = std::make_shared<ModuleInstance>();
    instance->syntax = syntax_.get();
    instance->storage.assign(layout_.global_bytes / 8 + 2 + 32, 0);
    u64 base = round_up(reinterpret_cast<u64>(instance->storage.data()), 256);
    instance->base = base;
    for (size_t i = 0; i < syntax_->variables.size(); ++i) {
        const Variable& variable = syntax_->variables[i];
        if (variable.space == Space::Shared || variable.init.empty())
            continue;
        u8* to = reinterpret_cast<u8*>(base + layout_.address[i]);
        std::memcpy(to, variable.init.data(), variable.init.size());
        for (auto& [offset, symbol] : variable.init_symbols) {
            auto found = syntax_->variable_index.find(symbol);
            if (found == syntax_->variable_index.end())
                throw PtxError(variable.line, "initialiser names unknown '" + symbol + "'");
            u64 address;
            std::memcpy(&address, to + offset, 8);
            address += base + layout_.address[found->second];
            std::memcpy(to + offset, &address, 8);
        }
    }
    return instance;
}

std::string Module::describe() const {
    std::string out = "{\"target\":" + json_text(syntax_->target) + ",\"kernels\":{";
    bool first = true;
    for (auto& function : syntax_->functions) {
        if (!function->is_entry)
            continue;
        out += std::string(first ? "" : ",") + json_text(function->name) + ":{\"params\":[";
        first = false;
        for (size_t i = 0; i < function->params.size(); ++i) {
            const Variable& p = function->params[i];
            out += std::string(i ? "," : "") + "[" + json_text(p.name) + "," + json_text(type_name(p.type)) + "," +
                   std::to_string(p.address) + "," + std::to_string(p.size) + "]";
        }
        auto list = [](const u32* v) {
            return "[" + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) + "]";
        };
        out += "],\"max_threads\":" + list(function->max_threads) +
               ",\"required\":" + (function->required_threads ? "true" : "false") +
               ",\"cluster\":" + list(function->cluster) + "}";
    }
    out += "},\"variables\":{";
    first = true;
    for (size_t i = 0; i < syntax_->variables.size(); ++i) {
        const Variable& v = syntax_->variables[i];
        if (v.space != Space::Global && v.space != Space::Const)
            continue;
        out += std::string(first ? "" : ",") + json_text(v.name) + ":[" + std::to_string(layout_.address[i]) + "," +
               std::to_string(v.size) + "]";
        first = false;
    }
    return out + "}}";
}

u32 ctas_per_sm(u32 shared_bytes, u32 threads) {
    u32 by_shared = kSharedPerSm / std::max<u32>(shared_bytes, 1),
        by_threads = kThreadsPerSm / round_up(std::max<u32>(threads, 1), 32);
    return std::max<u32>(1, std::min({by_shared, by_threads, kCtasPerSm}));
}

std::unique_ptr<Launch> prepare(const LaunchArguments& a) {
    auto launch = std::make_unique<Launch>();
    launch->program = a.module->program(a.kernel);
    launch->instance = a.instance;
    const Function& function = *launch->program->function;
    for (int i = 0; i < 3; ++i) {
        launch->grid[i] = a.grid[i], launch->block[i] = a.block[i];
        launch->cluster[i] = function.cluster[0] ? function.cluster[i] : std::max<u32>(1, a.cluster[i]);
        if (!a.grid[i] || !a.block[i])
            refuse("grid and block", "no zero", triple(a.grid) + ", " + triple(a.block));
        if (function.cluster[0] && a.cluster[i] > 1 && a.cluster[i] != function.cluster[i])
            refuse("cluster", triple(function.cluster), triple(a.cluster));
        if (a.grid[i] % launch->cluster[i])
            refuse("grid", "a multiple of the cluster " + triple(launch->cluster), triple(a.grid));
        if (function.required_threads && a.block[i] != function.max_threads[i])
            refuse("block", triple(function.max_threads), triple(a.block));
    }
    u32 threads = a.block[0] * a.block[1] * a.block[2],
        cluster = launch->cluster[0] * launch->cluster[1] * launch->cluster[2];
    u32 limit =
        function.max_threads[0] ? function.max_threads[0] * function.max_threads[1] * function.max_threads[2] : 1024;
    if (threads > limit)
        refuse("block", "at most " + std::to_string(limit) + " threads", std::to_string(threads));
    if (cluster > 16)
        refuse("cluster", "at most 16 CTAs", std::to_string(cluster));
    u32 shared = launch->program->static_shared + a.dynamic_shared;
    if (shared - kSharedReserved > kSharedPerCta)
        refuse("shared memory", "at most " + std::to_string(kSharedPerCta) + " bytes per CTA",
            std::to_string(shared - kSharedReserved));
    u32 wanted = launch->program->param_bytes;
    if (a.param_bytes < wanted)
        refuse("parameters", std::to_string(wanted) + " bytes", std::to_string(a.param_bytes));
    launch->params.assign(wanted / 8 + 1 + 32, 0);
    launch->param_base = round_up(reinterpret_cast<u64>(launch->params.data()), 128);
    if (wanted)
        std::memcpy(reinterpret_cast<u8*>(launch->param_base), a.params, wanted);
    launch->dynamic_shared = a.dynamic_shared, launch->num_sms = a.num_sms, launch->rank = a.rank;
    launch->resident_limit = a.num_sms * ctas_per_sm(shared, threads);
    launch->label = a.kernel;
    return launch;
}

static std::string counters_json(const Counters& counters) {
    std::string out = "{";
    for (auto& [name, value] : listed(counters))
        out += std::string(out.size() > 1 ? "," : "") + "\"" + name + "\":" + std::to_string(value);
    return out + "}";
}

std::string report_json(const Machine& machine) {
    std::string out = "{\"findings\":[";
    for (size_t i = 0; i < machine.findings.size(); ++i) {
        const Finding& f = machine.findings[i];
        out += std::string(i ? "," : "") + "{\"kind\":" + json_text(f.kind) + ",\"text\":" + json_text(f.text) +
               ",\"count\":" + std::to_string(f.count) + "}";
    }
    out += "],\"counters\":" + counters_json(machine.counters);
    out.back() = ',';
    if (machine.races)
        out += "\"message_chain\":" + std::to_string(machine.races->longest_chain) + ",";
    out += "\"virtual_ns\":" + std::to_string(machine.virtual_ns) + "},\"roles\":{";
    const Observer& observer = machine.observer;
    for (size_t i = 0; i < observer.roles().size(); ++i)
        out += (i ? "," : "") + json_text(observer.roles()[i]) + ":" + counters_json(observer.counters[i]);
    out += "},\"schedule\":" + std::to_string(machine.schedule);
    return out + ",\"printed\":" + json_text(machine.printed) + "}";
}

std::string Machine::reached_lines() {
    std::set<int> lines;
    for (auto& [program, bytes] : reached)
        for (size_t i = 0; i < bytes.size(); ++i)
            if (bytes[i])
                lines.insert(program->function->statements[program->code[i].statement].line);
    std::string out;
    for (int line : lines)
        out += std::to_string(line) + " ";
    return out;
}

} // namespace deep_gemm_k3::emulator
