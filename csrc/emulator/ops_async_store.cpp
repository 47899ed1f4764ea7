// st.async and red.async.
#include "async.hpp"

namespace deep_gemm_k3::emulator {

namespace {

// extras: op, type, then values; a the target, c the barrier, d its row
void exec_async_store(Warp& w, const Inst& in, u32 m) {
    Machine& machine = *w.machine;
    ReduceOp reduce = static_cast<ReduceOp>(w.extra(in, 0));
    Type type = static_cast<Type>(w.extra(in, 1));
    u32 size = static_cast<u32>(type_size(type)), n = in.n;
    for (u32 left = m; left; left &= left - 1) {
        int lane = first_lane(left);
        u64 target = (w.address(in.a, lane) + static_cast<u64>(in.imm)) & ~kWindowMask;
        if (target & (size * n - 1))
            fault_misaligned(w, target, size * n);
        SharedPlace to = shared_place(w, target, size * n),
                    bar = mbarrier_place(w, extra_address(w, in, 2, lane) & ~kWindowMask, false);
        auto data = std::make_shared<std::vector<u8>>(size * n);
        for (u32 k = 0; k < n; ++k) {
            u64 value = size == 8 ? w.row<u64>(w.extra(in, 4 + k))[lane] : w.row<u32>(w.extra(in, 4 + k))[lane];
            std::memcpy(data->data() + k * size, &value, size);
        }
        auto op = new_op(w, "an asynchronous store", true);
        op->to_shared = true;
        note_async(w, *op, to.cta->shared.data() + to.offset, size * n, reduce == ReduceOp::None);
        op->write = [=, &machine] {
            if (reduce == ReduceOp::None)
                write_shared(*to.cta, to.offset, data->data(), size * n);
            else
                reduce_bytes(to.cta->shared.data() + to.offset, data->data(), size * n, reduce, type);
            mbarrier_transactions(machine, *bar.cta, bar.offset, -static_cast<s32>(size * n));
        };
        machine.submit(std::move(op));
    }
    ++w.effects;
}

void build_async_store(Builder& b, bool reduces) {
    b.take_any({"weak", "relaxed"});
    b.take_any({"cluster"});
    if (!b.take("shared::cluster") || !b.take("mbarrier::complete_tx::bytes"))
        b.fail("only .shared::cluster with .mbarrier::complete_tx::bytes is modelled");
    ReduceOp op = reduces ? take_reduce(b) : ReduceOp::None;
    std::string vector = b.take_of({"v2", "v4"});
    u32 n = vector.empty() ? 1 : static_cast<u32>(vector[1] - '0');
    Type type = b.take_type();
    if (reduces ? !reduce_exists(op, type) || type_is_float(type) : type_size(type) < 4 || n * type_size(type) > 16)
        b.fail("this type does not exist here");
    b.want(3, 3);
    b.in.n = static_cast<u8>(n);
    b.address(&Inst::a, b.at(0));
    b.constant_extra(static_cast<u32>(op));
    b.constant_extra(static_cast<u32>(type));
    b.address_extra(b.at(2));
    for (u32 k = 0; k < n; ++k)
        b.use_extra(n == 1 ? b.at(1) : b.at(1).parts.at(k), type);
    b.emit(exec_async_store);
}

} // namespace

void build_st_async(Builder& b) {
    build_async_store(b, false);
}
void build_red_async(Builder& b) {
    build_async_store(b, true);
}

} // namespace deep_gemm_k3::emulator
