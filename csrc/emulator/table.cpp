// The table of every opcode that has a model.
#include "ops.hpp"

namespace deep_gemm_k3::emulator {

const std::unordered_map<std::string, BuildFunction>& build_table() {
    static const Table table = [] {
        Table made;
        register_control(made);
        register_integer(made);
        register_bits(made);
        register_float(made);
        register_convert(made);
        register_compare(made);
        register_move(made);
        register_memory(made);
        register_atomics(made);
        register_warp(made);
        register_barriers(made);
        register_mbarrier(made);
        register_async(made);
        register_matrix(made);
        register_mma(made);
        register_wgmma(made);
        register_tcgen05(made);
        return made;
    }();
    return table;
}

} // namespace deep_gemm_k3::emulator
