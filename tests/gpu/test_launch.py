"""The launch layer on a device: the probe kernel, attributes, co-residency, graphs, aborts past a running kernel."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_support import SHAPE, probe

from deep_gemm_k3 import _extension
from deep_gemm_k3.jit import Cache, KernelSource, KernelStore
from deep_gemm_k3.mega.weights import default_target

pytestmark = pytest.mark.gpu

DEVICE = 0
CHUNK = 4096
NUM_BYTES = 1 << 20


class ProbeParams(ctypes.Structure):
    _fields_ = [
        ("numbers", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("destination", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint32),
        ("hold_ns", ctypes.c_uint32),
    ]


def target() -> str:
    return default_target(torch.device("cuda", DEVICE))


def launch_shape(grid: int, cluster: int = 1, shared: int = 0, threads: int = 128) -> list[int]:
    return [grid, 1, 1, threads, 1, 1, cluster, 1, 1, shared]


class Probe:
    """The loaded kernel with its tensors."""

    def __init__(self, store: KernelStore, source: KernelSource) -> None:
        self.ops = _extension.ops()
        self.handle = store.load(source, f"cuda:{DEVICE}", ctypes.sizeof(ProbeParams))
        self.numbers = torch.zeros(256, dtype=torch.int64, device="cuda")
        self.source = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda")
        self.destination = torch.zeros_like(self.source)
        self.source_of = source

    def params(self, num_bytes: int = NUM_BYTES, hold_ns: int = 0) -> torch.Tensor:
        tensors = (self.numbers, self.source, self.destination)
        value = ProbeParams(*(tensor.data_ptr() for tensor in tensors), num_bytes, hold_ns)
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)

    def launch(self, grid: int = 132, **options: Any) -> None:
        settings = {name: options.pop(name) for name in ("cooperative", "dependent") if name in options}
        params = self.params(**{name: options.pop(name) for name in ("num_bytes", "hold_ns") if name in options})
        flags = (settings.get("cooperative", False), settings.get("dependent", False))
        self.ops.launch_kernel(self.handle, launch_shape(grid, **options), params, *flags)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> KernelStore:
    return KernelStore(Cache(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def probe_kernel(store: KernelStore) -> Probe:
    torch.cuda.init()
    return Probe(store, probe(target()))


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest):
    yield
    if "probe_kernel" in request.fixturenames:
        kernel = request.getfixturevalue("probe_kernel")
        torch.cuda.synchronize()
        kernel.numbers.zero_()
        kernel.destination.zero_()
        torch.cuda.synchronize()


def host_numbers() -> list[int]:
    names = {
        "num_ranks": "num_ranks",
        "num_experts": "num_experts",
        "num_topk": "num_topk",
        "num_max_tokens": "num_max_tokens_per_rank",
        "num_max_shared_tokens": "num_max_shared_tokens",
        "hidden": "hidden",
        "intermediate": "intermediate_hidden",
        "shared_intermediate": "shared_intermediate_hidden",
    }
    table = json.loads(_extension.ops().workspace_bytes(json.dumps({names[k]: v for k, v in SHAPE.items()})))
    return [table["total_bytes"], *(part[what] for part in table["components"] for what in ("offset", "bytes"))]


def test_layout_numbers_and_bytes_come_back(probe_kernel: Probe) -> None:
    probe_kernel.launch()
    torch.cuda.synchronize()
    wanted = host_numbers()
    assert probe_kernel.numbers[: len(wanted)].tolist() == wanted
    assert probe_kernel.numbers[len(wanted) :].sum().item() == 0  # no chunk was lost
    assert torch.equal(probe_kernel.source, probe_kernel.destination)


@pytest.mark.parametrize(
    "options",
    [
        {"cooperative": True},
        {"dependent": True},
        {"cluster": 2},
        {"cluster": 2, "shared": 100 << 10, "cooperative": True},
        {"grid": 128, "cluster": 16},
        {"shared": 200 << 10},
    ],
    ids=str,
)
def test_launch_attributes(probe_kernel: Probe, options: dict[str, Any]) -> None:
    probe_kernel.launch(**options)
    torch.cuda.synchronize()
    assert torch.equal(probe_kernel.source, probe_kernel.destination)


def test_current_stream_is_used(probe_kernel: Probe) -> None:
    side = torch.cuda.Stream()
    start, end = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(side):
        start.record()
        probe_kernel.launch(hold_ns=50_000_000)
        end.record()
    torch.cuda.current_stream().synchronize()
    assert not end.query()  # the default stream had nothing to wait for
    side.synchronize()
    assert torch.equal(probe_kernel.source, probe_kernel.destination)


def test_wrong_architecture_names_both(store: KernelStore) -> None:
    other = {"sm_90a": "sm_100a", "sm_100a": "sm_90a"}[target()]
    with pytest.raises(RuntimeError) as error:
        store.load(probe(other), f"cuda:{DEVICE}", ctypes.sizeof(ProbeParams))
    message = str(error.value)
    assert f"wanted an artefact for {target()} (device 0, " in message and f"given one for {other}" in message


def test_argument_size_is_compared_at_loading(store: KernelStore) -> None:
    with pytest.raises(RuntimeError, match="wanted an argument of 32 bytes, given one of 48 bytes"):
        store.load(probe(target(), num_stages=2), f"cuda:{DEVICE}", 48)


def test_kernel_facts(probe_kernel: Probe, store: KernelStore) -> None:
    info = json.loads(probe_kernel.ops.kernel_info(probe_kernel.handle))
    resources = store.get(probe_kernel.source_of).resources
    assert info["registers"] == resources.registers > 0
    assert info["static_shared_bytes"] >= CHUNK
    assert info["local_bytes"] == resources.stack == 0


def test_too_large_a_grid_is_refused(probe_kernel: Probe) -> None:
    ops, handle = probe_kernel.ops, probe_kernel.handle
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    one_a_sm = 200 << 10
    ops.check_co_resident(handle, launch_shape(sms, shared=one_a_sm), 0)
    with pytest.raises(RuntimeError, match=f"wanted at most {sms} CTAs, which {sms} SMs hold at once"):
        ops.check_co_resident(handle, launch_shape(sms + 1, shared=one_a_sm), 0)
    with pytest.raises(RuntimeError, match="wanted at most 33 CTAs, which 33 SMs hold"):
        ops.check_co_resident(handle, launch_shape(34, shared=one_a_sm), 33)
    with pytest.raises(RuntimeError, match="all resident at once"):
        probe_kernel.launch(grid=sms + 1, shared=one_a_sm, cooperative=True)
    torch.cuda.synchronize()


def test_side_kernel_on_the_sms_gives_a_result_not_a_hang(probe_kernel: Probe) -> None:
    """A cooperative grid that needs every SM waits for the side kernel's SMs, then starts as a whole."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        probe_kernel.launch(grid=8, shared=200 << 10, hold_ns=100_000_000, num_bytes=0)
    start = time.perf_counter()
    probe_kernel.launch(grid=sms, shared=200 << 10, cooperative=True)
    torch.cuda.synchronize()
    assert time.perf_counter() - start > 0.05
    assert torch.equal(probe_kernel.source, probe_kernel.destination)


