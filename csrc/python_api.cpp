// Binding table of the host extension: schemas only, no logic.
// Other translation units add their operators with STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm_k3, m).
#include <torch/csrc/stable/library.h>

#include <string>

namespace deep_gemm_k3 {

std::string version() {
    return DEEP_GEMM_K3_VERSION;
}

} // namespace deep_gemm_k3

STABLE_TORCH_LIBRARY(deep_gemm_k3, m) {
    m.def("version() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CompositeImplicitAutograd, m) {
    m.impl("version", TORCH_BOX(&deep_gemm_k3::version));
}
