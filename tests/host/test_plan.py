"""The plan: pure, total, enumerable, and readable."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm_k3 import Plan
from deep_gemm_k3._extension import INCLUDE_DIR, ops
from deep_gemm_k3.mega.plan import all_configs

K3: dict[str, Any] = {
    "num_ranks": 8,
    "num_experts": 896,
    "num_topk": 16,
    "num_max_tokens_per_rank": 8192,
    "num_max_shared_tokens": 8192,
    "hidden": 3584,
    "intermediate_hidden": 3072,
    "shared_intermediate_hidden": 768,
    "shared_hidden": 7168,
    "shared_output": "token_owner",
}
ONE_EXPERT = {**K3, "num_ranks": 1, "num_experts": 1, "num_topk": 1}
ROUTED = {**K3, "shared_output": "none"}


def sweep(problem: dict[str, Any], tokens: list[int], experts: list[int], ranks: list[int]) -> int:
    found = json.loads(ops().plan_sweep(json.dumps({**problem, "tokens": tokens, "experts": experts, "ranks": ranks})))
    assert found["fault"] is None, found
    return int(found["count"])


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("output", ["none", "dense", "hidden_sharded", "token_owner"])
def test_every_problem_has_a_plan_that_fits(target: str, output: str) -> None:
    problem = {**K3, "target": target, "shared_output": output}
    everything = sweep(problem, [0, 8192, 511], [1, 1024, 1], [1, 64, 1])
    assert everything == 17 * 1024 * 64
    assert sweep(problem, [0, 8192, 1], [1, 1024, 341], [1, 64, 21]) == 8193 * 4 * 4


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("topk", [1, 32])
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 128), (8192, 8192), (65536, 128)])
def test_extreme_widths_have_plans(invariant: bool, topk: int, hidden: int, intermediate: int) -> None:
    problem = {
        **K3,
        "batch_invariant": invariant,
        "num_topk": topk,
        "hidden": hidden,
        "intermediate_hidden": intermediate,
    }
    assert sweep(problem, [0, 8192, 273], [1, 1024, 93], [1, 64, 7]) == 31 * 12 * 10


def distinct(configs: list[dict[str, Any]]) -> set[str]:
    return {entry["literal"] for entry in configs}


@pytest.mark.parametrize(
    "problem", [K3, ONE_EXPERT, ROUTED, {**K3, "target": "sm_100a"}], ids=["k3", "one", "routed", "sm100"]
)
def test_all_configs_holds_every_choice(problem: dict[str, Any]) -> None:
    configs = all_configs(problem)
    literals = distinct(configs)
    assert len(literals) == len(configs) <= 40
    counts = [0, 1, 2, 7, 8, 9, 16, 17, 31, 64, 65, 127, 128, 129, 500, 2048, 8192]
    for tokens in counts:
        for shared_tokens in counts:
            plan = Plan.make(**{**problem, "num_tokens": tokens, "num_shared_tokens": shared_tokens})
            assert plan.literal in literals


def test_all_configs_of_a_narrow_range() -> None:
    decode = all_configs({**K3, "max_tokens": 8, "max_shared_tokens": 64})
    assert distinct(decode) < distinct(all_configs(K3))
    assert {entry["config"]["routed_tile"]["num_tokens"] for entry in decode} == {8}


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 8192),
    shared_tokens=st.integers(0, 8192),
    others=st.lists(st.integers(0, 8192), min_size=2, max_size=2),
)
def test_batch_invariant_plans_ignore_token_counts(tokens: int, shared_tokens: int, others: list[int]) -> None:
    base = {**K3, "batch_invariant": True}
    first = Plan.make(**base, num_tokens=tokens, num_shared_tokens=shared_tokens)
    second = Plan.make(**base, num_tokens=others[0], num_shared_tokens=others[1])
    assert first.literal == second.literal
    assert set(first.config["splits"].values()) == {1}


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_batch_invariant_plans_ignore_ranks(ranks: int) -> None:
    def path(count: int) -> dict[str, Any]:
        config = dict(Plan.make(**{**K3, "batch_invariant": True, "num_ranks": count, "num_tokens": 8}).config)
        return {name: config[name] for name in ("routed_tile", "shared_tile", "splits")}

    assert path(ranks) == path(8)


def test_tiles_follow_expected_rows() -> None:
    def tile(tokens: int) -> int:
        return int(Plan.make(**{**ROUTED, "num_tokens": tokens}).config["routed_tile"]["num_tokens"])

    few = [tile(tokens) for tokens in range(0, 256, 16)]
    assert few == sorted(few) and set(few) == {8, 16, 32, 48} and tile(8) == 8
    assert {tile(tokens) for tokens in range(192, 8192, 64)} == {48, 72, 88, 104, 160}
    assert {tile(tokens) for tokens in (1024, 2048, 4096, 8192)} == {160}


# Mainloops of every tile; the widest tile has three of several sets.
WIDTHS = {
    48: [(48, 40, 32)], 72: [(72, 56, 48)], 88: [(88, 80, 72)], 104: [(104, 88, 80)],
    160: [(160, 144, 112), (160, 144, 88)],
}  # fmt: skip


@pytest.mark.parametrize("tokens", [224, 256, 448, 512, 640, 768, 1024, 1152, 1536, 2048, 4096, 8192])
def test_many_rows_take_the_tile_that_pads_least(tokens: int) -> None:
    """Rows of an expert are about Poisson distributed; its blocks, as few as can be, take the widths that together have the
    fewest places; a block costs the tokens of the mainloop that it takes, and about 32 more."""
    mean = ROUTED["num_ranks"] * tokens * ROUTED["num_topk"] / ROUTED["num_experts"]

    def places(rows: int, widths: tuple[int, ...]) -> int:
        blocks = max(1, -(-rows // widths[0]))
        sums = {0}
        for _ in range(blocks):
            sums = {total + width for total in sums for width in widths}
        return min(total for total in sums if total >= rows) + 32 * blocks

    def cost(widths: tuple[int, ...]) -> float:
        rows = range(max(0, int(mean - 9 * math.sqrt(mean))), int(mean + 9 * math.sqrt(mean)))
        weights = (math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in rows)
        return sum(weight * places(n, widths) for n, weight in zip(rows, weights, strict=True))

    for fast_math, tiles in ((True, (48, 72, 88, 104, 160)), (False, (48, 72, 88, 104))):
        config = Plan.make(**{**ROUTED, "num_tokens": tokens, "fast_math": fast_math}).config
        chosen = (config["routed_tile"]["num_tokens"], *config["narrow_widths"].values())
        assert tuple(sorted(chosen, reverse=True)) in WIDTHS[chosen[0]]
        least = min(cost(widths) for tile in tiles for widths in WIDTHS[tile])
        assert cost(tuple(sorted(chosen, reverse=True))) <= 1.02 * least


@pytest.mark.parametrize("given", [(88, 96), (100, 96), (104, 96), (104, 104), (96, 4), (0, 96), (96, 0)])
def test_narrow_widths_that_cannot_be(given: tuple[int, int]) -> None:
    widths = dict(zip(("middle", "least"), given, strict=True))
    wanted = {**ROUTED, "num_tokens": 512, "overrides": {"routed_tokens": 104, "narrow_widths": widths}}
    plan = Plan.make(**wanted)
    if given[1] == 0:  # not given: the planner's own
        assert plan.data["fault"] is None and plan.config["narrow_widths"] == {"middle": 88, "least": 80}
    else:
        assert (
            plan.data["fault"]
            == "the narrow widths are no multiples of 8 in falling order, or equal, below the routed token tile"
        )


@pytest.mark.parametrize(
    ("tokens", "ctas", "tile", "narrow"), [(8, 2, 8, 0), (64, 2, 16, 8), (64, 1, 16, 0), (128, 2, 32, 0)]
)
def test_few_tokens_have_one_narrower_width(tokens: int, ctas: int, tile: int, narrow: int) -> None:
    """Where two CTAs share an SM blocks of up to eight tokens are multiplied by single warps, which is faster."""
    wanted = {
        **ROUTED,
        "num_ranks": 1,
        "num_experts": 112,
        "num_tokens": tokens,
        "overrides": {"num_ctas_per_sm": ctas},
    }
    config = Plan.make(**wanted).config
    assert config["routed_tile"]["num_tokens"] == tile
    assert config["narrow_widths"] == {"middle": narrow, "least": narrow}


@pytest.mark.parametrize(("target", "fault"), [("sm_90a", None), ("sm_100a", "narrower mainloops are for sm_90a")])
def test_narrow_widths_are_sm90s(target: str, fault: str | None) -> None:
    overrides = {"routed_tokens": 96, "narrow_widths": {"middle": 64, "least": 32}}
    assert Plan.make(**{**ROUTED, "num_tokens": 512, "target": target, "overrides": overrides}).data["fault"] == fault


def test_nearly_equal_tiles_do_not_take_turns() -> None:
    """Another kernel is worth a hundredth of the work: 512 tokens, where 88 and 104 tokens cost the same, take the narrower
    tile, which is the faster one, and over more and more tokens few kernels follow each other."""
    chosen = []
    for tokens in range(224, 8192, 16):
        config = Plan.make(**{**ROUTED, "num_tokens": tokens}).config
        chosen.append((config["routed_tile"]["num_tokens"], config["narrow_widths"]["least"]))
    assert chosen[(512 - 224) // 16] == (88, 72)
    assert sum(a != b for a, b in itertools.pairwise(chosen)) <= 8


def test_a_part_of_a_device_gets_one_cta_on_each_sm() -> None:
    """Two of one rank's CTAs beside each other would leave nothing to start on to the rank they wait for, or too little."""
    few = {**K3, "num_tokens": 1, "num_sms": 66}
    assert Plan.make(**few).config["num_ctas_per_sm"] == 2
    part = {**few, "whole_device": False}
    plan = Plan.make(**part)
    assert plan.config["num_ctas_per_sm"] == 1 and plan.data["grid"] == 66
    assert {entry["config"]["num_ctas_per_sm"] for entry in all_configs(part)} == {1}


