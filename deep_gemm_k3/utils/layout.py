"""Layout of scale tensors: packed UE8M0 words with the row index running fastest."""

from __future__ import annotations

import torch

from ..arguments import check_int, check_tensor, is_int, refuse_value
from .math import align, ceil_div
from .quantize import UE8M0_NAN, float_to_ue8m0, pack_ue8m0, unpack_ue8m0

_BLOCK_K = 32
_ALIGN_MN = 4
"""Rows are padded to 16 bytes of int32, the stride granularity of a tensor map."""


def _mn_major(words: torch.Tensor) -> torch.Tensor:
    """``words`` int32 [groups, mn, kw] with strides (kw * aligned mn, 1, aligned mn)."""
    groups, mn, kw = words.shape
    storage = torch.zeros((groups, kw, align(mn, _ALIGN_MN)), dtype=torch.int32, device=words.device)
    storage[:, :, :mn] = words.transpose(1, 2)
    return storage[:, :, :mn].transpose(1, 2)


def _refuse_nan(codes: torch.Tensor) -> None:
    if bool((codes == UE8M0_NAN).any()):
        where = (codes == UE8M0_NAN).nonzero()[0].tolist()
        raise ValueError(f"sf: wanted UE8M0 codes 0..254, given 255 (NaN) at {where}")


def _codes_of(sf: torch.Tensor) -> torch.Tensor:
    if sf.dtype == torch.float32:
        return float_to_ue8m0(sf)
    if sf.dtype == torch.uint8:
        _refuse_nan(sf)
        return sf
    raise ValueError(f"sf: wanted float32, uint8 or int32, given {sf.dtype}")


def transform_sf_into_required_layout(
    sf: torch.Tensor, mn: int, k: int, recipe: tuple[int, int] | tuple[int, int, int], num_groups: int | None = None
) -> torch.Tensor:
    """Scales of a matrix [mn, k] (or of ``num_groups`` of them) as packed UE8M0 words, MN-major.

    ``sf`` holds one scale per row and 32 columns: float32 powers of two or uint8 UE8M0 codes, both [groups, mn, k / 32]
    (without the first dimension when ``num_groups`` is None), or words that are packed already, int32
    [groups, mn, ceil(k / 128)]. Returns int32 [groups, mn, ceil(k / 128)] whose strides are
    (words * mn rounded up to 4, 1, mn rounded up to 4); bytes past k / 32 are zero.

    Raises ``ValueError``, with what was wanted and given, for another recipe than (1, 32) or (1, 1, 32), a wrong shape
    or dtype, and for scales that are no power of two, NaN in any of the forms included: they are never rounded.
    """
    check_tensor("sf", sf)
    mn, k = check_int("mn", mn, 0, 2**31 - 1), check_int("k", k, 0, 2**31 - 1)
    if num_groups is not None:
        num_groups = check_int("num_groups", num_groups, 0, 2**31 - 1)
    whole = isinstance(recipe, tuple | list) and all(map(is_int, recipe))
    if not whole or tuple(recipe) not in ((1, _BLOCK_K), (1, 1, _BLOCK_K)):
        raise refuse_value("recipe", "(1, 32) or (1, 1, 32)", recipe)
    blocks, words = ceil_div(k, _BLOCK_K), ceil_div(k, 4 * _BLOCK_K)
    lead = [] if num_groups is None else [num_groups]
    wanted = [*lead, mn, words if sf.dtype == torch.int32 else blocks]
    if list(sf.shape) != wanted:
        raise ValueError(f"sf: wanted shape {wanted} for {sf.dtype}, given {list(sf.shape)}")
    if sf.dtype == torch.int32:
        _refuse_nan(unpack_ue8m0(sf))
        packed = sf
    else:
        codes = _codes_of(sf)
        if blocks % 4:
            codes = torch.nn.functional.pad(codes, (0, 4 * words - blocks))
        packed = pack_ue8m0(codes)
    result = _mn_major(packed if num_groups is not None else packed.unsqueeze(0))
    return result if num_groups is not None else result[0]
