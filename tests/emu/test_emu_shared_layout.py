"""Where a kernel's shared memory lies: static variables, dynamic arrays behind them, other kernels' variables; and the
package's traced kernels, which have both kinds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from emu_support import compile_cuda, fresh_emulator

import deep_gemm_k3 as dg
from deep_gemm_k3 import _extension
from deep_gemm_k3.bench import trace
from deep_gemm_k3.emulator import Device, EmulatorError, Module
from deep_gemm_k3.testing import metrics
from deep_gemm_k3.testing.data import WorldShape, make_world

BOTH_KINDS = """
extern __shared__ __align__(1024) unsigned char tail[];
extern "C" __global__ void k(int* out, unsigned long long* at, int bytes) {
    __shared__ int head[5];
    if (threadIdx.x < 5) head[threadIdx.x] = 100 + threadIdx.x;
    for (int i = threadIdx.x; i < bytes; i += 32) tail[i] = i * 7;
    __syncthreads();
    int sum = 0;
    for (int i = threadIdx.x; i < bytes; i += 32) sum += tail[i] == (unsigned char)(i * 7);
    out[threadIdx.x] = sum;
    if (threadIdx.x < 5) out[32 + threadIdx.x] = head[threadIdx.x];
    if (threadIdx.x == 0) {
        at[0] = __cvta_generic_to_shared(head);
        at[1] = __cvta_generic_to_shared(tail);
    }
}"""

TWO_KERNELS = """
extern __shared__ int dynamic[];
template <int N> __device__ void use(int* out) {
    __shared__ int mine[N];
    for (int i = threadIdx.x; i < N; i += 32) mine[i] = i;
    dynamic[threadIdx.x] = N;
    __syncthreads();
    out[threadIdx.x] = mine[N - 1 - threadIdx.x] + dynamic[31 - threadIdx.x];
}
extern "C" __global__ void a(int* out) { use<11000>(out); }
extern "C" __global__ void b(int* out) { use<12000>(out); }
extern "C" __global__ void c(int* out) { out[threadIdx.x] = dynamic[threadIdx.x] = threadIdx.x; }"""


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 65536, 200 << 10])
def test_dynamic_memory_begins_behind_static_memory(num_bytes: int) -> None:
    out, at = np.zeros(64, np.int32), np.zeros(2, np.uint64)
    device = Device(race_detection=True)
    device.launch(Module(compile_cuda(BOTH_KINDS)), "k", 1, 32, shared_bytes=num_bytes, params=[out, at, num_bytes])
    assert out[:32].sum() == num_bytes and out[32:37].tolist() == [100, 101, 102, 103, 104]
    assert at[1] % 1024 == 0 and at[1] >= at[0] + 20
    assert not device.findings


def test_a_byte_past_dynamic_memory_is_out_of_bounds() -> None:
    out, at = np.zeros(64, np.int32), np.zeros(2, np.uint64)
    with pytest.raises(EmulatorError, match="out-of-bounds"):
        Device().launch(Module(compile_cuda(BOTH_KINDS)), "k", 1, 32, shared_bytes=999, params=[out, at, 1000])


@pytest.mark.parametrize(("kernel", "size"), [("a", 11000), ("b", 12000)])
def test_a_kernel_has_no_other_kernels_variables(kernel: str, size: int) -> None:
    out, dynamic_bytes = np.zeros(32, np.int32), (227 << 10) - 4 * size
    module = Module(compile_cuda(TWO_KERNELS))
    Device().launch(module, kernel, 1, 32, shared_bytes=dynamic_bytes, params=[out])
    assert out.tolist() == [size - 1 - i + size for i in range(32)]
    Device().launch(module, "c", 1, 32, shared_bytes=227 << 10, params=[out])
    assert out.tolist() == list(range(32))
    with pytest.raises(EmulatorError, match="shared memory: wanted at most"):
        Device().launch(module, kernel, 1, 32, shared_bytes=dynamic_bytes + 16, params=[out])


emulated = fresh_emulator()
SHAPE = WorldShape(
    tokens=(21,), experts=6, topk=3, hidden=384, intermediate=256, shared_tokens=18, shared_hidden=384,
    shared_intermediate=128,
)  # fmt: skip


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_traced_kernels_run(emulated: None, target: str) -> None:
    """The same bits as without a timeline, and events of every warp that has any, in the order of time."""
    given = make_world(SHAPE, 2, target=target)[0]
    shared = given.shared
    assert shared is not None
    outputs = []
    for is_traced in (False, True):
        buffer = dg.get_symm_buffer_for_mega_moe(
            None, 6, 384, 3, 384, 256, bf16_shared_intermediate_hidden=128, num_sms=2, target=target
        )
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            getattr(buffer, name)[:21].copy_(getattr(given.routed, name))
        timeline = torch.zeros(trace.layout().num_bytes(64), dtype=torch.uint8)
        _extension.ops().set_debug(buffer.handle, 0, timeline.data_ptr() if is_traced else 0)
        y = torch.full((21, 384), float("nan"), dtype=torch.bfloat16)
        shared_y = torch.full((18, 384), float("nan"), dtype=torch.bfloat16)
        dg.fp8_fp4_mega_moe_bf16_shared(
            y,
            shared_y,
            given.l1,
            given.l2,
            shared.x,
            shared.l1,
            shared.l2,
            shared.rms_weight,
            1e-5,
            buffer,
            situ_beta=4.0,
            situ_linear_beta=25.0,
        )
        outputs.append((y, shared_y, timeline))
        buffer.destroy()
    (y, shared_y, nothing), (traced_y, traced_shared_y, timeline) = outputs
    metrics.assert_bitwise(traced_y, y)
    metrics.assert_bitwise(traced_shared_y, shared_y)
    assert not nothing.any()
    marks = list(trace.marks(timeline))
    events = {mark.event for mark in marks}
    assert {"start", "pushed", "listed", "gathered", "task", "multiplied", "finished", "combined", "end"} <= events
    for one, other in pairwise(marks):
        assert (one.cta, one.warp) != (other.cta, other.warp) or one.us <= other.us
    assert trace.chrome_trace(timeline)["traceEvents"]
