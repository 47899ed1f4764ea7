"""The SiTU regression: what the activation and the fused shared expert must do, through the public calls alone.

Runs on whatever the machine has, CUDA or CPU, as a script (``python tests/test_mega_moe_situ.py``) and under pytest.

* Metamorphic: SiTU with very large betas is SwiGLU; small betas are clearly different from it and from each other; subnormal
  betas give finite numbers. No reference is involved, so nothing can be wrong in the same way on both sides.
* Shared: the fused norm equals the routed call followed by a norm; the shared expert equals a BF16 MLP in torch and the
  package's oracle; what either publication mode writes is bitwise the dense output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deep_gemm_k3 as deep_gemm
from deep_gemm_k3.testing import metrics, oracle
from deep_gemm_k3.utils import per_token_cast_to_fp4, per_token_cast_to_fp8

NUM_EXPERTS = 4
NUM_TOPK = 1
NUM_TOKENS = 64
CAPACITY = 96
HIDDEN = 1024
INTERMEDIATE = 512
NUM_SHARED_TOKENS = 72
SHARED_HIDDEN = 2048
SHARED_INTERMEDIATE = 1024

CASES: dict[str, dict[str, Any]] = {
    "swiglu": {"activation": "swiglu"},
    "situ_hi": {"activation": "situ", "situ_beta": 4096.0, "situ_linear_beta": 4096.0},
    "situ_gate_low": {"activation": "situ", "situ_beta": 0.25, "situ_linear_beta": 4096.0},
    "situ_linear_low": {"activation": "situ", "situ_beta": 4096.0, "situ_linear_beta": 0.5},
    "situ_tiny": {"activation": "situ", "situ_beta": 1e-40, "situ_linear_beta": 1e-40},
}


class Normal:
    """Seeded N(0, scale) BF16 tensors, drawn on the CPU so that every device sees the same numbers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator, self.device = torch.Generator(device="cpu").manual_seed(seed), device

    def __call__(self, *shape: int, scale: float) -> torch.Tensor:
        value = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return (value * scale).to(torch.bfloat16).to(self.device)


