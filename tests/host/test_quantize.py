"""Number formats: every code, round trips, saturation, zero, tiny and huge scales, refusals."""

from __future__ import annotations

import independent_reference as ref
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm_k3.utils import math, per_token_cast_to_fp4, per_token_cast_to_fp8, quantize
from deep_gemm_k3.utils.layout import transform_sf_into_required_layout

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_every_ue8m0_code() -> None:
    values = quantize.ue8m0_to_float(ALL_BYTES)
    expected = np.exp2(np.arange(255, dtype=np.float64) - 127)
    assert np.array_equal(values[:255].numpy().astype(np.float64), expected)
    assert torch.isnan(values[255])
    assert torch.equal(quantize.float_to_ue8m0(values[:255]), ALL_BYTES[:255])
    assert torch.equal(quantize.ceil_to_ue8m0(values[:255]), ALL_BYTES[:255])
    words = quantize.pack_ue8m0(ALL_BYTES.view(8, 32))
    assert [int(words[0, 0]) >> (8 * i) & 255 for i in range(4)] == [0, 1, 2, 3]
    assert torch.equal(quantize.unpack_ue8m0(words), ALL_BYTES.view(8, 32))


def test_every_e4m3_code() -> None:
    """Decoding, and encoding of every value, every midpoint and the numbers just beside them."""
    decoded = ALL_BYTES.view(torch.float8_e4m3fn).float().numpy().astype(np.float64)
    np.testing.assert_array_equal(decoded, ref.E4M3)
    table = ref.E4M3[:127]
    middle = (table[1:] + table[:-1]) / 2
    points = np.concatenate(
        (table, middle, np.nextafter(middle.astype(np.float32), np.float32(0)), middle * (1 + 1e-6))
    )
    points = np.concatenate((points, -points)).astype(np.float32)
    encoded = quantize.float_to_e4m3(torch.from_numpy(points))
    np.testing.assert_array_equal(encoded.float().numpy(), ref.e4m3_round(points.astype(np.float64)).astype(np.float32))
    codes = torch.cat((ALL_BYTES[:127], ALL_BYTES[128:255])).view(torch.float8_e4m3fn)
    assert torch.equal(quantize.float_to_e4m3(codes.float()).view(torch.uint8), codes.view(torch.uint8))


def test_e4m3_saturates() -> None:
    x = torch.tensor([448.0, 464.0, 1e9, float("inf"), -500.0, -float("inf")])
    assert quantize.float_to_e4m3(x).float().tolist() == [448.0] * 4 + [-448.0] * 2
    assert torch.isnan(quantize.float_to_e4m3(torch.tensor([float("nan")])).float()).all()


def test_every_e2m1_code() -> None:
    packed = ALL_BYTES.view(16, 16)
    values = quantize.e2m1_to_float(packed).numpy()
    raw = packed.numpy()
    np.testing.assert_array_equal(values[:, 0::2], ref.E2M1[raw & 15])
    np.testing.assert_array_equal(values[:, 1::2], ref.E2M1[raw >> 4])
    assert torch.equal(quantize.e2m1_to_float(packed.view(torch.int8)), torch.from_numpy(values))
    codes = quantize.unpack_e2m1(packed)
    assert torch.equal(quantize.pack_e2m1(codes), packed)
    back = quantize.float_to_e2m1(torch.from_numpy(values))
    assert torch.equal(back, torch.where(codes == 8, torch.zeros_like(codes), codes))  # no negative zero


