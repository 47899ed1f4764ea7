"""The demo's command."""

from __future__ import annotations

from typing import Annotated

import typer

from deep_gemm_k3.arguments import is_device
from deep_gemm_k3.demo.checks import Row, check
from deep_gemm_k3.demo.data import Problem, make_layer
from deep_gemm_k3.demo.run import Progress, run
from deep_gemm_k3.emulator import service
from deep_gemm_k3.mega.buffer_spec import pick_device, target_of
from deep_gemm_k3.mega.group import SingleRank


def print_verdict(rows: list[Row]) -> None:
    width = max(len(row.check) for row in rows)
    print(f"\n{'check':<{width}}  {'values':>8}  {'found':>18}  {'limit':>16}  verdict")
    for row in rows:
        verdict = "ok" if row.passed else "FAILED"
        print(f"{row.check:<{width}}  {row.compared:>8}  {row.distance:>18}  {row.limit:>16}  {verdict}")


def findings() -> list[Row]:
    """What the emulator objects to in the calls since it was cleared, told line by line; nothing where it ran none."""
    report = service.report()
    executed, found = report["counters"]["instructions"], report["findings"]
    for one in found:
        print(f"finding: {one['kind']} ({one['count']} times): {one['text']}")
    return [Row("findings of the emulator", executed, str(len(found)), "0", not found)] if executed else []


app = typer.Typer(add_completion=False)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of all inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; the default is a GPU where there is one.")] = "",
) -> None:
    """Run the main job on this machine and check it. Exit code 1 when a check fails or the emulator finds a fault."""
    import torch

    if device and not is_device(device):
        raise typer.BadParameter(f"wanted cpu, cuda or cuda:N, given {device!r}", param_hint="--device")
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target_of(pick_device(SingleRank(), chosen))
    except ValueError as error:  # now, not when the weights are made
        raise typer.BadParameter(str(error).removeprefix("device: "), param_hint="--device") from None
    progress = Progress()
    problem = Problem.for_device(chosen, seed)
    layer = make_layer(problem, progress)
    progress(f"made tokens and the {problem.shared_width}-wide shared expert")
    service.clear()
    rows = check(layer, run(layer, chosen, progress), progress) + findings()
    print_verdict(rows)
    if not all(row.passed for row in rows):
        raise typer.Exit(1)