def test_captured_launch_replays_with_new_data(probe_kernel: Probe) -> None:
    graph = torch.cuda.CUDAGraph()
    assert not probe_kernel.ops.is_capturing(DEVICE)
    with torch.cuda.graph(graph):
        assert probe_kernel.ops.is_capturing(DEVICE)
        probe_kernel.launch()
    for _ in range(3):
        probe_kernel.source.random_(0, 256)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(probe_kernel.source, probe_kernel.destination)


def test_cold_kernel_in_a_capture_is_refused_with_the_call_to_make(probe_kernel: Probe) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"wanted before the capture of a CUDA graph.*call warmup\(buffer\)"):
            probe_kernel.ops.refuse_while_capturing(DEVICE, "compiling a signature", "warmup(buffer)")
        probe_kernel.launch()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(probe_kernel.source, probe_kernel.destination)


def tensor_map(where: str, **changes: Any) -> bytes:
    data = torch.zeros(64 * 256, dtype=torch.bfloat16, device="cuda")
    spec = {"address": data.data_ptr(), "dims": [256, 64], "strides": [512], "box": [64, 32]} | changes
    return bytes.fromhex(_extension.ops().encode_tensor_map(where, json.dumps(spec)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"box": [64, 256]},
        {"box": [256, 32], "swizzle": 0},
        {"dims": [64, 8, 2, 100], "strides": [128, 65536, 1024], "box": [64, 8, 2, 8]},
        {"type": 0, "dims": [512, 64], "box": [128, 256], "element_strides": [1, 2]},
    ],
    ids=str,
)
def test_driver_takes_what_our_rules_take(changes: dict[str, Any]) -> None:
    encoded = tensor_map("cuda:0", **changes)
    assert len(encoded) == 128 and encoded != tensor_map("emulator", **changes)


