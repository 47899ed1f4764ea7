#!/usr/bin/env python3
"""Counters of the Blackwell kernel in the emulator, for few and for many tokens; needs no GPU.

    python scripts/measure_sm100.py [--tokens 8 512] [--only NAME]
    python scripts/measure_sm100.py --uneven 3

Eight ranks with one expert each, two of them for every token, widths 512/256 (routed) and 512/256 (shared), two SMs a rank,
token-owner publication: each rank's shared expert sees the tokens of all ranks. Prints one line per variant of the call:
what the second call of a buffer has read, written and sent, over all ranks. Bytes are of global memory, peers' included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["DGK3_CPU_TARGET"] = "sm_100a"

from deep_gemm_k3.emulator import service
from deep_gemm_k3.mega.buffer import SymmBuffer
from deep_gemm_k3.mega.local_world import LocalRank
from deep_gemm_k3.testing.data import WorldShape, make_world
from deep_gemm_k3.testing.oracle import Options
from deep_gemm_k3.testing.runner import RankCall, RunOptions, Session

NUM_RANKS = 8
SITU = Options("situ", None, 4.0, 25.0)
# Tiles that the planner takes at Kimi K3's widths: tokens of a rank -> (routed tile, shared tile).
TILES = {8: (16, 32), 512: (96, 128)}
SHOWN = (
    "global_read", "global_written", "peer_read", "peer_written", "system_operations", "tma_loads", "tensor_products",
    "macs", "instructions", "barrier_waits", "mbarrier_waits", "message_chain",
)  # fmt: skip


def variants(tokens: int) -> dict[str, dict[str, Any]]:
    """What the planner is told. "messages" looks for races as well, which is what knows the order of messages."""
    routed, shared = TILES[tokens]
    tiles = {"routed_tokens": routed, "shared_tokens": shared}
    return {
        "as planned": tiles,
        "shared tile of the routed experts": tiles | {"shared_tokens": routed},
        "CTAs alone": tiles | {"num_cluster_ctas": 1},
        "messages": tiles,
    }


def measure(tokens: int, name: str) -> dict[str, Any]:
    """Counters of one variant's second call, over all ranks."""
    shape = WorldShape((tokens,) * NUM_RANKS, NUM_RANKS, 2, 512, 256, tokens * NUM_RANKS, 512, 256)
    given = make_world(shape, 1, "uniform", "exact", target="sm_100a")
    service.configure(seed=1, race_detection=name == "messages")
    session = Session(shape, device="cpu", overrides=variants(tokens)[name], num_sms=2, timeout_s=3000)

    def body(group: LocalRank, buffer: SymmBuffer) -> None:
        call = RankCall(buffer, given[group.rank], SITU, "sp_rs", RunOptions())
        call.fill()
        try:
            for _ in range(2):
                group.barrier("before a call")
                if group.rank == 0:
                    service.clear()
                group.barrier("counters are clear")
                call.call()
                call.settle()
                group.barrier("after a call")
        finally:
            call.destroy()

    try:
        session.run(body, timeout_s=3000)
        report = service.report()
    finally:
        session.close()
        service.configure()
    if report["findings"]:
        raise SystemExit(f"{name}: {report['findings']}")
    return {counter: report["counters"].get(counter, "-") for counter in SHOWN}


def uneven(seed: int) -> dict[str, float]:
    """Two pairs share blocks of 192 tokens and of 8, in turn: when each CTA's math warps have finished their tasks, in
    thousands of the emulator's steps from the start."""
    shape = WorldShape((200,), 2, 1, 512, 2048)
    given = make_world(shape, 1, "hot_expert", "exact", target="sm_100a")[0]
    overrides = {"routed_tokens": 192, "num_cluster_ctas": 2}
    session = Session(shape, device="cpu", overrides=overrides, num_sms=4, timeout_s=3000)

    def body(group: LocalRank, buffer: SymmBuffer) -> None:
        call = RankCall(buffer, given, Options("swiglu"), "routed", RunOptions())
        call.fill()
        call.call()  # the first one compiles
        call.settle()
        service.configure(seed=seed)
        service.observe(trace=True)
        service.clear()
        call.call()
        call.settle()

    try:
        session.run(body, timeout_s=3000)
        events = json.loads(service.trace())["traceEvents"]
    finally:
        session.close()
        service.observe()
        service.configure()
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    slices = [(tracks[e["pid"], e["tid"]].split(" warp")[0], e) for e in events if e["ph"] == "X"]
    start, done = min(e["ts"] for _, e in slices), dict[str, float]()
    for track, event in slices:
        if track.startswith("math") and event["name"].startswith("wait_barrier"):
            done[track] = max(done.get(track, 0.0), round(event["ts"] + event["dur"] - start, 1))
    return dict(sorted(done.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", choices=sorted(TILES), default=sorted(TILES))
    parser.add_argument("--uneven", type=int, default=0, metavar="SEEDS", help="the balance of an uneven load instead")
    parser.add_argument("--only", default="", help="variants whose name has this")
    arguments = parser.parse_args()
    for seed in range(1, arguments.uneven + 1):
        print(f"uneven load, seed {seed}: {uneven(seed)}", flush=True)
    for tokens in [] if arguments.uneven else arguments.tokens:
        for name in variants(tokens):
            if arguments.only in name:
                started = time.monotonic()
                counters = " ".join(f"{key}={value}" for key, value in measure(tokens, name).items())
                print(f"{tokens} tokens, {name}: {counters} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