def this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cast_to_fp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [E, N, K] as the public calls take it: packed E2M1 and packed power-of-two scales."""
    groups, n, k = weights.shape
    parts = [per_token_cast_to_fp4(weights[g], use_ue8m0=True, gran_k=32) for g in range(groups)]
    sf = torch.stack([s for _, s in parts])
    return torch.stack([w for w, _ in parts]), deep_gemm.transform_sf_into_required_layout(sf, n, k, (1, 32), groups)


class Routed:
    """Tokens, routing and weights of the routed part, and the buffer they go through."""

    def __init__(self, normal: Normal, scale: float, capacity: int, zero_expert: bool, **buffer_options: Any) -> None:
        self.device = normal.device
        x = normal(NUM_TOKENS, HIDDEN, scale=0.5)
        l1 = normal(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, scale=scale)
        if zero_expert:
            l1[0].zero_()
        l2 = normal(NUM_EXPERTS, HIDDEN, INTERMEDIATE, scale=scale)
        self.x, self.x_sf = per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)
        self.idx = (torch.arange(NUM_TOKENS, dtype=torch.int64, device=self.device) % NUM_EXPERTS).view(-1, NUM_TOPK)
        self.weights = torch.ones(NUM_TOKENS, NUM_TOPK, dtype=torch.float32, device=self.device)
        self.l1, self.l2 = deep_gemm.transform_weights_for_mega_moe(cast_to_fp4(l1), cast_to_fp4(l2), activation="situ")
        self.buffer = deep_gemm.get_symm_buffer_for_mega_moe(
            None, NUM_EXPERTS, capacity, NUM_TOPK, HIDDEN, INTERMEDIATE,
            mma_type="fp8xfp4", activation="situ", device=self.device, **buffer_options,
        )  # fmt: skip

    def fill(self) -> torch.Tensor:
        """Zero the buffer, write the inputs, and return an output full of NaN."""
        self.buffer.buffer.zero_()
        self.buffer.x[:NUM_TOKENS].copy_(self.x)
        self.buffer.x_sf[:NUM_TOKENS].copy_(self.x_sf)
        self.buffer.topk_idx[:NUM_TOKENS].copy_(self.idx)
        self.buffer.topk_weights[:NUM_TOKENS].copy_(self.weights)
        return torch.full((NUM_TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16, device=self.device)

    def run(self, **options: Any) -> torch.Tensor:
        y = self.fill()
        deep_gemm.fp8_fp4_mega_moe(y, self.l1, self.l2, self.buffer, **options)
        synchronize(self.device)
        return y


# -------------------------------------------------------------------------------------------------------- metamorphic
def check_cases(results: dict[str, torch.Tensor]) -> dict[str, float]:
    """The relations between the cases' outputs; returns the distances."""
    for name, y in results.items():
        assert bool(torch.isfinite(y).all()), f"{name}: wanted finite numbers, given NaN or infinity"
    swiglu = results["swiglu"]
    norm = float(swiglu.double().norm())
    assert norm > 1e-6, f"swiglu: wanted a norm above 1e-6, given {norm:g}"
    hi = metrics.relative_l2(results["situ_hi"], swiglu)
    gate = metrics.relative_l2(results["situ_gate_low"], swiglu)
    linear = metrics.relative_l2(results["situ_linear_low"], swiglu)
    apart = metrics.relative_l2(results["situ_gate_low"], results["situ_linear_low"])
    assert hi < 0.05, f"situ(4096, 4096) against swiglu: wanted below 0.05, given {hi:g}"
    low_floor, apart_floor = max(0.05, 4 * hi), max(0.025, 2 * hi)
    assert gate > low_floor, f"situ(0.25, 4096) against swiglu: wanted above {low_floor:g}, given {gate:g}"
    assert linear > low_floor, f"situ(4096, 0.5) against swiglu: wanted above {low_floor:g}, given {linear:g}"
    assert apart > apart_floor, f"the two small betas: wanted above {apart_floor:g} apart, given {apart:g}"
    return {"hi": hi, "gate_low": gate, "linear_low": linear, "low_apart": apart}


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    part = Routed(Normal(20260730, this_device()), 0.05, CAPACITY, zero_expert=True)
    yield part
    part.buffer.destroy()


@pytest.mark.parametrize("fast_math", [True, False])
def test_situ_metamorphic(routed: Routed, fast_math: bool) -> None:
    results = {name: routed.run(fast_math=fast_math, **case) for name, case in CASES.items()}
    distances = check_cases(results)
    print(f"fast_math={fast_math}: " + ", ".join(f"{name} {value:.2e}" for name, value in distances.items()))
    for name, y in results.items():
        assert not y[::NUM_EXPERTS].any(), f"{name}: expert 0's L1 is zero, so are its tokens"


