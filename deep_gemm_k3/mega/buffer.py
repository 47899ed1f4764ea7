"""The symmetric buffer of a fused call: equal on every rank, addressable from all, usable for every layer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import count

import torch

from .. import envs
from .._extension import ops
from ..arguments import check_choice, check_text
from .buffer_spec import BufferSpec, Layout, make_spec
from .group import Group, Unique, as_group, check_equal
from .local_world import LocalRank
from .memory import RankMemory, allocate, refusing, settle

_TAG = "get_symm_buffer_for_mega_moe"

_live: weakref.WeakValueDictionary[int, SymmBuffer] = weakref.WeakValueDictionary()
_names = count()


def own_stream(group: Group, device: torch.device) -> None:
    """Ranks of a local world on one device must not queue behind each other: give this thread a stream of its own."""
    if device.type != "cuda" or not isinstance(group, LocalRank) or group.size == 1:
        return
    torch.cuda.set_device(device)
    default = torch.cuda.default_stream(device)
    if torch.cuda.current_stream(device) == default:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(default)
        torch.cuda.set_stream(stream)


class SymmBuffer(Unique):
    """One rank's end of a symmetric buffer. Made by `get_symm_buffer_for_mega_moe`; all of it starts as zeros.

    `x`, `x_sf`, `topk_idx` and `topk_weights` are the views that a caller fills before a call; `buffer` is the whole
    allocation. After `destroy()` they raise; tensors taken from them before keep their memory until they are dropped.

    A buffer takes one call at a time. A call (or `warmup`) that comes from a second thread while one is inside is refused
    at once, and harms neither that one nor the buffer. On a GPU a call is inside while the host enqueues it: threads may
    take turns, and what they enqueue has to be ordered by streams.
    """

    def __init__(self, group: Group, spec: BufferSpec, layout: Layout, device: torch.device) -> None:
        self.group_view = group
        self.spec = spec
        self.layout = layout
        self.device = device
        self.handle = 0
        self.signatures: list[Mapping[str, object]] = []  # those whose first call is over
        self._memory: RankMemory | None = None
        memory = allocate(group, device, layout.num_bytes, _TAG, spec.sizes())
        # First calls of signatures talk here, so that an aborted buffer leaves the group's own exchanges in step.
        self.channel = group.channel(f"buffer-{group.all_gather(next(_names), _TAG)[0]}")
        self.handle = ops().buffer_create(spec.to_json(), memory.bases)
        if device.type == "cpu" and envs.CPU_EXECUTOR.is_set():
            ops().set_route(self.handle, envs.CPU_EXECUTOR.get())
        self._memory = memory
        self._views = {"buffer": memory.own}
        for name, dtype, width in (
            ("x", torch.float8_e4m3fn, spec.hidden),
            ("x_sf", torch.int32, spec.hidden // 128),
            ("topk_idx", torch.int64, spec.num_topk),
            ("topk_weights", torch.float32, spec.num_topk),
        ):
            self._views[name] = self.component(name).view(dtype).view(spec.num_max_tokens_per_rank, width)
        self._finalizer = weakref.finalize(self, ops().buffer_destroy, self.handle)
        self._finalizer.atexit = False
        _live[self.handle] = self
        if isinstance(group, LocalRank):
            group.watch(self)

    def __repr__(self) -> str:
        state = "destroyed" if self._memory is None else f"{self.layout.num_bytes} bytes on {self.device}"
        return f"SymmBuffer(rank {self.rank} of {self.num_ranks}, {state})"

    def __enter__(self) -> SymmBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    @property
    def group(self) -> object:
        """The group as the caller passed it."""
        return self.group_view.handle

    @property
    def x(self) -> torch.Tensor:
        """E4M3 [num_max_tokens_per_rank, hidden]."""
        return self._view("x")

    @property
    def x_sf(self) -> torch.Tensor:
        """int32 [num_max_tokens_per_rank, hidden / 128]: four UE8M0 scale bytes each, one per 32 columns."""
        return self._view("x_sf")

    @property
    def topk_idx(self) -> torch.Tensor:
        """int64 [num_max_tokens_per_rank, num_topk]: expert ids, -1 for none."""
        return self._view("topk_idx")

    @property
    def topk_weights(self) -> torch.Tensor:
        """FP32 [num_max_tokens_per_rank, num_topk]."""
        return self._view("topk_weights")

    @property
    def buffer(self) -> torch.Tensor:
        """int8: the whole allocation. Zeroing it while all ranks are idle is legal."""
        return self._view("buffer")

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def num_ranks(self) -> int:
        return self.spec.num_ranks

    @property
    def num_experts(self) -> int:
        return self.spec.num_experts

    @property
    def num_topk(self) -> int:
        return self.spec.num_topk

    @property
    def hidden(self) -> int:
        return self.spec.hidden

    @property
    def intermediate_hidden(self) -> int:
        return self.spec.intermediate_hidden

    @property
    def bf16_shared_intermediate_hidden(self) -> int:
        return self.spec.shared_intermediate_hidden

    @property
    def num_max_tokens_per_rank(self) -> int:
        return self.spec.num_max_tokens_per_rank

    @property
    def num_max_shared_tokens(self) -> int:
        return self.spec.num_max_shared_tokens

    @property
    def activation(self) -> str:
        return self.spec.activation

    @property
    def target(self) -> str:
        return self.spec.target

    @property
    def num_sms(self) -> int:
        return self.spec.num_sms

    @property
    def timeout_s(self) -> float:
        return self.spec.timeout_ns / 1e9

    @property
    def base_ptrs(self) -> tuple[int, ...]:
        """Every rank's buffer as this process, or device, addresses it."""
        return tuple(self._alive().bases)

    def component(self, name: str) -> torch.Tensor:
        """The bytes of one component of the layout, as int8."""
        memory = self._alive()
        offset, size = self.layout.components[check_choice("name", name, self.layout.components)]
        return memory.own[offset : offset + size]

    def check(self) -> None:
        """Raise what made the buffer unusable: an abort found on this or another rank. Does not wait for kernels."""
        self._alive()
        try:
            ops().buffer_check(self.handle)
        except RuntimeError as error:
            from .first_call import explained  # which needs this module

            raise explained(self, error) from None

    def abort_peers(self, message: str) -> None:
        """End the waits of all ranks with `message`; the buffer refuses work from then on. Legal from any thread."""
        check_text("message", message)
        if self._memory is not None:
            ops().buffer_abort(self.handle, message)

    def refuse_call(self, message: str) -> None:
        """For a call of this rank that cannot be made: peers may wait for it, and are told. Not while another is inside: it
        is that one which they wait for."""
        if self.num_ranks > 1 and self._memory is not None and ops().buffer_calls(self.handle) == 0:
            self.abort_peers(message)

    def destroy(self) -> None:
        """Free this rank's end. Not a collective: memory lives on while peers still hold it. A second call does nothing.

        Raises while a call of another thread is inside the buffer; `abort_peers` ends that call's waits.
        """
        if self._memory is None:
            return
        settle(self.device)
        ops().buffer_destroy(self.handle)
        self._finalizer.detach()
        _live.pop(self.handle, None)
        self.channel.close()
        self._views = {}
        self._memory = None

    def _alive(self) -> RankMemory:
        if self._memory is None:
            raise RuntimeError("sym_buffer: wanted a live buffer, given one that was destroyed")
        return self._memory

    def _view(self, name: str) -> torch.Tensor:
        self._alive()
        return self._views[name]


