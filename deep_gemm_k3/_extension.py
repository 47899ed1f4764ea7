"""The host extension: found, checked and loaded once, on first use."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

PACKAGE_DIR = Path(__file__).resolve().parent
LIBRARY = PACKAGE_DIR / "_C.so"
INCLUDE_DIR = PACKAGE_DIR / "include"
OLDEST_TORCH = (2, 11)

_lock = threading.Lock()
_loaded = False


class ExtensionError(ImportError):
    """The host extension cannot be used; the message names the command that mends it."""


def mending_command() -> str:
    if (PACKAGE_DIR.parent / "setup.py").exists():
        return f"cd {PACKAGE_DIR.parent} && python setup.py build_ext --inplace"
    return "pip install --force-reinstall --no-deps --no-build-isolation deep_gemm_k3"


def layout_digest(include_dir: Path = INCLUDE_DIR) -> str:
    """Hash of the headers by which host library and kernels agree: configs, arguments, every offset.

    setup.py compiles it into the library; a library built from other headers would launch kernels with wrong addresses.
    """
    root = include_dir / "deep_gemm_k3"
    shared = [root / name for name in ("types.cuh", "config.cuh", "params.cuh", "sync/fault.cuh")]
    digest = hashlib.sha256()
    for path in (*shared, *sorted((root / "plan").glob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def check_layout(built: str) -> None:
    """Raises unless ``built``, the digest inside the library, is that of this installation's headers."""
    found = layout_digest()
    if built != found:
        raise ExtensionError(
            f"deep_gemm_k3: wanted a host extension built from the headers in {INCLUDE_DIR} (digest {found}), given "
            f"{LIBRARY} built from others (digest {built}). Mend with: {mending_command()}"
        )


def torch_release(version: str) -> tuple[int, int]:
    """(major, minor) of a torch version string."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def configure_log() -> None:
    """Lets DGK3_LOG_LEVEL, where it is set, decide what the package's logger prints. Otherwise the program decides."""
    import logging

    from deep_gemm_k3 import envs

    if not envs.LOG_LEVEL.is_set():
        return
    log = logging.getLogger("deep_gemm_k3")
    log.setLevel(envs.LOG_LEVEL.get().upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False


def load() -> None:
    """Loads the extension into torch's dispatcher; later calls cost one comparison."""
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        import torch

        if torch_release(torch.__version__) < OLDEST_TORCH:
            raise ExtensionError(
                f"deep_gemm_k3: wanted torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} (the host extension uses its "
                f"stable ABI), given torch {torch.__version__}. Mend with: pip install 'torch>=2.11'"
            )
        if not LIBRARY.exists():
            raise ExtensionError(
                f"deep_gemm_k3: the host extension {LIBRARY} has not been built. Mend with: {mending_command()}"
            )
        try:
            torch.ops.load_library(str(LIBRARY))
        except OSError as error:
            raise ExtensionError(
                f"deep_gemm_k3: the host extension {LIBRARY} cannot be loaded with torch {torch.__version__}; it was "
                f"built for another machine or another torch ({error}). Mend with: {mending_command()}"
            ) from error
        check_layout(getattr(torch.ops.deep_gemm_k3, "layout_digest", lambda: "none")())
        configure_log()
        _loaded = True


def ops() -> Any:
    """``torch.ops.deep_gemm_k3`` with the extension loaded."""
    load()
    import torch

    return torch.ops.deep_gemm_k3