# -------------------------------------------------------------------------------------------------------------- shared
class Shared:
    """The routed part with the shared expert beside it."""

    epsilon = 1e-6
    betas = {"situ_beta": 1.25, "situ_linear_beta": 1.5}

    def __init__(self, device: torch.device) -> None:
        normal = Normal(20260823, device)
        options = {"bf16_shared_intermediate_hidden": SHARED_INTERMEDIATE}
        self.routed = Routed(normal, 0.04, NUM_TOKENS, zero_expert=False, **options)
        self.x = normal(NUM_SHARED_TOKENS, SHARED_HIDDEN, scale=0.25)
        self.raw_l1 = normal(2 * SHARED_INTERMEDIATE, SHARED_HIDDEN, scale=0.02)
        self.raw_l2 = normal(SHARED_HIDDEN, SHARED_INTERMEDIATE, scale=0.02)
        self.l1, self.l2 = deep_gemm.transform_weights_for_mega_moe(self.raw_l1, self.raw_l2, activation="situ")
        self.gamma = (1.0 + normal(HIDDEN, scale=0.1).float()).to(torch.bfloat16)
        self.device = device

    def _call(
        self, entry: Callable[..., None], outputs: tuple[torch.Tensor, ...], tail: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        r = self.routed
        y = r.fill()
        shared = (self.x, self.l1, self.l2, self.gamma, self.epsilon)
        entry(y, *outputs, r.l1, r.l2, *shared, *tail, r.buffer, activation="situ", **self.betas)
        synchronize(self.device)
        return y

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = NUM_SHARED_TOKENS, SHARED_HIDDEN
        shared_y = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self.device)
        return self._call(deep_gemm.fp8_fp4_mega_moe_bf16_shared, (shared_y,), ()), shared_y

    def published(self, entry: Callable[..., None], generations: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(y, what was published) of one call per generation; nothing but that generation may have changed."""
        shape = (generations, NUM_SHARED_TOKENS, 1, SHARED_HIDDEN)
        workspace = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self.device)
        flags = torch.zeros(9, dtype=torch.int32, device=self.device)
        flags[2] = workspace[0].numel() * workspace.element_size()
        pointers = torch.tensor([workspace.data_ptr()], dtype=torch.int64, device=self.device)
        for generation in range(generations):
            flags[0] = generation
            y = self._call(entry, (), (workspace, flags, pointers))
            assert bool(workspace[generation + 1 :].isnan().all())
            yield y, workspace[generation, :, 0].clone()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    part = Shared(this_device())
    yield part
    part.routed.buffer.destroy()


def test_fused_norm(shared: Shared) -> None:
    """The fused norm is the routed-only call followed by a norm."""
    plain = shared.routed.run(activation="situ", **shared.betas).float()
    inverse = torch.rsqrt(plain.square().mean(-1, keepdim=True) + shared.epsilon)
    reference = (plain * inverse * shared.gamma.float()).to(torch.bfloat16)
    y, _ = shared.dense()
    error = metrics.relative_l2(y, reference)
    print(f"fused norm: relative L2 {error:.2e}")
    assert error < 2e-3, f"fused norm: wanted a relative L2 below 2e-3, given {error:g}"


def test_shared_expert(shared: Shared) -> None:
    """The shared output against a BF16 MLP of torch, and against the oracle within the package's tolerances."""
    _, actual = shared.dense()
    beta, linear = shared.betas["situ_beta"], shared.betas["situ_linear_beta"]
    gate, up = F.linear(shared.x, shared.raw_l1).float().chunk(2, dim=-1)
    hidden = torch.sigmoid(gate) * (beta * torch.tanh(gate / beta)) * (linear * torch.tanh(up / linear))
    reference = F.linear(hidden.to(torch.bfloat16), shared.raw_l2)
    error = metrics.relative_l2(actual, reference)
    print(f"shared expert against torch: relative L2 {error:.2e}")
    assert error < 1e-2, f"shared expert: wanted a relative L2 below 1e-2, given {error:g}"
    options = oracle.Options("situ", None, beta, linear)
    expected = oracle.shared_expert(shared.x.cpu(), shared.raw_l1.cpu(), shared.raw_l2.cpu(), options)
    print(f"shared expert against the oracle: {metrics.assert_close(actual.cpu(), expected, 'shared expert')}")


@pytest.mark.parametrize(("mode", "generations"), [("rs", 3), ("sp_rs", 1)])
def test_published_is_dense(shared: Shared, mode: str, generations: int) -> None:
    """Both publication modes write, bit for bit, what the dense call returns, and the same routed output."""
    y, dense = shared.dense()
    entry = getattr(deep_gemm, f"fp8_fp4_mega_moe_bf16_shared_{mode}")
    for generation, (again, published) in enumerate(shared.published(entry, generations)):
        metrics.assert_bitwise(published, dense, f"{mode}, generation {generation}")
        metrics.assert_bitwise(again, y, f"y of {mode}, generation {generation}")


def main() -> None:
    device = this_device()
    start = time.perf_counter()
    print(f"SiTU regression on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU tensors'}")
    part = Routed(Normal(20260730, device), 0.05, CAPACITY, zero_expert=True)
    try:
        for fast_math in (True, False):
            test_situ_metamorphic(part, fast_math)
    finally:
        part.buffer.destroy()
    both = Shared(device)
    try:
        test_fused_norm(both)
        test_shared_expert(both)
        for mode, generations in (("rs", 3), ("sp_rs", 1)):
            test_published_is_dense(both, mode, generations)
            print(f"{mode}: {generations} generation(s) bitwise equal to the dense output")
    finally:
        both.routed.buffer.destroy()
    print(f"passed in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
