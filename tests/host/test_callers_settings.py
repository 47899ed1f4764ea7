"""What a caller's thread has set for torch changes nothing about a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from small_ranks import Rank, alone


@contextlib.contextmanager
def restored(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast_bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_float16": lambda: torch.autocast("cpu", torch.float16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "default_device": lambda: torch.device("meta"),
    "default_float64": lambda: restored(torch.set_default_dtype, torch.float64, torch.float32),
    "default_bfloat16": lambda: restored(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "matmul_medium": lambda: restored(torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": lambda: restored(torch.use_deterministic_algorithms, True, False),
    "one_thread": lambda: restored(torch.set_num_threads, 1, torch.get_num_threads()),
}


@pytest.fixture(scope="module")
def expected() -> tuple[torch.Tensor, torch.Tensor]:
    rank = alone()
    rank.dense()
    return rank.y, rank.shared_y


def equal(rank: Rank, expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(rank.y, expected[0]) and torch.equal(rank.shared_y, expected[1])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_callers_settings_change_nothing(name: str, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    rank = alone()
    with SETTINGS[name]():
        rank.dense()
    assert equal(rank, expected)
    rank.y.zero_()
    rank.dense()
    assert equal(rank, expected)


def test_inputs_may_require_gradients(expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    rank = alone()
    shared = rank.given.shared
    assert shared is not None
    rank.dense(
        shared_x=shared.x.clone().requires_grad_(),
        shared_l1_weights=torch.nn.Parameter(shared.l1),
        shared_l2_weights=torch.nn.Parameter(shared.l2),
        rms_weight=torch.nn.Parameter(shared.rms_weight),
    )
    assert equal(rank, expected)
    assert not rank.y.requires_grad and not rank.shared_y.requires_grad
