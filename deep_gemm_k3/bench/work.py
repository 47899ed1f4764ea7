"""What a call has to do at least: bytes to move, operations to do, and the times below which no kernel can be.

Bytes count what must come from or go to memory once: the weights of the experts that got a row, the shared expert's
weights, inputs and outputs. What the kernel moves between its own phases is left out, so a percentage of the floor
tells the whole distance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

WEIGHT_BYTES = 0.53125  # four bits and a scale byte per 32


@dataclass(frozen=True)
class Ceilings:
    """What one device reaches at best. Defaults: an H200, measured with plain copies and matrix products."""

    memory_gb_s: float = 4550.0
    tensor_tflop_s: float = 791.0
    launch_us: float = 3.3  # of a graph with one empty kernel; shown, not part of a floor


# By target. Of sm_100a those of a B200's data sheet, since none has been measured.
CEILINGS = {"sm_90a": Ceilings(), "sm_100a": Ceilings(8000.0, 4500.0)}


@dataclass(frozen=True)
class Shape:
    """One rank's call. ``experts`` are the rank's own; ``shared_tokens`` 0: no shared expert."""

    tokens: int
    experts: int = 112
    topk: int = 16
    hidden: int = 3584
    intermediate: int = 3072
    shared_tokens: int = 0
    shared_hidden: int = 7168
    shared_intermediate: int = 768
    ranks: int = 1

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def shared_parameters(self) -> int:
        return 3 * self.shared_hidden * self.shared_intermediate if self.shared_tokens else 0


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one rank's call, and the two floors they set, in microseconds."""

    bytes: int
    operations: int
    memory_us: float
    tensor_us: float

    @property
    def floor_us(self) -> float:
        return max(self.memory_us, self.tensor_us)

    def row(self, measured_us: float) -> dict[str, Any]:
        """For a record: the floors, what part of the time they are, and the rates that were reached."""
        return {
            **asdict(self),
            "floor_us": self.floor_us,
            "percent_of_floor": 100.0 * self.floor_us / measured_us,
            "gb_s": self.bytes / measured_us * 1e-3,
            "tflop_s": self.operations / measured_us * 1e-6,
        }


def work(shape: Shape, experts_hit: int, rows: int, ceilings: Ceilings | None = None) -> Work:
    """``experts_hit`` of the rank's experts got ``rows`` rows (token, slot) in all, wherever the tokens came from."""
    c = ceilings or Ceilings()
    weights = int(experts_hit * shape.expert_parameters * WEIGHT_BYTES) + 2 * shape.shared_parameters
    routed = shape.tokens * (shape.hidden + shape.hidden // 32 + 12 * shape.topk + 2 * shape.hidden)
    shared = 2 * shape.shared_tokens * 2 * shape.shared_hidden
    operations = 2 * (rows * shape.expert_parameters + shape.shared_tokens * shape.shared_parameters)
    total = weights + routed + shared
    return Work(total, operations, total / c.memory_gb_s * 1e-3, operations / c.tensor_tflop_s * 1e-6)


def expected_experts(shape: Shape) -> float:
    """Experts of a rank that get a row, when all ranks' tokens choose uniformly."""
    missing = (1.0 - shape.topk / (shape.experts * shape.ranks)) ** (shape.tokens * shape.ranks)
    return shape.experts * (1.0 - missing)


def device_floor_us(row: Mapping[str, Any]) -> float:
    """A record's floor for the device: local ranks share its memory and its tensor cores."""
    ranks: int = row["shape"]["ranks"] // row.get("processes", 1)
    return ranks * float(row["work"]["floor_us"])
