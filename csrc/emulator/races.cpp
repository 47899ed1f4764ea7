#include "exec.hpp"

namespace deep_gemm_k3::emulator {

void note_access(Warp&, const Inst&, u8*, u32, Access, int) {}

} // namespace deep_gemm_k3::emulator
