"""Workspaces that the shared expert's output is published to, in either of the two modes.

`rs` (hidden-sharded): rank d's workspace is [generation, token, source rank, hidden / ranks]; it gets every rank's partial
of its own columns. `sp_rs` (token-owner): [generation, local token, source rank, hidden]; it gets every rank's partial of
the tokens that rank d owns. Nothing is summed: that is the consumer's part.

`flags` is the consumer's state on the device. A call reads [0], the generation to write, and [2], the bytes between
generations. The rest is for consumers that clear what they have read: [1] the generation last written, [3] that it is
dirty, [4] how many of its bytes are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..arguments import check_int, refuse_value
from .buffer import SymmBuffer, own_stream
from .buffer_spec import pick_device
from .group import Group, Unique, as_group, check_equal
from .memory import RankMemory, allocate, refusing, settle

MODES = {"rs": 3, "sp_rs": 1}  # fewest generations
NUM_FLAGS = 12
MAX_GENERATION_BYTES = 2**31 - 1
_TAG = "PublicationWorkspace"


def _shape(group: Group, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Shape of the workspace, from checked arguments."""
    mode, ranks = given["mode"], group.size
    if not isinstance(mode, str) or mode not in MODES:
        raise refuse_value("mode", "'rs' (hidden-sharded) or 'sp_rs' (token-owner)", mode)
    tokens = check_int("num_max_tokens", given["num_max_tokens"], 1, 2**24)
    generations = check_int("num_generations", given["num_generations"], MODES[mode], 2**16)
    hidden = check_int("hidden", given["hidden"], 8, 2**20, 8)
    if mode == "rs" and hidden % (8 * ranks) != 0:
        raise refuse_value("hidden", f"a multiple of 8 columns for each of {ranks} ranks", hidden)
    row = (tokens, ranks, hidden // ranks) if mode == "rs" else (-(-tokens // ranks), ranks, hidden)
    if 2 * row[0] * row[1] * row[2] > MAX_GENERATION_BYTES:
        raise refuse_value(
            "num_max_tokens", f"a generation of at most {MAX_GENERATION_BYTES} bytes", 2 * row[0] * row[1] * row[2]
        )
    return (generations, *row)


class PublicationWorkspace(Unique):
    """This rank's workspace, flags and the peers' addresses. Collective over `group`, or over a buffer's group.

    `workspace`, `flags` and `peer_ptrs` are what a publishing call takes, in that order. `num_max_tokens` counts all shared
    tokens of a call. With three generations a consumer may read one while the next is written; one generation (token-owner
    mode only) is enough where the consumer runs on the call's stream and has read it before the next call.
    """

    def __init__(
        self,
        group: object,
        mode: str,
        num_max_tokens: int,
        hidden: int,
        num_generations: int = 3,
        *,
        device: object = None,
    ) -> None:
        if isinstance(group, SymmBuffer):
            device = group.device if device is None else device
            group = group.group_view
        view = as_group(group)
        given = {"mode": mode, "num_max_tokens": num_max_tokens, "hidden": hidden, "num_generations": num_generations}
        shape, self.device = refusing(view, lambda: (_shape(view, given), pick_device(view, device)), _TAG)
        check_equal(view.all_gather({**given, "device": self.device.type}, _TAG), _TAG)
        own_stream(view, self.device)
        self.mode = mode
        self.num_max_tokens = num_max_tokens
        self.generation_bytes = 2 * shape[1] * shape[2] * shape[3]
        with torch.inference_mode(False):  # its tensors outlive the caller's mode
            self._create(view, shape)

    def _create(self, view: Group, shape: tuple[int, ...]) -> None:
        sizes = f"a workspace of {shape[0]} generations for num_max_tokens {self.num_max_tokens}"
        memory = allocate(view, self.device, shape[0] * self.generation_bytes, _TAG, sizes)
        self._memory: RankMemory | None = memory
        self._workspace = memory.own.view(torch.bfloat16).view(shape)
        self._peer_ptrs = torch.tensor(memory.bases, dtype=torch.int64, device="cpu").to(self.device)
        self._flags = torch.zeros(NUM_FLAGS, dtype=torch.int32, device="cpu")
        self._flags[1] = min(1, shape[0] - 1)
        self._flags[2] = self.generation_bytes
        self._flags = self._flags.to(self.device)
        rotated = [self.generation_bytes, 1, 0, 0, 0, 0, 0]
        self._rotated = torch.tensor(rotated, dtype=torch.int32, device="cpu").to(self.device)

    def __enter__(self) -> PublicationWorkspace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    @property
    def workspace(self) -> torch.Tensor:
        """BF16 [generations, tokens, ranks, hidden / ranks] (`rs`) or [generations, local tokens, ranks, hidden]."""
        self._alive()
        return self._workspace

    @property
    def flags(self) -> torch.Tensor:
        """int32 [12] on the device."""
        self._alive()
        return self._flags

    @property
    def peer_ptrs(self) -> torch.Tensor:
        """int64 [ranks] on the device: every rank's workspace as it is addressed from here."""
        self._alive()
        return self._peer_ptrs

    @property
    def num_generations(self) -> int:
        return self.workspace.size(0)

    @property
    def generation(self) -> int:
        """The generation that the next call writes. Reads the device, so it waits for what is queued there."""
        return int(self.flags[0].item())

    def view(self, generation: int | None = None) -> torch.Tensor:
        """One generation: [token, source rank, columns]. None: the one last rotated away, which waits for the device."""
        if generation is None:
            generation = int(self.flags[1].item())
        return self.workspace[check_int("generation", generation, 0, self.num_generations - 1)]

    def rotate(self, num_tokens: int | None = None) -> None:
        """Move on to the next generation, in stream order and without a host wait; legal in a CUDA graph.

        `num_tokens` is how many shared tokens the last call published; it tells a clearing consumer how much is dirty.
        """
        used = self.num_max_tokens if num_tokens is None else num_tokens
        used = check_int("num_tokens", used, 0, self.num_max_tokens)
        flags, shape = self.flags, self._workspace.shape
        rows = used if self.mode == "rs" else -(-used // shape[2])
        flags[1:2].copy_(flags[0:1])
        flags[0:1].add_(1).remainder_(shape[0])
        flags[2:9].copy_(self._rotated)
        flags[4:5].fill_(2 * rows * shape[2] * shape[3])

    def destroy(self) -> None:
        """Free this rank's part. Not a collective; memory lives on while peers hold it. A second call does nothing."""
        if self._memory is None:
            return
        settle(self.device)
        self._memory = None
        del self._workspace, self._flags, self._peer_ptrs, self._rotated

    def _alive(self) -> None:
        if self._memory is None:
            raise RuntimeError("publication workspace: wanted a live one, given one that was destroyed")