def test_e2m1_rounding() -> None:
    """Nearest, ties towards zero, saturating."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert quantize.float_to_e2m1(midpoints).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert quantize.float_to_e2m1(torch.nextafter(midpoints, torch.tensor(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert quantize.float_to_e2m1(-midpoints).tolist() == [0, 9, 10, 11, 12, 13, 14]
    assert quantize.float_to_e2m1(torch.tensor([6.0, 7.0, 1e30, -1e30, -0.1, -0.0])).tolist() == [7, 7, 7, 15, 0, 0]


@pytest.mark.parametrize("exponent", range(-149, 128))
def test_ceil_to_ue8m0_at_every_exponent(exponent: int) -> None:
    power = np.float32(np.exp2(np.float64(exponent)))
    below, above = np.nextafter(power, np.float32(0)), np.nextafter(power, np.float32(np.inf))
    codes = quantize.ceil_to_ue8m0(torch.from_numpy(np.array([below, power, above], dtype=np.float32))).tolist()
    code = max(exponent, -127) + 127
    assert codes[1] == code
    assert codes[0] == code if below > np.float32(2.0**-127) and exponent > -126 else codes[0] <= code
    assert codes[2] == (min(code + 1, 254) if above > np.float32(2.0**-127) else 0)


def test_ceil_to_ue8m0_extremes() -> None:
    x = torch.tensor([0.0, 1e-45, 2.0**-127, 2.0**-127 * (1 + 2**-20), 3e38, float("inf")])
    assert quantize.ceil_to_ue8m0(x).tolist() == [0, 0, 0, 1, 254, 254]


@pytest.mark.parametrize(
    "bad", [0.0, -1.0, 3.0, 1.0000001, float("nan"), float("inf"), -float("inf"), 2.0**-128, 3e-39]
)
def test_other_scales_are_refused_by_name(bad: float) -> None:
    sf = torch.full((2, 5, 8), 0.5)
    sf[1, 3, 6] = bad
    with pytest.raises(ValueError, match=r"sf: wanted powers of two in .* given .* at \[1, 3, 6\]"):
        transform_sf_into_required_layout(sf, 5, 256, (1, 32), 2)


# -------------------------------------------------------------------------------------------------------- input quantisers
@given(
    rows=st.integers(0, 9),
    blocks=st.integers(1, 5),
    log_scale=st.integers(-60, 60),
    seed=st.integers(0, 2**31),
    bf=st.booleans(),
)
def test_fp8_against_float64(rows: int, blocks: int, log_scale: int, seed: int, bf: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, blocks * 128, generator=g) * 2.0**log_scale
    x = x.to(torch.bfloat16) if bf else x
    values, words = per_token_cast_to_fp8(x, True, 32, True)
    assert values.dtype == torch.float8_e4m3fn
    assert list(words.shape) == [rows, blocks]
    same, sf = per_token_cast_to_fp8(x, True, 32)
    assert torch.equal(same.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(quantize.ue8m0_to_float(quantize.unpack_ue8m0(words)), sf)
    xd = x.double().numpy().reshape(rows, blocks * 4, 32)
    amax = np.maximum(np.abs(xd).max(axis=2, initial=0.0), 1e-4)
    scale = sf.double().numpy()
    # the smallest power of two that is at least amax / 448; one ulp of slack where amax * FP32(1/448) is rounded
    assert (scale * 448 >= amax * (1 - 2**-22)).all()
    assert (scale * 224 < amax * (1 + 2**-22)).all()
    expected = ref.e4m3_round(xd / scale[:, :, None]).reshape(rows, blocks * 128)
    np.testing.assert_array_equal(values.double().numpy(), expected)
    assert torch.equal(
        quantize.dequantize_e4m3(values, words).double(), torch.from_numpy(expected * scale.repeat(32, 1))
    )


def test_fp8_scale_is_exact_at_the_edges() -> None:
    """448 times a power of two takes that power; the next BF16 takes the next one."""
    for exponent in range(-12, 60):
        edge = torch.tensor(448.0 * 2.0**exponent, dtype=torch.bfloat16)
        over = torch.nextafter(edge, torch.tensor(float("inf"), dtype=torch.bfloat16))
        for top, wanted in ((edge, exponent), (over, exponent + 1)):
            x = torch.zeros(1, 128, dtype=torch.bfloat16)
            x[0, 7] = -top
            _, sf = per_token_cast_to_fp8(x, True, 32)
            assert float(sf[0, 0]) == 2.0**wanted


def test_fp8_zero_and_huge() -> None:
    values, sf = per_token_cast_to_fp8(torch.zeros(2, 256), True, 32)
    assert values.float().abs().sum() == 0
    assert (sf == 2.0**-22).all()  # 1e-4 / 448 = 2.2e-7
    values, sf = per_token_cast_to_fp8(torch.full((1, 128), 3e38), True, 32)
    assert float(values[0, 0].float() * sf[0, 0]) == pytest.approx(3e38, rel=2**-4)


def test_fp8_without_powers_of_two() -> None:
    x = torch.randn(3, 200)
    values, sf = per_token_cast_to_fp8(x, False, 128)
    assert list(sf.shape) == [3, 2]
    assert torch.equal(sf[:, 0], x[:, :128].abs().amax(1) / 448.0)
    restored = values.float() * sf.repeat_interleave(128, 1)[:, :200]
    assert (restored - x).abs().max() <= x.abs().max() / 16
    with pytest.raises(ValueError, match="use_packed_ue8m0: wanted use_ue8m0=True"):
        per_token_cast_to_fp8(x, False, 128, True)
    with pytest.raises(ValueError, match="divisible by 4"):
        per_token_cast_to_fp8(x, True, 128, True)
    with pytest.raises(ValueError, match="x: wanted a floating-point matrix"):
        per_token_cast_to_fp8(x[0], True)


@pytest.mark.parametrize("log_scale", [-100, -14, -3, 0, 5, 100])
def test_fp4_against_float64(log_scale: int) -> None:
    x = torch.randn(7, 320) * 2.0**log_scale
    packed, sf = per_token_cast_to_fp4(x, True, 32)
    assert (packed.dtype, list(packed.shape), list(sf.shape)) == (torch.int8, [7, 160], [7, 10])
    xd = x.double().numpy().reshape(7, -1, 32)
    scale = sf.double().numpy()
    amax = np.maximum(np.abs(xd).max(axis=2), 1e-4)
    assert (scale * 6 >= amax * (1 - 2**-22)).all()
    assert (scale * 3 < amax * (1 + 2**-22)).all()
    scaled = (xd / scale[:, :, None]).reshape(7, 320)
    values = quantize.e2m1_to_float(packed).numpy()
    nearest = np.abs(np.abs(scaled)[:, :, None] - ref.E2M1[:8]).min(axis=2)
    np.testing.assert_array_equal(np.abs(np.abs(values) - np.abs(scaled)), nearest)
    assert (values * scaled >= 0).all()
    again, _ = per_token_cast_to_fp4(torch.from_numpy(values) * sf.repeat_interleave(32, 1), True, 32)
    if log_scale >= -3:  # below the floor of 1e-4 a second quantisation meets the same floor only by chance
        assert torch.equal(quantize.e2m1_to_float(again) != 0, torch.from_numpy(values != 0))


NO_NUMBERS = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fp4_says_in_the_scale_what_it_cannot_say_in_the_values(bad: float, dtype: torch.dtype) -> None:
    """One block of 4 rows by 8 blocks has something that is no number; all others keep their bits."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    spoiled = x.clone()
    spoiled[2, 3 * 32 + 5] = bad
    hit = torch.zeros(4, 8, dtype=torch.bool)
    hit[2, 3] = True
    for use_ue8m0 in (True, False):
        (packed, sf), (good, good_sf) = (per_token_cast_to_fp4(data, use_ue8m0, 32) for data in (spoiled, x))
        assert torch.equal(sf.isnan(), hit) and torch.equal(sf[~hit], good_sf[~hit])
        assert (sf[hit].view(torch.int32) == 0x7FC00000).all()
        blocks = packed.view(4, 8, 16)
        assert torch.equal(blocks[~hit], good.view(4, 8, 16)[~hit]) and not blocks[hit].any()
    packed, words = per_token_cast_to_fp4(spoiled, True, 32, True)
    codes = quantize.unpack_ue8m0(words)
    assert torch.equal(codes == 255, hit)
    assert torch.equal(quantize.dequantize_e2m1(packed, codes).isnan(), hit.repeat_interleave(32, 1))
    for form in (words, codes, quantize.ue8m0_to_float(codes)):
        with pytest.raises(ValueError, match=r"sf: wanted .*, given (255 \(NaN\)|nan) at \[2, 3\]"):
            transform_sf_into_required_layout(form, 4, 256, (1, 32))


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_fp8_shows_what_is_no_number(bad: float, use_ue8m0: bool) -> None:
    x = torch.randn(4, 256)
    x[2, 100] = bad
    values, sf = per_token_cast_to_fp8(x, use_ue8m0, 32)
    restored = values.float() * sf.repeat_interleave(32, 1)
    assert not restored[2, 100].isfinite() and (not np.isnan(bad) or restored[2, 100].isnan())
    good, good_sf = per_token_cast_to_fp8(torch.where(x.isfinite(), x, 0.0), use_ue8m0, 32)
    assert torch.equal(sf[[0, 1, 3]], good_sf[[0, 1, 3]])
    assert torch.equal(values[[0, 1, 3]].view(torch.uint8), good[[0, 1, 3]].view(torch.uint8))


