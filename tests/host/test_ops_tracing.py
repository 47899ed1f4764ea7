"""The operator under fake tensors, torch.compile and several threads, and what a call costs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from small_ranks import BF16, Rank, alone

import deep_gemm_k3 as dg
from deep_gemm_k3 import envs, ops, probes


def caller(rank: Rank) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rank.buffer.topk_weights[: x.size(0)].copy_(x[:, :2])
        dg.fp8_fp4_mega_moe(y, rank.given.l1, rank.given.l2, rank.buffer)
        return y * 2

    return layer


def test_fake_tensors_trace_a_call_without_running_it() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    rank = alone()
    with FakeTensorMode() as mode:
        y = torch.empty(3, 128, dtype=BF16)
        pairs = [tuple(mode.from_tensor(t) for t in pair) for pair in (rank.given.l1, rank.given.l2)]
        arguments = [y, *pairs[0], *pairs[1], mode.from_tensor(rank.buffer.buffer), rank.buffer.handle, 0]
        ops.mega_moe(*arguments, *([None] * 10), (1, 1, 32), "swiglu", None, True, None, None, False, "host")
    assert rank.y.isnan().all()


def test_torch_compile_traces_a_caller() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    rank = alone()
    layer = caller(rank)
    x, y = torch.rand(3, 4), torch.full((3, 128), float("nan"), dtype=BF16)
    expected = layer(x, y).clone()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    again = torch.full((3, 128), float("nan"), dtype=BF16)
    assert torch.equal(compiled(x, again), expected)
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert ops.mega_moe in targets


def test_schema_names_what_is_written() -> None:
    schema = ops.mega_moe._schema
    written = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert written == {"y", "buffer", "shared_y", "shared_rs_workspace", "cumulative_local_expert_recv_stats"}
    assert not schema.returns


# ------------------------------------------------------------------------------------------------------------ threads, cost
def test_calls_from_several_threads_on_buffers_of_their_own() -> None:
    ranks = [alone() for _ in range(4)]
    expected = [rank.routed() for rank in ranks] and [rank.y.clone() for rank in ranks]
    errors: list[BaseException] = []

    def work(rank: Rank) -> None:
        try:
            for tokens in (1, 2, 3, 2, 1, 3):
                rank.routed(y=rank.y[:tokens])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(rank.y, wanted) for rank, wanted in zip(ranks, expected, strict=True))


def test_a_null_launch_stops_before_anything_is_written() -> None:
    rank = alone()
    torch.ops.deep_gemm_k3.set_route(rank.buffer.handle, "none")
    rank.routed()
    rank.dense()
    assert rank.y.isnan().all() and rank.shared_y.isnan().all()
    torch.ops.deep_gemm_k3.set_route(rank.buffer.handle, "oracle")
    rank.routed()
    assert not rank.y.isnan().any()


def test_validated_calls_are_cheap(source_root: str) -> None:
    """A loose bound: the figure itself comes from the script, on a quiet machine."""
    environment = envs.child_environment({"PYTHONPATH": source_root, "DGK3_CPU_TARGET": None})  # as its users do
    script = f"{source_root}/scripts/measure_host_overhead.py"
    printed = subprocess.run(
        [sys.executable, script, "--calls", "2000"], check=True, capture_output=True, text=True, env=environment
    ).stdout
    figures = [float(line.split()[-2]) for line in printed.splitlines() if line.endswith(" us")]
    assert len(figures) == 4 and max(figures) < 200


def test_probe_of_the_driver_agrees_with_torch() -> None:
    assert bool(probes.cuda_driver()) == torch.cuda.is_available()
