"""What each encoding does to the values, for all that a model may compute and for what none should."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.state_encodings import ENCODINGS, LARGEST_FP8_STATE, VALUES_AT_ONCE, Encoding, relative_error

pytestmark = pytest.mark.filterwarnings("error")
FP8 = ENCODINGS["fp8_e4m3"]
LOSSLESS = [name for name, encoding in ENCODINGS.items() if not encoding.lossy]


def there_and_back(encoding: Encoding, states: torch.Tensor) -> torch.Tensor:
    """Decoded states [tokens, layers, hidden]."""
    num_tokens, num_layers, hidden_size = states.shape
    payload = {name: pa.py_buffer(value.numpy()) for name, value in encoding.encode(states).items()}
    widths = encoding.bytes_per_token(num_layers, hidden_size)
    assert {name: value.size for name, value in payload.items()} == {
        name: num_tokens * width for name, width in widths.items()
    }
    aux, last = encoding.decode(payload, (num_tokens, num_layers, hidden_size))
    return torch.cat([aux, last], dim=1).view(states.shape)


def scale_of(states: torch.Tensor) -> torch.Tensor:
    """The scale that the docstring states, by its definition: [tokens, layers, 1] float64."""
    largest = states.double().abs().amax(dim=-1, keepdim=True)
    powers = torch.tensor([2.0**exponent for exponent in range(-117, 121)], dtype=torch.float64)
    return powers[torch.searchsorted(powers, largest / 448)]


def beyond_bound(states: torch.Tensor) -> int:
    """How many decoded values are further off than the docstring states."""
    decoded = there_and_back(FP8, states)
    assert bool(decoded.isfinite().all())
    bound = torch.maximum(states.double().abs() * 2**-4, scale_of(states) * 2**-10)
    return int(((decoded.double() - states.double()).abs() > bound).sum())


@pytest.mark.parametrize("encoding", LOSSLESS)
def test_every_bit_pattern_survives(encoding: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    states = bits.view(torch.bfloat16).view(64, 4, 256)
    assert torch.equal(there_and_back(ENCODINGS[encoding], states).view(torch.int16).flatten(), bits)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_some_tokens_are_decoded_as_among_all(encoding: str) -> None:
    states = torch.randn(9, 4, 8).bfloat16() * torch.arange(1, 37).view(9, 4, 1)
    payload = {name: pa.py_buffer(value.numpy()) for name, value in ENCODINGS[encoding].encode(states).items()}
    whole = ENCODINGS[encoding].decode(payload, (9, 4, 8))
    for some in (slice(0, 0), slice(0, 4), slice(4, 9)):
        part = ENCODINGS[encoding].decode(payload, (9, 4, 8), some)
        assert [torch.equal(found, all_[some]) for found, all_ in zip(part, whole, strict=True)] == [True, True]


def test_raw_states_are_decoded_without_a_copy() -> None:
    states = torch.randn(5, 4, 8).bfloat16()
    payload = {name: pa.py_buffer(value.numpy()) for name, value in ENCODINGS["bf16"].encode(states).items()}
    decoded = ENCODINGS["bf16"].decode(payload, (5, 4, 8))
    assert [each.data_ptr() for each in decoded] == [buffer.address for buffer in payload.values()]


def test_fp8_keeps_its_bound_for_every_finite_value() -> None:
    """All bf16 values that it takes: among neighbours, where the scale is near, and among values far from them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = bits[bits.abs() <= LARGEST_FP8_STATE]
    ordered = finite[: len(finite) // 8 * 8].view(-1, 2, 4)
    assert beyond_bound(ordered) == 0
    mixed = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    assert beyond_bound(mixed[: len(finite) // 120 * 120].view(-1, 3, 40)) == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(-100, 100), st.integers(1, 9), st.integers(1, 70))
def test_fp8_keeps_its_bound_at_any_magnitude_and_shape(
    seed: int, exponent: float, num_tokens: int, hidden_size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = 2.0 ** torch.randint(-20, 20, (num_tokens, 3, 1), generator=generator)
    values = torch.randn(num_tokens, 3, hidden_size, generator=generator, dtype=torch.float64)
    assert beyond_bound((values * spread * 2.0**exponent).bfloat16()) == 0


@pytest.mark.parametrize("times", [1e3, 1e5])
def test_fp8_holds_massive_activations(times: float) -> None:
    """Residual streams have single channels a thousand times the median; the others must survive beside them."""
    states = torch.randn(200, 4, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    usual = there_and_back(FP8, states).double()
    states[:, :, 7] = 0.67 * times
    states[::2, 1, 300] = -times
    assert beyond_bound(states) == 0
    decoded = there_and_back(FP8, states).double()
    assert bool((decoded[:, :, 7] / (0.67 * times) - 1).abs().max() <= 2**-4)
    if times == 1e3:  # the rest loses next to nothing more than without them
        rest = [channel for channel in range(576) if channel not in (7, 300)]
        more = (decoded - states.double())[:, :, rest].norm() / (usual - states.double())[:, :, rest].norm()
        assert more < 1.02


def test_fp8_scales_each_layer_of_each_token_by_itself() -> None:
    states = torch.ones(2, 3, 16) * torch.tensor([[1.0, 2.0**40, 2.0**-40], [448.0, 449.0, 1e-36]])[..., None]
    codes = FP8.encode(states.bfloat16())["states_scale"].view(2, 3).tolist()
    # The least power of two that brings the largest value to at most 448, but not below 2^-117.
    assert codes == [[127 - 8, 127 + 32, 127 - 48], [127, 127, 127 - 117]]
    states[1, 1] = 452.0  # bf16 has 448, then 450
    assert FP8.encode(states.bfloat16())["states_scale"].view(2, 3)[1, 1] == 128


def test_fp8_of_values_that_e4m3_has_is_exact() -> None:
    values = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)  # 0 to 448
    states = torch.stack([values * 2.0**power for power in (-20, 0, 60)]).view(1, 3, 127)
    assert torch.equal(there_and_back(FP8, states), states)
    assert relative_error(states, states[:, :2].reshape(1, -1), states[:, 2]) == (0.0, 0.0)


def test_parts_and_odd_counts_come_out_like_the_whole() -> None:
    states = torch.randn(3, 5, 37, generator=torch.Generator().manual_seed(2)).bfloat16()
    alone = torch.cat([there_and_back(FP8, states[token : token + 1]) for token in range(3)])
    assert torch.equal(there_and_back(FP8, states), alone)
    many = states.repeat(VALUES_AT_ONCE // (5 * 37) + 2, 1, 1)
    assert torch.equal(there_and_back(FP8, many), alone.repeat(len(many) // 3, 1, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.3e38])
def test_fp8_refuses_what_is_not_finite(value: float) -> None:
    states = torch.ones(4, 2, 8).bfloat16()
    states[2, 1, 3] = value
    with pytest.raises(ValueError, match="finite states only"):
        FP8.encode(states)


@pytest.mark.parametrize("magnitude", [1e-35, 1e-18, 1.0, 1e20, 1e37])
def test_relative_error_is_right_at_any_magnitude(magnitude: float) -> None:
    generator = torch.Generator().manual_seed(3)
    states = (torch.randn(50, 4, 64, generator=generator) * magnitude).bfloat16()
    states[7, 2] = 0.0
    decoded = there_and_back(FP8, states)
    ratio = (decoded.double() - states.double()).norm(dim=-1) / states.double().norm(dim=-1)
    ratio[7, 2] = 0.0
    mean, worst = relative_error(states, decoded[:, :3].flatten(1), decoded[:, 3])
    assert mean == pytest.approx(ratio.mean().item(), rel=0.01)
    assert worst == pytest.approx(ratio.max().item(), rel=0.01)
    assert 0.02 < mean < 0.03  # e4m3 rounds by 2^-4 at most


def test_the_table_is_torchs_own_conversion() -> None:
    codes = np.arange(256, dtype=np.uint8)
    payload = {"states_fp8": pa.py_buffer(codes.tobytes()), "states_scale": pa.py_buffer(bytes([127, 127]))}
    found = torch.cat(FP8.decode(payload, (1, 2, 128)), dim=1)[0]
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