def test_shared_tiles_are_chosen_apart_from_routed_ones() -> None:
    few = Plan.make(**{**K3, "num_tokens": 1, "num_shared_tokens": 8192}).config
    many = Plan.make(**{**K3, "num_tokens": 8192, "num_shared_tokens": 1}).config
    assert few["routed_tile"]["num_tokens"] == 8 and few["shared_tile"]["num_tokens"] == 64
    assert many["routed_tile"]["num_tokens"] == 160 and many["shared_tile"]["num_tokens"] == 64


def test_few_tiles_are_split_along_k() -> None:
    config = Plan.make(**{**ONE_EXPERT, "num_tokens": 8, "num_shared_tokens": 64}).config
    assert config["splits"]["routed_l1"] > 1 and config["splits"]["shared_l1"] > 1
    whole = {**ONE_EXPERT, "num_sms": 132, "num_tokens": 8, "num_shared_tokens": 64, "target": "sm_90a"}
    # 24 x 7 + 12 x 8 tasks of L1 for 264 CTAs; 28 units of K divide by 7, and L2's 6 of the shared expert stay whole.
    assert Plan.make(**whole).config["splits"] == {"routed_l1": 7, "routed_l2": 8, "shared_l1": 8, "shared_l2": 1}
    many = Plan.make(**{**K3, "num_tokens": 64, "num_shared_tokens": 512}).config["splits"]
    assert set(many.values()) == {1}


