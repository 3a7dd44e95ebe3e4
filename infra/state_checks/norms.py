"""How long a sample's states are, layer by layer, against those of the stage's other samples.

A layer's states have about the same length in every sample, whatever the text; layers differ much more from each
other than samples do. So states of another layer, of another model, or scaled by a mistake stand out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from infra.config import CONTENT, Config

Floats = npt.NDArray[np.float64]

# Different tokens that are measured of a sample: the median of more would be no better.
_MEASURED_TOKENS = 256
# The first tokens may be attention sinks, hundreds of times as long as the others: a short sample is little else.
_FEWEST_TOKENS = 8
# Fewer samples than this are no statistics.
_FEWEST_SAMPLES = 8
# Standard deviation of a normal distribution over its median absolute deviation.
_SIGMA_PER_MAD = 1.4826


class NormsConfig(Config):
    """When a sample's states count as too long or too short."""

    norm_spreads: Annotated[float, CONTENT, Field(gt=0)] = 20.0
    """States are refused when a layer's norm is further from the stage's than this many spreads (robust standard
    deviations over samples) and than `norm_log_units`."""
    norm_log_units: Annotated[float, CONTENT, Field(gt=0)] = 0.4
    """The least distance that is refused, in natural logarithm: 0.4 is a factor of 1.5."""


class LayerNorms(NamedTuple):
    """Robust centre and spread, over samples, of each layer's log norm.

    Args:
        samples: how many.
        centre: [layers] median.
        spread: [layers] scaled median absolute deviation.
    """

    samples: int
    centre: Floats
    spread: Floats

    @classmethod
    def of(cls, samples: Sequence[Floats]) -> LayerNorms:
        """Those of samples, one at least, each the [layers] of `log_norms`."""
        values = np.stack(samples)  # [samples, layers]
        centre = np.median(values, axis=0)
        return cls(len(samples), centre, _SIGMA_PER_MAD * np.median(np.abs(values - centre), axis=0))

    def with_others(self, other: LayerNorms) -> LayerNorms:
        """Of both together: the moments of the mixture, so that a difference between the two widens the spread."""
        samples = self.samples + other.samples
        centre = (self.samples * self.centre + other.samples * other.centre) / samples
        square = self.samples * (self.spread**2 + self.centre**2) + other.samples * (
            other.spread**2 + other.centre**2
        )
        return LayerNorms(samples, centre, np.sqrt(np.maximum(square / samples - centre**2, 0.0)))

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "centre": [round(float(value), 5) for value in self.centre],
            "spread": [round(float(value), 5) for value in self.spread],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LayerNorms:
        return cls(int(value["samples"]), np.array(value["centre"], float), np.array(value["spread"], float))


class NormsCheck:
    """Judges samples by the norms of those of the stage's earlier shards. Thread-safe.

    Of a shard its centre and spread are remembered, so a resumed stage learns from the records all it knew before.
    """

    def __init__(self, config: NormsConfig, layer_ids: Sequence[int]) -> None:
        self._config = config
        self._layer_ids = layer_ids
        self._known: LayerNorms | None = None
        self._lock = threading.Lock()

    def learn(self, norms: LayerNorms) -> None:
        """Take a shard's samples into the stage's statistics."""
        with self._lock:
            self._known = self._known.with_others(norms) if self._known else norms

    def known(self) -> LayerNorms | None:
        """The stage's statistics; None while they are of too few samples to judge others by."""
        with self._lock:
            return self._known if self._known and self._known.samples >= _FEWEST_SAMPLES else None

    def problem(self, norms: Floats | None, reference: LayerNorms) -> str | None:
        """Why states of these norms are refused; None if they are not.

        Args:
            norms: [layers] of `log_norms`.
            reference: statistics of the samples to compare with; of few samples they refuse nothing.
        """
        if norms is None or reference.samples < _FEWEST_SAMPLES:
            return None
        distance = norms - reference.centre
        allowed = np.maximum(self._config.norm_log_units, self._config.norm_spreads * reference.spread)
        worst = int(np.argmax(np.abs(distance) / allowed))
        if abs(distance[worst]) <= allowed[worst]:
            return None
        return (
            f"norms: states of layer {self._layer_ids[worst]} are {math.exp(distance[worst]):.2f} times as long as "
            f"in {reference.samples} other samples; a factor of up to {math.exp(allowed[worst]):.2f} is allowed"
        )


def log_norms(states: Tensor, input_ids: Sequence[int]) -> Floats | None:
    """Log of the median L2 norm of each layer's states, [layers]; None of a sample with too few tokens to tell.

    The median over different tokens, each where it first occurs: of text that says one word a thousand times the
    most states are those of that word, and may be a hundred times as long as all others.

    Args:
        states: [tokens, layers, hidden], finite and nowhere all zero.
        input_ids: the tokens.
    """
    _, places = np.unique(np.asarray(input_ids), return_index=True)
    if len(places) < _FEWEST_TOKENS:
        return None
    places = np.sort(places)[:: -(-len(places) // _MEASURED_TOKENS)]
    measured = states[torch.from_numpy(places)]
    norms = torch.linalg.vector_norm(measured, dim=-1, dtype=torch.float32)  # [measured, layers]
    medians: Floats = norms.median(dim=0).values.double().numpy()
    return np.log(medians)
