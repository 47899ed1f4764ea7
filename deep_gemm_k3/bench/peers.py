"""Public numbers to stand beside ours, and what we aim at.

Microseconds on one H200, one rank, L2 cold, the routed part alone: none of these has the shared expert, SiTU, the norm or
the publication that our time includes, and none is exact for every scale. K3's widths, 112 experts, top-16.
"""

from __future__ import annotations

NAMES = (
    "DeepGEMM FP4 MegaMoE",
    "DeepGEMM FP8 MegaMoE",
    "Marlin W4A16",
    "FlashInfer CUDA",
    "FlashInfer CuTe-DSL",
)

# tokens -> the best figure of each of NAMES
SWEEP: dict[int, tuple[float, ...]] = {
    1: (220, 170, 135, 112, 131),
    8: (706, 671, 570, 396, 392),
    32: (971, 930, 808, 592, 556),
    64: (1010, 971, 836, 655, 566),
    128: (1126, 1043, 1131, 720, 628),
    512: (1862, 1347, 3235, 1442, 1311),
    2048: (5465, 3115, 9162, 3930, 3544),
}
ONE_EXPERT: tuple[float, ...] = (47.6, 42.4, 50.8, 51.9, 47.4)  # top-1, eight tokens

# The same on two H200s, one process each and 112 experts per rank, of the two kernels that communicate; the larger rank's.
TWO_DEVICES: dict[int, tuple[float, ...]] = {
    8: (717, 700),
    64: (1025, 1012),
    512: (1832, 1504),
    2048: (5650, 4325),
}
TWO_DEVICES_ONE_EXPERT: tuple[float, ...] = (57, 56)

GOALS: dict[int, float] = {1: 90, 8: 350, 32: 490, 64: 530, 128: 600, 512: 1000, 2048: 3000}
ONE_EXPERT_GOAL = 28.0
TWO_DEVICES_GOALS: dict[int, float] = {8: 365, 64: 515, 512: 1030}
TWO_DEVICES_ONE_EXPERT_GOAL = 30.0


def best(tokens: int, experts: int, topk: int, devices: int = 1) -> tuple[float, str] | None:
    """The best public time of a shape on so many devices, a rank on each, and whose it is."""
    table, one = {1: (SWEEP, ONE_EXPERT), 2: (TWO_DEVICES, TWO_DEVICES_ONE_EXPERT)}.get(devices, ({}, None))
    row = {(112, 16): table.get(tokens), (1, 1): one if tokens == 8 else None}.get((experts, topk))
    if row is None:
        return None
    us = min(row)
    return us, NAMES[row.index(us)]


def goal(tokens: int, experts: int, topk: int, devices: int = 1) -> float | None:
    """What everything fused is to take."""
    goals, one = {1: (GOALS, ONE_EXPERT_GOAL), 2: (TWO_DEVICES_GOALS, TWO_DEVICES_ONE_EXPERT_GOAL)}.get(
        devices, ({}, None)
    )
    return {(112, 16): goals.get(tokens), (1, 1): one if tokens == 8 else None}.get((experts, topk))
