"""The executor: launch records over raw memory, several ranks in threads, against the whole-world oracle."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deep_gemm_k3.testing import executor, metrics
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.world import RankInput, mega_moe_reference

SITU = Options("situ", None, 4.0, 25.0)
SHAPE = WorldShape((5, 0, 3, 8), 8, 3, 256, 256, 8, 512, 128)
CAPACITY = 384


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class World:
    """Symmetric buffers and outputs of all ranks in this process, and the records that a host library would write."""

    def __init__(self, ranks: list[RankInput], shape: WorldShape, mode: str) -> None:
        self.ranks, self.shape, self.mode = ranks, shape, mode
        h, k, t = shape.hidden, shape.topk, CAPACITY
        sizes = {"header": 128, "x": t * h, "x_sf": t * h // 32, "topk_idx": 8 * t * k, "topk_weights": 4 * t * k}
        sizes["combine"] = 2 * t * k * h
        self.layout, end = {}, 64
        for name, size in sizes.items():
            self.layout[name] = end
            end += size
        self.buffers = [torch.full((end,), 0x7F, dtype=torch.uint8) for _ in ranks]
        for buffer, rank in zip(self.buffers, ranks, strict=True):
            for name in ("x", "x_sf", "topk_idx", "topk_weights"):
                value = getattr(rank.routed, name).contiguous().view(-1).view(torch.uint8)
                buffer[self.layout[name] : self.layout[name] + value.numel()] = value
        self.y = [torch.full((n, h), float("nan"), dtype=torch.bfloat16) for n in shape.tokens]
        self.stats = [torch.full((shape.experts // shape.ranks,), 100, dtype=torch.int32) for _ in ranks]
        self.outputs = self._outputs()
        self.flags = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
        self.flags[2] = self.outputs[0][0].numel() * 2
        self.pointers = torch.tensor([w.data_ptr() for w in self.outputs])
        self.keep: list[Any] = []

    def _outputs(self) -> list[torch.Tensor]:
        s = self.shape
        rows, hidden = s.shared_tokens or 0, s.shared_hidden
        size = {
            "rs": (3, rows, s.ranks, hidden // s.ranks),
            "sp_rs": (2, rows // s.ranks, s.ranks, hidden),
        }.get(self.mode, (rows, hidden))
        return [torch.full(size, float("nan"), dtype=torch.bfloat16) for _ in self.ranks]

    def record(self, index: int) -> dict[str, Any]:
        rank, s = self.ranks[index], self.shape
        tensors = {
            "y": self.y[index],
            "l1_weights": rank.l1[0],
            "l1_weights_sf": rank.l1[1],
            "l2_weights": rank.l2[0],
            "l2_weights_sf": rank.l2[1],
            "cumulative_local_expert_recv_stats": self.stats[index],
        }
        suffix = {"routed": "", "dense": "_bf16_shared"}.get(self.mode, f"_bf16_shared_{self.mode}")
        if self.mode != "routed":
            assert rank.shared is not None
            tensors |= {"shared_x": rank.shared.x, "rms_weight": rank.shared.rms_weight}
            tensors |= {"shared_l1_weights": rank.shared.l1, "shared_l2_weights": rank.shared.l2}
        if self.mode == "dense":
            tensors["shared_y"] = self.outputs[index]
        elif self.mode != "routed":
            tensors |= {"shared_rs_workspace": self.outputs[index], "shared_rs_flags": self.flags}
            tensors["shared_rs_peer_ptrs"] = self.pointers
        self.keep.append(tensors)
        scalars = {"num_tokens": s.tokens[index], "num_shared_tokens": s.shared_tokens, "rms_epsilon": 1e-5}
        return {
            "version": 1,
            "entry": "fp8_fp4_mega_moe" + suffix,
            "handle": 1,
            "rank": index,
            "num_ranks": s.ranks,
            "problem": {
                "num_experts": s.experts,
                "num_topk": s.topk,
                "num_max_tokens_per_rank": CAPACITY,
                "hidden": s.hidden,
                "intermediate_hidden": s.intermediate,
            },
            "tensors": {n: [t.data_ptr(), str(t.dtype)[6:], list(t.shape)] for n, t in tensors.items()},
            "scalars": scalars | dataclasses.asdict(SITU) | {"fast_math": False, "batch_invariant": False},
            "peers": [buffer.data_ptr() for buffer in self.buffers],
            "layout": self.layout,
            "plan": {},
        }

    def run(self, monkeypatch: pytest.MonkeyPatch, change: Any = None) -> list[Exception | None]:
        barrier = threading.Barrier(self.shape.ranks, timeout=60)
        phases: list[int] = []

        def join(call: executor._Call, phase: int) -> None:
            phases.append(phase)
            barrier.wait()

        monkeypatch.setattr(executor._Call, "barrier", join)
        errors: list[Exception | None] = [None] * self.shape.ranks

        def one(index: int) -> None:
            record = self.record(index)
            if change is not None:
                change(index, record)
            try:
                executor.run(json.dumps(record))
            except RuntimeError as error:
                errors[index] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(self.shape.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


@pytest.mark.parametrize("mode", ["routed", "dense", "rs", "sp_rs"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_executor_equals_the_oracle(mode: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make_world(SHAPE, 71, "holes", target=target)
    if mode == "routed":
        ranks = [dataclasses.replace(rank, shared=None) for rank in ranks]
    world = World(ranks, SHAPE, mode)
    for _ in range(2):  # nothing of the first call is in the way of the second
        assert world.run(monkeypatch) == [None] * 4
    publication = mode if mode.endswith("rs") else None
    wanted = [torch.full_like(t, float("nan")) for t in world.outputs]
    reference = [dataclasses.replace(r, workspace=w) for r, w in zip(ranks, wanted, strict=True)]
    for index, out in enumerate(mega_moe_reference(reference, SITU, publication, generation=1)):
        metrics.assert_bitwise(world.y[index], out.y)
        assert torch.equal(world.stats[index], 100 + 2 * out.counts)
        if mode == "dense":
            assert out.shared_y is not None
            metrics.assert_bitwise(world.outputs[index], out.shared_y)
    if publication:
        for got, want in zip(world.outputs, wanted, strict=True):
            metrics.assert_bitwise(got, want)


def test_every_rank_refuses_a_bad_expert_id(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [dataclasses.replace(rank, shared=None) for rank in make_world(SHAPE, 73)]
    ranks[2].routed.topk_idx[1, 2] = 8
    world = World(ranks, SHAPE, "routed")
    for error in world.run(monkeypatch):
        assert "topk_idx on rank 2, token 1, slot 2: wanted -1 or an expert below 8, given 8" in str(error)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("generation", r"rank 1: shared_rs_flags[0]: wanted a generation"),
        ("stride", r"rank 1: shared_rs_flags[2]: wanted the workspace's bytes"),
        ("pointers", r"rank 1: shared_rs_peer_ptrs: wanted distinct addresses"),
        ("rows", "num_shared_tokens: wanted one number on all ranks, given 8 on rank 0 and 4 on rank 1"),
    ],
)
def test_every_rank_refuses_a_bad_publication(what: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_world(SHAPE, 79), SHAPE, "rs")
    flags, pointers = world.flags.clone(), world.pointers.clone()
    flags[0 if what == "generation" else 2] = 3
    pointers[3] = pointers[0]

    def change(index: int, record: dict[str, Any]) -> None:
        if index != 1:
            return
        if what == "rows":
            record["scalars"]["num_shared_tokens"] = 4
        elif what == "pointers":
            record["tensors"]["shared_rs_peer_ptrs"][0] = pointers.data_ptr()
        else:
            record["tensors"]["shared_rs_flags"][0] = flags.data_ptr()

    for error in world.run(monkeypatch, change):
        assert message in str(error)


def test_empty_tensors_never_touch_their_address() -> None:
    assert list(executor.tensor_at(0, torch.bfloat16, [0, 7]).shape) == [0, 7]
