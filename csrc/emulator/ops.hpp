// Shared by the builder files: handler templates over lanes, type switches, and one registration function per family.
#pragma once

#include <tuple>

#include "decode.hpp"
#include "exec.hpp"
#include "numeric.hpp"

namespace deep_gemm_k3::emulator {

using Table = std::unordered_map<std::string, BuildFunction>;
void build_float(Builder& b);     // add, sub, mul, ... with a floating-point type
void build_half(Builder& b);      // the same for f16, bf16 and their pairs
void build_red_async(Builder& b); // red.async, in the asynchronous family
void register_control(Table& table);
void register_integer(Table& table);
void register_bits(Table& table);
void register_float(Table& table);
void register_convert(Table& table);
void register_compare(Table& table);
void register_move(Table& table);
void register_memory(Table& table);
void register_atomics(Table& table);
void register_warp(Table& table);
void register_barriers(Table& table);
void register_mbarrier(Table& table);
void register_async(Table& table);
void register_matrix(Table& table);
void register_mma(Table& table);
void register_wgmma(Table& table);
void register_tcgen05(Table& table);

// Result and argument types of a lambda without captures.
template <class F>
struct Signature : Signature<decltype(&F::operator())> {};
template <class F, class R, class... A>
struct Signature<R (F::*)(A...) const> {
    using Result = R;
    template <int I>
    using Argument = std::tuple_element_t<I, std::tuple<A...>>;
};

// Lane by lane, F of the operands in the types that F declares.
template <auto F>
void exec_unary(Warp& w, const Inst& in, u32 m) {
    using S = Signature<decltype(F)>;
    using R = typename S::Result;
    using A = typename S::template Argument<0>;
    const Cell<A>* a = w.row<Cell<A>>(in.a);
    write_lanes(w.row<Cell<R>>(in.dst), m, [&](int i) { return to_cell<R>(F(from_cell<A>(a[i]))); });
}

template <auto F>
void exec_binary(Warp& w, const Inst& in, u32 m) {
    using S = Signature<decltype(F)>;
    using R = typename S::Result;
    using A = typename S::template Argument<0>;
    using B = typename S::template Argument<1>;
    const Cell<A>* a = w.row<Cell<A>>(in.a);
    const Cell<B>* b = w.row<Cell<B>>(in.b);
    write_lanes(
        w.row<Cell<R>>(in.dst), m, [&](int i) { return to_cell<R>(F(from_cell<A>(a[i]), from_cell<B>(b[i]))); });
}

template <auto F>
void exec_ternary(Warp& w, const Inst& in, u32 m) {
    using S = Signature<decltype(F)>;
    using R = typename S::Result;
    using A = typename S::template Argument<0>;
    using B = typename S::template Argument<1>;
    using C = typename S::template Argument<2>;
    const Cell<A>* a = w.row<Cell<A>>(in.a);
    const Cell<B>* b = w.row<Cell<B>>(in.b);
    const Cell<C>* c = w.row<Cell<C>>(in.c);
    write_lanes(w.row<Cell<R>>(in.dst), m,
        [&](int i) { return to_cell<R>(F(from_cell<A>(a[i]), from_cell<B>(b[i]), from_cell<C>(c[i]))); });
}

// operands d, a[, b[, c]] of one type
inline void operands_unary(Builder& b, Type type) {
    b.want(2, 2);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
}
inline void operands_binary(Builder& b, Type type) {
    b.want(3, 3);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), type);
}
inline void operands_ternary(Builder& b, Type type) {
    b.want(4, 4);
    b.def(&Inst::dst, b.at(0), type);
    b.use(&Inst::a, b.at(1), type);
    b.use(&Inst::b, b.at(2), type);
    b.use(&Inst::c, b.at(3), type);
}

} // namespace deep_gemm_k3::emulator
