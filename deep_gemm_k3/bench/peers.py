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

GOALS: dict[int, float] = {1: 90, 8: 350, 32: 490, 64: 530, 128: 600, 512: 1000, 2048: 3000}
ONE_EXPERT_GOAL = 28.0


def best(tokens: int, experts: int, topk: int) -> tuple[float, str] | None:
    """The best public time of a shape and whose it is."""
    row = ONE_EXPERT if (tokens, experts, topk) == (8, 1, 1) else SWEEP.get(tokens)
    if row is None or (experts, topk) not in ((1, 1), (112, 16)) or (experts == 1 and tokens != 8):
        return None
    us = min(row)
    return us, NAMES[row.index(us)]


def goal(tokens: int, experts: int, topk: int) -> float | None:
    """What everything fused is to take."""
    if (tokens, experts, topk) == (8, 1, 1):
        return ONE_EXPERT_GOAL
    return GOALS.get(tokens) if (experts, topk) == (112, 16) else None
