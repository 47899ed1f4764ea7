"""Execution of one rank's part of a fused call on the CPU, with the oracle's arithmetic.

The host library validates a call, plans it and hands this module one JSON object, the launch record. Every tensor in it
is given by its address in this process, so the executor sees exactly the memory that a kernel would see: this rank's own
tensors and the symmetric buffers of all ranks.

Launch record (version 1)::

    {
      "version": 1,
      "entry":  "fp8_fp4_mega_moe" | "fp8_fp4_mega_moe_bf16_shared"
                | "fp8_fp4_mega_moe_bf16_shared_rs" | "fp8_fp4_mega_moe_bf16_shared_sp_rs",
      "handle": int,                 # of the symmetric buffer; first argument of cpu_barrier
      "rank": int, "num_ranks": int,
      "problem": {"num_experts": int, "num_topk": int, "num_max_tokens_per_rank": int,
                  "hidden": int, "intermediate_hidden": int},
      "tensors": {name: [address, dtype, shape]},        # contiguous; dtype as torch names it, without "torch."
      "scalars": {"num_tokens": int, "num_shared_tokens": int,
                  "activation": "swiglu" | "situ", "activation_clamp": float | null,
                  "situ_beta": float | null, "situ_linear_beta": float | null,
                  "rms_epsilon": float | null, "fast_math": bool, "batch_invariant": bool},
      "peers":  [address, ...],      # base of every rank's symmetric buffer, mapped into this process, in rank order
      "layout": {"x": offset, "x_sf": offset, "topk_idx": offset, "topk_weights": offset,
                 "combine": offset, "header": offset},   # bytes from a base; equal on all ranks
      "plan":   {...}                # not read here
    }

Tensor names; those an entry has no use for are absent (or null), never empty placeholders::

    y                    bfloat16 [num_tokens, hidden]
    l1_weights           routed, transformed for any target (the target is recognised by dtype and shape)
    l1_weights_sf        its scale partner (may have zero elements: then the address is not read)
    l2_weights, l2_weights_sf
    cumulative_local_expert_recv_stats   int32 [E_local], optional
    shared_x             bfloat16 [num_shared_tokens, shared_hidden]
    shared_l1_weights    bfloat16 [2 * shared_intermediate, shared_hidden]
    shared_l2_weights    bfloat16 [shared_hidden, shared_intermediate]
    rms_weight           bfloat16 [hidden]
    shared_y             bfloat16 [num_shared_tokens, shared_hidden]; the dense entry only
    shared_rs_workspace  bfloat16 [generations, tokens, ranks, columns]; publication entries only, like the next two
    shared_rs_flags      int32 [>= 9]
    shared_rs_peer_ptrs  int64 [ranks]

Regions of the symmetric buffer, T = num_max_tokens_per_rank::

    x             float8_e4m3fn [T, hidden]
    x_sf          int32 [T, hidden / 128], four UE8M0 bytes each, K-major
    topk_idx      int64 [T, num_topk]
    topk_weights  float32 [T, num_topk]
    combine       bfloat16 [T, num_topk, hidden], written by the ranks that own the experts
    header        128 bytes at any 16-byte aligned place that the executor alone uses; contents need not survive a call

Order of one call; ``cpu_barrier(handle, phase)`` is ``torch.ops.deep_gemm_k3.cpu_barrier``, joined by every rank, with
release/acquire meaning, releasing the GIL, raising on time-out or when a peer has aborted::

    write own header                       peers may not read it yet
    barrier phase 0                        every rank's inputs and header are in place
    check headers and expert ids           all ranks read the same data and so reach the same verdict
    routed partials -> combine slots of the source ranks; shared expert -> shared_y or the peers' workspaces; statistics
    barrier phase 1                        all partials and publications are visible; all inputs may be overwritten
    combine own tokens, RMSNorm -> y

Two barriers are enough: a rank writes its next header, partials or publication only after phase 0 of the next call, which
this rank joins after it has combined.

``run`` returns nothing. It raises ``RuntimeError`` with a message for the caller; the host library then marks the buffer
as aborted, which also wakes the peers that wait in a barrier.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from . import oracle
from .oracle import Options, RoutedInput

_PREFIX = "fp8_fp4_mega_moe"
_MODES = {f"{_PREFIX}": "routed", f"{_PREFIX}_bf16_shared": "dense"}
_MODES |= {f"{_PREFIX}_bf16_shared_rs": "rs", f"{_PREFIX}_bf16_shared_sp_rs": "sp_rs"}

_INPUTS_READY = 0
_RESULTS_READY = 1
_HEADER_WORDS = 16
_TOKENS, _SHARED_TOKENS, _FAULT, _KIND = range(4)
_FAULTS = {
    1: "shared_rs_flags[0]: wanted a generation that the workspace has",
    2: "shared_rs_flags[2]: wanted the workspace's bytes per generation",
    3: "shared_rs_peer_ptrs: wanted distinct addresses, none of them null, and this workspace's own in its place",
}


def tensor_at(address: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A tensor over memory of this process; no copy, no ownership. An empty one never reads ``address``."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)


def _tensors(record: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: tensor_at(entry[0], getattr(torch, entry[1]), entry[2])
        for name, entry in record["tensors"].items()
        if entry is not None
    }


class _Call:
    """One rank's view of one call: its own tensors and the regions of all ranks' symmetric buffers."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.mode = _MODES[record["entry"]]
        self.handle, self.rank, self.num_ranks = record["handle"], record["rank"], record["num_ranks"]
        self.problem, self.scalars, self.layout = record["problem"], record["scalars"], record["layout"]
        self.peers = record["peers"]
        self.tensors = _tensors(record)
        self.options = Options(*(self.scalars.get(name) for name in Options.__dataclass_fields__))
        self.experts = self.problem["num_experts"] // self.num_ranks

    def region(self, rank: int, name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        return tensor_at(self.peers[rank] + self.layout[name], dtype, shape)

    def header(self, rank: int) -> torch.Tensor:
        return self.region(rank, "header", torch.int64, [_HEADER_WORDS])

    def routed(self, rank: int, tokens: int) -> RoutedInput:
        hidden, topk = self.problem["hidden"], self.problem["num_topk"]
        return RoutedInput(
            self.region(rank, "x", torch.float8_e4m3fn, [tokens, hidden]),
            self.region(rank, "x_sf", torch.int32, [tokens, hidden // 128]),
            self.region(rank, "topk_idx", torch.int64, [tokens, topk]),
            self.region(rank, "topk_weights", torch.float32, [tokens, topk]),
        )

    def slots(self, rank: int, tokens: int) -> torch.Tensor:
        shape = [tokens, self.problem["num_topk"], self.problem["hidden"]]
        return self.region(rank, "combine", torch.bfloat16, shape)

    def barrier(self, phase: int) -> None:
        torch.ops.deep_gemm_k3.cpu_barrier(self.handle, phase)

    # -------------------------------------------------------------------------------------------------- device-side checks
    def own_fault(self) -> int:
        """The number in ``_FAULTS`` of what is wrong with this rank's publication arguments; 0 when nothing is."""
        if self.mode not in ("rs", "sp_rs"):
            return 0
        workspace, flags = self.tensors["shared_rs_workspace"], self.tensors["shared_rs_flags"]
        pointers = self.tensors["shared_rs_peer_ptrs"].tolist()
        if not 0 <= int(flags[0]) < workspace.size(0):
            return 1
        if int(flags[2]) != workspace[0].numel() * workspace.element_size():
            return 2
        if 0 in pointers or len(set(pointers)) != len(pointers) or pointers[self.rank] != workspace.data_ptr():
            return 3
        return 0

    def write_header(self) -> None:
        header = self.header(self.rank)
        header[_TOKENS], header[_SHARED_TOKENS] = self.scalars["num_tokens"], self.scalars["num_shared_tokens"]
        header[_FAULT], header[_KIND] = self.own_fault(), self.kind()

    def kind(self) -> int:
        """A number for what the calls of all ranks have in common: entry, options, shared width."""
        has_clamp, has_norm = self.options.activation_clamp is not None, "rms_weight" in self.tensors
        width = self.tensors["shared_x"].size(1) if self.mode != "routed" else 0
        kind = (self.mode, self.options.activation, has_clamp, self.scalars.get("fast_math"), has_norm, width)
        return zlib.crc32(repr(kind).encode())

    def check_world(self, headers: list[list[int]], sources: list[RoutedInput]) -> None:
        """Raise what any rank finds wrong; every rank looks at the same data and raises the same."""
        for rank, header in enumerate(headers):
            if header[_FAULT]:
                raise RuntimeError(f"rank {rank}: {_FAULTS[header[_FAULT]]}")
            if header[_KIND] != headers[0][_KIND]:
                raise RuntimeError(f"entry or options differ between ranks: rank {rank} has others than rank 0")
            if self.mode in ("rs", "sp_rs") and header[_SHARED_TOKENS] != headers[0][_SHARED_TOKENS]:
                raise RuntimeError(
                    f"num_shared_tokens: wanted one number on all ranks, given {headers[0][_SHARED_TOKENS]} on rank 0 "
                    f"and {header[_SHARED_TOKENS]} on rank {rank}"
                )
        experts = self.problem["num_experts"]
        for rank, source in enumerate(sources):
            bad = (source.topk_idx < -1) | (source.topk_idx >= experts)
            if bool(bad.any()):
                token, slot = bad.nonzero()[0].tolist()
                raise RuntimeError(
                    f"topk_idx on rank {rank}, token {token}, slot {slot}: wanted -1 or an expert below {experts}, "
                    f"given {int(source.topk_idx[token, slot])}"
                )

    # ----------------------------------------------------------------------------------------------------------- the work
    def run_shared(self) -> None:
        if self.mode == "routed":
            return
        t = self.tensors
        result = oracle.shared_expert(t["shared_x"], t["shared_l1_weights"], t["shared_l2_weights"], self.options)
        if self.mode == "dense":
            t["shared_y"].copy_(result)
            return
        workspace, flags = t["shared_rs_workspace"], t["shared_rs_flags"]
        offset = int(flags[0]) * int(flags[2])
        generations = [
            tensor_at(pointer + offset, torch.bfloat16, list(workspace.shape[1:]))
            for pointer in t["shared_rs_peer_ptrs"].tolist()
        ]
        (oracle.publish_rs if self.mode == "rs" else oracle.publish_sp_rs)(result, generations, self.rank)

    def run_routed(self, sources: list[RoutedInput], partials: list[torch.Tensor]) -> None:
        t = self.tensors
        weights = (t["l1_weights"], t["l1_weights_sf"]), (t["l2_weights"], t["l2_weights_sf"])
        counts = oracle.run_local_experts(sources, weights, self.rank * self.experts, self.options, partials)
        stats = t.get("cumulative_local_expert_recv_stats")
        if stats is not None:
            stats += counts

    def finish(self, source: RoutedInput, partials: torch.Tensor) -> None:
        y = oracle.combine(partials, source.topk_idx)
        if self.mode != "routed":
            y = oracle.rms_norm(y, self.tensors["rms_weight"], self.scalars["rms_epsilon"])
        self.tensors["y"].copy_(y)


@contextlib.contextmanager
def _share_of_cores(num_ranks: int) -> Iterator[None]:
    """Torch's threads for this rank: all ranks of a call work at the same time, most often on one machine."""
    before = torch.get_num_threads()
    share = max(1, min(before, len(os.sched_getaffinity(0)) // num_ranks))
    if share < before:
        torch.set_num_threads(share)
    try:
        yield
    finally:
        if share < before:
            torch.set_num_threads(before)


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """What the caller's thread has set for its own arithmetic must not reach this one's: autocast, inference mode,
    gradients, the default device."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        yield


def run(launch_json: str) -> None:
    """Execute this rank's part of the call that ``launch_json`` describes; returns when its outputs are complete.

    Collective: all ranks of the buffer are in it at the same time. Raises ``RuntimeError`` as the module's head says.
    """
    with _own_settings():
        _run(_Call(json.loads(launch_json)))


def _run(call: _Call) -> None:
    call.write_header()
    call.barrier(_INPUTS_READY)
    headers = [call.header(rank).tolist() for rank in range(call.num_ranks)]
    sources = [call.routed(rank, header[_TOKENS]) for rank, header in enumerate(headers)]
    call.check_world(headers, sources)
    partials = [call.slots(rank, header[_TOKENS]) for rank, header in enumerate(headers)]
    with _share_of_cores(call.num_ranks):
        call.run_shared()
        call.run_routed(sources, partials)
        call.barrier(_RESULTS_READY)
        call.finish(sources[call.rank], partials[call.rank])
