"""Weight layouts: from checkpoint order to what one target's kernels read, and back.

Routed weights come as ``(weight, sf)``: packed E2M1 int8 or uint8 [E, N, K / 2] and one UE8M0 scale per row and 32
columns, uint8 [E, N, K / 32] or int32 [E, N, K / 128] as ``transform_sf_into_required_layout`` returns it. L1 has N = 2 * I rows,
the gate projection's before the up projection's; L2 has N = H. A transformed pair tells its target by dtype and shape:

=========  ===============================  ============================================================
target     weight                           sf
=========  ===============================  ============================================================
sm_90a     uint8 [E, N / 64, K / 128, 4352]  uint8 [E, 0]; the scales are inside the weight
sm_100a    int8 [E, N, K / 2]               int32 [E, K / 128, N], four UE8M0 bytes each along K
=========  ===============================  ============================================================

**sm_90a.** A unit holds 64 rows x 128 columns: 4096 bytes of codes, then 256 of scales, so any run of units of a row block
is one bulk copy. Thread ``32 * w + 4 * g + t`` of a warpgroup owns 16 bytes at 16 times its number in each 64-column half:
for either 32-column block two words X and Y with the codes of row ``16 * w + g`` and of row ``16 * w + 8 + g``, columns
2t, 2t + 1, 2t + 8, 2t + 9, ... A code's bits are scattered so that a rotation and a mask bring them to the bits
{15; 8, 7; 6} of a BF16 half, which reads as the value times 2^-126; the masks of X and Y together use all 64 bits once.
A scale byte is 245 + s for the scale 2^s, so only s in [-124, 9] exists: exactly the range in which the kernels'
multiplication is exact. L1 rows are permuted so that rows 0..7 of every 16-row group are gate rows and rows 8..15 the up
rows of the same columns (see :func:`_sm90_rows`).

**sm_100a.** L1 rows alternate between 8 gate and 8 up rows. Scale words follow the same row order, and inside every
128 rows the word of row 32 * i + j stands at 4 * j + i, as the copy to tensor memory spreads them.

Shared BF16 weights have one layout for all targets: the one they come in.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import torch

from ..arguments import ACTIVATIONS, TARGETS, check_choice, shown
from ..utils.math import ceil_div
from ..utils.quantize import pack_ue8m0, unpack_ue8m0
from .buffer_spec import target_of

WeightPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Weights = TypeVar("Weights", torch.Tensor, WeightPair)

default_target = target_of  # the layout that tensors on a device get
CHECKPOINT = "checkpoint"
UNIT_ROWS = 64
UNIT_K = 128
UNIT_CODE_BYTES = 4096
UNIT_BYTES = 4352
SM90_MIN_EXPONENT = -124
SM90_MAX_EXPONENT = 9
_SM90_SCALE_BIAS = 245
_UE8M0_BIAS = 127

# Distance, in bits to the left, from a field's place in its word to the BF16 half; pair 3 is split over both words.
_ROTATIONS = (0, 4, 10)
_SPLIT_ROTATION_X = 6
_SPLIT_ROTATION_Y = 12
_SPLIT_IN_X = 0x06030603


# ------------------------------------------------------------------------------------------------- bits of an sm_90a unit
def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical right shift of int32."""
    return (x >> n) & ((1 << (32 - n)) - 1) if n else x


def _rotate_left(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x << n) | _shift_right(x, 32 - n) if n % 32 else x


def _spread(byte: torch.Tensor) -> torch.Tensor:
    """Two E2M1 codes (a byte as int32) at the bits {15; 8, 7; 6} of the lower and the upper half word."""
    low = ((byte & 0x07) << 6) | ((byte & 0x08) << 12)
    return low | ((byte & 0x70) << 18) | ((byte & 0x80) << 24)


