"""Counters per role, bytes local and peer, chains of messages between ranks, and the trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emu_support import HEADER, compile_cuda, cuda_module, fresh_emulator
from typer.testing import CliRunner

from deep_gemm_k3.demo import checks
from deep_gemm_k3.demo.data import Problem, make_layer
from deep_gemm_k3.demo.run import Progress, run
from deep_gemm_k3.emulator import Device, EmulatorError, Launch, Module, service
from deep_gemm_k3.emulator.cli import app

hopper = fresh_emulator("sm_90a")

# Warp 0 waits at a barrier for warp 1, which counts for a while first.
TWO_ROLES = """
__device__ __forceinline__ int busy(int rounds) { int x = 1; for (int i = 0; i < rounds; ++i) x = x * 3 + i; return x; }
__device__ __forceinline__ void meet_the_others() { asm volatile("bar.sync 1, 64;" ::: "memory"); }
extern "C" __global__ void k(int* out, int rounds) {
    if (threadIdx.x >= 32) out[threadIdx.x] = busy(rounds);
    meet_the_others();
    if (threadIdx.x < 32) out[threadIdx.x] = out[threadIdx.x + 32];
}
"""

# Ranks 0 and 1 count a word of each other up in turns.
PING_PONG = """
extern "C" __global__ void k(unsigned* mine, unsigned* peers, unsigned rank, unsigned rounds) {
    for (unsigned i = 1; i <= rounds; ++i) {
        if (rank == 0) asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(peers), "r"(i) : "memory");
        unsigned seen = 0;
        while (seen < i) asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
        if (rank == 1) asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(peers), "r"(i) : "memory");
    }
}
"""


def waits_and_runs(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[tuple[int, int], str]]:
    events = json.loads(text)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    return [e for e in slices if e["cat"] == "wait"], [e for e in slices if e["cat"] == "run"], names


# The mangled name of a function with 160 numbers is longer than what the demangler takes as it is.
@pytest.mark.parametrize("arguments", [0, 160])
def test_counters_and_trace_know_roles(arguments: int) -> None:
    source = TWO_ROLES
    if arguments:
        source = source.replace(
            "__device__ __forceinline__ void meet", "template <int...> __device__ __forceinline__ void meet"
        )
        source = source.replace("    meet_the_others();", f"    meet_the_others<{', '.join(['1000'] * arguments)}>();")
    out = np.zeros(64, np.int32)
    device = Device(roles="waits,counts", trace=True)
    device.launch(Module(compile_cuda(source, "sm_90a", "--generate-line-info")), "k", 1, 64, params=[out, 3000])
    of = device.role_counters
    assert list(of) == ["waits", "counts"]
    assert sum(role["instructions"] for role in of.values()) == device.counters["instructions"]
    assert of["counts"]["instructions"] > 20 * of["waits"]["instructions"]
    assert of["counts"]["global_written"] == of["waits"]["global_written"] == 128
    assert of["waits"]["global_read"] == 128 and of["counts"]["global_read"] == 0
    waits, runs, names = waits_and_runs(device.trace())
    assert set(names.values()) == {"waits, CTA 0 warp 0", "counts, CTA 0 warp 1"}
    named = [wait for wait in waits if names[wait["pid"], wait["tid"]].startswith("waits")]
    assert {wait["name"] for wait in named} == {"meet_the_others"}
    assert "test.cu" in named[0]["args"]["at"]
    assert {run_["name"] for run_ in runs} == {"waits", "counts"}
    for tid in {e["tid"] for e in waits + runs}:  # slices of a track follow each other
        track = sorted((e["ts"], e["ts"] + e["dur"]) for e in waits + runs if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(track))
    assert not json.loads(device.trace())["traceEvents"][1:]


@pytest.mark.parametrize("rounds", [1, 3])
def test_bytes_of_peers_and_chains_of_messages(rounds: int) -> None:
    words = [np.zeros(1, np.uint32) for _ in range(2)]
    device = Device(race_detection=True)
    for rank, word in enumerate(words):
        device.own(word, rank)
    module = Module(compile_cuda(PING_PONG))
    device.run(
        [Launch(module, "k", 1, 1, [words[rank], words[1 - rank], rank, rounds], rank=rank) for rank in range(2)]
    )
    assert not device.findings
    assert device.counters["message_chain"] == 2 * rounds
    assert device.counters["peer_written"] == device.counters["global_written"] == 4 * 2 * rounds
    assert device.counters["peer_read"] == 0


def test_a_deadlock_names_the_roles_that_wait() -> None:
    module = cuda_module('extern "C" __global__ void k() { asm volatile("bar.sync 1, 96;" ::: "memory"); }')
    device = Device(roles="math,producer")
    with pytest.raises(EmulatorError, match=r"deadlock(.|\n)*warp 0 \(math\) lanes(.|\n)*warp 1 \(producer\) lanes"):
        device.launch(module, "k", 1, 64, params=[])


def test_roles_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"roles: wanted name\*count"):
        Device(roles="math*0")


def test_command_writes_a_trace(tmp_path: Path) -> None:
    ptx, trace = tmp_path / "k.ptx", tmp_path / "trace.json"
    ptx.write_text(HEADER + ".visible .entry k() { bar.sync 0; ret; }")
    result = CliRunner().invoke(app, [str(ptx), "--block", "64", "--roles", "a,b", "--trace", str(trace)])
    assert result.exit_code == 0, result.output
    assert "a:" in result.output
    _, runs, names = waits_and_runs(trace.read_text())
    assert {names[e["pid"], e["tid"]] for e in runs} == {"a, CTA 0 warp 0", "b, CTA 0 warp 1"}


def test_the_fused_kernels_roles(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of the Hopper kernel: what each role does, whose memory it touches, and what waits are called."""
    monkeypatch.setattr(service, "_observe_once", lambda: None)
    service.observe(trace=True)
    service.configure(race_detection=True)
    try:
        layer = make_layer(
            Problem(
                hidden=256, intermediate=256, shared_hidden=256, shared_slice=128, parts=1, experts_per_rank=2, topk=2,
                tokens=(3, 2), shared_tokens=8,
            )
        )  # fmt: skip
        rows = checks.check(layer, run(layer, "cpu", Progress()), lambda _: None)
        report, trace = service.report(), service.trace()
    finally:
        service.observe()
    assert all(row.passed for row in rows)
    of, total = report["roles"], report["counters"]
    assert {name for name, counters in of.items() if counters["instructions"]} == {"math", "producer", "dispatch"}
    assert of["math"]["macs"] == total["macs"] > 0 and of["producer"]["macs"] == of["dispatch"]["macs"] == 0
    assert of["producer"]["bulk_copies"] > 0 and of["producer"]["tma_loads"] == total["tma_loads"] > 0
    assert of["dispatch"]["peer_written"] > 0 and of["math"]["peer_written"] > 0 and of["producer"]["peer_written"] == 0
    assert 0 < total["peer_written"] < total["global_written"]
    assert total["message_chain"] >= 2  # rows to the expert, partials back
    waits, _, names = waits_and_runs(trace)
    tracks = {name.split(",")[0] for name in names.values()}
    assert tracks == {"math", "producer", "dispatch"}
    called = {wait["args"]["calls"] for wait in waits}
    assert any("wait_ready" in calls for calls in called), called
