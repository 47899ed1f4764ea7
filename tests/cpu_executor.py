"""What computes calls on CPU tensors while a module's tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deep_gemm_k3 import envs


@pytest.fixture(scope="module", autouse=True)
def calls_go_to_the_oracle() -> Iterator[None]:
    """These tests are about everything around the kernel: the oracle computes what they call, in child processes too. Their
    weights are in Hopper's layout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(envs.CPU_EXECUTOR.name, "oracle")
        patch.setenv(envs.CPU_TARGET.name, "sm_90a")
        yield
