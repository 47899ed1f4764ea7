"""Upstream's way of calling, over a process group of one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mega_support import DEVICE, Family
from upstream_caller import SHARED_TOKENS, SIGNATURES, TOKENS, call_all, shape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]

FAMILIES = (Family(shape(1), *SIGNATURES, counts=[(TOKENS, SHARED_TOKENS)]),)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    options = {"backend": "gloo"}
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
        options = {"backend": "nccl", "device_id": DEVICE}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60), **options)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_caller_of_upstream(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGK3_TIMEOUT_S", "10")  # such a caller cannot name a limit
    call_all(group, DEVICE)
