"""``python -m deep_gemm_k3``: demo, plan, doctor and what other parts of the package add.

A sub-command lives in a module of its own with a typer application named ``app``; the module is imported only when its
command runs, so listing the commands stays cheap.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# command -> (module:attribute, help); the attribute is a typer application.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo.cli:app", "Run the main job on this machine and check it independently."),
    "plan": ("plan_cli:app", "Show what a call would run: configuration, bytes and the reasons."),
    "doctor": ("doctor:app", "Look at this machine: what works, what is missing, how to mend it."),
    "warmup": ("jit.cli:warmup_app", "Compile everything a call can choose, ahead of time."),
    "cache": ("jit.cli:cache_app", "List, verify or clear the compiled kernels."),
    "bench": ("bench.cli:app", "Measure, compare and plot."),
    "emulate": ("emulator.cli:app", "Run a PTX file on the emulator."),
}


def available() -> dict[str, tuple[str, str]]:
    """The commands whose modules this installation has; nothing is imported to find out."""
    package = Path(__file__).resolve().parent
    found = {}
    for name, (target, text) in COMMANDS.items():
        if package.joinpath(*target.split(":")[0].split(".")).with_suffix(".py").exists():
            found[name] = (target, text)
    return found


def usage() -> str:
    import deep_gemm_k3

    lines = [f"deep_gemm_k3 {deep_gemm_k3.__version__}", "", "usage: python -m deep_gemm_k3 COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<8} {text}" for name, (_, text) in available().items()]
    return "\n".join([*lines, "", "python -m deep_gemm_k3 COMMAND --help tells more."])


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        import deep_gemm_k3

        print(deep_gemm_k3.__version__)
        return 0
    commands = available()
    if arguments[0] not in commands:
        print(f"command: wanted one of {', '.join(commands)}, given {arguments[0]!r}", file=sys.stderr)
        return 2
    module, attribute = commands[arguments[0]][0].split(":")
    app = getattr(importlib.import_module(f"deep_gemm_k3.{module}"), attribute)
    try:
        app(arguments[1:], prog_name=f"python -m deep_gemm_k3 {arguments[0]}")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        # What the package or the machine refuses is a message; where it comes from is for those who look for faults.
        from deep_gemm_k3 import envs

        if envs.LOG_LEVEL.get() == "debug":
            raise
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
