"""What the fused call replaces, as separate operations of torch: the unfused parts, timed in the same run.

The routed experts by torch's grouped GEMM on BF16 weights (the library has none for MXFP4) with the gather, the gating and
the sum over slots around them, the norm, the shared expert by cuBLAS, and for what publication replaces a copy of the
shared output, or between devices NCCL's reduce-scatter. Data are random and weights rotate where they would stay in a
cache; each product is compared with a plain one before its time counts. Parts are timed like single rows, rest included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from .data import DeviceDraws
from .measure import Effort
from .timing import Timer, repeated, timer
from .work import Shape, work

_TOLERANCE = 2e-2  # BF16 results of two orders of summation
_COLD_BYTES = 320 << 20

Parts = dict[str, float]


def situ(gate_up: torch.Tensor) -> torch.Tensor:
    """SiTU as eager torch does it, BF16 in and out."""
    gate, up = (part.float() for part in gate_up.chunk(2, dim=-1))
    return ((4 * torch.tanh(gate / 4)) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))).to(torch.bfloat16)


def _close(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < _TOLERANCE:
        raise RuntimeError(f"baseline {name}: wanted a relative error below {_TOLERANCE}, given {error:.3g}")


class Baselines:
    """The parts for one device, at the widths of ``shape``; ``effort`` says how much is timed.

    BF16 weights of all experts (7.4 GB at K3's 112) are made once, when first needed.
    """

    def __init__(self, shape: Shape, device: torch.device, effort: Effort) -> None:
        self.shape, self.device, self.effort = shape, device, effort
        self._grouped: tuple[torch.Tensor, torch.Tensor] | None = None
        self._shared: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._product: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

    def all(self, shape: Shape, topk_idx: torch.Tensor) -> Parts:
        """Every part of a call of ``shape`` whose tokens chose ``topk_idx``, and their sums."""
        floor = work(shape, shape.experts, topk_idx.numel()).floor_us
        calls = self.effort.calls_of(2 * floor)
        parts = {**self.routed(topk_idx, calls), **self.norm(shape.tokens, calls)}
        parts |= self.shared(shape.shared_tokens, calls)
        gemms = [parts.get(name) for name in ("grouped_gemms_us", "shared_gemms_us") if name in parts]
        if "grouped_gemms_us" in parts:
            parts["gemms_sum_us"] = sum(g for g in gemms if g is not None)
            around = ("gather_us", "gating_us", "slots_us", "norm_us", "shared_gating_us")
            parts["sum_us"] = parts["gemms_sum_us"] + sum(parts.get(name, 0.0) for name in around)
        return parts

    def _time(self, call: Callable[[int], Any], calls: int) -> float:
        call(0)
        timed = timer(call, calls, self.device)
        timed.prepare()
        return repeated(timed, self.effort.replays, self.effort.rest_of(self.device)).median

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    # ------------------------------------------------------------------------------------------------- shared expert
    def _shared_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        s = self.shape
        if not self._shared:
            one = 6 * s.shared_hidden * s.shared_intermediate  # bytes
            g = DeviceDraws(self.device, 8)
            for _ in range(max(2, min(16, -(-_COLD_BYTES // one)))):
                l1 = g.normal(2 * s.shared_intermediate, s.shared_hidden, scale=0.03)
                self._shared.append((l1, g.normal(s.shared_hidden, s.shared_intermediate, scale=0.03)))
        return self._shared

    def shared(self, rows: int, calls: int) -> Parts:
        """The shared expert: its two GEMMs, the cheapest gating (one product), and both with SiTU as eager torch has it."""
        if not rows:
            return {}
        s, weights = self.shape, self._shared_weights()
        x, hidden = self._random(rows, s.shared_hidden), self._random(rows, s.shared_intermediate)
        gate_up, gated = self._empty(rows, 2 * s.shared_intermediate), torch.empty_like(hidden)
        out, copied = self._empty(rows, s.shared_hidden), self._empty(rows, s.shared_hidden)

        def gemms(i: int) -> None:
            l1, l2 = weights[i % len(weights)]
            torch.mm(x, l1.t(), out=gate_up)
            torch.mm(hidden, l2.t(), out=out)

        def whole(i: int) -> None:
            l1, l2 = weights[i % len(weights)]
            torch.mm(x, l1.t(), out=gate_up)
            torch.mm(situ(gate_up), l2.t(), out=out)

        gemms(0)
        _close(gate_up[0], weights[0][0].float() @ x[0].float(), "shared L1")
        _close(out[0], weights[0][1].float() @ hidden[0].float(), "shared L2")
        return {
            "shared_gemms_us": self._time(gemms, calls),
            "shared_gating_us": self._time(lambda _: torch.mul(*gate_up.chunk(2, dim=1), out=gated), calls),
            "shared_us": self._time(whole, calls),
            "publication_copy_us": self._time(lambda _: copied.copy_(out), calls),
        }

    def norm(self, tokens: int, calls: int) -> Parts:
        x, gamma = self._random(tokens, self.shape.hidden), torch.ones_like(self._empty(self.shape.hidden))
        return {"norm_us": self._time(lambda _: F.rms_norm(x, (self.shape.hidden,), gamma, 1e-5), calls)}

    def apart(self, shape: Shape) -> Timer:
        """What a routed call without norm leaves of a call of ``shape``, as one batch: both shared GEMMs, the cheapest gating
        between them, and the norm. To be timed in turns with the fused call, so at its clocks."""
        s, rows = self.shape, shape.shared_tokens
        weights = self._shared_weights() if rows else []
        x, gate_up = self._random(rows, s.shared_hidden), self._empty(rows, 2 * s.shared_intermediate)
        gated, out = self._empty(rows, s.shared_intermediate), self._empty(rows, s.shared_hidden)
        y, gamma = self._random(shape.tokens, s.hidden), torch.ones_like(self._empty(s.hidden))

        def call(i: int) -> None:
            if weights:
                l1, l2 = weights[i % len(weights)]
                torch.mm(x, l1.t(), out=gate_up)
                torch.mul(*gate_up.chunk(2, dim=1), out=gated)
                torch.mm(gated, l2.t(), out=out)
            F.rms_norm(y, (s.hidden,), gamma, 1e-5)

        call(0)
        timed = timer(
            call, self.effort.calls_of(work(shape, shape.experts, shape.tokens * shape.topk).floor_us), self.device
        )
        timed.prepare()
        return timed

    # ------------------------------------------------------------------------------------------------ routed experts
    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._grouped is None:
            s, g = self.shape, DeviceDraws(self.device, 9)
            l1, l2 = (
                self._empty(s.experts, 2 * s.intermediate, s.hidden),
                self._empty(s.experts, s.hidden, s.intermediate),
            )
            for expert in range(s.experts):
                l1[expert] = g.normal(2 * s.intermediate, s.hidden, scale=0.02)
                l2[expert] = g.normal(s.hidden, s.intermediate, scale=0.02)
            self._grouped = l1, l2
        return self._grouped

    def routed(self, topk_idx: torch.Tensor, calls: int) -> Parts:
        """Grouped GEMMs over one rank's routing, and what must lie between them; empty slots are left out."""
        if self._product is None:
            return {}
        s, (l1, l2) = self.shape, self._weights()
        tokens, topk = topk_idx.shape
        flat = topk_idx.flatten()
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        ends = torch.bincount(flat[order], minlength=s.experts).cumsum(0).to(torch.int32)
        source = order // topk
        back = torch.zeros_like(flat)
        back[order] = torch.arange(order.numel(), device=self.device)
        x, hidden = self._random(tokens, s.hidden), self._random(order.numel(), s.intermediate)
        gathered, gated = x[source], torch.empty_like(hidden)
        first = self._product(gathered, l1.transpose(1, 2), offs=ends)
        last = self._product(hidden, l2.transpose(1, 2), offs=ends)
        for row in (0, order.numel() - 1):
            expert = int(flat[order[row]])
            _close(first[row], l1[expert].float() @ gathered[row].float(), "grouped L1")
            _close(last[row], l2[expert].float() @ hidden[row].float(), "grouped L2")

        def gemms(_: int) -> None:
            self._product(gathered, l1.transpose(1, 2), offs=ends)
            self._product(hidden, l2.transpose(1, 2), offs=ends)

        def slots(rows: torch.Tensor) -> torch.Tensor:
            return rows[back].view(tokens, topk, s.hidden).sum(dim=1)

        def whole(_: int) -> None:
            rows = self._product(x[source], l1.transpose(1, 2), offs=ends)
            slots(self._product(situ(rows), l2.transpose(1, 2), offs=ends))

        return {
            "grouped_gemms_us": self._time(gemms, calls),
            "gather_us": self._time(lambda _: torch.index_select(x, 0, source, out=gathered), calls),
            "gating_us": self._time(lambda _: torch.mul(*first.chunk(2, dim=1), out=gated), calls),
            "slots_us": self._time(lambda _: slots(last), calls),
            "routed_us": self._time(whole, calls),
        }


def reduce_scatter_us(rows: int, shape: Shape, device: torch.device, effort: Effort) -> float:
    """This rank's time for torch.distributed's reduce-scatter of a dense shared output, BF16 [rows, Hs], over its processes:
    what token-owner publication and its consumer's sum replace. Rows are rounded up to a multiple of the ranks."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    rows = -(-rows // ranks) * ranks
    given = torch.ones(rows, shape.shared_hidden, dtype=torch.bfloat16, device=device)
    got = torch.zeros(rows // ranks, shape.shared_hidden, dtype=torch.bfloat16, device=device)

    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch renames it

    def call(_: int) -> None:
        scatter(got, given)

    call(0)
    if not bool((got == ranks).all()):
        raise RuntimeError(f"baseline reduce-scatter: wanted {ranks} everywhere")
    timed = timer(call, effort.calls, device)
    timed.prepare()
    return repeated(timed, effort.replays, effort.rest_of(device)).median


def compared(row: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """The unfused ``parts`` for a fused call's record, and whether the call is at most as long as each of their sums. A sum
    is compared with the time that was taken like it: torch's parts with the single row, what ran in turns with the same."""
    turns = row.get("in_turns_us", {})
    fused: Parts = {name: row["us"] for name in ("sum_us", "gemms_sum_us") if name in parts}
    if "routed" in turns:
        parts = {**parts, "own_sum_us": turns["routed"] + turns["apart"]}
        fused = {"own_sum_us": turns[row["mode"]], **fused}
    kept = {name: us <= parts[name] for name, us in fused.items()}
    return {"baselines": parts, "compared_us": fused, "not_slower_than": kept}
