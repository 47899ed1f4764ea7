"""mbarrier: phases, pending counts and transaction counts, against a model written from the definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from emu_support import run_ptx

from deep_gemm_k3.emulator import Device, EmulatorError


@dataclass
class Barrier:
    """What the documentation says: a phase ends when no arrival and no byte is outstanding."""

    expected: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.expected

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.expected


def step(rng: np.random.Generator, barrier: Barrier) -> tuple[str, bool]:
    """A random operation that is legal now: its PTX, and whether it returns a state. Does it on the model."""
    kinds = ["expect"]
    if barrier.bytes > 0:
        kinds += ["complete"] * 2
    if barrier.pending > 0:
        kinds += ["arrive", "many", "both"]
    if barrier.pending > 1 or (barrier.pending and barrier.bytes):
        kinds.append("keep")
        if barrier.expected > 2:
            kinds.append("drop")
    kind = rng.choice(kinds)
    count = int(rng.integers(1, max(1, barrier.pending) + 1))
    amount = int(rng.integers(1, 1000))
    text = {
        "expect": f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {amount};",
        "complete": f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], {barrier.bytes};",
        "arrive": "mbarrier.arrive.release.cta.shared::cta.b64 %s, [bar];",
        "many": f"mbarrier.arrive.shared.b64 %s, [bar], {count};",
        "keep": "mbarrier.arrive.noComplete.shared::cta.b64 %s, [bar], 1;",
        "drop": "mbarrier.arrive_drop.shared::cta.b64 %s, [bar];",
        "both": f"mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 %s, [bar], {amount};",
    }[kind]
    if kind == "complete":
        barrier.bytes = 0
    if kind in ("expect", "both"):
        barrier.bytes += amount
    if kind in ("arrive", "both", "keep", "drop"):
        barrier.pending -= 1
    if kind == "many":
        barrier.pending -= count
    if kind == "drop":
        barrier.expected -= 1
    barrier.settle()
    return text, "%s" in text


@pytest.mark.parametrize("seed", range(12))
def test_random_sequences(seed: int) -> None:
    """After every operation the parity of both phases is asked for, and of the last state its count and whether it is over."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    barrier, body, want = Barrier(count), f"mbarrier.init.shared::cta.b64 [bar], {count};", []
    last, states = -1, 0
    for i in range(80):
        before = barrier.pending
        phase = barrier.phase
        text, returns = step(rng, barrier)
        body += text
        if returns:
            last, states = phase, before
        flags = [barrier.phase % 2 != 0, barrier.phase % 2 != 1, last >= 0 and barrier.phase != last]
        want.append(sum(int(f) << b for b, f in enumerate(flags)) | (states << 8 if last >= 0 else 0))
        body += """mbarrier.test_wait.parity.shared::cta.b64 %p, [bar], 0; selp.u32 %v, 1, 0, %p;
        mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p, [bar], 1; selp.u32 %u, 2, 0, %p; or.b32 %v, %v, %u;"""
        if last >= 0:
            body += """mbarrier.test_wait.relaxed.cta.shared::cta.b64 %p, [bar], %s; selp.u32 %u, 4, 0, %p; or.b32 %v, %v, %u;
            mbarrier.pending_count.b64 %u, %s; shl.b32 %u, %u, 8; or.b32 %v, %v, %u;"""
        body += f"st.global.b32 [%y+{4 * i}], %v;"
    out = np.zeros(80, np.uint32)
    head = ".shared .align 8 .b64 bar; .reg .pred %p; .reg .b32 %v, %u; .reg .b64 %s, %y; ld.param.u64 %y, [y];"
    device = run_ptx(head + body, ".param .u64 y", [out], block=1)
    assert out.tolist() == want
    assert not device.findings


def test_a_bounded_wait_returns_when_nobody_arrives() -> None:
    body = """.shared .align 8 .b64 bar; .reg .pred %p; .reg .b32 %v; .reg .b64 %y; ld.param.u64 %y, [y];
    mbarrier.init.shared::cta.b64 [bar], 1; mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0, 1000; selp.u32 %v, 1, 2, %p; st.global.b32 [%y], %v;
    mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 1, 1000; selp.u32 %v, 1, 2, %p; st.global.b32 [%y+4], %v;"""
    out = np.zeros(2, np.uint32)
    run_ptx(body, ".param .u64 y", [out], block=1, device=Device(on_deadlock="time"))
    assert out.tolist() == [2, 1]


REMOTE = """.shared .align 8 .b64 bar; .reg .pred %p, %q; .reg .b32 %r, %t, %a, %v; .reg .b64 %y; ld.param.u64 %y, [y];
mov.u32 %r, %cluster_ctarank; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared::cta.b64 [bar], 96; @%p fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
setp.eq.u32 %q, %r, 0; @%q bra WAIT; mov.u32 %a, bar; mapa.shared::cluster.u32 %a, %a, 0;
@%p mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%a], 64; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%a];
@%p mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%a], 64; bra DONE;
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p, [bar], 0; @!%p bra WAIT; mad.wide.u32 %y, %t, 4, %y; mov.u32 %v, 1; st.global.b32 [%y], %v;
DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


@pytest.mark.parametrize("adversary", ["random", "earliest", "latest"])
def test_arrivals_and_bytes_from_other_ctas(adversary: str) -> None:
    out = np.zeros(32, np.uint32)
    device = Device(seed=1, adversary=adversary, race_detection=True)
    run_ptx(REMOTE, ".param .u64 y", [out], grid=4, cluster=4, device=device)
    assert np.all(out == 1)
    assert not device.findings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mbarrier.init.shared::cta.b64 [bar], 0;", "count of 0"),
        ("mbarrier.init.shared::cta.b64 [bar], 1048576;", "count of 1048576"),
        ("mbarrier.init.shared::cta.b64 [bar+4], 1;", "misaligned"),
        ("mbarrier.inval.shared::cta.b64 [bar];", "no mbarrier"),
        ("mbarrier.test_wait.parity.shared::cta.b64 %p, [bar], 0;", "no initialised mbarrier"),
        ("mbarrier.init.shared::cta.b64 [bar], 1; mbarrier.inval.shared::cta.b64 [bar]; mbarrier.arrive.shared::cta.b64 %s, [bar];", "no initialised mbarrier"),
        ("mbarrier.init.shared::cta.b64 [bar], 1; mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 1048576;", "transaction-overflow"),
        ("mbarrier.init.shared::cta.b64 [bar], 1; mbarrier.arrive.noComplete.shared::cta.b64 %s, [bar], 1;", "noComplete"),
    ],
)  # fmt: skip
def test_misuse(text: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run_ptx(".shared .align 8 .b64 bar; .reg .pred %p; .reg .b64 %s;" + text, "", [], block=1)
