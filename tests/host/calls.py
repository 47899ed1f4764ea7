"""One good call of every entry, straight on the operator and without a group, to be spoilt by tests."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from deep_gemm_k3 import ops as lent
from deep_gemm_k3._extension import ops

RANKS, RANK = 2, 1
EXPERTS, TOPK, TOKENS, HIDDEN, INTERMEDIATE = 4, 2, 3, 256, 128
SHARED_TOKENS, SHARED_HIDDEN, SHARED_INTERMEDIATE = 4, 256, 128
MAX_TOKENS = 384
GENERATIONS = 3
BF16 = torch.bfloat16

ROUTED, DENSE, HIDDEN_SHARDED, TOKEN_OWNER = range(4)
ENTRIES = {
    ROUTED: "fp8_fp4_mega_moe",
    DENSE: "fp8_fp4_mega_moe_bf16_shared",
    HIDDEN_SHARDED: "fp8_fp4_mega_moe_bf16_shared_rs",
    TOKEN_OWNER: "fp8_fp4_mega_moe_bf16_shared_sp_rs",
}
OUTPUTS = ("y", "shared_y", "shared_rs_workspace", "cumulative_local_expert_recv_stats")

_SPEC = {
    "num_ranks": RANKS,
    "num_experts": EXPERTS,
    "num_topk": TOPK,
    "num_max_tokens_per_rank": MAX_TOKENS,
    "num_max_shared_tokens": 2 * MAX_TOKENS,
    "hidden": HIDDEN,
    "intermediate_hidden": INTERMEDIATE,
    "shared_intermediate_hidden": SHARED_INTERMEDIATE,
    "rank": RANK,
    "num_sms": 4,
    "timeout_ns": 10**9,
    "device": "cpu",
    "device_index": 0,
    "activation": "situ",
    "owner": 0,
}


def weights(target: str) -> dict[str, torch.Tensor]:
    """Empty routed weights of the target's layout."""
    local, rows = EXPERTS // RANKS, 2 * INTERMEDIATE
    if target == "sm_90a":
        return {
            "l1_weights": torch.empty(local, rows // 64, HIDDEN // 128, 4352, dtype=torch.uint8),
            "l1_weights_sf": torch.empty(local, 0, dtype=torch.uint8),
            "l2_weights": torch.empty(local, HIDDEN // 64, INTERMEDIATE // 128, 4352, dtype=torch.uint8),
            "l2_weights_sf": torch.empty(local, 0, dtype=torch.uint8),
        }
    return {
        "l1_weights": torch.empty(local, rows, HIDDEN // 2, dtype=torch.int8),
        "l1_weights_sf": torch.empty(local, HIDDEN // 128, rows, dtype=torch.int32),
        "l2_weights": torch.empty(local, HIDDEN, INTERMEDIATE // 2, dtype=torch.int8),
        "l2_weights_sf": torch.empty(local, INTERMEDIATE // 128, HIDDEN, dtype=torch.int32),
    }


@dataclass
class Call:
    """Arguments of one operator call, by name. ``spec`` changes the buffer."""

    entry: int
    target: str = "sm_90a"
    spec: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = {**_SPEC, "target": self.target, **self.spec}
        self.num_ranks: int = spec["num_ranks"]
        self.rank: int = spec["rank"]
        total = json.loads(ops().workspace_bytes(json.dumps(spec)))["total_bytes"]
        # Pages that nobody writes cost nothing.
        self.memory = [torch.frombuffer(mmap.mmap(-1, total), dtype=torch.int8) for _ in range(self.num_ranks)]
        self.handle = ops().buffer_create(json.dumps(spec), [memory.data_ptr() for memory in self.memory])
        self.arguments = self._arguments()
        for name in OUTPUTS:
            if self.arguments[name] is not None:
                self.arguments[name].view(torch.uint8).fill_(0x5A)

    def _arguments(self) -> dict[str, Any]:
        shared = self.entry != ROUTED
        published = self.entry in (HIDDEN_SHARDED, TOKEN_OWNER)
        workspace = flags = pointers = None
        if published:
            owner = self.entry == TOKEN_OWNER
            rows, width = (
                (SHARED_TOKENS // self.num_ranks, SHARED_HIDDEN)
                if owner
                else (SHARED_TOKENS, SHARED_HIDDEN // self.num_ranks)
            )
            workspace = torch.empty(GENERATIONS, rows, self.num_ranks, width, dtype=BF16)
            flags = torch.zeros(9, dtype=torch.int32)
            flags[2] = workspace[0].numel() * 2
            pointers = torch.arange(1, self.num_ranks + 1) << 24  # further apart than the workspaces are long
            pointers[self.rank] = workspace.data_ptr()
        return {
            "y": torch.empty(TOKENS, HIDDEN, dtype=BF16),
            **weights(self.target),
            "buffer": self.memory[self.rank],
            "handle": self.handle,
            "entry": self.entry,
            "shared_x": torch.empty(SHARED_TOKENS, SHARED_HIDDEN, dtype=BF16) if shared else None,
            "shared_l1_weights": torch.empty(2 * SHARED_INTERMEDIATE, SHARED_HIDDEN, dtype=BF16) if shared else None,
            "shared_l2_weights": torch.empty(SHARED_HIDDEN, SHARED_INTERMEDIATE, dtype=BF16) if shared else None,
            "rms_weight": torch.ones(HIDDEN, dtype=BF16) if shared else None,
            "rms_epsilon": 1e-5 if shared else None,
            "shared_y": torch.empty(SHARED_TOKENS, SHARED_HIDDEN, dtype=BF16) if self.entry == DENSE else None,
            "shared_rs_workspace": workspace,
            "shared_rs_flags": flags,
            "shared_rs_peer_ptrs": pointers,
            "cumulative_local_expert_recv_stats": torch.empty(EXPERTS // RANKS, dtype=torch.int32),
            "recipe": (1, 1, 32),
            "activation": "situ",
            "activation_clamp": None,
            "fast_math": True,
            "situ_beta": 4.0,
            "situ_linear_beta": 25.0,
            "batch_invariant": False,
            "validate": "host",
        }  # fmt: skip

    def component(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A region of this rank's buffer."""
        spec = {**_SPEC, "target": self.target, **self.spec}
        rows = json.loads(ops().workspace_bytes(json.dumps(spec)))["components"]
        offset, size = next((row["offset"], row["bytes"]) for row in rows if row["name"] == name)
        return self.memory[self.rank][offset : offset + size].view(dtype).view(*shape)

    def swiglu(self) -> Call:
        self.arguments |= {"activation": "swiglu", "situ_beta": None, "situ_linear_beta": None}
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        self.arguments[name] = value

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def run(self) -> None:
        lent.mega_moe(**self.arguments)

    def outputs(self) -> dict[str, bytes]:
        """The bytes of everything that a call may write, before and after."""
        found = {}
        for name in OUTPUTS:
            tensor = self.arguments[name]
            if tensor is not None and tensor.untyped_storage().nbytes() > 0:
                raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                found[name] = raw.numpy().tobytes()
        return found

    def close(self) -> None:
        ops().buffer_destroy(self.handle)


# ------------------------------------------------------------------------------------------------- ways to spoil a tensor
def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=torch.float16)


def other_rank(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    return wide[..., ::2]


def off_by_one_element(tensor: torch.Tensor) -> torch.Tensor:
    raw = torch.empty(tensor.numel() * tensor.itemsize + 16, dtype=torch.uint8)
    return raw[tensor.itemsize :][: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)


def resized(dim: int, change: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] += change
        return (torch.zeros if len(shape) == 1 else torch.empty)(shape, dtype=tensor.dtype)

    return spoil
