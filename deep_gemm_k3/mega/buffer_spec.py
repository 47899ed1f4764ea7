"""What a caller asks of a symmetric buffer: checked, completed with defaults, and laid out."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import envs
from .._extension import ops
from ..arguments import ACTIVATIONS, TARGETS, check_choice, check_int, check_int32, refuse_value
from .group import Group, check_timeout
from .local_world import LocalRank

TOKEN_ALIGNMENT = 384
MAX_TOKENS = 2**20 // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT
EMULATED_SMS = 4


@dataclass(frozen=True)
class BufferSpec:
    """What decides the layout of a buffer, plus what a rank knows about its own part in it."""

    num_ranks: int
    num_experts: int
    num_topk: int
    num_max_tokens_per_rank: int
    num_max_shared_tokens: int
    hidden: int
    intermediate_hidden: int
    shared_intermediate_hidden: int
    activation: str
    target: str
    device: str
    rank: int
    device_index: int
    num_sms: int
    timeout_ns: int
    owner: int

    def common(self) -> dict[str, Any]:
        """The fields that must be equal on all ranks, named as the caller named them."""
        own = ("rank", "device_index", "num_sms", "timeout_ns", "owner")
        fields = {name: value for name, value in asdict(self).items() if name not in own}
        fields["bf16_shared_intermediate_hidden"] = fields.pop("shared_intermediate_hidden")
        return fields

    def sizes(self) -> str:
        """What decides the bytes, in words."""
        return (
            f"num_max_tokens_per_rank {self.num_max_tokens_per_rank}, num_topk {self.num_topk}, hidden {self.hidden}, "
            f"intermediate_hidden {self.intermediate_hidden} and num_max_shared_tokens {self.num_max_shared_tokens}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Layout:
    """Where each component of a buffer lies."""

    num_bytes: int
    components: Mapping[str, tuple[int, int]]  # name -> offset, bytes

    @classmethod
    def of(cls, spec: BufferSpec) -> Layout:
        """The layout of a buffer, worked out by the host library, which also checks the spec's numbers."""
        try:
            table = json.loads(ops().workspace_bytes(spec.to_json()))
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return cls(table["total_bytes"], {row["name"]: (row["offset"], row["bytes"]) for row in table["components"]})


def _whole(given: Mapping[str, Any], name: str) -> int:
    """An integer argument; whether its value fits is for the host library to say."""
    return check_int32(name, given[name])


def _check_choices(given: Mapping[str, object]) -> None:
    """The arguments of which this package serves only some of upstream's values."""
    if _whole(given, "num_shared_experts") != 0:
        raise refuse_value(
            "num_shared_experts",
            "0: FP8-scaled shared experts are not served, BF16 ones go by bf16_shared_intermediate_hidden",
            given["num_shared_experts"],
        )
    if given["use_fp8_dispatch"] is not None and given["use_fp8_dispatch"] is not True:
        raise refuse_value("use_fp8_dispatch", "None or True: tokens are dispatched in FP8", given["use_fp8_dispatch"])
    check_choice("mma_type", given["mma_type"], ("fp8xfp4",))
    check_choice("activation", given["activation"], ACTIVATIONS)


def pick_device(group: Group, device: object) -> torch.device:
    """The device a buffer goes to: the one asked for, else what the process group's backend serves, else CUDA if any."""
    if device is not None:
        try:
            chosen = torch.device(device)  # type: ignore[call-overload]
        except (RuntimeError, TypeError, ValueError) as error:
            raise refuse_value("device", "a CPU or CUDA device", device) from error
    else:
        backend = getattr(group.handle, "name", None)
        on_cpu = callable(backend) and backend() == "gloo"
        chosen = torch.device("cuda" if not on_cpu and torch.cuda.is_available() else "cpu")
    if chosen.type not in ("cpu", "cuda"):
        raise refuse_value("device", "a CPU or CUDA device", str(chosen))
    if chosen.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise refuse_value("device", "one that torch can use here (no CUDA device was found)", str(chosen))
    count = torch.cuda.device_count()
    if chosen.index is not None and chosen.index >= count:
        raise refuse_value("device", f"cuda or cuda:0..{count - 1}", str(chosen))
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)


def target_of(device: torch.device) -> str:
    """The architecture that kernels for tensors on `device` are compiled for."""
    if device.type == "cpu":
        return envs.CPU_TARGET.get()
    capability = torch.cuda.get_device_capability(device)
    if capability[0] == 9:
        return "sm_90a"
    if capability[0] == 10:
        return "sm_100a"
    raise refuse_value("device", "compute capability 9.0 (sm_90a) or 10.x (sm_100a)", f"{device} with {capability}")


def _pick_target(device: torch.device, asked: object) -> str:
    """The target asked for, if tensors on `device` can have it; without one the device's."""
    if asked is None:
        return target_of(device)
    choices = TARGETS if device.type == "cpu" else (target_of(device),)
    return check_choice("target", asked, choices, f" for tensors on {device.type}")


def _sm_share(group: Group, device: torch.device, num_sms: int | None) -> int:
    if device.type == "cpu":
        return check_int("num_sms", EMULATED_SMS if num_sms is None else num_sms, 1, 1024)
    available = torch.cuda.get_device_properties(device).multi_processor_count
    if num_sms is None:
        num_sms = max(1, available // group.size) if isinstance(group, LocalRank) else available
    return check_int("num_sms", num_sms, 1, available)


def make_spec(group: Group, given: Mapping[str, Any]) -> tuple[BufferSpec, torch.device]:
    """Check the arguments of `get_symm_buffer_for_mega_moe` on this rank; raises naming the first that does not fit."""
    _check_choices(given)
    asked = check_int("num_max_tokens_per_rank", given["num_max_tokens_per_rank"], 1, MAX_TOKENS)
    num_tokens = -(-asked // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT
    timeout_s = check_timeout(envs.TIMEOUT_S.get() if given["timeout_s"] is None else given["timeout_s"])
    device = pick_device(group, given["device"])
    spec = BufferSpec(
        num_ranks=group.size,
        num_experts=_whole(given, "num_experts"),
        num_topk=_whole(given, "num_topk"),
        num_max_tokens_per_rank=num_tokens,
        num_max_shared_tokens=num_tokens
        if given["num_max_shared_tokens"] is None
        else _whole(given, "num_max_shared_tokens"),
        hidden=_whole(given, "hidden"),
        intermediate_hidden=_whole(given, "intermediate_hidden"),
        shared_intermediate_hidden=_whole(given, "bf16_shared_intermediate_hidden"),
        activation=given["activation"],
        target=_pick_target(device, given["target"]),
        device=device.type,
        rank=group.rank,
        device_index=device.index or 0,
        num_sms=_sm_share(group, device, given["num_sms"]),
        timeout_ns=max(1, int(timeout_s * 1e9)),
        owner=threading.get_native_id() if isinstance(group, LocalRank) and group.size > 1 else 0,
    )
    Layout.of(spec)  # the host library checks the numbers, and the bytes that they take
    return spec, device
