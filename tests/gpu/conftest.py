"""Kernels of the fused call are compiled once, all together, before the first test that needs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Read when CUDA starts. Streams of local ranks must not share a hardware queue, and no code may be loaded while one rank's
# kernel waits for another's.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


@pytest.fixture(scope="session")
def mega_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile the ``FAMILIES`` of all selected modules in parallel; their first calls then load no more than that."""
    import mega_support

    if mega_support.DEVICE.type != "cuda":
        yield
        return
    modules = {id(item.module): item.module for item in request.session.items}
    for module in modules.values():
        if hasattr(module, "BACKGROUND"):
            module.BACKGROUND.start()
    narrowed = mega_support.Narrowed(
        family for module in modules.values() for family in getattr(module, "FAMILIES", ())
    )
    print(f"\n{narrowed.compile()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mega_support.plan, "all_configs", narrowed)
        yield


@pytest.fixture(scope="module", autouse=True)
def _families(request: pytest.FixtureRequest) -> Iterator[None]:
    """The buffers and weights of a module's families live as long as its tests."""
    families = getattr(request.module, "FAMILIES", ())
    if families:
        request.getfixturevalue("mega_kernels")
    yield
    for family in families:
        family.close()
