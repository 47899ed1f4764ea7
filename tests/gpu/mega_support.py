"""Shared by the tests of the fused kernel: families of calls that use the same buffers, weights and compiled kernels.

The device is the GPU where there is one. On the CPU the same code runs with the oracle behind the calls, which shows
mistakes of the tests themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_gemm_k3 import envs
from deep_gemm_k3._extension import ops
from deep_gemm_k3.mega import plan
from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.mega.weights import default_target
from deep_gemm_k3.testing import data
from deep_gemm_k3.testing.data import WorldShape
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RankCall, RankResult, RunOptions, Session, check_world, run_world
from deep_gemm_k3.testing.world import RankInput

DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
TARGET = default_target(DEVICE)
OUTPUTS = {"routed": "none", "dense": "dense", "rs": "hidden_sharded", "sp_rs": "token_owner"}

SWIGLU = Options("swiglu")
CLAMPED = Options("swiglu", activation_clamp=2048.0)
SITU = Options("situ", None, 4.0, 25.0)

# Shapes that several modules use: what they compile is then the same. Over four ranks a shard of the shared width is 288
# columns, so that 128-column tiles straddle shards.
ONE_RANK = WorldShape((768,), 8, 4, 1024, 512, 768, 2048, 256)
TWO_RANKS = WorldShape((384,) * 2, 8, 4, 1024, 512, 384, 2048, 256)
FOUR_RANKS = WorldShape((384,) * 4, 16, 4, 1024, 512, 384, 1152, 256)
EIGHT_RANKS = WorldShape((384,) * 8, 32, 4, 1024, 512, 384, 2048, 256)


def patience_s() -> float:
    """The limit of waits where a test names none; a tool that slows kernels down sets DGK3_TIMEOUT_S."""
    return envs.TIMEOUT_S.get() if envs.TIMEOUT_S.is_set() else 10.0


@dataclass(frozen=True)
class Signature:
    """What is compiled together: everything a call of this kind can choose."""

    mode: str
    options: Options
    fast_math: bool = False
    batch_invariant: bool = False

    def __str__(self) -> str:
        clamp = "-clamp" if self.options.activation_clamp is not None else ""
        extras = ("-fast" if self.fast_math else "") + ("-invariant" if self.batch_invariant else "")
        return f"{self.mode}-{self.options.activation}{clamp}{extras}"


EXACT_SWIGLU = Signature("routed", SWIGLU)
EXACT_SITU = Signature("routed", SITU)
DENSE, RS, SP_RS = (Signature(mode, SITU) for mode in ("dense", "rs", "sp_rs"))


Counts = Iterable[tuple[int, int]]


def pairs(tokens: Iterable[int], shared_tokens: Iterable[int] = (0,)) -> list[tuple[int, int]]:
    """Every token count of a rank with every count of shared tokens."""
    shared = tuple(shared_tokens)
    return [(count, also) for count in tokens for also in shared]


class Family:
    """Calls of one shape: ``shape.tokens`` is the capacity of the ranks, ``shape.shared_tokens`` that of the shared expert.

    A signature has up to 21 kernels. ``counts`` names the (tokens of a rank, shared tokens) that the tests' calls have, for
    all signatures or for each: only what those choose is compiled then, and any other call fails for want of its kernel.
    Without it everything is compiled that a call can choose, as in a program.
    """

    ranks_on_a_device: int | None = None  # None: all of them
    has_statistics = True

    def __init__(
        self,
        shape: WorldShape,
        *signatures: Signature,
        counts: Counts | Mapping[Signature, Counts] | None = None,
        **buffer_options: Any,
    ) -> None:
        self.shape, self.signatures = shape, signatures
        of_each = counts if isinstance(counts, Mapping) else {one: counts for one in signatures if counts is not None}
        self._counts = {signature: list(of_signature) for signature, of_signature in of_each.items()}
        self._buffer_options = buffer_options
        self._session: Session | None = None
        self._weights: dict[tuple[str, int], list[RankInput]] = {}

    # ------------------------------------------------------------------------------------------------------ what is kept
    @property
    def session(self) -> Session:
        if self._session is None:
            self._session = Session(self.shape, device=DEVICE, **{"timeout_s": patience_s(), **self._buffer_options})
        return self._session

    def weights(self, kind: str = "exact", seed: int = 1) -> list[RankInput]:
        """All ranks' weights, with no tokens."""
        found = self._weights.get((kind, seed))
        if found is None:
            empty = replace(self.shape, tokens=(0,) * self.shape.ranks)
            if empty.shared_tokens is not None:
                empty = replace(empty, shared_tokens=0)
            found = data.make_world(empty, seed, "uniform", kind, TARGET, DEVICE, drawn_on=DEVICE)
            self._weights[kind, seed] = found
        return found

    def drop_session(self) -> None:
        """Forget the buffers, as after an abort."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        self._weights.clear()
        self.drop_session()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------------------------------ inputs
    def world(
        self,
        tokens: Sequence[int] | int,
        shared_tokens: int = 0,
        routing: str = "uniform",
        kind: str = "exact",
        seed: int = 1,
    ) -> list[RankInput]:
        """All ranks' inputs of one call. The weights depend on ``kind`` alone, the tokens on ``seed`` too."""
        counts = (tokens,) * self.shape.ranks if isinstance(tokens, int) else tuple(tokens)
        shape = replace(self.shape, tokens=counts)
        made = []
        for rank, weights in enumerate(self.weights(kind)):
            routed = data.make_routed(shape, seed, rank, routing, kind, drawn_on=DEVICE)
            shared = weights.shared
            if shared is not None:
                # The rows alone: narrow slices keep the rest of the draw small.
                rows = replace(shape, shared_tokens=shared_tokens, shared_intermediate=128)
                shared = replace(shared, x=data.make_shared(rows, seed, rank, kind, drawn_on=DEVICE).x)
            made.append(replace(weights, routed=routed, shared=shared))
        return made

    # ------------------------------------------------------------------------------------------------------------- calls
    def run(self, ranks: Sequence[RankInput], signature: Signature, calls: int = 1) -> list[RankResult]:
        how = how_of(signature, calls)
        try:
            return run_world(ranks, signature.options, signature.mode, how, self.session)
        except BaseException:
            self.drop_session()
            raise

    def check(
        self, ranks: Sequence[RankInput], signature: Signature, bitwise: bool = True, calls: int = 1
    ) -> list[RankResult]:
        how = how_of(signature, calls)
        try:
            return check_world(ranks, signature.options, signature.mode, how, bitwise, session=self.session)
        except BaseException:
            self.drop_session()
            raise

    def each_rank(self, body: Callable[[LocalRank, SymmBuffer], Any], timeout_s: float = 60.0) -> list[Any]:
        try:
            return self.session.run(body, timeout_s)
        except BaseException:
            self.drop_session()
            raise

    # -------------------------------------------------------------------------------------------------------- compilation
    def problems(self) -> Iterable[tuple[Signature, dict[str, Any]]]:
        """What the host library is asked for all configs of, one for each signature."""
        s, options = self.shape, self._buffer_options
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count if DEVICE.type == "cuda" else 132
        sharing = self.ranks_on_a_device or s.ranks
        common = {
            "num_ranks": s.ranks, "num_experts": s.experts, "num_topk": s.topk, "hidden": s.hidden,
            "intermediate_hidden": s.intermediate, "num_max_tokens_per_rank": -(-max(1, *s.tokens, 0) // 384) * 384,
            "target": TARGET, "num_sms": options.get("num_sms") or sms // sharing, "has_statistics": self.has_statistics,
            "whole_device": sharing == 1 and "num_sms" not in options,
        }  # fmt: skip
        shared_limit = common["num_max_tokens_per_rank"] if s.shared_tokens is None else max(s.shared_tokens, 1)
        common["num_max_shared_tokens"] = shared_limit
        common["shared_intermediate_hidden"] = 0 if s.shared_tokens is None else s.shared_intermediate
        for signature in self.signatures:
            yield signature, {
                **common, "shared_output": OUTPUTS[signature.mode], "activation": signature.options.activation,
                "has_clamp": signature.options.activation_clamp is not None, "fast_math": signature.fast_math,
                "batch_invariant": signature.batch_invariant,
                "shared_hidden": 0 if signature.mode == "routed" else s.shared_hidden,
            }  # fmt: skip

    def chosen(self) -> Iterable[tuple[frozenset[str], set[str]]]:
        """For each signature: all kernels it can choose, which identify it, and those that the tests' counts choose."""
        for signature, problem in self.problems():
            everything = frozenset(config["literal"] for config in plan.all_configs(problem))
            counts = self._counts.get(signature)
            if counts is None:
                yield everything, set(everything)
                continue
            asked = [{**problem, "num_tokens": tokens, "num_shared_tokens": shared} for tokens, shared in counts]
            yield everything, {ops().config_literal(json.dumps(one)) for one in asked}


class WithoutStatistics(Family):
    """The calls count no received rows."""

    has_statistics = False


def how_of(signature: Signature, calls: int = 1) -> RunOptions:
    return RunOptions(fast_math=signature.fast_math, batch_invariant=signature.batch_invariant, calls=calls)


def rank_call(buffer: SymmBuffer, given: RankInput, signature: Signature) -> RankCall:
    return RankCall(buffer, given, signature.options, signature.mode, how_of(signature))


class Narrowed:
    """Stands in the place of ``plan.all_configs``: of a signature that families name counts for, only what those choose."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._everything = plan.all_configs
        self._chosen: dict[frozenset[str], set[str]] = {}
        for family in families:
            for everything, chosen in family.chosen():
                self._chosen.setdefault(everything, set()).update(chosen)

    def __call__(self, problem: Mapping[str, Any]) -> list[dict[str, Any]]:
        configs = self._everything(problem)
        everything = frozenset(config["literal"] for config in configs)
        chosen = self._chosen.get(everything, everything)
        own = problem.get("literal")  # what the call chooses that brings the signature
        return [config for config in configs if config["literal"] in chosen or config["literal"] == own]

    def literals(self) -> set[str]:
        return set().union(*self._chosen.values())

    def compile(self) -> str:
        """All kernels of the families at once; what a first call then does is load."""
        from deep_gemm_k3.jit.kernel import default_store
        from deep_gemm_k3.jit.source import KernelSource
        from deep_gemm_k3.jit.warmup import warm_up

        sources = [KernelSource(plan.KERNELS[TARGET], TARGET, literal) for literal in sorted(self.literals())]
        return str(warm_up(sources, default_store()))


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)
