"""Every layout number has one home: g++ and the running package read the same offsets from the plan headers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deep_gemm_k3 import Plan
from deep_gemm_k3._extension import INCLUDE_DIR, ops
from deep_gemm_k3.mega.buffer_spec import BufferSpec, Layout
from deep_gemm_k3.mega.plan import all_configs

SHAPES: dict[str, dict[str, Any]] = {
    "k3_ep8": {
        "num_ranks": 8, "num_experts": 896, "num_topk": 16, "num_max_tokens_per_rank": 512, "num_max_shared_tokens": 4096,
        "hidden": 3584, "intermediate_hidden": 3072, "shared_intermediate_hidden": 768,
    },
    "k3_ep16_prefill": {
        "num_ranks": 16, "num_experts": 896, "num_topk": 16, "num_max_tokens_per_rank": 8192,
        "num_max_shared_tokens": 131072, "hidden": 3584, "intermediate_hidden": 3072, "shared_intermediate_hidden": 384,
    },
    "smallest": {
        "num_ranks": 1, "num_experts": 1, "num_topk": 1, "num_max_tokens_per_rank": 1, "num_max_shared_tokens": 0,
        "hidden": 128, "intermediate_hidden": 128, "shared_intermediate_hidden": 0,
    },
    "wide": {
        "num_ranks": 64, "num_experts": 1024, "num_topk": 32, "num_max_tokens_per_rank": 384, "num_max_shared_tokens": 7,
        "hidden": 8192, "intermediate_hidden": 4096, "shared_intermediate_hidden": 1024,
    },
}  # fmt: skip

PROGRAM = """
#include <deep_gemm_k3/plan/workspace.cuh>
#include <deep_gemm_k3/plan/shared_memory.cuh>
#include <cstdio>
#include <cstdlib>
using namespace deep_gemm_k3;
int main(int argc, char** argv) {
    int v[8];
    for (int i = 0; i < 8; ++i) v[i] = std::atoi(argv[i + 1]);
    const BufferShape s{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]};
    for (int i = 0; i < plan::kNumComponents; ++i) {
        const auto c = static_cast<plan::Component>(i);
        std::printf("%llu %llu\\n", (unsigned long long)plan::component_offset(s, c),
                    (unsigned long long)plan::component_bytes(s, c));
    }
    std::printf("%llu\\n", (unsigned long long)plan::total_bytes(s));
}
"""


def compiled(source: str, directory: Path, name: str) -> Path:
    compiler = shutil.which("g++")
    assert compiler is not None, "a C++ compiler is needed to build the package, and here"
    path = directory / f"{name}.cpp"
    path.write_text(source)
    program = directory / name
    subprocess.run(
        [compiler, "-std=c++20", "-O0", "-Wall", "-Werror", f"-I{INCLUDE_DIR}", str(path), "-o", str(program)],
        check=True,
    )
    return program


@pytest.fixture(scope="module")
def layout_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(PROGRAM, tmp_path_factory.mktemp("layout"), "layout")


@pytest.mark.parametrize("name", SHAPES)
def test_workspace_offsets(name: str, layout_program: Path) -> None:
    shape = SHAPES[name]
    table = json.loads(ops().workspace_bytes(json.dumps(shape)))
    rounded = table["shape"]
    assert rounded["num_max_tokens"] == -(-shape["num_max_tokens_per_rank"] // 384) * 384
    order = ("num_ranks", "num_experts", "num_topk", "num_max_tokens", "num_max_shared_tokens", "hidden", "intermediate",
             "shared_intermediate")  # fmt: skip
    printed = subprocess.run(
        [layout_program, *(str(rounded[key]) for key in order)], check=True, capture_output=True, text=True
    )
    lines = printed.stdout.split("\n")
    expected = [f"{part['offset']} {part['bytes']}" for part in table["components"]]
    assert lines[: len(expected)] == expected
    assert int(lines[len(expected)]) == table["total_bytes"]
    placing = {"activation": "situ", "target": "sm_90a", "device": "cpu", "rank": 0, "device_index": 0}
    spec = BufferSpec(**shape, **placing, num_sms=1, timeout_ns=1, owner=0)
    seen_by_buffers = Layout.of(spec)
    assert seen_by_buffers.num_bytes == table["total_bytes"]
    assert seen_by_buffers.components == {p["name"]: (p["offset"], p["bytes"]) for p in table["components"]}


def test_shared_memory_of_every_config(tmp_path: Path) -> None:
    """The planner's sum is the kernel's sum, and fits."""
    problem = {**SHAPES["k3_ep8"], "shared_hidden": 7168, "shared_output": "token_owner"}
    literals = [entry["literal"] for entry in all_configs(problem)]
    body = "".join(
        f'    {{ constexpr Config c = {literal}; std::printf("%d %d\\n", plan::stage_bytes(c), plan::shared_memory_bytes(c)); }}\n'
        for literal in literals
    )
    source = "#include <deep_gemm_k3/plan/shared_memory.cuh>\n#include <cstdio>\nusing namespace deep_gemm_k3;\n"
    program = compiled(source + "int main() {\n" + body + "}\n", tmp_path, "shared_memory")
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    by_literal = dict(zip(literals, printed, strict=True))
    for tokens in (0, 1, 8, 40, 100, 200, 512):
        for shared_tokens in (0, 8, 64, 512, 4096):
            plan = Plan.make(**problem, num_tokens=tokens, num_shared_tokens=shared_tokens)
            memory = plan.data["shared_memory"]
            assert by_literal[plan.literal] == f"{memory['bytes_per_stage']} {memory['bytes_per_cta']}"
            assert memory["bytes_per_cta"] <= memory["limit"]
            # Two CTAs on an SM share its memory, and the driver keeps a part of each.
            per_sm = plan.config["num_ctas_per_sm"]
            assert per_sm * (memory["bytes_per_cta"] + 1024) <= 228 * 1024