def test_a_ring_of_splits_is_short() -> None:
    """What is on its way for further stages delays the sums of splits; but a ring must hold a split's stages twice."""
    whole = {**ONE_EXPERT, "num_sms": 132, "num_tokens": 8, "num_shared_tokens": 64, "target": "sm_90a"}
    stages = {n: Plan.make(**whole, overrides={"splits": {"routed_l1": n}}).config["num_stages"] for n in (1, 4, 5, 7)}
    assert stages[5] == stages[7] == 3 and stages[4] == stages[1] > 3  # of 28 units
    assert Plan.make(**{**K3, "num_tokens": 8, "num_shared_tokens": 64}).config["num_stages"] > 3
    idle = Plan.make(**{**K3, "num_tokens": 0, "num_shared_tokens": 64}).config  # whose peers may fill all its experts
    assert idle["splits"]["routed_l1"] == 7 and idle["num_stages"] > 3


def test_few_shared_tiles_are_no_longer_than_routed_ones() -> None:
    """12 tiles of 7168 x 128 BF16 weights would take as long as four routed ones each."""
    splits = Plan.make(**{**K3, "num_tokens": 8, "num_shared_tokens": 64}).config["splits"]
    assert splits == {"routed_l1": 1, "routed_l2": 1, "shared_l1": 4, "shared_l2": 1}
    few = Plan.make(**{**K3, "num_ranks": 1, "num_experts": 112, "num_tokens": 1, "num_shared_tokens": 1}).config
    assert set(few["splits"].values()) == {1}