def test_abort_passes_a_kernel_that_holds_every_sm(probe_kernel: Probe) -> None:
    """Cells are written while a kernel occupies the whole device, and inside somebody's capture."""
    ops = probe_kernel.ops
    spec = {
        "device": "cuda",
        "device_index": DEVICE,
        "target": target(),
        "num_ranks": 2,
        "num_experts": 4,
        "num_topk": 1,
        "num_max_tokens_per_rank": 384,
        "num_max_shared_tokens": 0,
        "hidden": 1024,
        "intermediate_hidden": 512,
        "shared_intermediate_hidden": 0,
        "num_sms": 66,
        "timeout_ns": 10**9,
        "activation": "swiglu",
        "owner": 0,
    }
    memory = [torch.zeros(65536 // 4, dtype=torch.int32, device="cuda") for _ in range(2)]
    bases = [part.data_ptr() for part in memory]
    handles = [ops.buffer_create(json.dumps(spec | {"rank": rank}), bases) for rank in range(2)]
    record = ops.buffer_error_record(handles[0])
    assert record != 0
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    probe_kernel.launch(grid=sms, shared=200 << 10, hold_ns=500_000_000, num_bytes=0)
    done.record()
    start = time.perf_counter()
    ops.buffer_abort(handles[0], "y: wanted bfloat16, given float32")
    seconds = time.perf_counter() - start
    assert not done.query() and seconds < 0.1
    with pytest.raises(RuntimeError, match="rank 0: y: wanted bfloat16, given float32"):
        ops.buffer_check(handles[0])
    torch.cuda.synchronize()
    cells = [part[384 // 4 : 384 // 4 + 2].tolist() for part in memory]
    assert cells == [[0x10000, 0], [0x10000, 0]]
    for handle in handles:
        ops.buffer_destroy(handle)


def test_overhead_of_a_launch(probe_kernel: Probe) -> None:
    """The whole operator, from Python: argument conversion, registry, driver."""
    params, shape = probe_kernel.params(num_bytes=0), launch_shape(1)
    ops, handle = probe_kernel.ops, probe_kernel.handle
    call = ops.launch_kernel.default
    for _ in range(50):
        call(handle, shape, params, False, False)
    torch.cuda.synchronize()
    rounds = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            call(handle, shape, params, False, False)
        rounds.append((time.perf_counter() - start) / 50)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            call(handle, shape, params, False, False)
    graph.replay()
    torch.cuda.synchronize()
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    graph.replay()
    end_event.record()
    torch.cuda.synchronize()
    eager = sorted(rounds)[len(rounds) // 2] * 1e6
    graphed = start_event.elapsed_time(end_event) * 1e3 / 100
    print(f"\nlaunch overhead: eager {eager:.2f} us a call, in a graph {graphed:.2f} us a kernel")
    assert eager <= 20.0
    assert graphed <= 5.0


def test_extension_is_the_one_artefact(source_root: str) -> None:
    """Built anywhere, loaded here: no Python, no C++ symbols of torch, every C symbol present in this torch."""
    import subprocess
    import sys

    script = Path(source_root) / "scripts" / "check_abi.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
