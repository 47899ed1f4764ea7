"""Faults and their fault-free twins: a kernel differs from its twin in one place, FAULT. The twin is run over 100 seeds in all
three ways of completing asynchronous work, with race detection, and must give no finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from emu_support import cuda_module
from test_emu_async import HELPERS
from test_emu_findings import kinds

INIT = 'if (t == 0) { init(&bar, COUNT); asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); } __syncthreads();'
LOAD = (
    'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" '
    ':: "r"(sptr(tile)), "l"(x), "r"(sptr(&bar)) : "memory");'
)
STORE = (
    'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" :: "l"(y), "r"(sptr(tile)) : "memory"); '
    'asm volatile("cp.async.bulk.commit_group;" ::: "memory"); asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");'
)
PROXY = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
CLUSTER = 'asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");'


@dataclass(frozen=True)
class Twins:
    """``body`` in a kernel of 64 threads over x and y (64 ints each), a tile of 64 ints and one mbarrier."""

    body: str
    good: str
    bad: str
    expected: set[str]
    options: dict[str, Any] = field(default_factory=dict)


TWINS = {
    "deadlock on an mbarrier": Twins(
        INIT.replace("COUNT", "64") + "FAULT arrive(&bar); wait(&bar, 0); y[t] = 1;", "", "if (t != 5)", {"deadlock"}
    ),
    "deadlock between flags in memory": Twins(
        "volatile int* flag = y; if (t == 0) { FAULT flag[1] = 1; } if (t == 32) { while (!flag[1]) {} flag[0] = 1; }",
        "",
        "while (!flag[0]) {}",
        {"deadlock"},
    ),
    "deadlock on a named barrier": Twins(
        'asm volatile("bar.sync 1, FAULT;" ::: "memory"); y[t] = 1;', "64", "96", {"deadlock"}
    ),
    "arrival without expectation": Twins(
        INIT.replace("COUNT", "1") + "if (t == 0) { arrive(&bar); FAULT arrive(&bar); } __syncthreads(); y[t] = 1;",
        "wait(&bar, 0);",
        "if (x[0] == 7) wait(&bar, 0); else { asm volatile(\"mbarrier.arrive.shared::cta.b64 _, [%0], 2;\" :: \"r\"(sptr(&bar)) : \"memory\"); }",
        {"mbarrier"},
    ),
    "transaction overflow": Twins(
        INIT.replace("COUNT", "1")
        + """if (t == 0) { for (int i = 0; i < 2; ++i) asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], FAULT;" :: "r"(sptr(&bar)) : "memory");
             for (int i = 0; i < 2; ++i) asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], FAULT;" :: "r"(sptr(&bar)) : "memory"); arrive(&bar); }
             wait(&bar, 0); y[t] = 1;""",
        "500000",
        "1048000",
        {"transaction-overflow"},
    ),
    "more bytes than are expected": Twins(
        INIT.replace("COUNT", "1") + "if (t == 0) { expect(&bar, FAULT); " + LOAD + " } wait(&bar, 0); y[t] = tile[t];",
        "256",
        "512",
        {"deadlock"},
    ),
    "re-initialised in use": Twins(
        INIT.replace("COUNT", "1")
        + "if (t >= 32) wait(&bar, 0); else if (t == 0) { for (int i = 0; i < 40; ++i) ((volatile int*)y)[0] = i; FAULT init(&bar, 1); arrive(&bar); }",
        "arrive(&bar); return;",
        "",
        {"mbarrier-reinit"},
    ),
    "used before it is initialised": Twins(
        "if (t == 0) { FAULT expect(&bar, 256); " + LOAD + " wait(&bar, 0); y[0] = tile[3]; }",
        "init(&bar, 1);",
        "",
        {"mbarrier"},
    ),
    "stage overwritten by a copy while it is read": Twins(
        INIT.replace("COUNT", "1")
        + "if (t == 0) { expect(&bar, 256); " + LOAD + " } wait(&bar, 0); y[t] = tile[t]; FAULT if (t == 0) { expect(&bar, 256); " + LOAD + " } wait(&bar, 1);",
        "__syncthreads();",
        "",
        {"race"},
    ),
    "two copies into one stage": Twins(
        INIT.replace("COUNT", "1")
        + "if (t == 0) { expect(&bar, 256); " + LOAD + " FAULT expect(&bar, 256); " + LOAD + " wait(&bar, 1); } __syncthreads(); y[t] = tile[t];",
        "wait(&bar, 0);",
        "if (0)",
        {"race", "mbarrier", "deadlock"},
    ),
    "proxy fence before a bulk store": Twins(
        "tile[t] = x[t]; FAULT __syncthreads(); if (t == 0) { " + STORE + " }", PROXY, "", {"proxy"}
    ),
    "shared memory out of bounds": Twins("tile[t] = 1; __syncthreads(); y[t] = tile[t + FAULT];", "0", "100000", {"out-of-bounds"}),
    "global memory out of bounds": Twins("y[t + FAULT] = 1;", "0", "1", {"out-of-bounds"}),
    "misaligned": Twins(
        'tile[t] = t; __syncthreads(); if (t < 8) { int a, b; asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(sptr(tile) + t * 8 + FAULT) : "memory"); y[t] = a + b; }',
        "0",
        "4",
        {"misaligned"},
    ),
    "uninitialised shared memory": Twins("FAULT tile[t] = 1; __syncthreads(); y[t] = tile[t];", "", "if (t != 9)", {"uninitialised-shared"}),
    "a CTA of the cluster has exited": Twins(
        'tile[t] = t; ' + CLUSTER + 'u32 other; asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(other) : "r"(sptr(tile))); '
        'if (blockIdx.x == 0) { for (volatile int i = 0; i < 200; ++i) {} u32 v; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(other + 4 * t) : "memory"); y[t] = v; } FAULT',
        CLUSTER,
        "",
        {"use-after-free"},
        {"grid": 2, "cluster": 2},
    ),
    "an aligned barrier in a branch": Twins("if (FAULT) __syncthreads(); y[t] = 1;", "x[0] == 0", "t % 32 < 16 || t >= 32", {"diverged-barrier", "deadlock"}),
    "counts that differ": Twins(
        'if (t < 32) asm volatile("bar.sync 1, 64;" ::: "memory"); else asm volatile("bar.sync 1, FAULT;" ::: "memory"); y[t] = 1;',
        "64",
        "128",
        {"barrier-count", "deadlock"},
    ),
    "a lane reads what another has stored": Twins("tile[t] = x[t]; FAULT y[t] = tile[t ^ 5];", "__syncwarp();", "", {"race"}),
    "a vote orders no memory": Twins(
        "tile[t] = x[t]; FAULT y[t] = tile[t ^ 5];", "__syncwarp();", "if (__any_sync(0xffffffff, x[t] == 9)) return;", {"race"}
    ),
    "a lane overwrites what another reads": Twins(
        "tile[t] = x[t]; __syncwarp(); y[t] = tile[t ^ 1]; FAULT tile[t] = 3;", "__syncwarp();", "", {"race"}
    ),
    "lanes read a matrix that the warp has stored": Twins(
        'if (t < 32) { asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(sptr(tile) + t % 8 * 16), "r"(t) : "memory"); FAULT y[t] = tile[t]; }',
        "__syncwarp();",
        "",
        {"race"},
    ),
    "a word from lane to lane": Twins(
        'if (t == 0) tile[1] = 0; __syncthreads(); if (t == 0) { tile[0] = 7; asm volatile("st.release.cta.shared.u32 [%0], 1;" :: "r"(sptr(tile + 1)) : "memory"); } '
        'else if (t < 32) { u32 v; do asm volatile("ld.FAULT.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(sptr(tile + 1)) : "memory"); while (!v); y[t] = tile[0]; }',
        "acquire",
        "relaxed",
        {"race"},
    ),
    "a lane that the mask does not name": Twins(
        'if (t < 16) asm volatile("bar.warp.sync FAULT;" ::: "memory"); y[t] = 1;', "0xffff", "0xff", {"member-mask"}
    ),
}  # fmt: skip


def run(twins: Twins, text: str, seeds: range) -> set[str]:
    source = f"""extern "C" __global__ void k(const int* x, int* y) {{
      __shared__ __align__(128) int tile[64]; __shared__ u64 bar; int t = threadIdx.x;
      {twins.body.replace("FAULT", text)} }}"""
    module = cuda_module(HELPERS + source)
    return kinds(module, [np.zeros(64, np.int32), np.zeros(64, np.int32)], seeds, **twins.options)


@pytest.mark.parametrize("name", TWINS)
def test_fault_is_found(name: str) -> None:
    found = run(TWINS[name], TWINS[name].bad, range(6))
    assert TWINS[name].expected & found, found


@pytest.mark.parametrize("name", TWINS)
def test_twin_has_no_finding_over_100_seeds(name: str) -> None:
    assert run(TWINS[name], TWINS[name].good, range(100)) == set()