def _gather(field: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_spread`, as uint8."""
    low = (_shift_right(field, 6) & 0x07) | (_shift_right(field, 12) & 0x08)
    high = (_shift_right(field, 18) & 0x70) | (_shift_right(field, 24) & 0x80)
    return (low | high).to(torch.uint8)


def _pack_tables(device: torch.device) -> torch.Tensor:
    """int32 [7, 256]: what a pair of codes (a byte) contributes to a word. Rows 0..2: pairs 0..2 to the word of their
    row; 3 and 4: pair 3 of row g to X and to Y; 5 and 6: pair 3 of row g + 8 to X and to Y."""
    spread = _spread(torch.arange(256, dtype=torch.int32, device=device))
    tables = [_rotate_left(spread, 32 - rotation) for rotation in _ROTATIONS]
    for rotation in (_SPLIT_ROTATION_X, _SPLIT_ROTATION_Y):
        split = _rotate_left(spread, 32 - rotation)
        tables += [split & _SPLIT_IN_X, _shift_right(split & ~_SPLIT_IN_X, 2)]
    return torch.stack(tables)


def _words_from_pairs(row_g: torch.Tensor, row_h: torch.Tensor, tables: torch.Tensor) -> WeightPair:
    """X and Y (int32) of the code pairs of row g and of row g + 8, both uint8 [pair 4, ...]."""

    def look_up(index: torch.Tensor, *rows: int) -> list[torch.Tensor]:
        flat = index.to(torch.int32).flatten()
        return [tables[row].index_select(0, flat).view(index.shape) for row in rows]

    (x,), (y,) = look_up(row_g[0], 0), look_up(row_h[0], 0)
    for pair in (1, 2):
        x |= look_up(row_g[pair], pair)[0]
        y |= look_up(row_h[pair], pair)[0]
    for row, (to_x, to_y) in ((row_g[3], (3, 4)), (row_h[3], (5, 6))):
        part_x, part_y = look_up(row, to_x, to_y)
        x |= part_x
        y |= part_y
    return x, y


def _pairs_from_words(x: torch.Tensor, y: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inverse of :func:`_words_from_pairs`: four bytes of row g and four of row g + 8, as uint8."""
    split = (x & _SPLIT_IN_X) | ((y << 2) & ~_SPLIT_IN_X)
    row_g = [_gather(_rotate_left(x, _ROTATIONS[pair])) for pair in range(3)]
    row_h = [_gather(_rotate_left(y, _ROTATIONS[pair])) for pair in range(3)]
    row_g.append(_gather(_rotate_left(split, _SPLIT_ROTATION_X)))
    row_h.append(_gather(_rotate_left(split, _SPLIT_ROTATION_Y)))
    return row_g, row_h


# --------------------------------------------------------------------------------------------------- row permutations
def _sm90_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Rows in packed order, [blocks, w 4, half 2, g 8, C]: row = 64 * block + 16 * w + 8 * half + g.

    A ``matrix`` [N, C] without gate keeps its order. From [2, I, C] (gate, up; I a multiple of 128) half 0 is the gate and
    half 1 the up projection, and block 4 * r + 2 * b1 + b0, warp 2 * w1 + w0, row g stand for the intermediate column
    128 * r + 64 * b1 + 32 * w1 + 16 * w0 + 8 * b0 + g.
    """
    columns = matrix.size(-1)
    if matrix.dim() == 2:
        return matrix.unflatten(0, (-1, 4, 2, 8))
    split = matrix.unflatten(1, (-1, 2, 2, 2, 2, 8))  # half, r, b1, w1, w0, b0, g
    return split.permute(1, 2, 5, 3, 4, 0, 6, 7).reshape(-1, 4, 2, 8, columns)


def _sm90_rows_back(rows: torch.Tensor, gated: bool) -> torch.Tensor:
    """The inverse of :func:`_sm90_rows`: [blocks, 4, 2, 8, C] to [N, C], with the gate's rows first where ``gated``."""
    blocks, columns = rows.size(0), rows.size(4)
    if not gated:
        return rows.reshape(blocks * UNIT_ROWS, columns)
    split = rows.reshape(blocks // 4, 2, 2, 2, 2, 2, 8, columns)  # r, b1, b0, w1, w0, half, g
    return split.permute(5, 0, 1, 3, 4, 2, 6, 7).reshape(blocks * UNIT_ROWS, columns)


def _interleave_8(matrix: torch.Tensor) -> torch.Tensor:
    """Rows [gate; up] to groups of 8 gate and 8 up rows in turn."""
    n = matrix.size(0)
    return matrix.reshape(2, n // 16, 8, -1).transpose(0, 1).reshape(n, -1)


def _interleave_8_back(matrix: torch.Tensor) -> torch.Tensor:
    n = matrix.size(0)
    return matrix.reshape(n // 16, 2, 8, -1).transpose(0, 1).reshape(n, -1)


# ------------------------------------------------------------------------------------------------- one expert, one target
def _refuse_scale(codes: torch.Tensor, target: str, label: str) -> None:
    """Name the first of ``codes`` [N, K / 32] that ``target`` has no exact form of; ``label`` is the tensor and expert."""
    bad, wanted = codes == 255, "a number as scale"
    if target == "sm_90a":
        low, high = SM90_MIN_EXPONENT + _UE8M0_BIAS, SM90_MAX_EXPONENT + _UE8M0_BIAS
        bad = (codes < low) | (codes > high)
        wanted = f"a scale in [2^{SM90_MIN_EXPONENT}, 2^{SM90_MAX_EXPONENT}] for sm_90a"
    if bool(bad.any()):
        row, block = bad.nonzero()[0].tolist()
        code = int(codes[row, block])
        given = "NaN" if code == 255 else f"2^{code - _UE8M0_BIAS}"
        raise ValueError(f"{label}, row {row}, block {block}: wanted {wanted}, given code {code} ({given})")


def _pack_sm90(weight: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, tables: torch.Tensor) -> None:
    """Rows of an expert, ``weight`` uint8 [N, K / 2] and ``codes`` uint8 [N, K / 32] (or both [2, I, ...] where gated), into
    ``out`` uint8 [N / 64, K / 128, 4352]."""
    blocks, units = out.shape[:2]
    # [m, w, half, g, unit, h, b, pair, t]: one byte is one pair of codes
    rows = _sm90_rows(weight).unflatten(4, (units, 2, 2, 4, 4))
    words = out[:, :, :UNIT_CODE_BYTES].unflatten(2, (2, 4, 8, 4, 16)).view(torch.int32)  # [m, unit, h, w, g, t, word]
    for b in range(2):
        ordered = rows[:, :, :, :, :, :, b].permute(2, 6, 0, 4, 5, 1, 3, 7)  # [half, pair, m, unit, h, w, g, t]
        words[..., 2 * b], words[..., 2 * b + 1] = _words_from_pairs(ordered[0], ordered[1], tables)
    # [m, w, half, g, unit, block] to [m, unit, w, g, half, block]
    scales = _sm90_rows(codes).unflatten(4, (units, 4)).permute(0, 4, 1, 3, 2, 5)
    out[:, :, UNIT_CODE_BYTES:] = (scales + (_SM90_SCALE_BIAS - _UE8M0_BIAS)).reshape(blocks, units, -1)


def _unpack_sm90(packed: torch.Tensor, gated: bool) -> WeightPair:
    """The inverse of :func:`_pack_sm90`: ``(weight uint8 [N, K / 2], codes uint8 [N, K / 32])``."""
    blocks, units = packed.shape[:2]
    words = packed[:, :, :UNIT_CODE_BYTES].unflatten(2, (2, 4, 8, 4, 16)).view(torch.int32)
    rows = torch.empty((blocks, 4, 2, 8, units, 2, 2, 4, 4), dtype=torch.uint8, device=packed.device)
    for b in range(2):
        halves = _pairs_from_words(words[..., 2 * b], words[..., 2 * b + 1])
        ordered = rows[:, :, :, :, :, :, b].permute(6, 2, 0, 4, 5, 1, 3, 7)
        for half in range(2):
            for pair in range(4):
                ordered[pair, half].copy_(halves[half][pair])
    scales = packed[:, :, UNIT_CODE_BYTES:].unflatten(2, (4, 8, 2, 4)).permute(0, 2, 4, 3, 1, 5)
    codes = _sm90_rows_back(scales.reshape(blocks, 4, 2, 8, units * 4), gated)
    return _sm90_rows_back(rows.view(blocks, 4, 2, 8, units * 64), gated), codes - (_SM90_SCALE_BIAS - _UE8M0_BIAS)


def _pack_sm100(weight: torch.Tensor, codes: torch.Tensor, out: WeightPair, gated: bool) -> None:
    """One expert's ``weight`` and ``codes`` into ``out``: int8 [N, K / 2] and int32 [K / 128, N]."""
    n = weight.size(0)
    words = pack_ue8m0(codes)
    if gated:
        weight, words = _interleave_8(weight), _interleave_8(words)
    out[0].view(torch.uint8).copy_(weight)
    spread = words.reshape(n // 128, 4, 32, -1).transpose(1, 2).reshape(n, -1)
    out[1].copy_(spread.t())


def _unpack_sm100(weight: torch.Tensor, words: torch.Tensor, gated: bool) -> WeightPair:
    """The inverse of :func:`_pack_sm100`."""
    n = weight.size(0)
    weight = weight.view(torch.uint8)
    words = words.t().reshape(n // 128, 32, 4, -1).transpose(1, 2).reshape(n, -1)
    if gated:
        weight, words = _interleave_8_back(weight), _interleave_8_back(words)
    return weight, unpack_ue8m0(words)


def _row_chunks(matrix: torch.Tensor, gated: bool) -> list[torch.Tensor]:
    """What is packed at a time, views of ``matrix`` [N, C]: all rows, or where ``gated`` the gate and up rows [2, n, C] of
    one half of the intermediate columns after the other. Packing takes about twice a chunk's codes as scratch: this keeps
    it below one expert's weights."""
    if not gated:
        return [matrix]
    return list(matrix.unflatten(0, (2, -1)).split(ceil_div(matrix.size(0) // 2, 384) * 128, dim=1))


# ------------------------------------------------------------------------------------------------------- identification
def _describe(pair: WeightPair) -> str:
    return " and ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in pair)


def identify_target(weight: torch.Tensor, sf: torch.Tensor, name: str = "weights") -> str:
    """``"sm_90a"``, ``"sm_100a"`` or ``"checkpoint"`` (not transformed), told by dtype and shape alone.

    Raises ``ValueError`` naming ``name`` for a pair that is none of these.
    """
    units = weight.dim() == 4 and weight.dtype == torch.uint8 and weight.size(3) == UNIT_BYTES
    if units and sf.dtype == torch.uint8 and list(sf.shape) == [weight.size(0), 0]:
        return "sm_90a"
    if weight.dim() == 3 and sf.dim() == 3 and weight.dtype in (torch.int8, torch.uint8):
        experts, n, half = weight.shape
        if sf.dtype == torch.uint8 and list(sf.shape) == [experts, n, half // 16]:
            return CHECKPOINT
        if sf.dtype == torch.int32 and list(sf.shape) == [experts, n, half // 64]:
            return CHECKPOINT
        if sf.dtype == torch.int32 and weight.dtype == torch.int8 and list(sf.shape) == [experts, half // 64, n]:
            return "sm_100a"
    raise ValueError(
        f"{name}: wanted (int8 or uint8 [E, N, K/2], uint8 [E, N, K/32] or int32 [E, N, K/128]) or a transformed pair, "
        f"given {_describe((weight, sf))}"
    )


def logical_shape(weight: torch.Tensor, sf: torch.Tensor) -> tuple[int, int, int]:
    """(experts, N, K) of a pair in any of the layouts."""
    if identify_target(weight, sf) == "sm_90a":
        return weight.size(0), weight.size(1) * UNIT_ROWS, weight.size(2) * UNIT_K
    return weight.size(0), weight.size(1), weight.size(2) * 2


def _canonical_target(target: str | None, device: torch.device) -> str:
    if target is None:
        return default_target(device)
    return check_choice("target", "sm_100a" if isinstance(target, str) and target == "sm_100f" else target, TARGETS)


# -------------------------------------------------------------------------------------------------------------- public
_ONE_OF_EACH = "l1, l2: wanted two (weight, sf) pairs or two BF16 matrices, given one of each"


def _require_pairs(**pairs: object) -> None:
    for name, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(t, torch.Tensor) for t in pair):
            raise TypeError(f"{name}: wanted a pair (weight, sf) of tensors, given {shown(pair)}")


def _check_pair(name: str, pair: WeightPair, gated: bool) -> None:
    if odd := [t for t in pair if t.layout != torch.strided or t.device.type not in ("cpu", "cuda")]:
        given = f"{str(odd[0].layout).removeprefix('torch.')} on {odd[0].device}"
        raise ValueError(f"{name}: wanted strided tensors in CPU or CUDA memory, given {given}")
    found = identify_target(*pair, name=name)
    if found != CHECKPOINT:
        raise ValueError(f"{name}: wanted weights in checkpoint layout, given weights transformed for {found}")
    n, k = pair[0].size(1), pair[0].size(2) * 2
    grain = 256 if gated else 128
    if n % grain or k % 128 or n == 0 or k == 0:
        raise ValueError(f"{name}: wanted N a multiple of {grain} and K a multiple of 128, given N {n}, K {k}")
    if k // 128 == n:
        raise ValueError(f"{name}: wanted N other than K / 128 (a layout is recognised by its shape), given both {n}")
    if pair[0].device != pair[1].device:
        raise ValueError(f"{name}: wanted weight and sf on one device, given {pair[0].device} and {pair[1].device}")


def expert_weights(weight: torch.Tensor, sf: torch.Tensor, expert: int, gated: bool) -> WeightPair:
    """One expert in checkpoint order, whatever the layout: packed E2M1 uint8 [N, K / 2], UE8M0 codes uint8 [N, K / 32].

    ``gated`` says that the rows are L1's, whose transformed order differs. The results may alias the input.
    """
    found = identify_target(weight, sf)
    if found == "sm_90a":
        return _unpack_sm90(weight[expert], gated)
    if found == "sm_100a":
        return _unpack_sm100(weight[expert], sf[expert], gated)
    codes = unpack_ue8m0(sf[expert]) if sf.dtype == torch.int32 else sf[expert]
    return weight[expert].view(torch.uint8), codes


def _transform(name: str, pair: WeightPair, target: str, gated: bool) -> WeightPair:
    weight, sf = pair
    experts, n, k = logical_shape(weight, sf)
    device = weight.device
    if target == "sm_90a":
        packed = torch.empty((experts, n // UNIT_ROWS, k // UNIT_K, UNIT_BYTES), dtype=torch.uint8, device=device)
        result = packed, torch.empty((experts, 0), dtype=torch.uint8, device=device)
        tables = _pack_tables(device)
    else:
        packed = torch.empty((experts, n, k // 2), dtype=torch.int8, device=device)
        result = packed, torch.empty((experts, k // 128, n), dtype=torch.int32, device=device)
    for expert in range(experts):
        codes_e2m1, codes = expert_weights(weight, sf, expert, gated)
        _refuse_scale(codes, target, f"{name} sf, expert {expert}")
        if target == "sm_100a":
            _pack_sm100(codes_e2m1, codes, (packed[expert], result[1][expert]), gated)
            continue
        begin = 0
        for part, part_codes in zip(_row_chunks(codes_e2m1, gated), _row_chunks(codes, gated), strict=True):
            end = begin + part.numel() * 2 // k // UNIT_ROWS
            _pack_sm90(part, part_codes, packed[expert, begin:end], tables)
            begin = end
    return result


def transform_weights_for_mega_moe(
    l1: Weights, l2: Weights, activation: str = "swiglu", *, target: str | None = None
) -> tuple[Weights, Weights]:
    """Weights in the layout that ``target`` reads (``"sm_90a"``, ``"sm_100a"``; None: that of the tensors' device).

    Routed: ``l1 = (weight [E, 2 * I, H / 2], sf)`` with rows [gate; up] and ``l2 = (weight [E, H, I / 2], sf)`` in the
    layouts of this module's head; returns two pairs. Shared: BF16 [2 * I, H] and [H, I], returned as they are.
    ``activation`` ('swiglu' or 'situ') does not change the layout.

    Raises ``TypeError`` for what is neither two pairs nor two matrices; ``ValueError`` for shapes, dtypes and devices that do
    not fit together, transformed weights, float scales (``transform_sf_into_required_layout`` converts them), and the first
    scale without exact form on the target, by expert, row and block: outside [2^-124, 2^9] on sm_90a, NaN anywhere.
    Temporary memory stays below one expert's weights.
    """
    check_choice("activation", activation, ACTIVATIONS)
    if isinstance(l1, torch.Tensor) and isinstance(l2, torch.Tensor):
        return _shared_unchanged(l1, l2)
    if isinstance(l1, torch.Tensor) or isinstance(l2, torch.Tensor):
        raise TypeError(_ONE_OF_EACH)
    _require_pairs(l1=l1, l2=l2)
    for name, pair in (("l1", l1), ("l2", l2)):
        _check_pair(name, pair, gated=name == "l1")
    (experts, n1, k1), (experts2, n2, k2) = logical_shape(*l1), logical_shape(*l2)
    if (experts2, n2, 2 * k2) != (experts, k1, n1):
        raise ValueError(
            f"l2: wanted [E {experts}, H {k1}, I {n1 // 2}] to fit l1, given [E {experts2}, H {n2}, I {k2}]"
        )
    name = _canonical_target(target, l1[0].device)
    return _transform("l1", l1, name, gated=True), _transform("l2", l2, name, gated=False)


def _shared_unchanged(l1: torch.Tensor, l2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for name, tensor in (("l1", l1), ("l2", l2)):
        if tensor.dtype != torch.bfloat16 or tensor.dim() != 2:
            raise ValueError(f"{name}: wanted a bfloat16 matrix, given {tensor.dtype} {list(tensor.shape)}")
    if (wanted := [l1.size(1), l1.size(0) // 2]) != list(l2.shape) or l1.size(0) % 2:
        raise ValueError(f"l2: wanted {wanted} to fit l1 {list(l1.shape)}, given {list(l2.shape)}")
    return l1, l2


def restore_weights_from_mega_moe(
    l1: torch.Tensor | WeightPair, l2: torch.Tensor | WeightPair
) -> tuple[torch.Tensor | WeightPair, torch.Tensor | WeightPair]:
    """The inverse of :func:`transform_weights_for_mega_moe`: checkpoint layout, weight uint8 [E, N, K / 2] and UE8M0 codes
    uint8 [E, N, K / 32]; BF16 matrices unchanged."""
    if isinstance(l1, torch.Tensor) and isinstance(l2, torch.Tensor):
        return l1, l2
    if isinstance(l1, torch.Tensor) or isinstance(l2, torch.Tensor):
        raise TypeError(_ONE_OF_EACH)
    _require_pairs(l1=l1, l2=l2)
    restored = []
    for pair, gated in ((l1, True), (l2, False)):
        experts = [expert_weights(*pair, expert, gated) for expert in range(pair[0].size(0))]
        restored.append((torch.stack([w for w, _ in experts]), torch.stack([c for _, c in experts])))
    return restored[0], restored[1]
