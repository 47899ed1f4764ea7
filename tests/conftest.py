"""Shared by all tests: devices, seeds, hypothesis, and the rule that nothing but a missing GPU may skip a test."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")

GPU_MARKERS = {"gpu": 1, "gpu2": 2}


@functools.cache
def cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, wanted in GPU_MARKERS.items():
            if item.get_closest_marker(marker) and cuda_devices() < wanted:
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {cuda_devices()}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not any(item.get_closest_marker(m) for m in GPU_MARKERS):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: only a missing GPU may skip a test, this one skipped itself"
    return report


@pytest.fixture(autouse=True)
def _seeds() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def source_root() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