def test_rows_that_are_known_need_no_room() -> None:
    assert Plan.make(**{**ONE_EXPERT, "num_tokens": 8}).config["routed_tile"]["num_tokens"] == 8
    for tokens in (9, 11, 16):  # of which up to 10 on average take tiles of 16 where counts vary
        assert Plan.make(**{**ONE_EXPERT, "num_tokens": tokens}).config["routed_tile"]["num_tokens"] == 16
    assert Plan.make(**{**ONE_EXPERT, "num_tokens": 17}).config["routed_tile"]["num_tokens"] == 32
    spread = {**ONE_EXPERT, "num_experts": 8, "num_ranks": 8, "num_tokens": 8}
    assert Plan.make(**spread).config["routed_tile"]["num_tokens"] == 16


def test_nothing_that_crosses_ranks_depends_on_a_ranks_own_counts() -> None:
    """Buffers of one shape are equal on all ranks whatever they plan."""
    tables = {json.dumps(Plan.make(**{**K3, "num_tokens": tokens}).data["buffer"]) for tokens in (0, 1, 500, 8192)}
    assert len(tables) == 1


def test_literal_names_every_field_of_config() -> None:
    text = (INCLUDE_DIR / "deep_gemm_k3" / "config.cuh").read_text()
    body = text[text.index("struct Config {") :].split("DG_HOST_DEVICE")[0]
    fields = re.findall(r"^\s+\w+ (\w+)(?: = [^;]+)?;", body, re.M)
    plan = Plan.make(**K3)
    assert set(fields) == set(plan.config)
    assert re.findall(r"(?<![\w{,] )\.(\w+) = ", plan.literal)[0] == fields[0]
    for name in fields:
        assert f".{name} = " in plan.literal


def test_literal_is_a_config(tmp_path: Path) -> None:
    """g++ accepts every literal as a constant and as a template argument."""
    compiler = shutil.which("g++")
    assert compiler is not None
    literals = [entry["literal"] for problem in (K3, ONE_EXPERT, ROUTED) for entry in all_configs(problem)]
    lines = ["#include <deep_gemm_k3/config.cuh>", "namespace deep_gemm_k3 {"]
    lines.append("template <Config C> constexpr int threads() { return C.num_threads; }")
    for i, literal in enumerate(literals):
        lines.append(f"constexpr Config config_{i} = {literal};\nstatic_assert(threads<config_{i}>() == 384);")
    source = tmp_path / "literals.cpp"
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", f"-I{INCLUDE_DIR}", str(source)], check=True
    )


