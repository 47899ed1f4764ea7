"""``python -m deep_gemm_k3 cache`` (list, verify, clear, path) and ``warmup``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from deep_gemm_k3.jit.cache import Cache
from deep_gemm_k3.jit.kernel import KernelStore
from deep_gemm_k3.jit.source import KernelSource
from deep_gemm_k3.jit.warmup import warm_up

cache_app = typer.Typer(help="List, verify or clear the compiled kernels.", no_args_is_help=True, add_completion=False)


@cache_app.command("path")
def show_path() -> None:
    """Print the directory."""
    print(Cache().root)


def _and_others(count: int) -> str:
    return f", {count} of another format" if count else ""


@cache_app.command("list")
def show_list(configs: Annotated[bool, typer.Option("--configs", help="Print each Config too.")] = False) -> None:
    """Print every kernel: architecture, size, compile time, registers, spills."""
    cache = Cache()
    count = others = total = 0
    for entry in cache.entries():
        total += entry.size
        if entry.other_format:
            others += 1
            print(f"{entry.path.stem[:12]}  of another format ({entry.other_format})")
            continue
        count += 1
        if entry.artefact is None:
            print(f"{entry.path.stem[:12]}  damaged: {entry.damage}")
            continue
        found = entry.artefact
        if found.ptx_only:
            machine_code = "PTX for the emulator"
        else:
            used = found.resources
            machine_code = f"{used.registers:3d} registers  {used.spill_stores + used.spill_loads} bytes spilled"
        print(
            f"{entry.path.stem[:12]}  {found.name:<10} {found.arch:<8} {entry.size / 1024:7.0f} KiB  "
            f"{found.seconds:5.1f} s  {machine_code}"
        )
        if configs:
            print(f"    {found.config}")
    print(f"{count} kernels{_and_others(others)}, {total / 2**20:.1f} MiB in {cache.root}")


@cache_app.command("verify")
def verify(remove: Annotated[bool, typer.Option("--remove", help="Remove damaged files.")] = False) -> None:
    """Check every kernel against its hashes; exit 1 when one is damaged (a damaged one is also rebuilt when needed).
    Those that another release of the package wrote are counted apart."""
    good = bad = others = kept = 0
    for entry in Cache().entries():
        if entry.artefact is not None:
            good += 1
            continue
        if entry.other_format:
            others += 1
            continue
        bad += 1
        print(f"{entry.path}: {entry.damage}")
        if remove:
            try:
                entry.path.unlink(missing_ok=True)
            except OSError as error:
                kept += 1
                print(f"not removed: {entry.path}: {error.strerror or error}", file=sys.stderr)
    removed = " and removed" if remove and bad and not kept else ""
    print(f"{good} kernels are sound, {bad} damaged{removed}{_and_others(others)}")
    if kept or (bad and not remove):
        raise typer.Exit(1)


@cache_app.command("clear")
def clear() -> None:
    """Remove every kernel; exit code 1 when one stays. Running processes keep what they have loaded."""
    cache = Cache()
    files, size, kept = cache.clear()
    print(f"removed {files} files, {size / 2**20:.1f} MiB from {cache.root}")
    for reason in kept:
        print(f"not removed: {reason}", file=sys.stderr)
    if kept:
        raise typer.Exit(1)


class SharedOutput(StrEnum):
    none = "none"
    dense = "dense"
    rs = "rs"
    sp_rs = "sp_rs"


class Activation(StrEnum):
    swiglu = "swiglu"
    situ = "situ"


class Architecture(StrEnum):
    sm_90a = "sm_90a"
    sm_100a = "sm_100a"
    sm_100f = "sm_100f"


warmup_app = typer.Typer(help="Compile everything a call can choose, ahead of time.", add_completion=False)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What the package refuses is a message and exit code 1, not a traceback."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error


# The modes as the plan calls them.
OUTPUTS = {"none": "none", "dense": "dense", "rs": "hidden_sharded", "sp_rs": "token_owner"}


def sources_of(problem: dict[str, Any], arch: str) -> list[KernelSource]:
    """Every kernel that the heuristics can choose for a problem, whatever its token counts. Raises ValueError for a problem
    of which some calls cannot be launched."""
    from deep_gemm_k3.mega.plan import KERNELS, all_configs

    target = arch.replace("100f", "100a")
    configs = all_configs(problem | {"target": target})
    faults = [found["fault"] for found in configs if found["fault"]]
    if faults:
        raise ValueError(f"{arch}: {len(faults)} of {len(configs)} kernels cannot be launched: {faults[0]}")
    return [KernelSource(KERNELS[target], arch, found["literal"]) for found in configs]


@warmup_app.command()
def warmup(
    *,
    num_ranks: Annotated[int, typer.Option("--ranks", help="Ranks of the group.")],
    num_max_tokens: Annotated[int, typer.Option("--max-tokens", help="The buffer's tokens per rank.")],
    num_max_shared_tokens: Annotated[int, typer.Option("--max-shared-tokens", help="0: as --max-tokens.")] = 0,
    num_experts: Annotated[int, typer.Option("--experts", help="Over all ranks.")] = 896,
    num_topk: Annotated[int, typer.Option("--topk")] = 16,
    hidden: int = 3584,
    intermediate: int = 3072,
    shared_hidden: int = 7168,
    shared_intermediate: Annotated[int, typer.Option(help="One rank's slice.")] = 768,
    modes: Annotated[list[SharedOutput], typer.Option("--mode", help="May be repeated.")] = [SharedOutput.dense],  # noqa: B006
    activation: Activation = Activation.situ,
    exact: Annotated[bool, typer.Option("--exact", help="fast_math=False.")] = False,
    batch_invariant: bool = False,
    statistics: bool = False,
    arch: Annotated[list[Architecture], typer.Option(help="May be repeated.")] = [Architecture.sm_90a],  # noqa: B006
    workers: Annotated[int, typer.Option(min=0, help="Processes that compile; 0: one per core.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the kernels, compile none.")] = False,
) -> None:
    """Compile everything a call can choose, ahead of time; exit code 1 unless all of it is in the cache. The defaults are
    Kimi K3's widths at TP 8."""
    sources: list[KernelSource] = []
    for target in arch:
        for mode in modes:
            problem: dict[str, Any] = {
                "num_ranks": num_ranks,
                "num_experts": num_experts,
                "num_topk": num_topk,
                "num_max_tokens_per_rank": num_max_tokens,
                "hidden": hidden,
                "intermediate_hidden": intermediate,
                "activation": activation.value,
                "fast_math": not exact,
                "batch_invariant": batch_invariant,
                "has_statistics": statistics,
                "shared_output": OUTPUTS[mode.value],
            }
            if mode is not SharedOutput.none:
                problem |= {
                    "shared_hidden": shared_hidden,
                    "shared_intermediate_hidden": shared_intermediate,
                    "num_max_shared_tokens": num_max_shared_tokens or num_max_tokens,
                }
            with plain_errors():
                sources += sources_of(problem, target.value)
    if dry_run:
        print(f"{len({source.key for source in sources})} kernels")
        return
    store = KernelStore()
    with plain_errors():
        report = warm_up(sources, store, workers=workers or None)
    distinct = {source.key: source for source in sources}.values()
    lost = sum(store.disk.find(source, store.compiler) is None for source in distinct)
    if lost:  # ready for this process alone, which ends
        print(f"{lost} of {report.requested} kernels could not be kept in {store.disk.root}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{report}, in {store.disk.root}")
