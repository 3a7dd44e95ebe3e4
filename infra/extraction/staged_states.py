"""States that an engine has staged as a file, and how they are read and checked: here, or in another process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from infra.extraction.rows import ExtractResult, ExtractSample
from infra.hidden_states import HiddenStatesMeta
from infra.state_checks.checks import states_problem


class Staged(NamedTuple):
    """What an engine has answered to one sample: one of the two is given.

    Args:
        path: of a whole safetensors file with `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens].
        error: why there is none.
    """

    path: str | None
    error: str | None


@dataclass
class StreamTimes:
    """What one stream has taken.

    Attributes:
        engine_seconds: that the engine has worked for it.
        waited_seconds: that its reader has waited, for the engine or for room in the staging.
    """

    engine_seconds: float = 0.0
    waited_seconds: float = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.waited_seconds += time.monotonic() - started


def read_staged(sample: ExtractSample, staged: Staged, meta: HiddenStatesMeta) -> ExtractResult:
    """Map and check one sample's file. Effects: deletes the file.

    Args:
        meta: of the shard that the states are for.
    """
    states = None
    if staged.path is None:
        error: str | None = f"vllm: {staged.error}"
    else:
        try:
            error, states = _checked(sample, load_file(staged.path), meta)
            os.unlink(staged.path)  # its pages stay mapped for as long as the states are held
        except (OSError, SafetensorError, KeyError) as problem:
            error = f"vllm: the staged file cannot be read: {problem!r}"
    return ExtractResult(sample.sample_id, error, None if error else states)


def _checked(sample: ExtractSample, staged: dict[str, Tensor], meta: HiddenStatesMeta) -> tuple[str | None, Tensor]:
    states = staged["hidden_states"]  # [tokens, layers, hidden]
    ids = staged["token_ids"].tolist()
    if ids != list(sample.input_ids):
        return f"ids: vLLM saw {len(ids)} that are not the {len(sample.input_ids)} of the response", states
    if states.ndim != 3 or states.shape[2] != meta.hidden_size:
        return f"length: states of shape {list(states.shape)}, not {meta.hidden_size} wide", states
    return states_problem(states, sample.input_ids, meta.layer_ids), states
