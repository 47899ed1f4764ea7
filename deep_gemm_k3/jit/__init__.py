"""From a Config to a loaded kernel: source text, toolchain, compiler, cache, warm-up.

    source.py     (kernel, architecture, Config literal) -> one readable translation unit
    toolchain.py  where NVRTC, the CUDA headers and CCCL are
    compiler.py   translation unit -> PTX and cubin
    cache.py      content key, lock between processes, atomic publication, verification
    lock.py       that lock
    kernel.py     memory cache in front of the disk cache; loading into a target
    warmup.py     many kernels in parallel, with progress

Nothing here needs a GPU, and nothing needs torch except loading.
"""

from deep_gemm_k3.jit.cache import Cache, default_cache_dir
from deep_gemm_k3.jit.compiler import Artefact, CompileError, Compiler, NvccCompiler, NvrtcCompiler, default_compiler
from deep_gemm_k3.jit.kernel import KernelStore, default_store
from deep_gemm_k3.jit.source import ARCHITECTURES, KernelSource, literal
from deep_gemm_k3.jit.toolchain import Toolchain, ToolchainError, find_toolchain
from deep_gemm_k3.jit.warmup import WarmupReport, warm_up

__all__ = [
    "ARCHITECTURES",
    "Artefact",
    "Cache",
    "CompileError",
    "Compiler",
    "KernelSource",
    "KernelStore",
    "NvccCompiler",
    "NvrtcCompiler",
    "Toolchain",
    "ToolchainError",
    "WarmupReport",
    "default_cache_dir",
    "default_compiler",
    "default_store",
    "find_toolchain",
    "literal",
    "warm_up",
]
