"""Mutation of the package's kernels: remove one fence, wait, arrival, commit or expected byte, and somebody must notice.

``scripts/mutation_sweep.py`` runs all mutants; its record and the reasons why the survivors are harmless are checked here,
together with a sample of mutants. A site is known by its kind, its instruction and the functions that it was inlined from.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deep_gemm_k3.testing.mutation import RULES, plain_name, sites
from deep_gemm_k3.testing.report import Reasons, document, latest_record, noticed_sites

ROOT = Path(__file__).resolve().parents[2]
PTX = """
.func f() {
	fence.proxy.async.global;
	@%p1 mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], %r2;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2;
	mbarrier.arrive.shared::cta.b64 _, [%r1];
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	red.release.sys.global.add.u32 [%rd1], %r1;
	ld.acquire.gpu.global.u32 %r1, [%rd1];
	barrier.red.and.pred.aligned %p1, 3, 96, %p2;
	bar.warp.sync -1;
	add.s32 %r1, %r1, 1;
	ld.relaxed.sys.global.u32 %r1, [%rd1];
}
"""


def test_sites_and_what_becomes_of_them() -> None:
    found = [(site.kind, site.op.split(".")[0], site.text.strip()) for site in sites(PTX)]
    assert found == [
        ("fence", "fence", ""),
        ("wait", "mbarrier", "@%p1 setp.eq.u32 %p2, 0, 0;"),
        ("arrive", "mbarrier", ""),
        ("expect", "mbarrier", "mbarrier.arrive.shared::cta.b64 _, [%r1];"),
        ("arrive", "mbarrier", ""),
        ("commit", "wgmma", ""),
        ("wait", "wgmma", ""),
        ("arrive", "red", ""),
        ("weaker", "red", "red.relaxed.sys.global.add.u32 [%rd1], %r1;"),
        ("narrower", "red", "red.release.gpu.global.add.u32 [%rd1], %r1;"),
        ("weaker", "ld", "ld.relaxed.gpu.global.u32 %r1, [%rd1];"),
        ("wait", "barrier", "mov.pred %p1, %p2;"),
        ("wait", "bar", ""),
    ]
    assert {kind for kind, _, _ in found} == {rule.kind for rule in RULES}


def test_names_of_any_length_are_read() -> None:
    assert plain_name("_ZN12deep_gemm_k36engine4waitILi3EEEvv") == "engine::wait"
    assert plain_name(f"_ZN12deep_gemm_k36engine4waitIJ{'Li1024E' * 160}EEEvv") == "engine::wait"


def test_mutating_changes_one_line() -> None:
    for site in sites(PTX):
        before, after = PTX.split("\n"), site.mutate(PTX).split("\n")
        assert [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y] == [site.line]


def test_every_recorded_survivor_has_its_reason() -> None:
    reasons, record = Reasons.load(), latest_record()
    noticed = noticed_sites(record)
    unexplained = [
        v["site"]
        for play in record["plays"]
        for v in play["verdicts"]
        if v.get("reached", True) and not (v["by"] or v["site"] in noticed or reasons.of(v["site"]))
    ]
    assert not unexplained
    assert {kind for play in record["plays"] for v in play["verdicts"] for kind in v["by"]} >= {
        "deadlock",
        "race",
        "wrong",
    }


def test_document_is_of_the_record() -> None:
    assert (ROOT / "docs" / "mutation.md").read_text() == document(latest_record(), Reasons.load())


@pytest.mark.timeout(900)  # about 40 s on an idle machine
def test_a_sample_of_mutants_is_noticed_again(tmp_path: Path) -> None:
    """In a process of its own: it forks, and keeps the threads of a recorded world."""
    out = tmp_path / "record.json"
    options = ["--play", "sp_rs", "--small", "--again", "--sample", "20", "--seeds", "2", "--out", str(out)]
    command = [sys.executable, str(ROOT / "scripts" / "mutation_sweep.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = json.loads(out.read_text())["plays"]
    assert len(result["verdicts"]) >= 12  # fewer: the kernel has changed so much that the sweep is due again
    assert not [v["site"] for v in result["verdicts"] if not v["by"]]
    assert not [v for v in result["verdicts"] if {"crash", "hang"} & set(v["by"])]
