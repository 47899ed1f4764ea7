"""What the demo checks, and against what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deep_gemm_k3.demo import reference
from deep_gemm_k3.demo.data import Bits, Layer, Problem, reference_routed, reference_shared
from deep_gemm_k3.demo.run import MODES, UNTOUCHED, RankResult

ROUTED_LIMIT = 2e-3
ROW_LIMIT = 1e-2
# Eight partials, each rounded to BF16 (relative error at most 2^-9), against a sum that is not rounded.
SHARED_LIMIT = 2.0**-8


@dataclass(frozen=True)
class Row:
    """One line of the verdict."""

    check: str
    compared: int
    distance: str
    limit: str
    passed: bool


def fragments(problem: Problem, results: list[RankResult], mode: str, part: int) -> tuple[Bits, Bits]:
    """(published [source, token, column], everything else) of one call, put together from all ranks' workspaces."""
    published = np.empty((problem.ranks, problem.shared_tokens, problem.shared_hidden), np.uint16)
    rest = []
    shard, owned = problem.shared_hidden // problem.ranks, problem.shared_tokens // problem.ranks
    for rank, result in enumerate(results):
        call = result.calls[mode, part]
        written = call.shared[call.generation]
        if mode == "rs":
            published[:, :, rank * shard : (rank + 1) * shard] = written[: problem.shared_tokens].transpose(1, 0, 2)
            rest.append(written[problem.shared_tokens :].ravel())
        else:
            published[:, rank * owned : (rank + 1) * owned] = written[:owned].transpose(1, 0, 2)
            rest.append(written[owned:].ravel())
        later = [g for g in range(len(call.shared)) if g > call.generation or g < call.generation - part]
        rest.append(call.shared[later].ravel())
    return published, np.concatenate(rest)


def equal_row(check: str, given: Bits, wanted: Bits) -> Row:
    different = int((given != wanted).sum())
    return Row(check, given.size, f"{different} differ", "0", different == 0 and given.size > 0)


def distance_row(check: str, given: NDArray[np.float64], wanted: NDArray[np.float64], limit: float) -> Row:
    distance = float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))
    return Row(check, given.size, f"rel. L2 {distance:.1e}", f"{limit:.1e}", distance < limit)


def check_published(problem: Problem, results: list[RankResult]) -> tuple[list[Row], dict[str, NDArray[np.float64]]]:
    """Every published value against the dense output; also the sums of the fragments over all source ranks."""
    rows, sums = [], {}
    for mode in MODES[1:]:
        total = np.zeros((problem.shared_tokens, problem.shared_hidden))
        published, dense, rest = [], [], []
        for part in range(problem.parts):
            fragment, others = fragments(problem, results, mode, part)
            published.append(fragment)
            rest.append(others)
            dense.append(np.stack([result.calls["dense", part].shared for result in results]))
            total += reference.decode_bf16(fragment).sum(axis=0)
        rows.append(equal_row(f"{mode}: published values = dense", np.stack(published), np.stack(dense)))
        everything = np.concatenate(rest)
        rows.append(equal_row(f"{mode}: all else untouched", everything, np.full_like(everything, UNTOUCHED)))
        sums[mode] = total
    return rows, sums


def check_routed(layer: Layer, results: list[RankResult]) -> list[Row]:
    problem = layer.problem
    outputs = {mode: np.concatenate([result.calls[mode, 0].y for result in results]) for mode in MODES}
    rows = [equal_row(f"{mode}: routed output = dense mode's", outputs[mode], outputs["dense"]) for mode in MODES[1:]]
    wanted = np.concatenate(reference_routed(layer))
    given = reference.decode_bf16(outputs["dense"])
    rows.append(distance_row("routed output, float64 from bytes", given, wanted, ROUTED_LIMIT))
    chosen = np.concatenate([(tokens.topk_idx >= 0).any(dim=1).numpy() for tokens in layer.tokens])
    error = np.linalg.norm(given - wanted, axis=1)[chosen] / np.linalg.norm(wanted, axis=1)[chosen]
    worst = float(error.max())
    rows.append(
        Row("routed output, worst token", len(error), f"rel. L2 {worst:.1e}", f"{ROW_LIMIT:.1e}", worst < ROW_LIMIT)
    )
    empty = outputs["dense"][~chosen]
    rows.append(equal_row("tokens without an expert are zero", empty, np.zeros_like(empty)))
    counts = [result.calls["dense", 0].y.shape[0] for result in results]
    rows.append(
        Row("rows of y per rank", problem.ranks, str(counts), str(list(problem.tokens)), counts == list(problem.tokens))
    )
    return rows


def check(layer: Layer, results: list[RankResult], progress: Callable[[str], None]) -> list[Row]:
    published, sums = check_published(layer.problem, results)
    progress("published values compared with the dense outputs")
    rows = published + check_routed(layer, results)
    progress("routed output computed again in float64, without ranks")
    wanted = reference_shared(layer)
    for mode, total in sums.items():
        name = f"{mode}: fragments summed, unsharded float64"
        rows.append(distance_row(name, total, wanted, SHARED_LIMIT))
    progress(f"shared expert computed again in float64, {layer.problem.shared_width} wide")
    return rows
