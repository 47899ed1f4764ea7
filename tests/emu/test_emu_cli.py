"""The command for a stranger's PTX, and the front end's errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from emu_support import HEADER, compile_cuda, run_ptx

from deep_gemm_k3.__main__ import main
from deep_gemm_k3.emulator import EmulatorError, Module

SOURCE = 'extern "C" __global__ void scale(float* x, float by, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= by; }'


def emulate(file: Path, grid: int, block: int, *parameters: str) -> int:
    """Exit code of the command, for one launch of the file's kernel."""
    given = [word for parameter in parameters for word in ("--param", parameter)]
    return main(["emulate", str(file), "--grid", str(grid), "--block", str(block), *given])


def test_emulate_runs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(compile_cuda(SOURCE))
    assert emulate(file, 2, 4, "f32[6]=arange", "2.0", "6") == 0
    text = capsys.readouterr().out
    assert "tensor([ 0.,  2.,  4.,  6.,  8., 10.])" in text and "instructions" in text
    assert main(["emulate", str(file), "--check"]) == 0
    assert "1 kernels for sm_90a" in capsys.readouterr().out


def test_emulate_reports_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(compile_cuda(SOURCE))
    assert emulate(file, 2, 64, "f32[100]", "2.0", "120") == 1
    assert "out-of-bounds" in capsys.readouterr().out


MANY = """
__device__ __noinline__ float twice(float x) { return x * 2; }
__device__ __noinline__ float more(float x) { return x + 2; }
extern "C" __global__ void pointer(float* x, int which) {
    float (*f)(float) = which ? twice : more;
    x[threadIdx.x] = f(x[threadIdx.x]);
}
extern "C" __global__ void plain(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }"""


def test_what_one_kernel_lacks_is_no_matter_to_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(compile_cuda(MANY, "sm_90a", "--generate-line-info"))
    assert main(["emulate", str(file), "--kernel", "plain", "--param", "f32[1000]=ones"]) == 0
    text = capsys.readouterr().out
    assert "2., 2., 2.,  ..., 1., 1., 1.]), [1000]" in text and "wgmma" not in text
    assert main(["emulate", str(file), "--kernel", "pointer", "--param", "f32[32]=ones", "--param", "1"]) == 1
    assert "calls through pointers are not modelled" in capsys.readouterr().out
    assert main(["emulate", str(file), "--check"]) == 1
    assert "PTX line" in capsys.readouterr().out  # of the function whose address is taken


def test_a_file_without_kernels_has_not_been_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(HEADER)
    for option in ([], ["--check"]):
        assert main(["emulate", str(file), *option]) == 1
        assert "wanted a kernel, found none" in capsys.readouterr().out


def test_shapes_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(compile_cuda(SOURCE))
    for given in ("x", "0", "1,2,3,4", "-1"):
        assert main(["emulate", str(file), f"--grid={given}"]) != 0
        assert f"{given}: wanted x[,y[,z]]" in capsys.readouterr().err


def test_the_systems_shared_memory_may_be_named() -> None:
    import numpy as np

    out = np.zeros(3, np.uint32)
    names = ("begin", "1", "end")
    body = ".reg .b32 %v; .reg .b64 %y; ld.param.u64 %y, [y]; " + "".join(
        f"mov.u32 %v, %reserved_smem_offset_{name}; st.global.u32 [%y+{4 * i}], %v; " for i, name in enumerate(names)
    )
    run_ptx(body, ".param .u64 y", [out], block=1)
    assert 0 == out[0] < out[1] < out[2] == 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.s33 %r, %r, 1;", "line 6: .*add.s33"),
        ("add.s32.fancy %r, %r, 1;", r"line 6: modifier '\.fancy' of 'add\.s32\.fancy' is not modelled"),
        ("frobnicate.b32 %r, %r;", "line 6: unknown opcode 'frobnicate.b32'"),
        ("add.s32 %r, %q, 1;", "line 6: unknown operand '%q'"),
        ("mov.u64 %r, 1;", "line 6: destination '%r' has type .b32, wanted .u64"),
        ("bra NOWHERE;", "line 6: unknown label 'NOWHERE'"),
        ("tcgen05.fence::before_thread_sync;", "line 6: 'tcgen05.*' does not exist on .target sm_90a|unknown opcode"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        Module(HEADER + ".visible .entry k() { .reg .b32 %r;\n\n" + text + "\nret; }").check()


def test_blocks_may_repeat_labels_and_registers() -> None:
    import numpy as np

    out = np.zeros(32, np.uint32)
    body = """.reg .b32 %t, %v; .reg .b64 %y; mov.u32 %t, %tid.x; mov.u32 %v, 0; ld.param.u64 %y, [y]; mad.wide.u32 %y, %t, 4, %y;
    { .reg .pred p; .reg .b32 i; mov.u32 i, 0; L: add.u32 %v, %v, 1; add.u32 i, i, 1; setp.lt.u32 p, i, %t; @p bra L; }
    { .reg .pred p; .reg .b32 i; mov.u32 i, 0; L: add.u32 %v, %v, 100; add.u32 i, i, 1; setp.lt.u32 p, i, 3; @p bra L; }
    st.global.u32 [%y], %v;"""
    run_ptx(body, ".param .u64 y", [out])
    assert out.tolist() == [300 + max(1, t) for t in range(32)]
