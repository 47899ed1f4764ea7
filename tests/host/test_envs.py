"""The table of environment variables, its typed access and its documentation."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from deep_gemm_k3 import _extension, envs

ROOT = Path(__file__).resolve().parents[2]


def test_readme_section_is_the_generated_one() -> None:
    readme = (ROOT / "README.md").read_text()
    begin, end = "<!-- environment: begin -->\n", "<!-- environment: end -->"
    section = readme[readme.index(begin) + len(begin) : readme.index(end)]
    assert section.strip() == envs.markdown().strip(), "run: python -m deep_gemm_k3.envs and paste it into README.md"


def test_names_are_unique_and_documented() -> None:
    names = [variable.name for variable in envs.table()]
    assert len(names) == len(set(names))
    assert all(variable.meaning.endswith(".") for variable in envs.table())


def test_every_variable_is_read_by_the_package() -> None:
    sources = "".join(p.read_text() for p in (ROOT / "deep_gemm_k3").rglob("*.py") if p.name != "envs.py")
    constants = {name for name, value in vars(envs).items() if isinstance(value, envs.Variable)}
    unread = {name for name in constants if not re.search(rf"\benvs\.{name}\b", sources)}
    assert not unread


def test_default_when_unset_or_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.table():
        monkeypatch.delenv(variable.name, raising=False)
        assert variable.get() == variable.default
        assert not variable.is_set()
        monkeypatch.setenv(variable.name, "")
        assert variable.get() == variable.default


@pytest.mark.parametrize(
    ("variable", "raw", "value"),
    [
        (envs.CPU_TARGET, "sm_100a", "sm_100a"),
        (envs.KEEP_SOURCES, "on", True),
        (envs.KEEP_SOURCES, "No", False),
        (envs.COMPILE_WORKERS, "3", 3),
        (envs.TIMEOUT_S, "0.5", 0.5),
        (envs.CACHE_DIR, "~/x", str(Path.home() / "x")),
    ],
)
def test_parsing(monkeypatch: pytest.MonkeyPatch, variable: envs.Variable[object], raw: str, value: object) -> None:
    monkeypatch.setenv(variable.name, raw)
    assert variable.get() == value
    assert type(variable.get()) is type(value)


@pytest.mark.parametrize(
    ("variable", "raw"),
    [
        (envs.CPU_TARGET, "sm_80"),
        (envs.KEEP_SOURCES, "maybe"),
        (envs.COMPILE_WORKERS, "-1"),
        (envs.COMPILE_WORKERS, "many"),
        (envs.TIMEOUT_S, "0"),
        (envs.TIMEOUT_S, "nan"),
    ],
)
def test_refusal_names_variable_wanted_and_given(
    monkeypatch: pytest.MonkeyPatch, variable: envs.Variable[object], raw: str
) -> None:
    monkeypatch.setenv(variable.name, raw)
    with pytest.raises(envs.EnvironmentValueError, match=f"{variable.name}: wanted .*, given '{re.escape(raw)}'"):
        variable.get()


def test_child_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGK3_A", "1")
    monkeypatch.setenv("DGK3_B", "2")
    child = envs.child_environment({"DGK3_A": None, "DGK3_B": "3"})
    assert "DGK3_A" not in child
    assert child["DGK3_B"] == "3"


def test_log_level_reaches_the_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("deep_gemm_k3")
    for name, value in (("level", log.level), ("handlers", []), ("propagate", log.propagate)):
        monkeypatch.setattr(log, name, value)
    monkeypatch.delenv("DGK3_LOG_LEVEL", raising=False)
    _extension.configure_log()
    assert log.handlers == []
    monkeypatch.setenv("DGK3_LOG_LEVEL", "debug")
    _extension.configure_log()
    _extension.configure_log()
    assert log.level == logging.DEBUG
    assert len(log.handlers) == 1
    log.handlers.clear()
