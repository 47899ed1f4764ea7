"""Compiles matrix products written in the CuTe DSL: kernels whose style this package has not shaped.

``python cute_dsl_gemms.py ARCH DIRECTORY`` leaves ``NAME.ptx`` there for every kernel of the architecture. It is a process
of its own because the DSL reads its settings when it is imported. It compiles without a GPU and without a driver.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

M, N, K = 256, 128, 256


def main(arch: str, out: Path) -> None:
    os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=str(out), CUTE_DSL_NO_CACHE="1")
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    def compile_kernel(name: str, kernel, *tensors: tuple) -> None:
        fakes = []
        for kind, shape in tensors:
            order = (1, 0, 2)[: len(shape)] if len(shape) > 1 else (0,)
            fakes.append(make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=128))
        (out / f"{name}.ptx").write_text(cute.compile(kernel, *fakes).__ptx__)

    bf16, f32, f8, f4 = cutlass.BFloat16, cutlass.Float32, cutlass.Float8E4M3FN, cutlass.Float4E2M1FN
    scale = cutlass.Float8E8M0FNU
    if arch == "sm_90a":
        from cute_dsl_hopper import Warpgroups

        compile_kernel("warpgroups", Warpgroups(), (bf16, (M, K)), (bf16, (2 * N, K)), (f32, (M, 2 * N)))
        return
    from cute_dsl_blackwell import Dense, Scaled

    compile_kernel("dense", Dense(), (bf16, (M, K)), (bf16, (N, K)), (f32, (M, N)))
    scales = [(scale, (rows * K // 32,)) for rows in (M, N)]
    for count in (1, 2):
        compile_kernel(f"scaled{count}", Scaled(count), (f8, (M, K, 1)), (f4, (N, K, 1)), *scales, (f32, (M, N, 1)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
