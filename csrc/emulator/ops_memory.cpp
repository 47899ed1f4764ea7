// Loads and stores of every space and vector width.
#include "async.hpp"

namespace deep_gemm_k3::emulator {

u16 take_ordering(Builder& b, Order fallback, Scope fallback_scope) {
    Order order = fallback;
    bool mmio = b.take("mmio");
    std::string name = b.take_of({"weak", "volatile", "relaxed", "acquire", "release", "acq_rel"});
    if (name == "weak")
        order = Order::Weak;
    if (name == "volatile")
        order = Order::Volatile;
    if (name == "relaxed")
        order = Order::Relaxed;
    if (name == "acquire")
        order = Order::Acquire;
    if (name == "release")
        order = Order::Release;
    if (name == "acq_rel")
        order = Order::AcqRel;
    Scope scope = order == Order::Volatile ? Scope::Sys : fallback_scope;
    std::string where = b.take_of({"cta", "cluster", "gpu", "sys"});
    if (where == "cta")
        scope = Scope::Cta;
    if (where == "cluster")
        scope = Scope::Cluster;
    if (where == "gpu")
        scope = Scope::Gpu;
    if (where == "sys")
        scope = Scope::Sys;
    bool has_default = b.s.op != "mbarrier" && fallback_scope != Scope::None; // a scope alone, or an order alone
    if (!has_default && b.s.op != "fence" && name != "weak" && name != "volatile" && name.empty() != where.empty())
        b.fail(name.empty() ? "wanted a memory order" : "wanted a scope");
    bool is_strong = order != Order::Weak;
    if (mmio && (order != Order::Relaxed || scope != Scope::Sys))
        b.fail(".mmio wants .relaxed.sys");
    return static_cast<u16>(static_cast<u16>(order) | (is_strong ? static_cast<u16>(scope) << kScopeShift : 0));
}

void want_order(const Builder& b, u16 mode, std::initializer_list<Order> orders) {
    Order given = order_of(mode);
    bool is_known = false;
    for (Order order : orders)
        is_known |= order == given;
    if (!is_known)
        b.fail("this memory order does not exist here");
    if (given != Order::Weak && scope_of(mode) == Scope::None)
        b.fail("wanted a scope");
}

Space take_space(Builder& b, Space fallback) {
    if (b.take("global"))
        return Space::Global;
    if (b.take_any({"shared", "shared::cta", "shared::cluster"}))
        return Space::Shared;
    if (b.take("local"))
        return Space::Local;
    if (b.take("const"))
        return Space::Const;
    if (b.take_any({"param", "param::entry", "param::func"}))
        return Space::Param;
    return fallback;
}

bool take_cache_hints(Builder& b) {
    while (b.take_any({"ca", "cg", "cs", "lu", "wb", "wt", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first",
        "L1::evict_last", "L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B",
        "L2::128B", "L2::256B", "unified"})) {
    }
    return b.take("L2::cache_hint");
}

// A loop may poll at more places than a split remembers: what it remembers stays until the loop has surely been left.
constexpr u32 kPollsOfALoop = 64;

void note_poll(Warp& w, u64 hash) {
    Split& split = *w.current;
    const u32 pc = w.pc - 1, now = ++split.num_polls;
    Poll* oldest = &split.polls[0];
    for (Poll& poll : split.polls) {
        if (poll.pc == pc) {
            if (poll.hash == hash && poll.effects == w.effects)
                w.stop = Stop::Parked, w.wait.what = nullptr;
            poll = {pc, now, hash, w.effects};
            return;
        }
        if (oldest->pc != kNoPc && (poll.pc == kNoPc || poll.last < oldest->last))
            oldest = &poll;
    }
    if (oldest->pc == kNoPc || now - oldest->last > kPollsOfALoop)
        *oldest = {pc, now, hash, w.effects};
}

namespace {

bool all_written(const u8* written, u32 bytes) {
    for (u32 i = 0; i < bytes; ++i)
        if (!written[i])
            return false;
    return true;
}

template <class T, class Row>
inline Row extend(T value, bool sign) {
    if constexpr (sizeof(T) == sizeof(Row))
        return std::bit_cast<Row>(value);
    else if constexpr (sizeof(T) == 16)
        return Row{};
    else {
        using Signed = std::make_signed_t<T>;
        using Out = std::make_signed_t<Row>;
        return sign ? static_cast<Row>(static_cast<Out>(static_cast<Signed>(value))) : static_cast<Row>(value);
    }
}

template <class T, class Row>
void exec_ld(Warp& w, const Inst& in, u32 m) {
    constexpr u32 kElement = sizeof(T);
    const u32 n = in.n, bytes = kElement * n;
    Row* out[16];
    if (n == 1)
        out[0] = w.row<Row>(in.dst);
    else
        for (u32 k = 0; k < n; ++k)
            out[k] = w.row<Row>(w.extra(in, k));
    const bool sign = in.mode & kSignExtend, polls = in.mode & kPolls,
               races = w.machine->races != nullptr && in.space != Space::Local && in.space != Space::Param &&
                       in.space != Space::Const;
    Cta& cta = *w.cta;
    u64 hash = 0;
    bool is_shared = false;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u64 address = w.address(in.a, i) + static_cast<u64>(in.imm);
        u8* p = resolve(w, in.space, address, bytes, Access::Read, i);
        if (is_shared_access(in.space, address)) {
            is_shared = true;
            size_t offset = static_cast<size_t>(p - cta.shared.data());
            if (offset < cta.shared.size() && !all_written(cta.written.data() + offset, bytes))
                check_initialised(w, p, bytes, address);
        }
        if (races)
            note_access(w, in.mode, p, bytes, Access::Read, i);
        T value[16];
        if (n == 1)
            std::memcpy(value, p, kElement);
        else if (bytes == 16)
            std::memcpy(value, p, 16); // one access: flags may travel with the data
        else
            std::memcpy(value, p, bytes);
        for (u32 k = 0; k < n; ++k)
            out[k][i] = extend<T, Row>(value[k], sign);
        if (polls) {
            u64 seen = 0;
            std::memcpy(&seen, value, std::min<size_t>(8, bytes));
            hash = hash * 0x9e3779b97f4a7c15ull + seen + address;
        }
    }
    u64 total = u64{bytes} * static_cast<u64>(std::popcount(m));
    if (is_shared)
        w.machine->counters.shared_read += total;
    else if (in.space == Space::Global || in.space == Space::Generic)
        count_global(w, w.address(in.a, first_lane(m)) + static_cast<u64>(in.imm), total, false);
    if (polls)
        note_poll(w, hash);
    if (scope_of(in.mode) == Scope::Sys)
        ++w.machine->counters.system_operations;
}

template <class T, class Row>
void exec_st(Warp& w, const Inst& in, u32 m) {
    constexpr u32 kElement = sizeof(T);
    const u32 n = in.n, bytes = kElement * n;
    const Row* source[16];
    if (n == 1)
        source[0] = w.row<Row>(in.b);
    else
        for (u32 k = 0; k < n; ++k)
            source[k] = w.row<Row>(w.extra(in, k));
    const bool races =
        w.machine->races != nullptr && in.space != Space::Local && in.space != Space::Param && in.space != Space::Const;
    bool is_shared = false;
    for (u32 left = m; left; left &= left - 1) {
        int i = first_lane(left);
        u64 address = w.address(in.a, i) + static_cast<u64>(in.imm);
        u8* p = resolve(w, in.space, address, bytes, Access::Write, i);
        is_shared = is_shared_access(in.space, address);
        if (races)
            note_access(w, in.mode, p, bytes, Access::Write, i);
        T value[16];
        for (u32 k = 0; k < n; ++k) {
            if constexpr (sizeof(T) == sizeof(Row))
                value[k] = std::bit_cast<T>(source[k][i]);
            else
                value[k] = static_cast<T>(source[k][i]);
        }
        if (n == 1)
            std::memcpy(p, value, kElement);
        else if (bytes == 16)
            std::memcpy(p, value, 16);
        else
            std::memcpy(p, value, bytes);
    }
    if (in.space == Space::Local || in.space == Space::Param)
        return;
    w.machine->touch(w);
    u64 total = u64{bytes} * static_cast<u64>(std::popcount(m));
    if (is_shared)
        w.machine->counters.shared_written += total;
    else
        count_global(w, w.address(in.a, first_lane(m)) + static_cast<u64>(in.imm), total, true);
    if (scope_of(in.mode) == Scope::Sys)
        ++w.machine->counters.system_operations;
}

Handler pick(int size, bool wide_row, bool is_load) {
    switch (size) {
    case 1:
        return is_load ? (wide_row ? exec_ld<u8, u64> : exec_ld<u8, u32>)
                       : (wide_row ? exec_st<u8, u64> : exec_st<u8, u32>);
    case 2:
        return is_load ? (wide_row ? exec_ld<u16, u64> : exec_ld<u16, u32>)
                       : (wide_row ? exec_st<u16, u64> : exec_st<u16, u32>);
    case 4:
        return is_load ? (wide_row ? exec_ld<u32, u64> : exec_ld<u32, u32>)
                       : (wide_row ? exec_st<u32, u64> : exec_st<u32, u32>);
    case 8:
        return is_load ? exec_ld<u64, u64> : exec_st<u64, u64>;
    case 16:
        return is_load ? exec_ld<Vec128, Vec128> : exec_st<Vec128, Vec128>;
    default:
        return nullptr;
    }
}

u32 take_vector(Builder& b) {
    std::string name = b.take_of({"v2", "v4", "v8"});
    return name.empty() ? 1 : static_cast<u32>(name[1] - '0');
}

// Row class of the data operands: registers may be wider than the type.
Type data_type(Builder& b, const Operand& data, Type type) {
    const Operand& one = data.kind == Operand::Kind::Vector ? data.parts.at(0) : data;
    Type actual = b.register_type(one);
    if (actual == Type::None && one.kind == Operand::Kind::Sink && data.kind == Operand::Kind::Vector)
        for (const Operand& part : data.parts)
            if (actual == Type::None)
                actual = b.register_type(part);
    if (actual == Type::None || type_size(actual) < type_size(type))
        return type;
    return row_class(actual) == row_class(type) ? type : actual;
}

void build_load_store(Builder& b) {
    bool is_load = b.s.op != "st";
    if (!is_load && b.take("async"))
        return build_st_async(b);
    bool nc = b.take("nc"), cv = b.take("cv");
    (void)nc;
    u16 mode = take_ordering(b, Order::Weak, Scope::None);
    want_order(b, mode, {Order::Weak, Order::Volatile, Order::Relaxed, is_load ? Order::Acquire : Order::Release});
    bool hint = take_cache_hints(b);
    Space space = take_space(b, Space::Generic);
    u32 n = take_vector(b);
    Type type = b.take_type();
    size_t base = hint ? 3 : 2;
    b.want(base, base);
    const Operand& data = b.at(is_load ? 0 : 1);
    bool is_vector = data.kind == Operand::Kind::Vector;
    if (is_vector && data.parts.size() != n && !(n == 1 && data.parts.size() == 1))
        b.fail("the vector has the wrong number of elements");
    if (!is_vector && n != 1)
        b.fail("wanted a vector operand");
    Type row = data_type(b, data, type);
    b.in.n = static_cast<u8>(n);
    b.in.space = space;
    b.address(&Inst::a, b.at(is_load ? 1 : 0));
    for (u32 k = 0; k < n; ++k) {
        const Operand& operand = is_vector ? data.parts[k] : data;
        if (n == 1)
            is_load ? b.def(&Inst::dst, operand, row) : b.use(&Inst::b, operand, row);
        else
            is_load ? b.def_extra(operand, row) : b.use_extra(operand, row);
    }
    bool is_strong = order_of(mode) != Order::Weak || cv;
    if (type_is_signed(type) && !type_is_float(type))
        mode |= kSignExtend;
    if (is_load && is_strong)
        mode |= kPolls;
    b.in.mode = mode;
    u32 total = n * static_cast<u32>(type_size(type));
    if (total > 32 || type_size(type) == 0)
        b.fail("this vector width does not exist");
    b.emit(pick(type_size(type), row_class(row) == RowClass::Double, is_load));
}

} // namespace

void register_memory(Table& table) {
    table["ld"] = table["ldu"] = table["st"] = build_load_store;
}

} // namespace deep_gemm_k3::emulator