def test_packing_names_the_callers_arguments() -> None:
    for cast in (per_token_cast_to_fp8, per_token_cast_to_fp4):
        with pytest.raises(ValueError, match=r"^gran_k: wanted a width of 200 columns .*by 4.*, given 7: 29 groups$"):
            cast(torch.zeros(2, 200), True, 7, True)


def test_fp4_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="x: wanted an even width, given 33"):
        per_token_cast_to_fp4(torch.zeros(2, 33), True, 32)


def test_upstream_import_path() -> None:
    assert math.per_token_cast_to_fp4 is per_token_cast_to_fp4
    with pytest.raises(AttributeError):
        _ = math.no_such_name
    assert (math.ceil_div(7, 4), math.ceil_div(8, 4), math.align(9, 8), math.ceil_div(0, 3)) == (2, 2, 16, 0)
    assert [n for n in range(20) if math.is_power_of_two(n)] == [1, 2, 4, 8, 16]


# -------------------------------------------------------------------------------------------------------------- scale layout
@given(
    groups=st.integers(0, 3),
    mn=st.integers(1, 40),
    k=st.integers(1, 20),
    kind=st.sampled_from(["float", "codes", "words"]),
)
def test_scale_layout(groups: int, mn: int, k: int, kind: str) -> None:
    k *= 32
    lead = [groups] if groups else []
    codes = torch.randint(0, 255, (*lead, mn, k // 32), dtype=torch.uint8)
    words = -(-k // 128)
    padded = torch.nn.functional.pad(codes, (0, 4 * words - k // 32))
    given_sf = {"float": quantize.ue8m0_to_float(codes), "codes": codes, "words": quantize.pack_ue8m0(padded)}[kind]
    result = transform_sf_into_required_layout(given_sf, mn, k, (1, 32), groups or None)
    assert list(result.shape) == [*lead, mn, words]
    aligned = (mn + 3) // 4 * 4
    assert result.stride()[-2:] == (1, aligned)
    if groups:
        assert result.stride(0) == words * aligned
    assert torch.equal(quantize.unpack_ue8m0(result.contiguous()), padded)


def test_scale_layout_refusals() -> None:
    sf = torch.ones(2, 6, 4)
    with pytest.raises(ValueError, match=r"recipe: wanted \(1, 32\) or \(1, 1, 32\), given \(1, 128\)"):
        transform_sf_into_required_layout(sf, 6, 128, (1, 128), 2)
    with pytest.raises(ValueError, match=r"sf: wanted shape \[2, 6, 8\] for torch.float32, given \[2, 6, 4\]"):
        transform_sf_into_required_layout(sf, 6, 256, (1, 32), 2)
    with pytest.raises(ValueError, match=r"sf: wanted float32, uint8 or int32, given torch\.float64"):
        transform_sf_into_required_layout(sf.double(), 6, 128, (1, 32), 2)
    with pytest.raises(ValueError, match=r"sf: wanted UE8M0 codes 0\.\.254, given 255 \(NaN\) at \[0, 1\]"):
        transform_sf_into_required_layout(torch.tensor([[127, 255, 3, 4]], dtype=torch.uint8), 1, 128, (1, 32))
