"""What the GPU tests compile, looked at without a GPU: kernels take most of that suite's time."""

from __future__ import annotations

import importlib
from pathlib import Path

import mega_support
import pytest
from mega_support import Family, Narrowed, Signature, pairs

from deep_gemm_k3.mega import plan

MODULES = sorted(path.stem for path in Path(mega_support.__file__).parent.glob("test_*.py"))
ONE_GPU = [name for name in MODULES if "two_gpus" not in name]
MOST_KERNELS = 230  # about a quarter of a second each on 27 cores
NARROWEST = {"sm_90a": 8, "sm_100a": 16}  # token tiles


@pytest.fixture(params=NARROWEST, autouse=True)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The suite on a GPU of either architecture."""
    monkeypatch.setattr(mega_support, "TARGET", request.param)
    return str(request.param)


def families() -> list[Family]:
    modules = [importlib.import_module(name) for name in ONE_GPU]
    return [family for module in modules for family in getattr(module, "FAMILIES", ())]


def test_named_counts_choose_kernels_of_their_signature() -> None:
    found = [pair for family in families() for pair in family.chosen()]
    assert len(found) > 50
    assert all(chosen and chosen <= everything for everything, chosen in found)


def test_the_suite_compiles_few_kernels() -> None:
    assert len(Narrowed(families()).literals()) <= MOST_KERNELS


def test_only_named_signatures_are_narrowed(target: str) -> None:
    named = Signature("routed", mega_support.SWIGLU)
    other = Signature("routed", mega_support.SITU)
    family = Family(mega_support.ONE_RANK, named, other, counts={named: pairs((5,))})
    problems = dict(family.problems())
    narrowed = Narrowed([family])
    few = narrowed(problems[named])
    assert [one["config"]["routed_tile"]["num_tokens"] for one in few] == [NARROWEST[target]]
    assert narrowed(problems[other]) == plan.all_configs(problems[other])
    unknown = {**problems[named], "num_experts": 16}
    assert narrowed(unknown) == plan.all_configs(unknown)
    # A first call's own kernel is loaded too, so that the call which brings a signature needs no count.
    own = plan.all_configs(problems[named])[-1]["literal"]
    assert {one["literal"] for one in narrowed({**problems[named], "literal": own})} == {own, few[0]["literal"]}
    # Another family that needs all of the signature gets all.
    both = Narrowed([family, Family(mega_support.ONE_RANK, named)])
    assert both(problems[named]) == plan.all_configs(problems[named])
