"""The launch layer without a GPU: its own checks, and what it asks of the driver (a stand-in that keeps a journal)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deep_gemm_k3 import _extension, envs

ROOT = Path(__file__).resolve().parents[2]
SHAPE = [132, 1, 1, 384, 1, 1, 1, 1, 1, 0]


def byte_tensor(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


@pytest.fixture(scope="module")
def ops():
    return _extension.ops()


# ---- the registry, on the target that launches nothing


def test_kernels_are_found_by_key_and_registered_once(ops) -> None:
    handle = ops.register_kernel("null", "one sm_90a {}", "entry", "sm_90a", byte_tensor(1), 16)
    assert handle > 0
    assert ops.register_kernel("null", "one sm_90a {}", "entry", "sm_90a", byte_tensor(1), 16) == handle
    assert ops.find_kernel("one sm_90a {}", -1) == handle
    assert ops.find_kernel("one sm_90a {}", 0) == 0
    assert ops.find_kernel("other sm_90a {}", -1) == 0
    assert json.loads(ops.kernel_info(handle))["key"] == "one sm_90a {}"
    ops.launch_kernel(handle, SHAPE, byte_tensor(16), False, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda ops, h: ops.launch_kernel(h, SHAPE, byte_tensor(17), False, False),
            "argument of 16 bytes, given one of 17",
        ),
        (
            lambda ops, h: ops.launch_kernel(h + 9999, SHAPE, byte_tensor(16), False, False),
            "kernel: wanted the handle of",
        ),
        (lambda ops, h: ops.launch_kernel(h, [1], byte_tensor(16), False, False), "shape: wanted 10 numbers"),
        (
            lambda ops, h: ops.register_kernel("gpu", "k", "e", "sm_90a", byte_tensor(1), 0),
            "where: wanted cuda:INDEX, emulator or null, given 'gpu'",
        ),
    ],
)
def test_refusals(ops, call, message: str) -> None:
    handle = ops.register_kernel("null", "refused sm_90a {}", "entry", "sm_90a", byte_tensor(1), 16)
    with pytest.raises(RuntimeError, match=message):
        call(ops, handle)


MAP = {"address": 4096, "dims": [256, 64], "strides": [512], "box": [64, 32]}


# ---- with the stand-in for the driver

PRELUDE = """
import json, sys, torch
from deep_gemm_k3 import _extension
ops = _extension.ops()
def cubin(arch):
    data = bytearray(64)
    data[:4] = b"\\x7fELF"; data[8] = 8; data[49] = arch
    return torch.frombuffer(data, dtype=torch.uint8)
def register(arch="sm_90a", image=90, params=32):
    return ops.register_kernel("cuda:0", f"mega {arch} {{}}", "entry", arch, cubin(image), params)
argument = torch.full((32,), 7, dtype=torch.uint8)
def shape(grid=132, cluster=1, shared=0):
    return [grid, 1, 1, 384, 1, 1, cluster, 1, 1, shared]
def refused(call):
    try:
        call()
    except RuntimeError as error:
        print("refused:", error)
    else:
        print("not refused")
