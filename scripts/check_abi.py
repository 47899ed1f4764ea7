#!/usr/bin/env python3
"""Checks that the host extension is one artefact for every supported Python and torch; exits 1 with the reasons.

    python scripts/check_abi.py [--library deep_gemm_k3/_C.so] [--torch DIRECTORY_OF_TORCH] [--symbols]

| rule | why |
|---|---|
| no symbol of the Python API is needed | one file for Python 3.11, 3.12, 3.13 and later |
| no C++ symbol of torch or c10 is needed | their ABI changes with every release |
| every C symbol of torch that is needed is exported by the torch at hand | a later or an older torch refuses it at load |
| needed libraries are those of torch and the C and C++ run time | nothing of the building machine |
| versions of glibc and libstdc++ needed are at most those of the oldest supported system | loads where it was not built |
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEWEST = {"GLIBC": (2, 36), "GLIBCXX": (3, 4, 32), "CXXABI": (1, 3, 14)}
LIBRARIES = re.compile(r"lib(torch_cpu|c|m|stdc\+\+|gcc_s|dl|rt|pthread)\.so(\.\d+)*|ld-linux[-\w]*\.so(\.\d+)*")
PYTHON = re.compile(r"_?Py[A-Z_]\w*")
TORCH_CXX = re.compile(r"_ZT?[VISn]?N?K?(?:St\d*)?(?:2at|3c10|5torch|5caffe)")
TORCH_C = re.compile(r"(?:aoti_torch|torch)_\w+")

_DYNAMIC, _DYNSYM, _VERNEED = 6, 11, 0x6FFFFFFE
_DT_NEEDED = 1


@dataclass
class Library:
    """What the dynamic linker reads of a 64-bit little-endian ELF file."""

    needed: list[str] = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    versions: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    info: int


def _sections(data: bytes) -> list[_Section]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise SystemExit("wanted a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    found = []
    for index in range(count):
        _, kind, _, _, offset, length, link, info, _, _ = struct.unpack_from("<IIQQQQIIQQ", data, start + index * size)
        found.append(_Section(kind, offset, length, link, info))
    return found


def read_library(path: Path) -> Library:
    data = path.read_bytes()
    sections = _sections(data)
    library = Library()

    def text(section: _Section, at: int) -> str:
        begin = sections[section.link].offset + at
        return data[begin : data.index(b"\0", begin)].decode()

    for section in sections:
        end = section.offset + section.size
        if section.kind == _DYNAMIC:
            for at in range(section.offset, end, 16):
                tag, value = struct.unpack_from("<qQ", data, at)
                if tag == _DT_NEEDED:
                    library.needed.append(text(section, value))
        elif section.kind == _DYNSYM:
            for at in range(section.offset + 24, end, 24):
                name, _, _, where = struct.unpack_from("<IBBH", data, at)
                if where == 0:
                    library.undefined.append(text(section, name))
                else:
                    library.defined.add(text(section, name))
        elif section.kind == _VERNEED:
            _read_versions(data, section, text, library.versions)
    return library


def _read_versions(data: bytes, section: _Section, text, out: list[str]) -> None:
    at = section.offset
    for _ in range(section.info):
        _, count, _, aux, following = struct.unpack_from("<HHIII", data, at)
        entry = at + aux
        for _ in range(count):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, entry)
            out.append(text(section, name))
            entry += step
        at += following


def torch_directory(given: Path | None) -> Path | None:
    if given is not None:
        return given
    spec = importlib.util.find_spec("torch")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def faults(library: Library, exported: set[str] | None) -> list[str]:
    found = []
    for name in library.undefined:
        if PYTHON.fullmatch(name):
            found.append(f"needs {name} of the Python API: it would be bound to one Python version")
        elif TORCH_CXX.match(name):
            found.append(f"needs {name}, a C++ symbol of torch: it would be bound to one torch release")
        elif exported is not None and TORCH_C.fullmatch(name) and name not in exported:
            found.append(f"needs {name}, which this torch does not export (older than the target version, or removed)")
    for name in library.needed:
        if not LIBRARIES.fullmatch(name):
            found.append(f"needs the library {name}, which is neither torch's nor the run time's")
    for version in library.versions:
        family, _, number = version.rpartition("_")
        parts = tuple(int(part) for part in number.split(".") if part.isdigit())
        if family in NEWEST and parts > NEWEST[family]:
            wanted = ".".join(map(str, NEWEST[family]))
            found.append(f"needs {version}; wanted at most {family}_{wanted}, so that it loads on older systems")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--library", type=Path, default=ROOT / "deep_gemm_k3" / "_C.so")
    parser.add_argument("--torch", type=Path)
    parser.add_argument("--symbols", action="store_true", help="print the symbols of torch that are needed")
    options = parser.parse_args(arguments)
    if not options.library.exists():
        print(f"{options.library}: not built; python setup.py build_ext --inplace")
        return 1
    library = read_library(options.library)
    directory = torch_directory(options.torch)
    exported, version = None, "none at hand"
    if directory is not None:
        exported = read_library(directory / "lib" / "libtorch_cpu.so").defined
        match = re.search(r"__version__ = ['\"]([^'\"]+)", (directory / "version.py").read_text())
        version = match.group(1) if match else "unknown"
    needed = sorted(name for name in library.undefined if TORCH_C.fullmatch(name))
    if options.symbols:
        print("\n".join(needed))
    found = faults(library, exported)
    for fault in found:
        print(f"{options.library.name}: {fault}")
    print(f"{options.library.name}: {len(needed)} C symbols of torch ({version}), {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
