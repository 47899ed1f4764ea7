"""A process that compiles: one JSON object a line in, one a line out. NVRTC takes one compilation at a time per process, so a
warm-up in parallel needs several. Ends when its input does, hence with its parent.

    {"name": ..., "arch": ..., "config": ..., "ptx_only": ...}  ->  {"seconds": ...} | {"data": base64 of the packed artefact} | {"error": ...}
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

from deep_gemm_k3.jit.cache import Cache, pack
from deep_gemm_k3.jit.compiler import default_compiler
from deep_gemm_k3.jit.source import KernelSource


def answer(cache: Cache, job: dict[str, Any]) -> dict[str, Any]:
    try:
        source = KernelSource(job["name"], job["arch"], job["config"], job.get("ptx_only", False))
        compiler = default_compiler()
        artefact = cache.get(source, compiler)
        if cache.find(source, compiler) is not None:
            return {"seconds": artefact.seconds}
        return {"data": base64.b64encode(pack(artefact)).decode()}
    except Exception as error:
        return {"error": str(error)}


def main() -> None:
    cache = Cache(Path(sys.argv[1]), tells_of_damage=False)  # the parent looks before it asks
    for line in sys.stdin:
        print(json.dumps(answer(cache, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
