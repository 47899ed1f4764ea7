"""The demo's float64 reference against torch's own conversions and a literal reading of the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deep_gemm_k3.demo import data as demo_data
from deep_gemm_k3.demo import reference as demo_reference


def test_e4m3_table_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(demo_reference.e4m3_values(), wanted)


def test_e2m1_table() -> None:
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(demo_reference.e2m1_values(), positive + [-v for v in positive])


def test_bf16_rounding_and_decoding_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100_000, generator=generator) * torch.exp2(
        torch.randint(-140, 120, (100_000,), generator=generator).double()
    )
    values = values.float().double()
    wanted = values.float().bfloat16()
    np.testing.assert_array_equal(demo_reference.to_bf16(values.numpy()), wanted.double().numpy())
    np.testing.assert_array_equal(demo_reference.decode_bf16(demo_data.bits_of(wanted)), wanted.double().numpy())


def test_e4m3_rounding_is_torchs() -> None:
    values = (torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 100).float()
    tiny = torch.linspace(-0.1, 0.1, 10_001)
    for given in (values, tiny):
        wanted = given.clamp(-448, 448).to(torch.float8_e4m3fn).double().numpy()
        np.testing.assert_array_equal(demo_reference.to_e4m3(given.double().numpy()), wanted)


def test_fp4_decoding_by_hand() -> None:
    packed = np.zeros((1, 16), np.uint8)
    packed[0, 0] = 0x5 | (0xF << 4)
    decoded = demo_reference.decode_fp4(packed, np.array([[129]], np.uint8))
    assert decoded[0, :3].tolist() == [12.0, -24.0, 0.0]


def test_fp8_decoding_by_hand() -> None:
    codes = np.zeros((1, 64), np.uint8)
    codes[0, 0], codes[0, 32] = 0x38, 0xB8
    decoded = demo_reference.decode_fp8(codes, np.array([[128, 126]], np.uint8))
    assert (decoded[0, 0], decoded[0, 32]) == (2.0, -0.5)


@pytest.mark.parametrize(("amax", "scale"), [(448.0, 1.0), (448.1, 2.0), (0.4, 2.0**-10), (896.0, 2.0)])
def test_block_scale_is_the_smallest_that_fits(amax: float, scale: float) -> None:
    values = np.full((1, 32), amax * 0.37)
    values[0, 3] = amax
    wanted = demo_reference.to_e4m3(values / scale) * scale
    np.testing.assert_array_equal(demo_reference.to_scaled_e4m3(values), wanted)


def test_zero_block_stays_zero() -> None:
    assert not demo_reference.to_scaled_e4m3(np.zeros((2, 64))).any()


def test_situ_by_the_formula() -> None:
    beta, linear_beta, gate, up = 4.0, 25.0, 1.7, -3.2
    wanted = beta * math.tanh(gate / beta) / (1 + math.exp(-gate)) * linear_beta * math.tanh(up / linear_beta)
    assert demo_reference.Situ(beta, linear_beta)(np.array(gate), np.array(up)) == pytest.approx(wanted, rel=1e-14)


def test_routing_skips_empty_slots_and_counts_duplicates() -> None:
    problem = demo_data.Problem(
        hidden=128,
        intermediate=128,
        shared_hidden=128,
        shared_slice=128,
        parts=1,
        experts_per_rank=2,
        topk=2,
        tokens=(3,),
    )
    layer = demo_data.make_layer(problem)
    layer.tokens[0].topk_idx[:] = torch.tensor([[0, 0], [0, -1], [-1, -1]])
    layer.tokens[0].topk_weights[:] = 0.5
    layer.tokens[0].x[1] = layer.tokens[0].x[0]
    layer.tokens[0].x_sf[1] = layer.tokens[0].x_sf[0]
    once_and_twice = demo_data.reference_routed(layer)[0]
    assert not once_and_twice[2].any()
    np.testing.assert_allclose(once_and_twice[0], once_and_twice[1], rtol=1e-2)  # the norm takes the factor 2 away
