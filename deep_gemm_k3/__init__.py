"""deep_gemm_k3: a fused, JIT-compiled MegaMoE kernel extension for Kimi K3.

Every public name is imported on first use, so ``import deep_gemm_k3`` needs neither a GPU, nor libcuda, nor NVRTC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The same names as in _PUBLIC, for type checkers.
    from .mega.api import (
        fp8_fp4_mega_moe,
        fp8_fp4_mega_moe_bf16_shared,
        fp8_fp4_mega_moe_bf16_shared_rs,
        fp8_fp4_mega_moe_bf16_shared_sp_rs,
    )
    from .mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
    from .mega.local_world import local_world
    from .mega.plan import Plan, warmup
    from .mega.publication import PublicationWorkspace
    from .mega.weights import transform_weights_for_mega_moe
    from .probes import supports_bf16_shared_independent_tokens
    from .utils.layout import transform_sf_into_required_layout

    __version__: str

__all__ = [
    "Plan",
    "PublicationWorkspace",
    "SymmBuffer",
    "__version__",
    "fp8_fp4_mega_moe",
    "fp8_fp4_mega_moe_bf16_shared",
    "fp8_fp4_mega_moe_bf16_shared_rs",
    "fp8_fp4_mega_moe_bf16_shared_sp_rs",
    "get_symm_buffer_for_mega_moe",
    "local_world",
    "supports_bf16_shared_independent_tokens",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "warmup",
]

# public name -> module that holds it
_PUBLIC: dict[str, str] = {
    "Plan": ".mega.plan",
    "PublicationWorkspace": ".mega.publication",
    "SymmBuffer": ".mega.buffer",
    "fp8_fp4_mega_moe": ".mega.api",
    "fp8_fp4_mega_moe_bf16_shared": ".mega.api",
    "fp8_fp4_mega_moe_bf16_shared_rs": ".mega.api",
    "fp8_fp4_mega_moe_bf16_shared_sp_rs": ".mega.api",
    "get_symm_buffer_for_mega_moe": ".mega.buffer",
    "local_world": ".mega.local_world",
    "supports_bf16_shared_independent_tokens": ".probes",
    "transform_sf_into_required_layout": ".utils.layout",
    "transform_weights_for_mega_moe": ".mega.weights",
    "warmup": ".mega.plan",
}

_SUBMODULES = ("bench", "demo", "doctor", "emulator", "envs", "jit", "mega", "ops", "probes", "testing", "utils")


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("deep_gemm_k3")
    except metadata.PackageNotFoundError:
        # A source tree on PYTHONPATH without an installation.
        import tomllib
        from pathlib import Path

        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        if project.exists():
            return str(tomllib.loads(project.read_text())["project"]["version"])
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_SUBMODULES, "__version__"})
