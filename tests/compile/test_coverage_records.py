"""The records of all kernels of the model: what they take over, what they call a fault, and that sm_100f is sm_100a's text."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deep_gemm_k3.jit import KernelSource, NvrtcCompiler
from deep_gemm_k3.mega.plan import KERNELS, all_configs

ROOT = Path(__file__).resolve().parents[2]
K3 = {
    "num_ranks": 8, "num_experts": 896, "num_topk": 16, "hidden": 3584, "intermediate_hidden": 3072,
    "num_max_tokens_per_rank": 8448, "num_max_shared_tokens": 67584, "shared_hidden": 7168, "shared_intermediate_hidden": 768,
    "shared_output": "token_owner", "activation": "situ", "max_tokens": 8, "max_shared_tokens": 64, "target": "sm_100a",
}  # fmt: skip
HEAD = {"target": "sm_100f", "compiler": "one", "machine code": True, "headers": "1234"}
GOOD = (128, 0, 0, 200_000, 512, 9000, 4.0)


def load_script(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def coverage() -> Any:
    return load_script("check_emulator_coverage")


def test_the_family_target_has_the_text_and_the_machine_code_of_the_exact_one(coverage: Any) -> None:
    literal = all_configs(K3)[0]["literal"]
    exact, family = (
        NvrtcCompiler().compile(KernelSource(KERNELS["sm_100a"], arch, literal)) for arch in ("sm_100a", "sm_100f")
    )
    assert exact.ptx != family.ptx
    assert coverage.same_text(coverage.for_family(exact.ptx)) == coverage.same_text(family.ptx)
    assert coverage.same_text(exact.ptx) != coverage.same_text(family.ptx)  # the target
    assert coverage.machine_code(exact.cubin) == coverage.machine_code(family.cubin)
    # Bytes alike stand outside the instructions too, where they make no difference: one that does is the operation of a load.
    loads = [match.start() for match in re.finditer(b"\x81\x79", exact.cubin)]
    spoilt = [exact.cubin[:at] + b"\x80" + exact.cubin[at + 1 :] for at in loads]
    assert any(coverage.machine_code(cubin) != coverage.machine_code(exact.cubin) for cubin in spoilt)
    with pytest.raises(ValueError, match="wanted one line"):
        coverage.for_family(family.ptx)


def made(coverage: Any, name: str, row: tuple[float, ...] = GOOD, **more: Any) -> Any:
    return coverage.Made(("sm_100f", "nvrtc"), name, row, {"add.s32": 3, "ret": 1}, **more)


def test_a_record_is_continued(coverage: Any, tmp_path: Path) -> None:
    record, file = coverage.Record(HEAD, {"a", "b"}), tmp_path / "record.json"
    record.add(made(coverage, "a", compared=("text", "machine code"), differs=("machine code",)))
    file.write_text(record.text())
    again = coverage.Record(HEAD, {"a", "b", "c"})
    assert again.resume(file)
    again.add(made(coverage, "b", compared=("machine code",)))
    found = json.loads(again.text())
    assert (found["kernels"], found["decoded"]) == (3, 2)
    assert found["opcodes_with_modifiers"] == {"add.s32": 6, "ret": 2}
    assert found["compared with sm_100a"] == {"machine code": 2, "text": 1}
    assert found["differs from sm_100a"] == {"machine code": ["a"]}


@pytest.mark.parametrize("changed", [{"headers": "other"}, {"compiler": "two"}, {"target": "sm_100a"}])
def test_a_record_of_other_sources_is_begun_again(coverage: Any, tmp_path: Path, changed: dict[str, Any]) -> None:
    record, file = coverage.Record(HEAD, {"a"}), tmp_path / "record.json"
    record.add(made(coverage, "a"))
    file.write_text(record.text())
    assert not coverage.Record(HEAD | changed, {"a"}).resume(file)
    assert not coverage.Record(HEAD, {"b"}).resume(file)  # the kernel that it holds is no longer chosen
    assert not coverage.Record(HEAD, {"a"}).resume(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("row", "more"),
    [
        ((255, 8, 0, 1, 1, 1, 1.0), {}),
        ((255, 0, 8, 1, 1, 1, 1.0), {}),
        ((255, 0, 0, 227 * 1024 + 1, 1, 1, 1.0), {}),
        ((255, 0, 0, 1, 513, 1, 1.0), {}),
        ((255, 0, 0, 1, 1, 1, 10.1), {}),
        (GOOD, {"lacking": "PTX line 6: no model"}),
        (GOOD, {"compared": ("text",), "differs": ("text",)}),
        ((), {"lacking": "CompileError: refused"}),
    ],
)
def test_faults(coverage: Any, tmp_path: Path, row: tuple[float, ...], more: dict[str, Any]) -> None:
    record, file = coverage.Record(HEAD, {"good", "bad"}), tmp_path / "record.json"
    record.add(made(coverage, "good"))
    assert not record.faults()
    record.add(made(coverage, "bad", row, **more))
    (fault,) = record.faults()
    assert fault.startswith("bad: ")
    file.write_text(record.text())
    again = coverage.Record(HEAD, {"good", "bad"})
    assert again.resume(file)
    # What did not compile is tried again; any other fault stays one.
    assert again.faults() == ([fault] if row else [])


def test_sm_100a_and_sm_90a_come_side_by_side_and_the_family_target_last(coverage: Any, tmp_path: Path) -> None:
    """Of sampled kernels at once; a name is the digest of the literal, so the literal is found for the name."""
    literals = [f"kernel {i}" for i in range(64)]
    wanted = {
        target: {coverage.name_of(text): {"literal": text} for text in literals} for target in ("sm_90a", "sm_100a")
    }
    keys = [("sm_100a", "nvrtc"), ("sm_90a", "nvrtc"), ("sm_100f", "nvrtc")]
    records = {key: coverage.Record(HEAD, set(wanted["sm_90a"])) for key in keys}
    taken = list(coverage.steps(records, wanted, 0, tmp_path))
    order = [step.target for step in taken]
    sampled = {step.name for step in taken if step.with_family}
    assert sampled
    assert sampled == {name for name in wanted["sm_100a"] if coverage.is_sampled(name)}
    assert order == ["sm_100a", "sm_90a"] * 64 + ["sm_100f"] * (64 - len(sampled))
    assert {step.name for step in taken if step.target == "sm_100f"} | sampled == set(wanted["sm_100a"])
    for key in keys:
        records[key].rows = dict.fromkeys(list(wanted["sm_100a"])[:60], GOOD)
    assert {step.name for step in coverage.steps(records, wanted, 0, tmp_path)} == set(list(wanted["sm_100a"])[60:])


def test_the_documents_say_what_the_records_say() -> None:
    table = load_script("coverage_table")
    for path, text in table.documents(ROOT).items():
        assert path.read_text() == text, f"{path}: run scripts/coverage_table.py"
    with pytest.raises(ValueError, match="wanted one pair of marks"):
        table.replaced("no marks", "a block")


def test_a_record_that_is_none_shows_as_none(coverage: Any, tmp_path: Path) -> None:
    record = coverage.Record(HEAD, {"a", "b"})
    record.add(made(coverage, "a", compared=("text", "machine code"), differs=("machine code",)))
    (tmp_path / "compiled-sm_100f-nvrtc.json").write_text(record.text())
    said = load_script("coverage_table").blackwell(tmp_path)
    assert "| sm_100a, nvrtc | none recorded" in said
    assert "| 1 of 2 | 128 | 0, 0 | 200,000 | 512 | 9,000 | 4.0, 4.0 | 0 | 0 | `1234` |" in said
    assert "text compared on 1 kernels, 0 differ; machine code on 1, 1 differ" in said
