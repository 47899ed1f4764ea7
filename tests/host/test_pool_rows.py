"""How an expert's rows fill its pool blocks: every row has a place of its own, every block its share."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deep_gemm_k3._extension import INCLUDE_DIR

PROGRAM = """
#include <deep_gemm_k3/plan/pool_rows.cuh>
#include <cstdio>
#include <cstdlib>
using namespace deep_gemm_k3;
int main(int, char** argv) {
    Config c{};
    c.arch = Architecture::kSM90;
    c.routed_tile.num_tokens = std::atoi(argv[1]);
    c.num_ctas_per_sm = std::atoi(argv[2]);
    const int tile = c.routed_tile.num_tokens;
    for (int rows = 1; rows <= 8 * tile; ++rows) {
        const plan::ExpertBlocks blocks(c, rows, (rows + tile - 1) / tile);
        for (int b = 0; b < blocks.num_blocks; ++b) std::printf("%d ", blocks.num_rows_of(b));
        for (int r = 0; r < rows; ++r) std::printf("%d ", blocks.place_of(r));
        std::printf("\\n");
    }
    for (int rows = 1; rows <= tile; ++rows) std::printf("%d ", plan::width_of(tile, rows));
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    assert compiler is not None, "a C++ compiler is needed to build the package, and here"
    folder = tmp_path_factory.mktemp("pool_rows")
    (folder / "rows.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++20", "-O1", f"-I{Path(INCLUDE_DIR)}", str(folder / "rows.cpp")]
    subprocess.run([*command, "-o", str(folder / "rows")], check=True)
    return folder / "rows"


@pytest.mark.parametrize(("tile", "ctas"), [(160, 1), (104, 1), (88, 1), (48, 1), (32, 1), (16, 2)])
def test_rows_and_places(program: Path, tile: int, ctas: int) -> None:
    *lines, last = subprocess.check_output([str(program), str(tile), str(ctas)], text=True).splitlines()
    has_widths = ctas == 1 and tile >= 40
    step, least = (16, tile - 48) if tile > 112 else (8, tile - 16)
    if has_widths:
        mainloops = (tile, tile - step, least)
        assert [int(v) for v in last.split()] == [min(w for w in mainloops if w >= n) for n in range(1, tile + 1)]
    for rows, line in enumerate(lines, start=1):
        numbers = [int(v) for v in line.split()]
        num_blocks = len(numbers) - rows
        assert num_blocks == -(-rows // tile)
        widths, places = numbers[:num_blocks], numbers[num_blocks:]
        assert sum(widths) == rows and min(widths) > 0 and max(widths) <= tile
        # Rows keep their order; block after block they take the first places.
        assert places == [b * tile + r for b, width in enumerate(widths) for r in range(width)]
        if has_widths:
            assert all(width % step == 0 for width in widths[:-1])
            assert max(-(-width // step) for width in widths) - min(-(-width // step) for width in widths) <= 1
        else:
            assert all(width == tile for width in widths[:-1])
