"""The package's own kernel through the public calls, on the emulator: four local ranks, every mode, every check."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import deep_gemm_k3 as dg
from deep_gemm_k3 import _extension
from deep_gemm_k3.demo import checks
from deep_gemm_k3.demo.data import Problem, make_layer
from deep_gemm_k3.demo.run import Progress, run
from deep_gemm_k3.emulator import service
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world


@pytest.fixture
def emulated() -> Iterator[None]:
    _extension.ops().set_cpu_route("emulator")
    service.clear()
    yield
    _extension.ops().set_cpu_route("oracle")
    service.configure()


SMALL = Problem(
    hidden=256, intermediate=256, shared_hidden=512, shared_slice=128, experts_per_rank=2, tokens=(3, 0, 6, 4)
)


def test_one_rank_agrees_with_the_oracle(emulated: None) -> None:
    shape = WorldShape(
        tokens=(5,),
        experts=2,
        topk=2,
        hidden=128,
        intermediate=128,
        shared_tokens=4,
        shared_hidden=128,
        shared_intermediate=128,
    )
    given = make_world(shape, 1, target="sm_90a")[0]
    outputs = []
    for route in ("emulator", "oracle"):
        _extension.ops().set_cpu_route(route)
        buffer = dg.get_symm_buffer_for_mega_moe(
            None, 2, 384, 2, 128, 128, bf16_shared_intermediate_hidden=128, num_sms=2
        )
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            getattr(buffer, name)[:5].copy_(getattr(given.routed, name))
        y = torch.full((5, 128), float("nan"), dtype=torch.bfloat16)
        dg.fp8_fp4_mega_moe(y, given.l1, given.l2, buffer)
        buffer.destroy()
        outputs.append(y)
    assert metrics.relative_l2(*outputs) < 2e-3
    assert not service.report()["findings"]


@pytest.mark.emu_full
@pytest.mark.parametrize("adversary", ["random", "earliest", "latest"])
def test_four_ranks_in_every_mode(emulated: None, adversary: str) -> None:
    service.configure(seed=4, adversary=adversary)
    layer = make_layer(SMALL)
    rows = checks.check(layer, run(layer, "cpu", Progress()), lambda _: None)
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]
    report = service.report()
    assert report["counters"]["wgmma"] + report["counters"]["mma"] > 0
    assert not report["findings"]
