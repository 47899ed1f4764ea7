"""``python -m deep_gemm_k3 plan``: what a call of a given shape runs, why, and how many bytes its buffer takes."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from deep_gemm_k3.mega.plan import Plan, all_configs


class SharedOutput(StrEnum):
    none = "none"
    dense = "dense"
    rs = "rs"
    sp_rs = "sp_rs"


class Target(StrEnum):
    sm_90a = "sm_90a"
    sm_100a = "sm_100a"


class Device(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


_OUTPUT_NAMES = {"none": "none", "dense": "dense", "rs": "hidden_sharded", "sp_rs": "token_owner"}

app = typer.Typer(add_completion=False)


def _at_least(tokens: int, max_tokens: int) -> int:
    """The buffer's limit: the one asked for, raised to the tokens of the call unless it is none at all."""
    return max(max_tokens, tokens) if max_tokens > 0 else max_tokens


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
    device: Annotated[Device, typer.Option(help="Where the tensors would live.")] = Device.cuda,
    num_sms: Annotated[int, typer.Option(help="SMs the call may use; 0: all of the target's usual device.")] = 0,
    batch_invariant: Annotated[bool, typer.Option(help="Plan for bits that do not depend on the batch.")] = False,
    literal: Annotated[bool, typer.Option("--literal", help="Print the Config as the kernel's source has it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a call would run: configuration, bytes and the reasons; exit code 1 when it cannot be launched. Nothing is
    allocated or compiled."""
    has_shared = shared is not SharedOutput.none
    problem: dict[str, Any] = {
        "num_ranks": ranks,
        "num_experts": experts,
        "num_topk": topk,
        "num_tokens": tokens,
        "num_max_tokens_per_rank": _at_least(tokens, max_tokens),
        "hidden": hidden,
        "intermediate_hidden": intermediate,
        "target": target.value,
        "batch_invariant": batch_invariant,
        "shared_output": _OUTPUT_NAMES[shared.value],
    }
    if has_shared:
        problem |= {
            "num_shared_tokens": shared_tokens,
            "num_max_shared_tokens": _at_least(shared_tokens, max_tokens),
            "shared_hidden": shared_hidden,
            "shared_intermediate_hidden": shared_intermediate,
        }
    if num_sms:
        problem["num_sms"] = num_sms
    try:
        planned = Plan.make(device=device.value, **problem)
        configs = all_configs(problem)
    except (RuntimeError, ValueError) as error:
        typer.echo(str(error).splitlines()[0], err=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps({**planned.data, "num_configs": len(configs)}, indent=2))
    else:
        print(planned.explain())
        print(f"warm-up   {len(configs)} configurations for all token counts of this signature\n")
        print(planned.byte_table())
        if literal:
            print(f"\n{planned.literal}")
    if planned.data["fault"]:
        raise typer.Exit(1)
