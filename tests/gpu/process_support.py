"""The fused kernel with one process per device: what runs inside the processes. `rank_of` is a rank's view of a family.

Without two devices the same code runs over gloo on the CPU, with the oracle behind the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mega_support import DEVICE, Family, Signature, how_of, patience_s

from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.group import Group, as_group
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.processes import warm_up
from deep_gemm_k3.testing.runner import RankResult, check_published, check_rank, make_buffer, run_rank
from deep_gemm_k3.testing.world import RankInput, RankOutput, mega_moe_reference

BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"
PROCESSES = 2


class Warm:
    """Something to do while kernels are compiled: start what the processes are forked from."""

    def start(self) -> None:
        warm_up()


class OneRank:
    """This process's rank with its buffer, in the place of a session of local ranks."""

    def __init__(self, shape: WorldShape, **options: Any) -> None:
        self.group: Group = as_group(None)
        self.buffer = make_buffer(None, shape, **options)

    def run(self, body: Callable[[Group, SymmBuffer], Any], timeout_s: float = 120.0) -> list[Any]:
        return [body(self.group, self.buffer)]

    def close(self) -> None:
        self.buffer.destroy()


class ProcessFamily(Family):
    """A family whose ranks are processes: `world` makes all ranks' inputs in each of them, a call runs this one's."""

    ranks_on_a_device = 1

    @property
    def session(self) -> Any:
        if self._session is None:
            options = {"device": DEVICE, "timeout_s": patience_s(), **self._buffer_options}
            self._session = OneRank(self.shape, **options)  # type: ignore[assignment]
        return self._session

    @property
    def group(self) -> Group:
        return self.session.group

    def run_here(self, ranks: Sequence[RankInput], signature: Signature, calls: int = 1) -> RankResult:
        def body(group: Group, buffer: SymmBuffer) -> RankResult:
            return run_rank(
                group, buffer, ranks[group.rank], signature.options, signature.mode, how_of(signature, calls)
            )

        (result,) = self.each_rank(body)
        return result

    def expected(self, ranks: Sequence[RankInput], signature: Signature) -> list[RankOutput]:
        from dataclasses import replace

        asked = [replace(one, shared=None) if signature.mode == "routed" else one for one in ranks]
        return mega_moe_reference(asked, signature.options)

    def check_here(
        self, ranks: Sequence[RankInput], signature: Signature, bitwise: bool = True, calls: int = 1
    ) -> RankResult:
        """`check_world` for this rank. What was published is compared with the oracle's partials (``bitwise``) or with
        those that every rank's dense call wrote."""
        expected, rank, mode = self.expected(ranks, signature), self.group.rank, signature.mode
        got = self.run_here(ranks, signature, calls)
        check_rank(got, expected[rank], f"{signature}, rank {rank}", calls, bitwise)
        if mode in ("rs", "sp_rs"):
            partials = (
                [one.shared_y for one in expected] if bitwise else self.dense_partials(ranks, signature, expected)
            )
            check_published(partials, mode, calls, {rank: got})
        return got

    def dense_partials(
        self, ranks: Sequence[RankInput], signature: Signature, expected: Sequence[RankOutput] | None = None
    ) -> list[torch.Tensor]:
        """What the dense mode writes on every rank, gathered; near the oracle's."""
        from dataclasses import replace

        got = self.run_here(ranks, replace(signature, mode="dense"))
        mine = got.shared_y
        assert mine is not None
        if expected is not None:
            want = expected[self.group.rank].shared_y
            assert want is not None
            metrics.assert_close(mine, want, "dense partial")
        gathered = self.group.all_gather(mine.view(torch.int16).cpu().numpy(), "dense partials")
        return [torch.from_numpy(part).to(DEVICE).view(torch.bfloat16) for part in gathered]
