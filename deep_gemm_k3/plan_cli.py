"""``python -m deep_gemm_k3 plan``: what a call of a given shape runs, why, and how many bytes its buffer takes."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from deep_gemm_k3._extension import ops


class SharedOutput(StrEnum):
    none = "none"
    dense = "dense"
    rs = "rs"
    sp_rs = "sp_rs"


class Target(StrEnum):
    sm_90a = "sm_90a"
    sm_100a = "sm_100a"


_OUTPUT_NAMES = {"none": "none", "dense": "dense", "rs": "hidden_sharded", "sp_rs": "token_owner"}

app = typer.Typer(add_completion=False)


def human(size: float) -> str:
    """Bytes in the largest unit that keeps a digit before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def byte_lines(table: dict[str, Any]) -> list[str]:
    """The components of a buffer and their sum."""
    total = table["total_bytes"]
    rows = [row for row in table["components"] if row["bytes"]]
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'component':<{width}}  {'offset':>14}  {'bytes':>14}  {'share':>6}"]
    lines += [
        f"{row['name']:<{width}}  {row['offset']:>14}  {row['bytes']:>14}  {row['bytes'] / total:>6.1%}" for row in rows
    ]
    return [*lines, f"{'buffer of one rank':<{width}}  {'':>14}  {total:>14}  {human(total)}"]


def reason_lines(plan: dict[str, Any]) -> list[str]:
    """The choice in words, with the numbers it comes from."""
    config = plan["config"]
    tile, memory = config["routed_tile"], plan["shared_memory"]
    mean = plan["expected_tokens_per_expert"]
    invariant = plan["batch_invariant"]
    why = "batch-invariant: one path for every count" if invariant else f"{mean:.2f} expected per expert"
    lines = [
        f"target         {plan['target']}, {plan['num_sms']} SMs, grid {plan['grid']} "
        f"({config['num_ctas_per_sm']} per SM, {config['num_threads']} threads)",
        f"routed tiles   {tile['num_rows']} rows x {tile['num_tokens']} tokens, K {tile['num_k']}: {why}",
    ]
    if config["shared_output"] != "none":
        tile = config["shared_tile"]
        lines.append(
            f"shared tiles   {tile['num_rows']} rows x {tile['num_tokens']} tokens, K {tile['num_k']}: "
            f"{plan['num_shared_tokens']} shared tokens"
        )
    splits = ", ".join(f"{name} {count}" for name, count in config["splits"].items() if count > 1)
    lines.append(f"splits of K    {splits or 'none: there are enough tiles'}")
    lines.append(
        f"shared memory  {memory['bytes_per_cta']} of {memory['limit']} bytes per CTA, {config['num_stages']} stages of "
        f"{memory['bytes_per_stage']}"
    )
    return lines


@app.command()
def plan(
    *,
    ranks: Annotated[int, typer.Option(help="Ranks of the group.")] = 8,
    experts: Annotated[int, typer.Option(help="Routed experts over all ranks.")] = 896,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 16,
    tokens: Annotated[int, typer.Option(help="Routed tokens of this rank.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="The buffer's limit; at least the tokens.")] = 384,
    hidden: Annotated[int, typer.Option(help="Routed width.")] = 3584,
    intermediate: Annotated[int, typer.Option(help="Routed intermediate width.")] = 3072,
    shared: Annotated[SharedOutput, typer.Option(help="Where the shared expert's output goes.")] = SharedOutput.dense,
    shared_tokens: Annotated[int, typer.Option(help="Rows of the shared input.")] = 64,
    shared_hidden: Annotated[int, typer.Option(help="Width of the shared input.")] = 7168,
    shared_intermediate: Annotated[int, typer.Option(help="This rank's slice of the shared expert.")] = 768,
    target: Annotated[Target, typer.Option(help="Architecture.")] = Target.sm_90a,
    num_sms: Annotated[int, typer.Option(help="SMs the call may use; 0: all of the target's usual device.")] = 0,
    batch_invariant: Annotated[bool, typer.Option(help="Plan for bits that do not depend on the batch.")] = False,
    literal: Annotated[bool, typer.Option("--literal", help="Print the Config as the kernel's source has it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a call would run: configuration, bytes and the reasons. Nothing is allocated or compiled."""
    has_shared = shared is not SharedOutput.none
    problem: dict[str, Any] = {
        "num_ranks": ranks,
        "num_experts": experts,
        "num_topk": topk,
        "num_tokens": tokens,
        "num_max_tokens_per_rank": max(max_tokens, tokens),
        "hidden": hidden,
        "intermediate_hidden": intermediate,
        "target": target.value,
        "batch_invariant": batch_invariant,
        "shared_output": _OUTPUT_NAMES[shared.value],
    }
    if has_shared:
        problem |= {
            "num_shared_tokens": shared_tokens,
            "num_max_shared_tokens": max(max_tokens, shared_tokens),
            "shared_hidden": shared_hidden,
            "shared_intermediate_hidden": shared_intermediate,
        }
    if num_sms:
        problem["num_sms"] = num_sms
    text = json.dumps(problem)
    try:
        planned = json.loads(ops().plan_explain(text))
        configs = json.loads(ops().all_configs(text))
    except RuntimeError as error:
        typer.echo(str(error).splitlines()[0], err=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(planned | {"num_configs": len(configs)}, indent=2))
        return
    print("\n".join(reason_lines(planned)))
    print(f"warm-up        {len(configs)} configurations for all token counts of this signature\n")
    print("\n".join(byte_lines(planned["buffer"])))
    if literal:
        print(f"\n{planned['literal']}")
    if planned["fault"]:
        print(f"\ncannot run: {planned['fault']}")
        raise typer.Exit(1)
