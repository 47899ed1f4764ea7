"""The generated translation unit and the headers it stands on."""

from __future__ import annotations

import shutil

import pytest
from jit_support import config, probe

from deep_gemm_k3.jit import KernelSource, literal
from deep_gemm_k3.jit.source import INCLUDE_DIR, headers_digest, package_headers


def test_literal_is_one_line_of_named_fields() -> None:
    text = literal({"a": 1, "b": {"c": True, "d": "Activation::kSiTU"}, "e": 0.5})
    assert text == "{.a = 1, .b = {.c = true, .d = Activation::kSiTU}, .e = 0x1.0000000000000p-1f}"


def test_source_is_readable() -> None:
    lines = probe().text.splitlines()
    assert "#include <deep_gemm_k3/kernels/probe.cuh>" in lines
    assert "    .shared_tile = {.num_rows = 128, .num_tokens = 16, .num_k = 64}," in lines
    assert sum(line.startswith("    .") for line in lines) == len(config())
    assert lines[-2] == "template __global__ decltype(kernels::probe<config>) kernels::probe<config>;"


def test_literal_of_the_planner_is_taken_as_it_is() -> None:
    text = "deep_gemm_k3::Config{\n    .arch = deep_gemm_k3::Architecture::kSM90,\n}"
    source = KernelSource("probe", "sm_90a", text)
    assert f"constexpr Config config = {text};" in source.text
    assert source.log_line == "probe sm_90a deep_gemm_k3::Config{ .arch = deep_gemm_k3::Architecture::kSM90, }"


def test_key_is_name_arch_and_literal() -> None:
    source = probe("sm_100f")
    assert source.key == f"probe sm_100f {source.config}"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("probe", "sm_89", "{.a = 1}"), "arch: wanted one of sm_90a, sm_100a, sm_100f, given 'sm_89'"),
        (("nothing", "sm_90a", "{.a = 1}"), "name: wanted a kernel of include/deep_gemm_k3/kernels, given 'nothing'"),
        (("../probe", "sm_90a", "{.a = 1}"), "name: wanted"),
        (("probe", "sm_90a", "a = 1"), "config: wanted a designated initialiser"),
    ],
)
def test_refusals_name_the_argument(arguments: tuple[str, str, str], named: str) -> None:
    with pytest.raises(ValueError) as error:
        KernelSource(*arguments)
    assert named in str(error.value)


def test_headers_are_found_through_includes() -> None:
    found = package_headers("deep_gemm_k3/kernels/probe.cuh", INCLUDE_DIR)
    assert {
        "deep_gemm_k3/kernels/probe.cuh",
        "deep_gemm_k3/config.cuh",
        "deep_gemm_k3/types.cuh",
        "deep_gemm_k3/plan/workspace.cuh",
    } <= set(found)
    assert all(not name.startswith("cuda") for name in found)


def test_digest_follows_contents_not_place(tmp_path) -> None:
    first, second = tmp_path / "first", tmp_path / "elsewhere" / "second"
    for root in (first, second):
        shutil.copytree(INCLUDE_DIR, root)
    header = "deep_gemm_k3/kernels/probe.cuh"
    assert headers_digest(header, first) == headers_digest(header, second) == headers_digest(header, INCLUDE_DIR)
    used = second / "deep_gemm_k3" / "types.cuh"
    used.write_text(used.read_text() + "// changed\n")
    assert headers_digest(header, second) != headers_digest(header, first)


def test_digest_ignores_headers_that_are_not_included(tmp_path) -> None:
    root = tmp_path / "include"
    shutil.copytree(INCLUDE_DIR, root)
    before = headers_digest("deep_gemm_k3/kernels/probe.cuh", root)
    (root / "deep_gemm_k3" / "unrelated.cuh").write_text("#pragma once\n")
    assert headers_digest("deep_gemm_k3/kernels/probe.cuh", root) == before


def test_include_cycles_and_missing_headers_end(tmp_path) -> None:
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n#include "gone.cuh"\n#include <cuda/ptx>\n')
    (tmp_path / "b.cuh").write_text('#include "a.cuh"\n')
    assert set(package_headers("a.cuh", tmp_path)) == {"a.cuh", "b.cuh"}
