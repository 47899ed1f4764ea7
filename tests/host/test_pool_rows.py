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
    c.narrow_widths = {std::atoi(argv[2]), std::atoi(argv[3])};
    const int tile = c.routed_tile.num_tokens;
    for (int rows = 1; rows <= 8 * tile; ++rows) {
        const plan::ExpertBlocks blocks(c, rows, (rows + tile - 1) / tile);
        for (int b = 0; b < blocks.num_blocks; ++b) std::printf("%d ", blocks.num_rows_of(b));
        for (int r = 0; r < rows; ++r) std::printf("%d ", blocks.place_of(r));
        std::printf("\\n");
    }
    for (int rows = 1; rows <= tile; ++rows) std::printf("%d ", plan::width_of(c, rows));
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


@pytest.mark.parametrize(
    ("tile", "narrow"),
    [
        (160, (144, 112)), (160, (144, 88)), (160, (128, 112)), (160, (152, 128)), (104, (96, 88)), (104, (88, 80)), (88, (80, 72)), (72, (56, 48)),
        (48, (40, 32)), (32, (0, 0)), (16, (8, 8)), (16, (0, 0)), (8, (0, 0)),
    ],
)  # fmt: skip
def test_rows_and_places(program: Path, tile: int, narrow: tuple[int, int]) -> None:
    command = [str(program), str(tile), *map(str, narrow)]
    *lines, last = subprocess.check_output(command, text=True).splitlines()
    mainloops = sorted({tile, *narrow} - {0})

    def width_of(num_rows: int) -> int:
        return min(width for width in mainloops if width >= num_rows)

    assert [int(v) for v in last.split()] == [width_of(n) for n in range(1, tile + 1)]
    for rows, line in enumerate(lines, start=1):
        numbers = [int(v) for v in line.split()]
        num_blocks = len(numbers) - rows
        assert num_blocks == -(-rows // tile)
        shares, places = numbers[:num_blocks], numbers[num_blocks:]
        assert sum(shares) == rows and min(shares) > 0 and max(shares) <= tile
        # Rows keep their order; block after block they take the first places.
        assert places == [b * tile + r for b, share in enumerate(shares) for r in range(share)]
        assert all(share in mainloops for share in shares[:-1])
        # No block but the last multiplies padding, and no block could be narrower than it is.
        padding = width_of(shares[-1]) - shares[-1]
        for share in shares:
            narrower = [width for width in mainloops if width < width_of(share)]
            assert not narrower or padding < width_of(share) - narrower[-1]
