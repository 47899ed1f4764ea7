"""Helpers with upstream's meaning: quantisers, scale layouts, integer arithmetic."""

from .layout import transform_sf_into_required_layout
from .math import align, ceil_div
from .quantize import per_token_cast_to_fp4, per_token_cast_to_fp8

__all__ = [
    "align",
    "ceil_div",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "transform_sf_into_required_layout",
]
