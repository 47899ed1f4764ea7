"""Comparison of results: relative L2 over a tensor and in its worst row, and bit by bit with a readable report."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TENSOR_TOLERANCE = 2e-3
ROW_TOLERANCE = 1e-2
"""Bounds against the oracle where only the order of accumulation differs."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Comparison:
    """Relative L2 errors. An error is infinite where ``actual`` is not finite or the reference is zero and it is not."""

    tensor: float
    worst_row: float
    worst_row_index: int

    def within(self, tensor: float = TENSOR_TOLERANCE, row: float = ROW_TOLERANCE) -> bool:
        return self.tensor < tensor and self.worst_row < row

    def __str__(self) -> str:
        return f"relative L2 {self.tensor:.3e}, worst row {self.worst_row:.3e} (row {self.worst_row_index})"


def _ratio(error: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    ratio = torch.where(error == 0, torch.zeros_like(error), error / norm)
    return torch.nan_to_num(ratio, nan=float("inf"), posinf=float("inf"))


def relative_l2(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the reference's norm, both in float64; infinite for anything not finite."""
    error = (actual.double() - reference.double()).norm()
    return float(_ratio(error, reference.double().norm()))


def compare(actual: torch.Tensor, reference: torch.Tensor) -> Comparison:
    """Errors of ``actual`` against ``reference``, both [rows, columns] of any float dtype; no rows are no error."""
    if actual.shape != reference.shape:
        raise ValueError(f"actual: wanted shape {list(reference.shape)}, given {list(actual.shape)}")
    if actual.numel() == 0:
        return Comparison(0.0, 0.0, -1)
    difference = (actual.double() - reference.double()).flatten(1)
    rows = _ratio(difference.norm(dim=1), reference.double().flatten(1).norm(dim=1))
    worst = int(rows.argmax())
    return Comparison(relative_l2(actual, reference), float(rows[worst]), worst)


def assert_close(actual: torch.Tensor, reference: torch.Tensor, name: str = "result") -> Comparison:
    """Raise ``AssertionError`` unless ``actual`` is within the tolerances of this module; returns the errors."""
    result = compare(actual, reference)
    if not result.within():
        raise AssertionError(f"{name}: {result}; wanted below {TENSOR_TOLERANCE:g} and {ROW_TOLERANCE:g}")
    return result


def bitwise_report(actual: torch.Tensor, reference: torch.Tensor, limit: int = 6) -> str | None:
    """None when both tensors hold the same bits, else how many elements differ, in which rows, and the first few.

    NaNs are equal when their bits are; +0 and -0 differ.
    """
    if actual.shape != reference.shape or actual.dtype != reference.dtype:
        return f"wanted {reference.dtype} {list(reference.shape)}, given {actual.dtype} {list(actual.shape)}"
    integer = _INTEGERS[actual.element_size()]
    bits = actual.contiguous().view(integer), reference.contiguous().to(actual.device).view(integer)
    wrong = bits[0] != bits[1]
    count = int(wrong.sum())
    if count == 0:
        return None
    places = wrong.nonzero()
    mask = (1 << (8 * actual.element_size())) - 1
    lines = []
    for place in places[:limit].tolist():
        at = tuple(place)
        got, want = (int(b[at]) & mask for b in bits)
        lines.append(f"  {place}: {float(actual[at])!r} (0x{got:x}), wanted {float(reference[at])!r} (0x{want:x})")
    if actual.dim() > 1:
        rows = places[:, 0].unique()
        some = ", ".join(str(r) for r in rows[:limit].tolist())
        lines.append(f"  in {rows.numel()} of {actual.size(0)} rows: {some}{', ...' if rows.numel() > limit else ''}")
    return f"{count} of {actual.numel()} elements differ\n" + "\n".join(lines)


def assert_bitwise(actual: torch.Tensor, reference: torch.Tensor, name: str = "result") -> None:
    """Raise ``AssertionError`` with :func:`bitwise_report` unless both hold the same bits."""
    report = bitwise_report(actual, reference)
    if report is not None:
        raise AssertionError(f"{name}: {report}")