def test_explain_says_what_runs_where() -> None:
    text = Plan.make(**{**K3, "num_tokens": 8, "num_shared_tokens": 64}).explain()
    for part in (
        "fp8_fp4_mega_moe_bf16_shared_sp_rs",
        "situ",
        "sm_90a",
        "896 experts over 8 ranks",
        "top-16",
        "264 CTAs",
    ):
        assert part in text
    on_cpu = Plan.make(device="cpu", **{**K3, "num_tokens": 8}).explain()
    assert "the oracle" in on_cpu and "no kernel executes here" in on_cpu


def test_byte_table_adds_up() -> None:
    plan = Plan.make(**K3)
    components = plan.data["buffer"]["components"]
    end = 0
    for part in components:
        assert part["offset"] % 1024 == 0 and part["offset"] >= end
        end = part["offset"] + part["bytes"]
    assert end <= plan.total_bytes < end + 1024
    table = plan.byte_table().splitlines()
    assert len(table) == len(components) + 2 and table[-1].startswith("total")
    # Worst-case routing, duplicates included: every route of every rank to one of this rank's experts.
    pool = next(part["bytes"] for part in components if part["name"] == "pool_x")
    assert pool >= 8 * 8448 * 16 * 3584 * 2


def test_shared_tokens_size_only_the_shared_intermediate() -> None:
    def sizes(limit: int) -> dict[str, int]:
        made = json.loads(ops().workspace_bytes(json.dumps({**K3, "num_max_shared_tokens": limit})))
        return {part["name"]: part["bytes"] for part in made["components"]}

    few, many = sizes(64), sizes(65536)
    assert {name for name in few if few[name] != many[name]} == {"shared_intermediate", "shared_counters"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_output": "sparse"}, "shared_output: wanted none or dense or hidden_sharded or token_owner, given sparse"),
        ({"target": "sm_80"}, "target: wanted sm_90a or sm_100a or sm_100f, given sm_80"),
        ({"activation": "gelu"}, "activation: wanted swiglu or situ, given gelu"),
        ({"num_tokens": 8449}, "num_tokens: wanted 0..8448, given 8449"),
        ({"num_shared_tokens": -1}, "num_shared_tokens: wanted 0..8192, given -1"),
        ({"shared_hidden": 7000}, "shared_hidden: wanted a multiple of 128 in 128..131072, given 7000"),
        ({"num_sms": 0}, "num_sms: wanted at least 1, given 0"),
        ({"shared_intermediate_hidden": 0}, "bf16_shared_intermediate_hidden: wanted a buffer made for a shared expert, given 0"),
        ({"num_experts": 2**40}, "num_experts: wanted a 32-bit integer, given 1099511627776"),
        ({"num_max_tokens_per_rank": -1, "num_tokens": 0}, "num_max_tokens_per_rank: wanted 1..1048320, given -1"),
        ({"num_max_tokens_per_rank": -400, "num_tokens": 0}, "num_max_tokens_per_rank: wanted 1..1048320, given -400"),
        ({"num_max_tokens_per_rank": 1048321}, "num_max_tokens_per_rank: wanted 1..1048320, given 1048321"),
        ({"num_max_tokens_per_rank": 1048320}, "buffer: wanted at most 1099511627776 bytes per rank, which num_max_tokens_per_rank decides first, given "),
        ({"num_topk": "16"}, "num_topk: wanted a 32-bit integer, given '16'"),
    ],
)  # fmt: skip
def test_bad_problems_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        Plan.make(**{**K3, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", '{"a": 1,}', "[1, 2", '{"num_ranks": 1} x', '"\\u12"', "nul", "[" * 100 + "]" * 100]
)
def test_broken_json_is_an_error_with_a_place(text: str) -> None:
    with pytest.raises(RuntimeError, match="json: wanted"):
        ops().plan_explain(text)
