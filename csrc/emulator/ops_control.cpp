// Branches, labels, exit, trap; divergence and reconvergence.
#include "ops.hpp"

namespace deep_gemm_k3::emulator {

void exec_label(Warp&, const Inst&, u32) {}

void exec_exit(Warp& w, const Inst&, u32 m) {
    w.exit_lanes(m);
    if (w.mask)
        return;
    w.current->state = SplitState::Dead;
    w.stop = Stop::Switch;
}

// Lanes that diverged earlier wait here for each other.
void exec_reconverge(Warp& w, const Inst&, u32) {
    while (w.node && w.node->rpc == w.pc - 1) {
        Node* node = w.node;
        node->arrived |= w.mask;
        if (node->arrived != node->expected) {
            w.current->state = SplitState::Dead;
            w.stop = Stop::Switch;
            return;
        }
        w.mask = node->arrived;
        w.node = node->parent;
        node->arrived = node->expected = 0;
        w.free_node(node);
    }
}

namespace {

void exec_jump(Warp& w, const Inst& in, u32) {
    w.pc = in.target;
}

void exec_branch(Warp& w, const Inst& in, u32 m) {
    if (m == w.mask) {
        w.pc = in.target;
        return;
    }
    if (in.reconverge != kNoPc && !(w.node && w.node->rpc == in.reconverge))
        w.node = w.new_node(in.reconverge, w.mask, w.node);
    u32 other = w.mask & ~m;
    bool take = w.machine->random() & 1; // which side runs first is the scheduler's to choose
    w.new_split(take ? w.pc : in.target, take ? other : m, w.node);
    w.mask = take ? m : other;
    if (take)
        w.pc = in.target;
}

void build_branch(Builder& b) {
    b.take("uni");
    b.want(1, 1);
    b.in.target = 0; // resolved when all labels are known
    bool is_conditional = !b.s.predicate.empty();
    b.emit(is_conditional ? exec_branch : exec_jump);
    if (is_conditional) // where the lanes that leave a loop here may meet
        b.emit_unguarded(exec_label);
}

void build_exit(Builder& b) {
    b.take("uni");
    b.want(0, 0);
    b.emit(exec_exit);
}

void exec_trap(Warp&, const Inst&, u32) {
    throw Fault("trap", "the program executed a trap");
}

void build_trap(Builder& b) {
    b.want(0, 0);
    b.emit(exec_trap);
}

void exec_nothing(Warp&, const Inst&, u32) {}

// Whoever looks at memory between two naps waits for it; one that does not waits for time alone.
void exec_yield(Warp& w, const Inst&, u32) {
    bool looks = false;
    for (Poll& poll : w.current->polls) {
        looks |= poll.pc != kNoPc;
        poll.pc = kNoPc;
    }
    w.wait.what = looks ? nullptr : kSleeps;
    w.stop = Stop::Parked;
}

void build_nanosleep(Builder& b) {
    b.take_type();
    b.want(1, 1);
    b.use(&Inst::a, b.at(0), Type::B32);
    b.emit(exec_yield);
}

// Hints without an effect on the result: operands are read and forgotten.
void finish_hint(Builder& b, size_t operands) {
    b.want(operands, operands);
    for (size_t i = 0; i < operands; ++i)
        if (b.at(i).kind == Operand::Kind::Address)
            b.address_extra(b.at(i));
        else
            b.constant(b.at(i));
    b.emit(exec_nothing);
}

void build_prefetch(Builder& b) {
    if (b.take("tensormap")) {
        b.take_any({"param", "const"});
        return finish_hint(b, 1);
    }
    b.take_any({"global", "local"});
    if (!b.take_any({"L1", "L2", "L2::evict_last", "L2::evict_normal"}))
        b.fail("no cache level");
    finish_hint(b, 1);
}

// applypriority and discard name a cache line and its size.
void build_line_hint(Builder& b) {
    b.take("global");
    if (!b.take(b.s.op == "discard" ? "L2" : "L2::evict_normal"))
        b.fail("no cache level");
    finish_hint(b, 2);
}

void build_dependency(Builder& b) {
    if (!b.take_any({"launch_dependents", "wait"}))
        b.fail("wanted .launch_dependents or .wait");
    finish_hint(b, 0);
}

void build_event(Builder& b) {
    b.take("mask");
    finish_hint(b, 1);
}

void build_setmaxnreg(Builder& b) {
    if (!b.take_any({"inc", "dec"}) || !b.take("sync") || !b.take("aligned") || !b.take("u32"))
        b.fail("unknown form");
    b.want(1, 1);
    u64 count = b.constant(b.at(0));
    if (count < 24 || count > 256 || count % 8)
        b.fail("the register count must be a multiple of 8 in 24..256");
    b.emit(exec_nothing);
}

// call (ret), vprintf, (format, arguments): the only call that is modelled, besides the failing assertion
std::string text_at(Warp& w, u64 address) {
    std::string out;
    for (;; ++address) {
        char c = static_cast<char>(*resolve(w, Space::Generic, address, 1, Access::Read, 0));
        if (!c)
            return out;
        out += c;
    }
}

std::string format_print(Warp& w, const std::string& format, u64 arguments, int lane) {
    std::string out;
    u64 offset = 0;
    auto argument = [&](u32 size) {
        offset = (offset + size - 1) / size * size;
        u64 value = 0;
        std::memcpy(&value, resolve(w, Space::Generic, arguments + offset, size, Access::Read, lane), size);
        offset += size;
        return value;
    };
    for (size_t i = 0; i < format.size(); ++i) {
        if (format[i] != '%') {
            out += format[i];
            continue;
        }
        size_t end = format.find_first_of("diouxXeEfFgGaAcsp%", i + 1);
        if (end == std::string::npos)
            break;
        std::string spec = format.substr(i, end - i + 1);
        char kind = spec.back(), buffer[256];
        i = end;
        bool is_long = spec.find('l') != std::string::npos || spec.find('z') != std::string::npos;
        std::string base = spec.substr(0, spec.find_first_of("lhzjt"));
        if (base.size() == spec.size())
            base.pop_back();
        if (kind == '%')
            out += '%';
        else if (kind == 's')
            out += text_at(w, argument(8));
        else if (std::string("eEfFgGaA").find(kind) != std::string::npos)
            std::snprintf(buffer, sizeof(buffer), (base + kind).c_str(), bits<double>(argument(8))), out += buffer;
        else if (kind == 'p')
            out += hex(argument(8));
        else if (kind == 'c')
            out += static_cast<char>(argument(4));
        else if (kind == 'd' || kind == 'i')
            std::snprintf(buffer, sizeof(buffer), (base + "lld").c_str(),
                is_long ? static_cast<long long>(argument(8)) : static_cast<long long>(static_cast<s32>(argument(4)))),
                out += buffer;
        else
            std::snprintf(buffer, sizeof(buffer), (base + "ll" + kind).c_str(),
                static_cast<unsigned long long>(argument(is_long ? 8 : 4))),
                out += buffer;
    }
    return out;
}

void exec_vprintf(Warp& w, const Inst& in, u32 m) {
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        u64 format, arguments;
        std::memcpy(&format, local_pointer(w, w.extra(in, 0), 8, lane), 8);
        std::memcpy(&arguments, local_pointer(w, w.extra(in, 1), 8, lane), 8);
        if (w.machine->printed.size() < (1u << 20))
            w.machine->printed += format_print(w, text_at(w, format), arguments, lane);
    }
}

void exec_assertfail(Warp& w, const Inst& in, u32 m) {
    int lane = first_lane(m);
    u64 message, file;
    u32 line;
    std::memcpy(&message, local_pointer(w, w.extra(in, 0), 8, lane), 8);
    std::memcpy(&file, local_pointer(w, w.extra(in, 1), 8, lane), 8);
    std::memcpy(&line, local_pointer(w, w.extra(in, 2), 4, lane), 4);
    throw Fault("assertion",
        text_at(w, file) + ":" + std::to_string(line) + ": assertion '" + text_at(w, message) + "' failed");
}

void build_call(Builder& b) {
    b.take("uni");
    size_t at = b.count() && b.at(0).kind == Operand::Kind::Vector ? 1 : 0;
    const std::string& name = b.at(at).name;
    bool is_print = name == "vprintf", is_assert = name == "__assertfail";
    if (!is_print && !is_assert)
        b.fail(
            "calls of '" + name + "' are not modelled: it has no body here, and is neither vprintf nor __assertfail");
    for (const Operand& parameter : b.at(at + 1).parts)
        b.constant_extra(b.local_offset(parameter));
    b.emit(is_print ? exec_vprintf : exec_assertfail);
}

} // namespace

void register_control(Table& table) {
    table["label"] = [](Builder& b) { b.emit(exec_label); };
    table["bra"] = build_branch;
    table["exit"] = table["ret"] = build_exit;
    table["trap"] = build_trap;
    table["brkpt"] = build_trap;
    table["call"] = build_call;
    table["nanosleep"] = build_nanosleep;
    table["setmaxnreg"] = build_setmaxnreg;
    table["prefetch"] = table["prefetchu"] = build_prefetch;
    table["applypriority"] = table["discard"] = build_line_hint;
    table["griddepcontrol"] = build_dependency;
    table["pmevent"] = build_event;
}

} // namespace deep_gemm_k3::emulator
