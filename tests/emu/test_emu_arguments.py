"""What the emulator's interface is given: refused by name before anything runs, never a crash, never other bits."""

from __future__ import annotations

import mmap
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emu_support import HEADER

from deep_gemm_k3 import envs
from deep_gemm_k3.__main__ import main
from deep_gemm_k3.emulator import Device, EmulatorError, Launch, Module, TensorMap, service

KINDS = ("u8", "s8", "b8", "u16", "s32", "u32", "b32", "u64", "s64", "b64", "f16", "bf16", "f32", "f64")
BITS = {"f16": "b16", "bf16": "b16", "s8": "b8", "u8": "b8"}


def storing(kind: str) -> Module:
    """A kernel that stores its second parameter where the first says."""
    bits = f"b{re.sub('[a-z]', '', kind)}"
    register = "b16" if bits == "b8" else bits
    return Module(
        f"{HEADER}.visible .entry k(.param .u64 to, .param .{kind} x) {{ .reg .b64 %p; .reg .{register} %x;"
        f" ld.param.u64 %p, [to]; ld.param.{bits} %x, [x]; st.global.{bits} [%p], %x; ret; }}"
    )


def stored(kind: str, value: Any) -> bytes:
    y = np.zeros(8, np.uint8)
    Device().launch(storing(kind), "k", 1, 1, params=[y, value])
    return bytes(y)[: int(re.sub("[a-z]", "", kind)) // 8]


def refused(pattern: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=f"^{pattern}"):
        call(*arguments, **options)


@pytest.mark.parametrize(
    ("kind", "value", "form"),
    [
        ("u8", True, "<B"),
        ("u8", 200, "<B"),
        ("s8", -3, "<b"),
        ("u16", 65535, "<H"),
        ("u32", 2**32 - 1, "<I"),
        ("s32", np.int64(-7), "<i"),
        ("b32", 1.5, "<f"),
        ("b32", 7, "<i"),
        ("b64", 1.5, "<d"),
        ("u64", 2**64 - 1, "<Q"),
        ("s64", -(2**63), "<q"),
        ("f16", 0.1, "<e"),
        ("f32", np.float32(0.1), "<f"),
        ("f32", 3, "<f"),
        ("f64", 0.1, "<d"),
    ],
)
def test_values_are_stored_as_the_parameters_type(kind: str, value: Any, form: str) -> None:
    assert stored(kind, value) == struct.pack(form, value)


@pytest.mark.parametrize("value", [0.1, -2.5, 1.00390625, 1.01171875, 3e38, float("inf"), float("nan")])
def test_bf16_parameters_are_rounded_as_torch_does(value: float) -> None:
    wanted = torch.tensor(value).to(torch.bfloat16)
    bits = int.from_bytes(stored("bf16", value), "little")
    assert bits == (0x7FFF if value != value else int(wanted.view(torch.int16)) & 0xFFFF)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_other_kinds_are_refused(kind: str) -> None:
    module, device = storing(kind), Device()
    width = int(re.sub("[a-z]", "", kind)) // 8
    is_float = kind in ("f16", "bf16", "f32", "f64")
    values: list[Any] = [None, "x", [1], 1j, np.array(3), object()]
    values += [torch.zeros(2), np.zeros(2), True] if is_float else [1 << (8 * width), -(1 << (8 * width - 1)) - 1]
    if not is_float:
        values += [] if width == 1 else [True]
        values += [] if kind in ("b32", "b64") else [1.5, np.float32(2)]
    if kind in ("f16", "f32"):
        values += [1e300]
    for value in values:
        y = np.zeros(8, np.uint8)
        refused(r"params\[1\] of k: wanted .*, given ", device.launch, module, "k", 1, 1, params=[y, value])
        assert not y.any()


ADD = Module(
    HEADER + ".visible .entry k(.param .u64 x) { .reg .b64 %p; .reg .b32 %a; ld.param.u64 %p, [x];"
    " ld.global.b32 %a, [%p]; add.u32 %a, %a, 1; st.global.b32 [%p], %a; ret; }"
)


def fake_tensor() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(4)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: torch.zeros(4, device="meta"), r"Tensor float32 \[4\], strided on meta"),
        (lambda: torch.eye(4).to_sparse(), r"Tensor float32 \[4, 4\], sparse_coo on cpu"),
        (lambda: torch.eye(4).to_sparse_csr(), r"Tensor float32 \[4, 4\], sparse_csr on cpu"),
        (fake_tensor, r"FakeTensor float32 \[4\] without data"),
    ],
)
def test_tensors_that_are_no_host_memory_are_refused(make: Any, given: str) -> None:
    tensor, device = make(), Device()
    text = f"wanted a dense CPU tensor or an array, given {given}$"
    refused(rf"params\[0\] of k: {text}", device.launch, ADD, "k", 1, 32, params=[tensor])
    refused(f"x: {text}", device.register_tensor, tensor, "x")
    refused(f"tensor: {text}", device.own, tensor, 0)
    refused(f"tensor map: tensor: {text}", TensorMap, tensor, "float32", [4], [], [4])