"""


# Imports torch once, then runs each program in a fork of its own: the driver is opened once per process.
SERVER = """
import ctypes, io, os, tempfile
for line in sys.stdin:
    job = json.loads(line)
    output = tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        for name, value in job["settings"].items():
            ctypes.CDLL(None).fake_driver_set(name.encode(), value)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
        code = 1
        try:
            exec(job["program"])
            code = 0
        except BaseException as error:
            print(repr(error))
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    output.seek(0)
    print(json.dumps({"status": status, "lines": output.read().decode().splitlines()}), flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-I", str(ROOT / "csrc"), "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(Path(__file__).with_name("fake_driver.cpp")), "-o", str(library)], check=True)
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=envs.child_environment({"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}),
    )
    yield process
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


@pytest.fixture
def journal(server):
    def run(program: str, **settings: int) -> list[str]:
        job = {"program": program, "settings": settings}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        reply = json.loads(server.stdout.readline())
        assert reply["status"] == 0, "\n".join(reply["lines"])
        return reply["lines"]

    return run


def test_module_is_loaded_eagerly_and_launched(journal) -> None:
    lines = journal(
        """
handle = register()
ops.launch_kernel(handle, shape(), argument, False, False)
ops.launch_kernel(handle, shape(cluster=2, shared=200000), argument, True, True)
ops.launch_kernel(handle, shape(cluster=2, shared=200000), argument, False, False)
info = json.loads(ops.driver_info())
print(info["version"], info["devices"])
"""
    )
    assert lines[:4] == ["retain", "module in context 1", "function entry", "load now"]
    assert lines[4] == "launch grid 132 1 1 block 384 shared 0 stream 1000 context 1 first byte 7"
    assert lines[5] == "attribute 8 = 200000"  # raised once
    assert lines[6].startswith("launch grid 132 1 1 block 384 shared 200000")
    assert lines[7:10] == ["  attribute 4: 2", "  attribute 2: 1", "  attribute 6: 1"]
    assert lines[10].startswith("launch") and lines[11] == "  attribute 4: 2"
    assert lines[12].startswith("13000 [{")


def test_wrong_architecture_names_both(journal) -> None:
    lines = journal(
        """
refused(lambda: register("sm_100a", 100))
refused(lambda: register("sm_90a", 100))
refused(lambda: ops.register_kernel("cuda:0", "mega sm_90a {}", "e", "sm_90a", torch.zeros(4, dtype=torch.uint8), 0))
"""
    )
    here = "sm_90a (device 0, Fake GPU, compute capability 9.0)"
    assert lines == [
        f"refused: kernel mega: wanted an artefact for {here}, given one for sm_100a",
        f"refused: kernel mega: wanted a cubin for {here}, given one for sm_100 that is named sm_90a",
        f"refused: kernel mega: wanted a cubin for {here}, given 4 bytes that are none",
    ]


@pytest.mark.parametrize(
    ("major", "minor", "arch", "image", "runs"),
    [
        (9, 0, "sm_90a", 90, True),
        (10, 0, "sm_90a", 90, False),
        (10, 0, "sm_100a", 100, True),
        (10, 3, "sm_100a", 100, False),
        (10, 3, "sm_100f", 100, True),
        (12, 0, "sm_100f", 100, False),
    ],
)
def test_which_device_runs_what(journal, major: int, minor: int, arch: str, image: int, runs: bool) -> None:
    lines = journal(f"refused(lambda: register({arch!r}, {image}))", major=major, minor=minor)
    assert lines[-1].startswith("not refused" if runs else "refused:")


def test_too_many_ctas_are_refused_before_the_launch(journal) -> None:
    lines = journal(
        """
handle = register()
ops.check_co_resident(handle, shape(264), 0)
ops.check_co_resident(handle, shape(66), 33)
refused(lambda: ops.check_co_resident(handle, shape(265), 0))
refused(lambda: ops.check_co_resident(handle, shape(67), 33))
refused(lambda: ops.check_co_resident(handle, shape(132), 133))
refused(lambda: ops.check_co_resident(handle, shape(202, cluster=2), 0))
"""
    )
    refusals = [line for line in lines if "refused" in line]
    assert "wanted at most 264 CTAs, which 132 SMs hold at once, given 265" in refusals[0]
    assert "wanted at most 66 CTAs, which 33 SMs hold at once, given 67" in refusals[1]
    assert refusals[2] == "refused: num_sms: wanted at most 132 (device 0), given 133"
    assert "wanted at most 200 CTAs" in refusals[3]
    assert not any(line.startswith("launch") for line in lines)


def test_drivers_refusals_are_passed_on(journal) -> None:
    lines = journal(
        "handle = register()\nrefused(lambda: ops.launch_kernel(handle, shape(), argument, True, False))",
        launch=720,
    )
    assert "wanted a grid whose CTAs are all resident at once" in lines[-1]
    lines = journal(
        "handle = register()\nrefused(lambda: ops.launch_kernel(handle, shape(), argument, False, False))",
        launch=1,
    )
    assert "the CUDA driver refused: CUDA_ERROR_INVALID_VALUE (1): as told" in lines[-1]


def test_argument_of_another_size_is_refused_at_loading(journal) -> None:
    lines = journal("refused(lambda: register(params=40))")
    assert lines[-1].startswith("refused: kernel mega: wanted an argument of 32 bytes, given one of 40 bytes")
    assert lines[-2] == "unload"


def test_shared_memory_beyond_the_device_is_refused(journal) -> None:
    lines = journal(
        "handle = register()\nrefused(lambda: ops.launch_kernel(handle, shape(shared=232000), argument, False, False))"
    )
    assert "wanted at most 231424 dynamic bytes (device 0), given 232000" in lines[-1]


def test_cold_kernel_in_a_capture_names_the_call_to_make(journal) -> None:
    program = "print(ops.is_capturing(0))\nrefused(lambda: ops.refuse_while_capturing(0, 'compiling', 'warm(x)'))"
    assert journal(program)[-2:] == ["False", "not refused"]
    lines = journal(program, capture=1)
    assert lines[-2] == "True"
    assert lines[-1].endswith("given a stream that is capturing; call warm(x) before the capture")


def test_unusable_driver_gives_its_reason(journal) -> None:
    lines = journal("refused(register)\nprint(json.loads(ops.driver_info())['unavailable'])", init=100)
    assert lines[0].startswith("refused: cuInit: wanted a usable device, given CUDA_ERROR")
    assert lines[1].startswith("cuInit: wanted a usable device")


def test_tensor_maps_are_encoded_by_the_driver(journal) -> None:
    lines = journal(f"print(ops.encode_tensor_map('cuda:0', {json.dumps(MAP)!r}))")
    assert lines == ["encode type 9 rank 2", "ab" * 128]


# The stand-in's device memory is the process' own, so that buffers are plain tensors.
TWO_RANKS = """
spec = dict(device="cuda", device_index=0, target="sm_90a", num_ranks=2, num_experts=4, num_topk=1,
            num_max_tokens_per_rank=384, num_max_shared_tokens=0, hidden=1024, intermediate_hidden=512,
            shared_intermediate_hidden=0, num_sms=66, timeout_ns=10**9, activation="swiglu", owner=0)
memory = [torch.zeros(65536 // 4, dtype=torch.int32) for _ in range(2)]
bases = [m.data_ptr() for m in memory]
handles = [ops.buffer_create(json.dumps(spec | {"rank": rank}), bases) for rank in range(2)]
CELL, TEXT = 384 // 4, (1024 + 2 * 64 * 128) // 4
def text_of(m):
    length = int(m[TEXT])
    return bytes(m[TEXT + 1 : TEXT + 1 + 255].numpy().tobytes()[:length]).decode()
"""


def test_refusal_is_written_into_every_ranks_cell_code_last(journal) -> None:
    lines = journal(
        TWO_RANKS
        + """
ops.buffer_abort(handles[1], "y: wanted bfloat16, given float32")
print([(hex(int(m[CELL])), int(m[CELL + 1]), text_of(m)) for m in memory])
refused(lambda: ops.buffer_check(handles[1]))
"""
    )
    cell = "('0x10000', 1, 'y: wanted bfloat16, given float32')"
    assert f"[{cell}, {cell}]" in lines, "\n".join(lines)
    copies = [line for line in lines if line.startswith("copy")]
    assert copies == ["copy 32 bytes out", "copy 1024 bytes in", "copy 28 bytes in", "copy 4 bytes in"] * 2
    assert "stream 1" in lines  # private, non-blocking
    assert lines[-1].endswith("rank 1: y: wanted bfloat16, given float32")


def test_first_report_stays(journal) -> None:
    lines = journal(
        TWO_RANKS
        + """
memory[0][CELL] = 1
ops.buffer_abort(handles[1], "too late for rank 0")
print([hex(int(m[CELL])) for m in memory], repr(text_of(memory[0])))
"""
    )
    assert lines[-1] == "['0x1', '0x10000'] ''"


def test_kernels_report_is_put_into_words(journal) -> None:
    lines = journal(
        TWO_RANKS
        + """
address = ops.buffer_error_record(handles[0])
ops.buffer_check(handles[0])
record = (ctypes.c_uint32 * 8).from_address(address)
record[1], record[2], record[3], record[4], record[5] = 1, 1 << 16 | 1, 1, 5, 4
record[0] = 1
refused(lambda: ops.buffer_check(handles[0]))
ops.buffer_check(handles[1])
for handle in handles:
    ops.buffer_destroy(handle)
"""
    )
    assert any(line.endswith("rank 1: time-out: dispatch at header of rank 1: wanted 5, seen 4") for line in lines)
    assert lines[-1] == "free pinned"


def test_real_headers_agree_with_our_declarations(tmp_path: Path) -> None:
    """The launch layer declares the driver's few types itself; cuda.h of the toolchain says the same."""
    from deep_gemm_k3.jit import find_toolchain

    checks = [
        "sizeof(CUlaunchConfig) == sizeof(cu::LaunchConfig)",
        "sizeof(CUlaunchAttribute) == sizeof(cu::LaunchAttribute)",
        "offsetof(CUlaunchAttribute, value) == offsetof(cu::LaunchAttribute, bytes)",
        "offsetof(CUlaunchConfig, attrs) == offsetof(cu::LaunchConfig, attributes)",
        "offsetof(CUlaunchConfig, hStream) == offsetof(cu::LaunchConfig, stream)",
        "sizeof(CUtensorMap) == 128",
        "CU_LAUNCH_ATTRIBUTE_COOPERATIVE == cu::kLaunchCooperative",
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION == cu::kLaunchClusterDimension",
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == cu::kLaunchProgrammaticStreamSerialization",
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == cu::kAttributeMaxDynamicSharedBytes",
        "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED == cu::kAttributeNonPortableClusterSize",
        "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK == cu::kAttributeMaxThreadsPerBlock",
        "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES == cu::kAttributeSharedBytes",
        "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES == cu::kAttributeLocalBytes",
        "CU_FUNC_ATTRIBUTE_NUM_REGS == cu::kAttributeNumRegisters",
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == cu::kDeviceNumSms",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == cu::kDeviceComputeMajor",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == cu::kDeviceComputeMinor",
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN == cu::kDeviceMaxSharedBytesOptin",
        "CUDA_ERROR_INVALID_CONTEXT == cu::kErrorInvalidContext",
        "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE == cu::kErrorCooperativeLaunchTooLarge",
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT == cu::kErrorStreamCaptureImplicit",
        "CU_STREAM_NON_BLOCKING == cu::kStreamNonBlocking",
        "CU_MEMHOSTALLOC_PORTABLE == cu::kHostAllocPortable",
        "CU_MEMHOSTALLOC_DEVICEMAP == cu::kHostAllocDeviceMap",
        "CU_STREAM_CAPTURE_MODE_RELAXED == cu::kCaptureModeRelaxed",
        "CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B == int(TensorMapType::k16U6Align16B)",
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 == int(TensorMapType::kBFloat16)",
        "CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B == int(TensorMapSwizzle::k128BAtom64B)",
    ]
    text = '#include <cstddef>\n#include <cuda.h>\n#include "jit/driver.hpp"\n#include "jit/tensor_map.hpp"\n'
    text += "using namespace deep_gemm_k3::jit;\n" + "".join(f"static_assert({check});\n" for check in checks)
    for name in ("LaunchKernelEx", "StreamIsCapturing", "OccupancyMaxActiveClusters", "MemHostAlloc"):
        text += f"static_assert(sizeof(&cu{name}) == sizeof(cu::Api::{name}));\n"
    (tmp_path / "same.cpp").write_text(text)
    include = [ROOT / "csrc", ROOT / "deep_gemm_k3" / "include", find_toolchain().cuda_include]
    flags = [flag for path in include for flag in ("-I", str(path))]
    command = ["g++", "-std=c++20", "-fsyntax-only", *flags, str(tmp_path / "same.cpp")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
