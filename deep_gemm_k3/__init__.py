"""deep_gemm_k3: a fused, JIT-compiled MegaMoE kernel extension for Kimi K3."""
