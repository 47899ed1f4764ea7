"""Weight transforms: against an independent decode of the packed bytes, inverses, refusals, scratch and speed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from deep_gemm_k3.mega import weights
from deep_gemm_k3.mega.weights import (
    identify_target,
    restore_weights_from_mega_moe,
    transform_weights_for_mega_moe,
)
from deep_gemm_k3.utils.layout import transform_sf_into_required_layout
from deep_gemm_k3.utils.quantize import ue8m0_to_float

U32 = np.uint32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def random_pair(
    experts: int, n: int, k: int, seed: int, low: int = 3, high: int = 136
) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=g)
    return weight, torch.randint(low, high + 1, (experts, n, k // 32), dtype=torch.uint8, generator=g)


def natural_values(weight: torch.Tensor, codes: torch.Tensor) -> np.ndarray:
    """float64 [N, K] of one expert in checkpoint order."""
    raw = weight.numpy().view(np.uint8)
    nibbles = np.empty((raw.shape[0], raw.shape[1] * 2), dtype=np.uint8)
    nibbles[:, 0::2], nibbles[:, 1::2] = raw & 15, raw >> 4
    signs = np.where(nibbles & 8, -1.0, 1.0)
    scale = np.exp2(codes.numpy().astype(np.float64) - 127).repeat(32, axis=1)
    return signs * E2M1[nibbles & 7] * scale


def rotl(x: np.ndarray, n: int) -> np.ndarray:
    return ((x << U32(n)) | (x >> U32(32 - n))).astype(U32)


def bf16_bits(half: np.ndarray) -> np.ndarray:
    """float64 of BF16 bit patterns, subnormals included."""
    return (half.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def decode_sm90(packed: np.ndarray, gated: bool) -> np.ndarray:
    """float64 [N, K] of one expert by doing what a kernel's thread does with its two words, value by value.

    ``packed`` is uint8 [N / 64, K / 128, 4352]. Written from the definition of the unit, not from the transform.
    """
    blocks, units = packed.shape[:2]
    out = np.full((blocks * 64, units * 128), np.nan)
    mask, split_mask = U32(0x81C081C0), U32(0x06030603)
    words = np.ascontiguousarray(packed[:, :, :4096]).view(U32).reshape(blocks, units, 2, 128, 4)
    scales = packed[:, :, 4096:].reshape(blocks, units, 32, 8)
    half_rows = blocks * 32
    for thread in range(128):
        w, g, t = thread // 32, thread % 32 // 4, thread % 4
        for h in range(2):
            for b in range(2):
                x, y = words[:, :, h, thread, 2 * b], words[:, :, h, thread, 2 * b + 1]
                z = (x & split_mask) | ((y << U32(2)) & ~split_mask)
                fields = {
                    0: [x & mask, (x << U32(4)) & mask, rotl(x, 10) & mask, (z << U32(6)) & mask],
                    8: [y & mask, (y << U32(4)) & mask, rotl(y, 10) & mask, rotl(z, 12) & mask],
                }
                for high, pairs in fields.items():
                    byte = scales[:, :, w * 8 + g, (4 if high else 0) + 2 * h + b].astype(np.uint32)
                    factor = bf16_bits(byte << np.uint32(7)) * 256.0  # the tokens carry the other 2^8
                    for pair, word in enumerate(pairs):
                        for upper in range(2):
                            half = (word >> U32(16 * upper)) & U32(0xFFFF)
                            value = bf16_bits(half) * factor
                            for block in range(blocks):
                                if gated:
                                    r, m = divmod(block, 4)
                                    column = 128 * r + 32 * (2 * (m >> 1) + (w >> 1)) + 16 * (w & 1) + 8 * (m & 1) + g
                                    row = column + (half_rows if high else 0)
                                else:
                                    row = block * 64 + 16 * w + g + high
                                k = 64 * h + 32 * b + 8 * pair + 2 * t + upper
                                out[row, k::128] = value[block]
    return out


def decode_sm100(weight: np.ndarray, words: np.ndarray, gated: bool) -> np.ndarray:
    """float64 [N, K] of one expert from int8 [N, K / 2] and int32 [K / 128, N], row by row."""
    n, half = weight.shape
    out = np.full((n, half * 2), np.nan)
    for row in range(n):
        source = row
        if gated:
            group, within = divmod(row, 16)
            source = group * 8 + within % 8 + (n // 2 if within >= 8 else 0)
        block, within = divmod(row, 128)
        place = block * 128 + 4 * (within % 32) + within // 32
        raw = weight[row].view(np.uint8)
        for word in range(half // 64):
            scale_bytes = int(words[word, place]) & 0xFFFFFFFF
            for part in range(4):
                scale = 2.0 ** (((scale_bytes >> (8 * part)) & 255) - 127)
                for i in range(16):
                    byte = int(raw[word * 64 + part * 16 + i])
                    for upper in range(2):
                        code = (byte >> (4 * upper)) & 15
                        value = (-1.0 if code & 8 else 1.0) * E2M1[code & 7] * scale
                        out[source, word * 128 + part * 32 + 2 * i + upper] = value
    return out


@pytest.mark.parametrize(
    ("gated", "n", "k"), [(True, 256, 128), (True, 512, 384), (False, 128, 256), (False, 384, 128)]
)
def test_sm90_values(gated: bool, n: int, k: int) -> None:
    """Every weight comes out of the kernel's recipe exactly, in its place, over the whole range of scales."""
    pair = random_pair(2, n, k, seed=n + k)
    other = random_pair(2, k, n // 2, seed=1) if gated else random_pair(2, 2 * k, n, seed=1)
    l1, l2 = transform_weights_for_mega_moe(*((pair, other) if gated else (other, pair)), target="sm_90a")
    packed = (l1 if gated else l2)[0].numpy()
    for expert in range(2):
        np.testing.assert_array_equal(
            decode_sm90(packed[expert], gated), natural_values(pair[0][expert], pair[1][expert])
        )


@pytest.mark.parametrize("gated", [True, False])
def test_sm100_values(gated: bool) -> None:
    l1, l2 = random_pair(1, 256, 256, seed=3, low=0, high=254), random_pair(1, 256, 128, seed=4, low=0, high=254)
    result = transform_weights_for_mega_moe(l1, l2, target="sm_100a")[0 if gated else 1]
    source = l1 if gated else l2
    np.testing.assert_array_equal(
        decode_sm100(result[0][0].numpy(), result[1][0].numpy(), gated), natural_values(source[0][0], source[1][0])
    )


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("packed_sf", [False, True])
@pytest.mark.parametrize(("experts", "inter", "hidden"), [(1, 128, 128), (3, 256, 384), (2, 384, 1024)])
def test_round_trip(target: str, packed_sf: bool, experts: int, inter: int, hidden: int) -> None:
    l1, l2 = random_pair(experts, 2 * inter, hidden, seed=5), random_pair(experts, hidden, inter, seed=6)
    given = [l1, l2]
    if packed_sf:
        given = [
            (
                w.view(torch.int8),
                transform_sf_into_required_layout(ue8m0_to_float(c), w.size(1), 2 * w.size(2), (1, 32), experts),
            )
            for w, c in given
        ]
    result = transform_weights_for_mega_moe(*given, target=target)
    for pair in result:
        assert identify_target(*pair) == target
    restored = restore_weights_from_mega_moe(*result)
    for (weight, codes), (weight_back, codes_back) in zip((l1, l2), restored, strict=True):
        assert torch.equal(weight, weight_back)
        assert torch.equal(codes, codes_back)


def test_result_shapes() -> None:
    l1, l2 = random_pair(2, 512, 384, seed=7), random_pair(2, 384, 256, seed=8)
    (w1, s1), (w2, s2) = transform_weights_for_mega_moe(l1, l2, target="sm_90a")
    assert (w1.dtype, list(w1.shape), list(s1.shape)) == (torch.uint8, [2, 8, 3, 4352], [2, 0])
    assert (w2.dtype, list(w2.shape), s2.dtype) == (torch.uint8, [2, 6, 2, 4352], torch.uint8)
    (w1, s1), (w2, s2) = transform_weights_for_mega_moe(l1, l2, "situ", target="sm_100f")
    assert (w1.dtype, list(w1.shape), s1.dtype, list(s1.shape)) == (torch.int8, [2, 512, 192], torch.int32, [2, 3, 512])
    assert (list(w2.shape), list(s2.shape)) == ([2, 384, 128], [2, 2, 384])
    assert identify_target(*transform_weights_for_mega_moe(l1, l2)[0]) == "sm_90a"


def test_shared_is_returned_unchanged() -> None:
    l1, l2 = torch.zeros(256, 384, dtype=torch.bfloat16), torch.zeros(384, 128, dtype=torch.bfloat16)
    for target in weights.TARGETS:
        r1, r2 = transform_weights_for_mega_moe(l1, l2, target=target)
        assert r1 is l1
        assert r2 is l2
    with pytest.raises(ValueError, match=r"l2: wanted \[384, 128\] to fit l1 .* given \[128, 384\]"):
        transform_weights_for_mega_moe(l1, l2.t(), target="sm_90a")
    with pytest.raises(ValueError, match=r"l1: wanted a bfloat16 matrix, given torch\.float32"):
        transform_weights_for_mega_moe(l1.float(), l2)


@pytest.mark.parametrize("code", [0, 1, 2, 137, 138, 254, 255])
def test_sm90_refuses_scales(code: int) -> None:
    l1, l2 = random_pair(3, 512, 256, seed=9), random_pair(3, 256, 256, seed=10)
    l2[1][2, 77, 5] = code
    given = "NaN" if code == 255 else rf"2\^{code - 127}"
    with pytest.raises(
        ValueError, match=rf"l2 sf, expert 2, row 77, block 5: wanted .*sm_90a, given code {code} \({given}\)"
    ):
        transform_weights_for_mega_moe(l1, l2, target="sm_90a")


def test_sm100_refuses_nan_only() -> None:
    l1, l2 = random_pair(1, 256, 128, seed=9, low=0, high=254), random_pair(1, 128, 128, seed=10, low=0, high=254)
    transform_weights_for_mega_moe(l1, l2, target="sm_100a")
    l1[1][0, 3, 1] = 255
    with pytest.raises(ValueError, match="l1 sf, expert 0, row 3, block 1: wanted a number as scale, given code 255"):
        transform_weights_for_mega_moe(l1, l2, target="sm_100a")


def test_refusals_name_wanted_and_given() -> None:
    l1, l2 = random_pair(2, 512, 384, seed=11), random_pair(2, 384, 256, seed=12)
    done = transform_weights_for_mega_moe(l1, l2, target="sm_100a")
    with pytest.raises(
        ValueError, match="l1: wanted weights in checkpoint layout, given weights transformed for sm_100a"
    ):
        transform_weights_for_mega_moe(*done, target="sm_90a")
    with pytest.raises(ValueError, match=r"target: wanted 'sm_90a' or 'sm_100a', given 'sm_80'"):
        transform_weights_for_mega_moe(l1, l2, target="sm_80")
    with pytest.raises(ValueError, match="activation: wanted 'swiglu' or 'situ', given 'gelu'"):
        transform_weights_for_mega_moe(l1, l2, "gelu")
    with pytest.raises(ValueError, match=r"l1: wanted .* given uint8 \[2, 512, 192\] and float32 \[2, 512, 12\]"):
        transform_weights_for_mega_moe((l1[0], ue8m0_to_float(l1[1])), l2)
    with pytest.raises(ValueError, match=r"l2: wanted \[E 2, H 384, I 256\] to fit l1, given \[E 2, H 384, I 128\]"):
        transform_weights_for_mega_moe(l1, random_pair(2, 384, 128, seed=1))
    with pytest.raises(ValueError, match="l1: wanted N a multiple of 256 and K a multiple of 128, given N 384"):
        transform_weights_for_mega_moe(random_pair(2, 384, 384, seed=1), l2)
    with pytest.raises(TypeError, match="one of each"):
        transform_weights_for_mega_moe(l1, torch.zeros(2, 2, dtype=torch.bfloat16))


def test_inputs_stay_untouched_and_layout_is_dense() -> None:
    l1, l2 = random_pair(2, 512, 256, seed=13), random_pair(2, 256, 256, seed=14)
    copies = [t.clone() for t in (*l1, *l2)]
    for target in weights.TARGETS:
        for pair in transform_weights_for_mega_moe(l1, l2, target=target):
            assert all(t.is_contiguous() for t in pair)
    assert all(torch.equal(a, b) for a, b in zip(copies, (*l1, *l2), strict=True))


def test_row_chunks_cover_the_matrix() -> None:
    for n in range(256, 8192, 256):
        matrix = torch.arange(n).view(n, 1)
        gated = weights._row_chunks(matrix, True)
        assert all(part.size(1) % 128 == 0 for part in gated)
        assert torch.equal(torch.cat(gated, 1).flatten(), matrix.flatten())
        (whole,) = weights._row_chunks(matrix, False)
        assert torch.equal(whole, matrix)


def peak_bytes(function: Callable[[], object]) -> int:
    """Largest number of bytes that ``function`` held at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    results = record.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("inter", "hidden"), [(3072, 3584), (384, 1024), (1024, 512)])
def test_scratch_is_below_one_experts_weights(target: str, inter: int, hidden: int) -> None:
    l1, l2 = random_pair(1, 2 * inter, hidden, seed=1), random_pair(1, hidden, inter, seed=2)
    l1_bytes, l2_bytes = (w.numel() + c.numel() for w, c in (l1, l2))
    peak = peak_bytes(lambda: transform_weights_for_mega_moe(l1, l2, target=target))
    assert peak - l1_bytes < l1_bytes + l2_bytes  # while L1 is packed its result is all there is yet


@pytest.mark.parametrize(
    ("l1", "error", "given"),
    [
        (None, TypeError, "l1: wanted a pair (weight, sf) of tensors, given None"),
        (
            (torch.zeros(1, 256, 64, dtype=torch.uint8),),
            TypeError,
            "l1: wanted a pair (weight, sf) of tensors, given tuple of Tensor",
        ),
        ("meta", ValueError, "l1: wanted strided tensors in CPU or CUDA memory, given strided on meta"),
        ("sparse", ValueError, "l1: wanted strided tensors in CPU or CUDA memory, given sparse_coo on cpu"),
    ],
)
def test_what_is_no_pair_of_plain_tensors_is_named(l1: Any, error: type[Exception], given: str) -> None:
    pair = torch.ones(1, 256, 64, dtype=torch.uint8), torch.full((1, 256, 4), 127, dtype=torch.uint8)
    l2 = torch.ones(1, 128, 64, dtype=torch.uint8), torch.full((1, 128, 4), 127, dtype=torch.uint8)
    if isinstance(l1, str):
        l1 = tuple(t.to("meta") if l1 == "meta" else t.to_sparse() for t in pair)
    with pytest.raises(error, match=re.escape(given)):
        transform_weights_for_mega_moe(l1, l2)
