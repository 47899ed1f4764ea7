"""tcgen05.mma.ws in every shape, and commits that reach some CTAs of a cluster; against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emu_support import run_ptx
from tensor_support import STEP, body_of_product, place_along_k, put, run_tensor

from deep_gemm_k3.emulator import Device

RNG = np.random.default_rng(47)
KINDS = {  # type, its code, elements along k of an instruction, what D's type is called
    "f16": (torch.bfloat16, 1, 16, 1), "tf32": (torch.float32, 2, 8, 1), "i8": (torch.int8, 1, 32, 2),
    "f8f6f4": (torch.float8_e5m2, 1, 32, 1),
}  # fmt: skip


def place_of(m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Column and lane of D: rows take lanes from 0 on, and 128 / m parts of the columns follow each other in the lanes."""
    row, col = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    share = n * m // 128
    return col % share, row + m * (col // share)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("m", [32, 64, 128])
def test_weight_stationary_products(m: int, n: int, kind: str, accumulate: bool) -> None:
    dtype, code, k, d = KINDS[kind]
    a, b = (torch.from_numpy(RNG.integers(-4, 5, (rows, k))).to(dtype) for rows in (m, n))
    image = np.zeros((1, 32 * 1024), np.uint8)
    steps, bases = np.zeros(1, STEP), []
    for at, matrix in ((0, a), (16 * 1024, b)):
        placed = place_along_k(matrix.shape[0], 2, "32B")
        put(image[0], at, placed, matrix.contiguous().view(torch.uint8).numpy().reshape(matrix.shape[0], -1, 16))
        bases.append(placed.descriptor(at))
    steps["a"], steps["b"] = bases
    steps["idesc"] = d << 4 | code << 7 | code << 10 | n >> 3 << 17 | m >> 4 << 24
    steps["acc"] = accumulate
    columns = n * m // 128
    before = np.full((1, columns, 128), 0xDEAD, np.uint32)
    col, lane = place_of(m, n)
    old = RNG.integers(-100, 100, (m, n))
    before[0, col, lane] = (old.astype(np.int32) if kind == "i8" else old.astype(np.float32)).view(np.uint32)
    body = body_of_product(kind).replace("tcgen05.mma.", "tcgen05.mma.ws.")
    device = Device(arch="sm_100a", race_detection=True)
    after = run_tensor(body, steps, image, before, columns, device=device)
    assert not device.findings, device.findings
    got = after[0, col, lane].view(np.int32 if kind == "i8" else np.float32)
    assert np.array_equal(got, (a.float() @ b.float().T).numpy() + (old if accumulate else 0))


COMMIT = """.reg .b32 %t, %r, %v; .reg .b16 %m; .reg .b64 %y; .reg .pred %p, %w; .shared .align 8 .b64 bar; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; mov.u32 %r, %cluster_ctarank; ld.param.u64 %y, [y];
@%p mbarrier.init.shared::cta.b64 [bar], 1; @%p fence.mbarrier_init.release.cluster; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
setp.eq.and.u32 %w, %r, ISSUER, %p; mov.b16 %m, MASK; @%w tcgen05.commit.cta_group::GROUP.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [bar], %m;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; setp.eq.u32 %w, MASK, MASK; mov.u32 %v, MASK; shr.u32 %v, %v, %r; and.b32 %v, %v, 1; setp.eq.u32 %w, %v, 0; @%w bra DONE;
TRY: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %w, [bar], 0; @!%w bra TRY;
DONE: mbarrier.test_wait.parity.shared::cta.b64 %w, [bar], 0; selp.u32 %v, 1, 0, %w; mad.wide.u32 %y, %r, 4, %y; @%p st.global.u32 [%y], %v; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("mask", [0b0001, 0b1111, 0b1010, 0b0110])
@pytest.mark.parametrize("adversary", ["random", "earliest", "latest"])
def test_commits_arrive_once_in_every_cta_of_the_mask(group: int, mask: int, adversary: str) -> None:
    for issuer in (0, 3):
        out = np.full(4, 9, np.uint32)
        body = COMMIT.replace("ISSUER", str(issuer)).replace("MASK", str(mask)).replace("GROUP", str(group))
        device = Device(arch="sm_100a", seed=mask, adversary=adversary)
        run_ptx(body, ".param .u64 y", [out], grid=4, cluster=4, device=device, target="sm_100a")
        assert out.tolist() == [mask >> rank & 1 for rank in range(4)]
        assert not device.findings