def test_memory_is_registered_only_where_it_is() -> None:
    device = Device()
    x = np.zeros(4, np.int32)
    here = int(x.ctypes.data)
    for address, size in ((0, 2**40), (-1, 5), (1.5, 4), (None, 4), (2**64, 1)):
        refused(r"address: wanted an integer in 1\.\.", device.register, address, size, "a")
    for size in (-1, 2**64, None, True):
        refused(r"size: wanted an integer in 0\.\.", device.register, here, size, "a")
    refused("address: wanted memory that this process may read and write", device.register, 4096, 2**40, "a")
    refused("address: wanted memory that this process may read and write", device.register, here, 2**46, "a")
    refused("name: wanted a string", device.register, here, 16, None)
    refused("writable: wanted True or False", device.register, here, 16, "a", 1)
    refused("address: wanted an integer", device.unregister, None)
    refused("rank: wanted an integer", device.own, x, -1)
    for null in (0, 4, 8 * 4096):
        with pytest.raises(EmulatorError, match="out-of-bounds"):
            device.launch(ADD, "k", 1, 1, params=[null])
    device.register(here, 16, "x")
    device.launch(ADD, "k", 1, 1, params=[here])
    assert x.tolist() == [1, 0, 0, 0]


def test_views_reach_all_of_their_memory() -> None:
    """Tensors, arrays and arrays of tensors, from the middle of an allocation: the kernel reaches back to its start."""
    module = Module(
        HEADER + ".visible .entry k(.param .u64 x) { .reg .b64 %p; .reg .b32 %a; ld.param.u64 %p, [x];"
        " ld.global.b32 %a, [%p+-16]; st.global.b32 [%p], %a; ret; }"
    )
    tensor, array = torch.arange(16, dtype=torch.int32), np.arange(16, dtype=np.int32)
    for view in (tensor[8:], tensor.numpy()[8:], tensor[4:].numpy()[4:], array[8:]):
        Device().launch(module, "k", 1, 1, params=[view])
        assert view[0] == 4
        view[0] = 8


def test_read_only_memory_stays_read_only(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(mmap.PAGESIZE))
    mapped = np.memmap(tmp_path / "data", np.int32, "r")
    for array in (mapped, mapped[8:], np.frombuffer(bytes(64), np.int32)):
        with pytest.raises(EmulatorError, match=r"read-only: write to read-only memory at .* of 'params"):
            Device().launch(ADD, "k", 1, 1, params=[array])
    device, here = Device(), int(mapped.ctypes.data)
    refused("address: wanted memory that this process may read and write", device.register, here, 64, "data")
    device.register(here, 64, "data", writable=False)
    writable = np.zeros(4, np.int32)
    Device().launch(ADD, "k", 1, 1, params=[np.broadcast_to(writable, (2, 4))])  # a view that numpy guards
    assert writable[0] == 1


def test_devices_are_checked() -> None:
    for arch in ("sm_70", "sm_9", "90a", "sm_90b", "", None, 90, b"sm_90a"):
        refused("arch: wanted sm_90a, sm_100a or another from sm_75 on, given ", Device, arch=arch)
    wrong: dict[str, list[Any]] = {"num_sms": [0, None, 1.5, True], "seed": [-1, None, "1"]}
    wrong |= {name: [1, None, "yes"] for name in ("race_detection", "lanes_apart", "coverage", "trace")}
    wrong |= {"quantum": [-1, 2**32, None], "max_instructions": [-1, 2**64, 1.5]}
    wrong |= {"adversary": ["none", None, []], "on_deadlock": ["", None], "roles": [None, 3]}
    for name, values in wrong.items():
        for value in values:
            refused(f"{name}: wanted .*, given ", Device, **{name: value})
    for name in ("seed", "adversary", "race_detection", "quantum"):
        for value in wrong[name]:
            refused(f"{name}: wanted .*, given ", service.configure, **{name: value})
    refused("patience_s: wanted seconds", service.configure, patience_s=-1)
    refused("trace: wanted True or False", service.observe, trace=None)
    refused("roles: wanted a string", service.observe, roles=None)


def test_launches_are_checked() -> None:
    device, x = Device(), np.zeros(4, np.int32)
    for params in (None, 5, "x", b"x", x, torch.zeros(1)):
        refused("params: wanted a list of values, given ", device.launch, ADD, "k", 1, 1, params=params)
    refused("params: k wants 1, given 2", device.launch, ADD, "k", 1, 1, params=[x, x])
    for name in ("grid", "block", "cluster"):
        for shape in (None, 1.5, "1", 0, -1, True, [], [1, 2, 3, 4], [1.5], 2**31, [1, 2**16], [None], {1: 2}):
            shapes = {"grid": 1, "block": 1, name: shape}
            refused(rf"{name}: wanted x\[, y\[, z\]\] .*, given ", device.launch, ADD, "k", **shapes, params=[x])
    for module in (None, "ptx", 5):
        refused("module: wanted a Module, given ", device.launch, module, "k", 1, 1)
    refused("kernel: wanted a string, given None", device.launch, ADD, None, 1, 1)
    for launches in (5, None, [5], [None]):
        refused("launches: wanted a list of Launch, given ", device.run, launches)
    for rank in (-1, None, 2**32):
        refused("rank: wanted an integer", device.launch, ADD, "k", 1, 1, params=[x], rank=rank)
    for ptx in (None, 5, ["x"]):
        refused("ptx: wanted text or bytes, given ", Module, ptx)
    refused("kernel: wanted one of k, given 'j'", ADD.check, "j")
    refused("name: wanted one of , given 'v'", device.symbol, ADD, "v")
    device.launch(ADD, "k", np.int64(1), (np.int32(1), 1), params=(x,))
    assert x.tolist() == [1, 0, 0, 0]