def buffer_of(handle: int) -> SymmBuffer:
    """The live buffer behind a handle of the host library."""
    found = _live.get(handle)
    if found is None:
        raise RuntimeError("sym_buffer: wanted a live buffer, given one that was destroyed")
    return found


def get_symm_buffer_for_mega_moe(
    group: object,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
    bf16_shared_intermediate_hidden: int = 0,
    *,
    num_max_shared_tokens: int | None = None,
    device: object = None,
    num_sms: int | None = None,
    timeout_s: float | None = None,
    target: str | None = None,
) -> SymmBuffer:
    """Allocate a symmetric buffer. Collective over `group`: a torch process group, a rank of a local world, or None.

    `num_max_tokens_per_rank` is rounded up to a multiple of 384, and is also the limit of shared tokens unless
    `num_max_shared_tokens` gives another. `bf16_shared_intermediate_hidden` is this rank's slice of the shared expert.
    `activation` only sizes the buffer: either may be called on it. `num_sms` defaults to the device's, divided by the
    ranks of a local world. `timeout_s` bounds every wait of a call. `target` is the architecture that the
    emulator stands for ("sm_90a", "sm_100a"; default: `DGK3_CPU_TARGET`); on a GPU it can only name the GPU's own. All
    ranks must pass equal values; bad ones raise on all of them, naming the argument.
    """
    given = dict(locals())
    rank_view = as_group(given.pop("group"))
    spec, chosen = refusing(rank_view, lambda: make_spec(rank_view, given), _TAG)
    check_equal(rank_view.all_gather(spec.common(), _TAG), _TAG)
    own_stream(rank_view, chosen)
    with torch.inference_mode(False):  # its views outlive the caller's mode
        return SymmBuffer(rank_view, spec, Layout.of(spec), chosen)
