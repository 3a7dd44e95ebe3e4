"""How the hidden states of one sample become the payload columns of a row, and back.

| encoding     | payload columns             | codecs     | bytes for each value                           |
|--------------|-----------------------------|------------|------------------------------------------------|
| `bf16`       | one for aux, one for last   | none       | 2                                              |
| `bf16_split` | high bytes, low bytes       | zstd, none | 1.4: high bytes pack, low bytes do not         |
| `fp8_e4m3`   | e4m3 values, e8m0 scales    | none       | 1, and one for each token and layer; lossy     |

The columns of `bf16` are those that the contract names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

Shape = tuple[int, int, int]  # tokens, layers, hidden
ALL = slice(None)
# A few MB of temporary tensors. Smaller parts are more steps, between which threads queue for Python's lock:
# on 16 cores ten threads took longer than one with 2**17.
VALUES_AT_ONCE = 2**20
PAIRS_AT_ONCE = 2**16
# bf16 goes up to 255 * 2^120, which e4m3 would round to 2^128.
LARGEST_FP8_STATE = 240 * 2.0**120


class Encoding(Protocol):
    """One way to store states. Columns are given in the order of the file."""

    @property
    def codecs(self) -> Mapping[str, str]:
        """Payload columns (large_binary) and the Parquet codec of each."""

    @property
    def lossy(self) -> bool:
        """Whether decoding gives other states than were encoded; then the error of every row is measured."""

    def bytes_per_token(self, num_layers: int, hidden_size: int) -> Mapping[str, int]:
        """Bytes that one token takes in each column, before its codec."""

    def encode(self, states: Tensor) -> Mapping[str, Tensor]:
        """Contiguous uint8 tensors by column, of states [tokens, layers, hidden] bf16 of any strides.

        Raises:
            ValueError: this encoding cannot hold them.
        """

    def decode(self, payload: Mapping[str, pa.Buffer], shape: Shape, tokens: slice = ALL) -> tuple[Tensor, Tensor]:
        """(aux [tokens, (layers - 1) * hidden], last [tokens, hidden]) in bf16: the buffers' own memory where that
        is possible, and never more than one copy. Each buffer has the size that `bytes_per_token` tells.

        Args:
            shape: of the whole sample.
            tokens: the ones to decode.
        """


class Bf16:
    """Raw little-endian bf16, decoded without a copy."""

    codecs: Mapping[str, str] = {"aux_hidden_states": "none", "verifier_last_hidden_states": "none"}
    lossy = False

    def bytes_per_token(self, num_layers: int, hidden_size: int) -> Mapping[str, int]:
        return dict(zip(self.codecs, (2 * (num_layers - 1) * hidden_size, 2 * hidden_size), strict=True))

    def encode(self, states: Tensor) -> Mapping[str, Tensor]:
        return {
            "aux_hidden_states": _bytes_of(states[:, :-1]),
            "verifier_last_hidden_states": _bytes_of(states[:, -1]),
        }

    def decode(self, payload: Mapping[str, pa.Buffer], shape: Shape, tokens: slice = ALL) -> tuple[Tensor, Tensor]:
        num_tokens, num_layers, hidden_size = shape
        aux, last = (_bf16_over(payload[name]) for name in self.codecs)
        rows = aux.view(num_tokens, (num_layers - 1) * hidden_size), last.view(num_tokens, hidden_size)
        return rows[0][tokens], rows[1][tokens]


class Bf16Split:
    """Lossless: the high bytes (sign and upper seven bits of the exponent) apart from the low bytes.

    Both are in the order [layers, tokens, hidden]. The states of one layer are of like magnitudes, so its high
    bytes pack to 0.37 by their frequencies alone; layers differ, and token by token they would pack to 0.41. The
    low bytes are all but random, and no codec is worth its time on them.
    """

    codecs: Mapping[str, str] = {"states_high": "zstd", "states_low": "none"}
    lossy = False

    def bytes_per_token(self, num_layers: int, hidden_size: int) -> Mapping[str, int]:
        return dict.fromkeys(self.codecs, num_layers * hidden_size)

    def encode(self, states: Tensor) -> Mapping[str, Tensor]:
        bits = states.transpose(0, 1).view(torch.int16).numpy().view(np.uint16)
        high, low = np.empty(bits.shape, np.uint8), bits.astype(np.uint8, order="C")
        np.right_shift(bits, 8, out=high, casting="unsafe")
        return {"states_high": torch.from_numpy(high).view(-1), "states_low": torch.from_numpy(low).view(-1)}

    def decode(self, payload: Mapping[str, pa.Buffer], shape: Shape, tokens: slice = ALL) -> tuple[Tensor, Tensor]:
        num_tokens, num_layers, hidden_size = shape
        by_layer = (num_layers, num_tokens, hidden_size)
        high, low = (
            np.frombuffer(payload[name], np.uint8).reshape(by_layer)[:, tokens].transpose(1, 0, 2)
            for name in self.codecs
        )
        bits = np.empty(high.shape, np.uint16)
        # Faster than shift and or, whose loops are not vectorized.
        np.multiply(high, 256, out=bits, dtype=np.uint16)
        np.add(bits, low, out=bits)
        return _aux_and_last(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))


class Fp8E4m3:
    """Lossy: torch.float8_e4m3fn under one power of two for each token and layer.

    The scale s is the least power of two, from 2^-117 on, with max|x| <= 448 s over the token's state at that layer
    (any, where all of it is zero). It is stored as OCP's E8M0: its exponent + 127, in a byte (OCP Microscaling
    Formats v1.0, section 5.4.1). A power of two makes scaling and decoding exact in bf16: rounding to e4m3 is the
    only error. For every value x

        |decoded - x| <= max(2^-4 |x|, 2^-10 s),

    the second where x is below e4m3's normal range, |x| < 2^-6 s. Since s < max|x| / 224 (or s = 2^-117), a state
    with one value 1000 times its median keeps 2^-4 for all values from a fourteenth of the median on. Decoded
    values are finite.

    Raises (from encode):
        ValueError: a value is NaN, infinite, or larger than `LARGEST_FP8_STATE`.
    """

    codecs: Mapping[str, str] = {"states_fp8": "none", "states_scale": "none"}
    lossy = True

    def bytes_per_token(self, num_layers: int, hidden_size: int) -> Mapping[str, int]:
        return dict(zip(self.codecs, (num_layers * hidden_size, num_layers), strict=True))

    def encode(self, states: Tensor) -> Mapping[str, Tensor]:
        values = torch.empty(states.shape, dtype=torch.float8_e4m3fn)
        codes = torch.empty(states.shape[:2], dtype=torch.uint8)
        for part in _parts(states.shape):
            largest = states[part].abs().amax(dim=-1).float()  # [tokens, layers]
            if not bool((largest <= LARGEST_FP8_STATE).all()):  # false for NaN
                raise ValueError(f"fp8_e4m3 holds finite states only, up to {LARGEST_FP8_STATE:.3g}")
            fraction, exponent = torch.frexp(largest)  # largest = fraction * 2^exponent, fraction in [0.5, 1)
            exponent = exponent - 9 + (fraction > 448 / 512).int()
            codes[part] = exponent.clamp(min=-117) + 127
            values[part] = states[part] * _powers_of_two(254 - codes[part])[..., None]
        return {"states_fp8": values.view(torch.uint8).view(-1), "states_scale": codes.view(-1)}

    def decode(self, payload: Mapping[str, pa.Buffer], shape: Shape, tokens: slice = ALL) -> tuple[Tensor, Tensor]:
        values, codes = (np.frombuffer(payload[name], np.uint8) for name in self.codecs)
        scales = _powers_of_two(torch.from_numpy(codes.reshape(shape[:2])[tokens].copy()))
        states = _bf16_of_e4m3(values.reshape(shape)[tokens].reshape(-1)).view(*scales.shape, shape[2])
        return _aux_and_last(states.mul_(scales[..., None]))


ENCODINGS: dict[str, Encoding] = {"bf16": Bf16(), "bf16_split": Bf16Split(), "fp8_e4m3": Fp8E4m3()}


def relative_error(states: Tensor, aux: Tensor, last: Tensor) -> tuple[float, float]:
    """(mean, worst) over tokens and layers of ||decoded - state|| / ||state||, within 1 % of it; 0 without tokens.

    Args:
        states: [tokens, layers, hidden] bf16, as they were encoded.
        aux: [tokens, (layers - 1) * hidden] bf16, as decoded.
        last: [tokens, hidden] bf16, as decoded.
    """
    num_tokens, num_layers, hidden_size = states.shape
    errors = torch.zeros(num_tokens, num_layers, dtype=torch.float64)
    for part in _parts(states.shape):
        decoded_aux = aux[part].reshape(-1, num_layers - 1, hidden_size)
        errors[part, :-1] = _norm_ratio(decoded_aux - states[part, :-1], states[part, :-1])
        errors[part, -1] = _norm_ratio(last[part] - states[part, -1], states[part, -1])
    return (errors.mean().item(), errors.max().item()) if num_tokens else (0.0, 0.0)


def _norm_ratio(difference: Tensor, states: Tensor) -> Tensor:
    """||difference|| / ||states|| over the last dimension; 0 where both are 0."""
    ratio = _norm(difference) / _norm(states)
    if bool(ratio.isfinite().all()):
        return ratio
    # All zero, or squares that the float32 sum of a bf16 norm cannot hold.
    return (_norm(difference.double()) / _norm(states.double())).nan_to_num(0.0)


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return norm.double()


def _parts(shape: Sequence[int]) -> Iterator[slice]:
    """Tokens of states [tokens, layers, hidden] in parts of `VALUES_AT_ONCE`."""
    tokens_at_once = max(1, VALUES_AT_ONCE // (shape[1] * shape[2]))
    return (slice(start, start + tokens_at_once) for start in range(0, shape[0], tokens_at_once))


def _aux_and_last(states: Tensor) -> tuple[Tensor, Tensor]:
    """Views of states [tokens, layers, hidden]: all layers but the last side by side, and the last."""
    rows = states.flatten(1)
    aux_width = rows.shape[1] - states.shape[2]
    return rows[:, :aux_width], rows[:, aux_width:]


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).view(-1)


def _bf16_over(data: pa.Buffer) -> Tensor:
    """The buffer's own memory as bf16.

    Through DLPack, since torch warns at each read-only buffer that it is given as one.
    """
    array = pa.Array.from_buffers(pa.int16(), data.size // 2, [None, data])
    return torch.utils.dlpack.from_dlpack(array).view(torch.bfloat16)


def _powers_of_two(codes: Tensor) -> Tensor:
    """bf16 values of E8M0 codes 1 to 254."""
    return codes.view(torch.float8_e8m0fnu).to(torch.bfloat16)


_E4M3_TO_BF16: npt.NDArray[np.int16] = (
    torch.arange(256, dtype=torch.int32)
    .to(torch.uint8)
    .view(torch.float8_e4m3fn)
    .to(torch.bfloat16)
    .view(torch.int16)
    .numpy()
)
# Of two neighbouring bytes at once: 256 KiB, which a core's cache holds.
_PAIRS_TO_BF16: npt.NDArray[np.int32] = _E4M3_TO_BF16[np.arange(2**16, dtype=np.uint16).view(np.uint8)].view(
    np.int32
)


def _bf16_of_e4m3(values: npt.NDArray[np.uint8]) -> Tensor:
    """[n] bf16 of n e4m3 bytes, by table: ten times as fast on a core as torch's own conversion."""
    found = np.empty(len(values), dtype=np.int16)
    num_pairs = len(values) // 2
    pairs, outcome = values[: 2 * num_pairs].view(np.uint16), found[: 2 * num_pairs].view(np.int32)
    for start in range(0, num_pairs, PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        np.take(
            _PAIRS_TO_BF16, pairs[part], out=outcome[part], mode="clip"
        )  # every index is right; "raise" would copy
    found[2 * num_pairs :] = _E4M3_TO_BF16[values[2 * num_pairs :]]
    return torch.from_numpy(found).view(torch.bfloat16)
