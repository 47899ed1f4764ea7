"""Each rule of scripts/check_budgets.py fires on a breach and stays quiet on its twin."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cxx_scan = load_script("cxx_scan")
budgets = load_script("check_budgets")

DEVICE = "deep_gemm_k3/include/deep_gemm_k3/roles/a.cuh"


def body(lines: int) -> str:
    return "\n".join(f"    int x{i} = {i};" for i in range(lines - 2))


# (rule, path, breach, twin)
CASES = [
    ("file-length", "csrc/a.cpp", "int x;\n" * 401, "int x;\n" * 400),
    ("file-length", "csrc/a.cpp", "int x;\n" * 401, "// budget: flat table\n" + "int x;\n" * 500),
    ("file-length", "tests/a.py", "x = 1\n" * 401, "x = 1\n" * 400),
    ("function-length", "tests/a.py", "def f():\n" + "    x = 1\n" * 80, "def f():\n" + "    x = 1\n" * 79),
    ("function-length", "csrc/a.cpp", "void f() {\n" + body(81) + "\n}\n", "void f() {\n" + body(80) + "\n}\n"),
    (
        "function-length",
        DEVICE,
        "namespace n {\ntemplate <typename T>\n__device__ void f(T a)\n{\n" + body(79) + "\n}\n}\n",
        "namespace n {\ntemplate <typename T>\n__device__ void f(T a)\n{\n" + body(78) + "\n}\n}\n",
    ),
    (
        "function-length",
        "csrc/a.cpp",
        "struct S : public B<(1)> {\n    S(int n) : n_{n}, m_(n) {\n" + body(81) + "\n    }\n};\n",
        "struct S : public B<(1)> {\n    S(int n) : n_{n}, m_(n) {\n" + body(80) + "\n    }\n};\n",
    ),
    (
        "template-parameters",
        DEVICE,
        "template <int A, int B, int C, int D> struct S;",
        "template <int A, int B, int C> struct S;",
    ),
    (
        "template-parameters",
        DEVICE,
        "template <typename A, B<int, 2> C, bool D = (1 < 2), int E = 0>\nvoid f();",
        "template <typename A, B<int, 2, 3> C = {1, 2}, bool D = (1 < 2)>\nvoid f();",
    ),
    (
        "arguments",
        "deep_gemm_k3/a.py",
        "def f(a, b, c, d, e, f, g): ...\n",
        "def f(self, a, b, c, d, e, f, *, g): ...\n",
    ),
    (
        "arguments",
        "deep_gemm_k3/a.py",
        "def f(a, b, c, d, e, f, /, g): ...\n",
        "def fp8_fp4_mega_moe(a, b, c, d, e, f, g): ...\n",
    ),
    (
        "arguments",
        "csrc/a.cpp",
        "int f(int a, int b, int c, int d, int e, int f, std::map<int, int> g) { return 0; }",
        "int f(int a, int b, int c, int d, int e, std::map<int, int> g) { return 0; }",
    ),
    ("inline-asm", DEVICE, 'void f() { asm volatile("x;" ::); }', '// asm volatile("x;")\nconst char* s = "asm(1)";'),
    ("inline-asm", "csrc/a.cpp", 'void f() { __asm__("nop"); }', "void asm_table(int x);"),
    (
        "spin",
        DEVICE,
        "void f() { while (ld_acquire_sys(p) != e) {} }",
        "void f() { while (n < 3) { x += ld_acquire_sys(p); ++n; } }",
    ),
    (
        "spin",
        DEVICE,
        "void f() { for (;;) { if (ld_relaxed(p)) break; } }",
        "void f() { for (int i = 0; i < 4; ++i) { x[i] = ld_relaxed(p); } }",
    ),
    (
        "spin",
        DEVICE,
        "void f() { do { x = try_wait_parity(b, 1); } while (!x); }",
        "void f() { do { x += 1; } while (x < 4); }",
    ),
    (
        "spin",
        "csrc/apis/a.cpp",
        "void f() { while (flag.load() == 0) { pause(); } }",
        "void f() { int x = flag.load(); }",
    ),
    ("environment", "deep_gemm_k3/a.py", "import os\nx = os.environ['A']\n", "environ = {}\nx = environ['A']\n"),
    (
        "environment",
        "deep_gemm_k3/a.py",
        "import os\nx = os.getenv('A')\n",
        "from deep_gemm_k3 import envs\nx = envs.CACHE_DIR.get()\n",
    ),
    ("environment", "deep_gemm_k3/a.py", "from os import environ\n", "from os import path\n"),
    ("environment", "csrc/a.cpp", 'auto x = std::getenv("A");', "// getenv(1)\n"),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_rule_fires_on_the_breach_only(case: tuple[str, str, str, str]) -> None:
    rule, path, breach, twin = case
    assert [f.rule for f in budgets.check_text(path, breach)] == [rule]
    assert budgets.check_text(path, twin) == []


def test_places_that_may() -> None:
    asm = 'void f() { asm volatile("x;" ::); }'
    assert budgets.check_text("deep_gemm_k3/include/deep_gemm_k3/ptx/a.cuh", asm) == []
    spin = "void f() { while (ld_acquire(p) != e) {} }"
    assert budgets.check_text("deep_gemm_k3/include/deep_gemm_k3/sync/a.cuh", spin) == []
    assert budgets.check_text("deep_gemm_k3/envs.py", "import os\nx = os.environ\n") == []
    assert budgets.check_text("setup.py", "import os\nx = os.environ\n") == []


def test_self_contained_headers(tmp_path: Path) -> None:
    plan = tmp_path / "deep_gemm_k3/include/deep_gemm_k3/plan"
    plan.mkdir(parents=True)
    (plan / "good.cuh").write_text("#pragma once\n#include <cstdint>\nconstexpr std::uint32_t x = 1;\n")
    assert budgets.main([str(tmp_path)]) == 0
    (plan / "bad.cuh").write_text("#pragma once\nconstexpr Missing x = 1;\n")
    findings = budgets.check_self_contained(tmp_path)
    assert [(f.rule, Path(f.path).name) for f in findings] == [("self-contained", "bad.cuh")]
    assert budgets.main([str(tmp_path)]) == 1


def test_findings_name_file_line_and_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/a.cpp").write_text('\n\nauto x = getenv("A");\n')
    assert budgets.main([str(tmp_path)]) == 1
    assert "csrc/a.cpp:3: environment: " in capsys.readouterr().out


def test_every_rule_has_a_case() -> None:
    described = {line.split("|")[1].strip() for line in budgets.__doc__.splitlines() if line.startswith("| ")} - {
        "rule"
    }
    assert described == {case[0] for case in CASES} | {"self-contained"}


SCANNER_SOURCE = """
#define LONG(x) \\
    { x }
namespace a::b {
// void commented(int x) { }
enum class E : int { one, two };
constexpr int table[] = {1, 2, 3};
struct S {
    int a = 1'000'000;
    bool operator()(int x, int y) const noexcept { return x == '{' || y == '"'; }
  private:
    static void quiet() {}
};
auto lambda = [](int x) {
    return x;
};
template <typename T>
    requires(sizeof(T) == 4)
T last(T x, S s = {}) {
    if (x) {
        return R"({ ( )";
    }
}
} // namespace a::b
"""


def test_scanner_finds_the_functions() -> None:
    found = [(f.name, f.parameters, f.lines) for f in cxx_scan.functions(cxx_scan.strip(SCANNER_SOURCE))]
    assert [name for name, _, _ in found] == ["operator()", "quiet", "lambda", "last"]
    assert found[0][1:] == (2, 1)
    assert found[1][1:] == (0, 1)
    assert found[3][1:] == (2, 7)


def test_stripping_keeps_lines() -> None:
    stripped = cxx_scan.strip(SCANNER_SOURCE)
    assert stripped.count("\n") == SCANNER_SOURCE.count("\n")
    assert len(stripped) == len(SCANNER_SOURCE)
    assert "commented" not in stripped
