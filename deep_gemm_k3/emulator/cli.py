"""``python -m deep_gemm_k3 emulate``: runs a kernel of any PTX file, or says what the emulator lacks for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deep_gemm_k3.arguments import check_output

app = typer.Typer(help="Run a PTX file on the emulator.", add_completion=False)

_DTYPES = ("f16", "bf16", "f32", "f64", "u8", "i8", "i16", "i32", "i64")


def parse_parameter(text: str) -> object:
    """``i32[1024]`` (zeros), ``f32[64,64]=randn``, ``=arange`` or ``=ones``: a tensor; else a number, or ``0x..`` bytes."""
    import torch

    kind, _, rest = text.partition("[")
    if kind in _DTYPES and rest:
        shape_text, end, fill = rest.partition("]")
        if not end:
            raise typer.BadParameter(f"{text}: wanted ] after the shape")
        if not all(part.strip().isdecimal() for part in shape_text.split(",")):
            raise typer.BadParameter(f"{text}: wanted whole numbers with commas between in the shape")
        shape = [int(part) for part in shape_text.split(",")]
        dtype = getattr(
            torch,
            {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "u8": "uint8"}.get(
                kind, f"int{kind[1:]}"
            ),
        )
        if fill == "=randn":
            return torch.randn(shape).to(dtype)
        if fill == "=arange":
            return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        if fill in ("", "=ones"):
            return (torch.ones if fill else torch.zeros)(shape, dtype=dtype)
        raise typer.BadParameter(f"{text}: wanted =randn, =arange or =ones after the shape")
    try:
        if text.startswith("hex:"):
            return bytes.fromhex(text[4:])
        is_hexadecimal = text.lower().lstrip("+-").startswith("0x")
        return float(text) if not is_hexadecimal and ("." in text or "e" in text) else int(text, 0)
    except ValueError:
        raise typer.BadParameter(f"{text}: wanted a number, hex:BYTES or DTYPE[SHAPE]") from None


def _triple(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) > 3 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text}: wanted x[,y[,z]], positive numbers")
    return [int(part) for part in parts]


def _shown(tensor: Any) -> str:
    """Short tensors whole, long ones by their ends."""
    import torch

    torch.set_printoptions(threshold=64)
    try:
        return f"{tensor}, {list(tensor.shape)}"
    finally:
        torch.set_printoptions(profile="default")


@app.command()
def emulate(
    file: Annotated[Path, typer.Argument(help="PTX text.", exists=True, dir_okay=False)],
    *,
    kernel: Annotated[str, typer.Option(help="Its name; needed when the file has several.")] = "",
    grid: Annotated[str, typer.Option(help="x[,y[,z]]")] = "1",
    block: Annotated[str, typer.Option(help="x[,y[,z]]")] = "32",
    cluster: Annotated[str, typer.Option(help="x[,y[,z]]")] = "1",
    shared: Annotated[int, typer.Option(min=0, help="Bytes of dynamic shared memory.")] = 0,
    param: Annotated[
        list[str] | None, typer.Option(help="In order: 7, 1.5, f32[64,64]=randn, i32[100], hex:0011.")
    ] = None,
    sms: Annotated[int, typer.Option(min=1, help="SMs of the device.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the schedule.")] = 0,
    adversary: Annotated[str, typer.Option(help="random, earliest or latest.")] = "random",
    races: Annotated[bool, typer.Option("--races", help="Look for data races.")] = False,
    roles: Annotated[str, typer.Option(help="Names of a CTA's warps in order: math*8,producer.")] = "",
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto here.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only decode every kernel.")] = False,
) -> None:
    """Run one kernel and print its tensors, counters and findings; exit code 1 when there is a finding or a fault, or no
    kernel."""
    from deep_gemm_k3.emulator import ArgumentError, Device, EmulatorError, Module

    try:
        if trace:
            check_output("--trace", trace)
        module = Module.load(file)
        if not module.kernels:
            raise EmulatorError(f"{file}: wanted a kernel, found none")
        if check:
            module.check()
            print(f"{file}: {len(module.kernels)} kernels for {module.target}, every instruction has a model")
            return
        if not kernel and len(module.kernels) != 1:
            raise EmulatorError(f"--kernel: wanted one of {', '.join(module.kernels)}")
        name = kernel or next(iter(module.kernels))
        values = [parse_parameter(text) for text in param or []]
        device = Device(
            sms, module.target, seed, adversary=adversary, race_detection=races, roles=roles, trace=trace is not None
        )
        started = time.perf_counter()
        failure = ""
        try:
            device.launch(
                module,
                name,
                _triple(grid),
                _triple(block),
                cluster=_triple(cluster),
                shared_bytes=shared,
                params=values,
            )
        except ArgumentError:
            raise
        except EmulatorError as error:
            failure = str(error)
        seconds = time.perf_counter() - started
        if trace:
            trace.write_text(device.trace())
    except (EmulatorError, ValueError) as error:
        print(error)
        raise typer.Exit(1) from None
    if device.printed:
        print(device.printed, end="")
    for number, value in enumerate(values):
        if hasattr(value, "data_ptr"):
            print(f"param {number}: {_shown(value)}")
    for counter, count in device.counters.items():
        if count:
            print(f"{counter:18s} {count}")
    for role, counters in device.role_counters.items():
        print(f"{role + ':':18s} " + ", ".join(f"{name} {count}" for name, count in counters.items() if count))
    print(f"{'seconds':18s} {seconds:.3f}")
    for finding in device.findings:
        print(f"finding: {finding.kind} ({finding.count} times): {finding.text}")
    if failure:
        print(failure)
    raise typer.Exit(1 if failure or device.findings else 0)
