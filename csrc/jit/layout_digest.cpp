// Which headers this library was built from: the Python side compares it when it loads the library.
#include <string>
#include <torch/csrc/stable/library.h>

namespace deep_gemm_k3::jit {

std::string layout_digest() {
    return DEEP_GEMM_K3_LAYOUT_DIGEST;
}

} // namespace deep_gemm_k3::jit

STABLE_TORCH_LIBRARY_FRAGMENT(deep_gemm_k3, m) {
    m.def("layout_digest() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(deep_gemm_k3, CompositeImplicitAutograd, m) {
    m.impl("layout_digest", TORCH_BOX(&deep_gemm_k3::jit::layout_digest));
}