def test_a_refused_list_of_launches_leaves_nothing_behind() -> None:
    device, x = Device(), np.zeros(4, np.int32)
    good = Launch(ADD, "k", 1, 1, [x])
    for bad in (Launch(ADD, "k", 1, 1, [None]), Launch(ADD, "k", 1, 4096, [x])):  # by this side, and by the machine
        with pytest.raises(EmulatorError):
            device.run([good, bad])
    device.run([good])
    assert x.tolist() == [1, 0, 0, 0]


def test_tensor_maps_are_checked() -> None:
    good: dict[str, Any] = {"tensor": torch.zeros(8, 64), "dtype": "float32", "sizes": [64, 8], "strides": [256]}
    good |= {"box": [32, 8]}
    TensorMap(**good)
    wrong: dict[str, list[Any]] = {name: [None, 5, "ab", [1.5, 1]] for name in ("sizes", "strides", "box")}
    wrong |= {"element_strides": [None, 5, [1, -1]], "tensor": [None, "x", -1, 2**64, 1.5], "dtype": ["int4", None]}
    wrong |= {"swizzle": ["1B", None], "oob_nan": [None, 1], "interleave": [None, -1, 3]}
    for name, values in wrong.items():
        for value in values:
            refused(f"tensor map: {name}: wanted .*, given ", TensorMap, **{**good, name: value})
    for rank in (0, 6):
        sizes = {"sizes": [1] * rank, "strides": [16] * max(rank - 1, 0), "box": [1] * rank}
        refused(f"tensor map: sizes: wanted 1 to 5 numbers, given {rank}", TensorMap, **good | sizes)


# ---- the command, and the variable


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "k.ptx"
    path.write_text(
        HEADER + ".visible .entry k(.param .u64 x, .param .u32 n) { .reg .b64 %p; .reg .b32 %n; ld.param.u64 %p, [x];"
        " ld.param.u32 %n, [n]; st.global.u32 [%p], %n; ret; }"
    )
    return path


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["f32[128", "1"], "f32[128: wanted ] after the shape"),
        (["f32[²]", "1"], "f32[²]: wanted whole numbers"),
        (["f32[4]", "1.5"], "params[1] of k: wanted an integer of 4 bytes for .u32, given 1.5"),
        (["f32[4]", "x"], "x: wanted a number, hex:BYTES or DTYPE[SHAPE]"),
        (["-0x11ec", "1"], "out-of-bounds"),
    ],
)
def test_parameters_of_the_command(
    file: Path, values: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emulate", str(file), *[word for value in values for word in ("--param", value)]]) != 0
    output = capsys.readouterr()
    assert told in output.out + output.err


@pytest.mark.parametrize(("place", "why"), [("none/x.json", "No such file or directory"), ("", "Is a directory")])
def test_a_trace_that_cannot_be_written_is_noticed_first(
    file: Path,
    tmp_path: Path,
    place: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Device, "launch", lambda *_, **__: pytest.fail("it ran"))
    path = str(tmp_path / place) if place else str(tmp_path)
    assert main(["emulate", str(file), "--param", "i32[4]", "--param", "1", "--trace", path]) == 1
    output = capsys.readouterr()
    assert f"--trace: wanted a file that can be written, given {path!r}: {why}" in output.out + output.err
    monkeypatch.setenv(envs.EMULATOR_TRACE.name, path)
    service._observe_once.cache_clear()
    try:
        refused(f"{envs.EMULATOR_TRACE.name}: wanted a file that can be written, given ", service.apply_environment)
    finally:
        service._observe_once.cache_clear()


def test_a_trace_file_is_there_only_at_exit(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = (
        "import os, shutil; from deep_gemm_k3.emulator import service; service.apply_environment();"
        f"assert not os.path.exists({str(path)!r})"
    )
    environment = envs.child_environment({envs.EMULATOR_TRACE.name: str(path)})
    for more, lost in (("", False), (f"; shutil.rmtree({str(tmp_path)!r})", True)):
        done = subprocess.run([sys.executable, "-c", text + more], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "Traceback" not in done.stderr
        assert (f"{path} could not be written: No such file" in done.stderr) == lost
        assert os.path.exists(path) != lost
        path.unlink(missing_ok=True)
