"""What the fused call replaces, as separate operations of torch: the unfused parts, timed in the same run.

The shared expert by cuBLAS, the routed experts by torch's grouped GEMM on BF16 weights (the library has none for MXFP4),
the norm, and a copy of the shared output for what publication replaces. Data are random; each part's result is compared
with a plain product before its time counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..testing.world import SharedInput
from .data import DeviceDraws
from .timing import timer
from .work import Shape

_TOLERANCE = 2e-2  # BF16 results of two orders of summation


def situ(gate_up: torch.Tensor) -> torch.Tensor:
    """SiTU as eager torch does it, BF16 in and out."""
    gate, up = (part.float() for part in gate_up.chunk(2, dim=-1))
    return ((4 * torch.tanh(gate / 4)) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))).to(torch.bfloat16)


def _close(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < _TOLERANCE:
        raise RuntimeError(f"baseline {name}: wanted a relative error below {_TOLERANCE}, given {error:.3g}")


def _time(call: Callable[[int], None], calls: int, replays: int, device: torch.device) -> float:
    call(0)
    timed = timer(call, calls, device)
    timed.prepare()
    return timed.graph(replays).median


class Baselines:
    """The parts for one device; ``grouped`` weights (BF16, 15 times 512 MB at K3's 112 experts) are made once."""

    def __init__(self, shape: Shape, device: torch.device, calls: int = 20, replays: int = 5) -> None:
        self.shape, self.device, self.calls, self.replays = shape, device, calls, replays
        self._grouped: tuple[torch.Tensor, torch.Tensor] | None = None
        self._product: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

    def _run(self, call: Callable[[int], None]) -> float:
        return _time(call, self.calls, self.replays, self.device)

    def shared(self, shared: list[SharedInput]) -> dict[str, float]:
        """The shared expert's two GEMMs alone, and with the activation between them; weights rotate."""
        if not shared:
            return {}
        rows, width = shared[0].x.shape
        inter = shared[0].l2.size(1)
        gate_up = torch.empty(rows, 2 * inter, dtype=torch.bfloat16, device=self.device)
        hidden = torch.empty(rows, inter, dtype=torch.bfloat16, device=self.device).normal_()
        out = torch.empty(rows, width, dtype=torch.bfloat16, device=self.device)

        def gemms(i: int) -> None:
            s = shared[i % len(shared)]
            torch.mm(s.x, s.l1.t(), out=gate_up)
            torch.mm(hidden, s.l2.t(), out=out)

        def whole(i: int) -> None:
            s = shared[i % len(shared)]
            torch.mm(s.x, s.l1.t(), out=gate_up)
            torch.mm(situ(gate_up), s.l2.t(), out=out)

        def copy(_: int) -> None:
            copied.copy_(out)

        gemms(0)
        _close(gate_up[0], shared[0].l1.float() @ shared[0].x[0].float(), "shared L1")
        _close(out[0], shared[0].l2.float() @ hidden[0].float(), "shared L2")
        copied = torch.empty_like(out)
        return {
            "shared_gemms_us": self._run(gemms),
            "shared_us": self._run(whole),
            "publication_copy_us": self._run(copy),
        }

    def norm(self, tokens: int) -> dict[str, float]:
        x = torch.randn(tokens, self.shape.hidden, device=self.device).to(torch.bfloat16)
        gamma = torch.ones(self.shape.hidden, dtype=torch.bfloat16, device=self.device)

        def call(_: int) -> None:
            F.rms_norm(x, (self.shape.hidden,), gamma, 1e-5)

        return {"norm_us": self._run(call)}

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._grouped is None:
            s, g = self.shape, DeviceDraws(self.device, 9)
            l1 = torch.empty(s.experts, 2 * s.intermediate, s.hidden, dtype=torch.bfloat16, device=self.device)
            l2 = torch.empty(s.experts, s.hidden, s.intermediate, dtype=torch.bfloat16, device=self.device)
            for expert in range(s.experts):
                l1[expert] = g.normal(2 * s.intermediate, s.hidden, scale=0.02)
                l2[expert] = g.normal(s.hidden, s.intermediate, scale=0.02)
            self._grouped = l1, l2
        return self._grouped

    def routed(self, topk_idx: torch.Tensor) -> dict[str, float]:
        """Grouped GEMMs over the routing of one rank: alone, and with gather, activation and combine around them."""
        if self._product is None or self.device.type != "cuda":
            return {}
        s, (l1, l2) = self.shape, self._weights()
        tokens, topk = topk_idx.shape
        order = topk_idx.flatten().argsort(stable=True)
        counts = torch.bincount(topk_idx.flatten(), minlength=s.experts)
        ends = counts.cumsum(0).to(torch.int32)
        source = order // topk
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=self.device)
        x = torch.randn(tokens, s.hidden, device=self.device).to(torch.bfloat16)
        hidden = torch.randn(order.numel(), s.intermediate, device=self.device).to(torch.bfloat16)
        gathered = x[source]
        first = self._product(gathered, l1.transpose(1, 2), offs=ends)
        expert = int(topk_idx.flatten()[order[0]])
        _close(first[0], l1[expert].float() @ gathered[0].float(), "grouped L1")

        def gemms(_: int) -> None:
            self._product(gathered, l1.transpose(1, 2), offs=ends)
            self._product(hidden, l2.transpose(1, 2), offs=ends)

        def whole(_: int) -> None:
            rows = self._product(x[source], l1.transpose(1, 2), offs=ends)
            out = self._product(situ(rows), l2.transpose(1, 2), offs=ends)
            out[back].view(tokens, topk, s.hidden).sum(dim=1)

        return {"grouped_gemms_us": self._run(gemms), "routed_us": self._run(whole)}

    def all(self, shape: Shape, shared: list[SharedInput], topk_idx: torch.Tensor) -> dict[str, float]:
        """Every part, and their sum (the kindest: GEMMs alone, norm, and the copy)."""
        parts = {**self.routed(topk_idx), **self.norm(shape.tokens), **self.shared(shared)}
        kind = ("grouped_gemms_us", "norm_us", "shared_gemms_us")
        if all(name in parts for name in kind):
            parts["sum_us"] = sum(parts[name] for name in kind)
        return parts
