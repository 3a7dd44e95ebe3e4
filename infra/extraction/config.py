"""Which hidden states are extracted, and with how many engines."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from infra.config import CONTENT, Config
from infra.errors import InputError
from infra.extraction.staging import Staging
from infra.gpu_sets import GpuSets, check_gpu_sets, on_gpu_sets
from infra.hidden_states import HiddenStatesMeta
from infra.state_checks.checks import ChecksConfig
from infra.verifiers.verifier import Verifier, VerifierShape, default_layer_ids
from infra.vllm_config import VllmConfig


class ExtractConfig(Config):
    """Which hidden states are extracted, and how."""

    layer_ids: Annotated[list[int] | None, CONTENT] = None
    """Layers whose states are kept, ascending, the last being the verifier's number of layers; the ones before it
    feed the draft. By default layer 2, the middle one, the third from the end, and the last."""
    encoding: Annotated[Literal["bf16", "bf16_split", "fp8_e4m3"], CONTENT] = "bf16"
    """How the states are stored. `bf16`: as they are. `bf16_split`: the same bits in 0.7 of the bytes. `fp8_e4m3`:
    half of the bytes, each value within 2^-4 of itself (but the smallest; infra/state_encodings.py)."""
    checks: Annotated[ChecksConfig, CONTENT] = ChecksConfig()
    """What a sample's states must pass before they count."""
    max_failed_share: float = Field(default=0.02, ge=0.0, le=1.0)
    """Share of the samples that may fail before the stage does."""
    engines: int = Field(default=1, ge=1)
    """vLLM engines on this node, each with the whole model; they share the shards."""
    gpu_sets: GpuSets | None = None
    """GPUs of each engine, by number or UUID. By default several engines share out the visible GPUs in order, each
    as many as its parallel sizes (tensor x pipeline) need."""
    shards_per_engine: int | None = Field(default=None, ge=1)
    """Shards that one engine has at a time: while it computes one, the others are checked, encoded and written,
    each by a process of its own into a file in the staging folder. By default two, and where an engine outruns
    that, as a small verifier on a GPU does, as many as keep it busy: up to its share of the cores and of the
    free memory, and to as many as `staging_gib` holds."""
    timeout_seconds: float = Field(default=3600.0, gt=0.0)
    """How long one request may take before the engine counts as hung and is ended."""
    staging_folder: str | None = None
    """Folder for states on their way, on a local disk or in memory (/dev/shm); by default the system's temporary
    folder. Beside what `staging_gib` bounds it holds one encoded shard for each that is in work."""
    staging_gib: float | None = Field(default=None, gt=0.0)
    """GiB that may lie there at once, of all engines together; the engines wait while it is full. By default 8, or
    half of what is free there if that is less. One sample must fit."""

    @model_validator(mode="after")
    def _gpus_for_all(self) -> Self:
        check_gpu_sets(self.gpu_sets, self.engines, "engines")
        return self

    def staging(self, name: str) -> Staging:
        """The staging of a stage, not yet open."""
        limit_bytes = None if self.staging_gib is None else int(self.staging_gib * 2**30)
        return Staging(name, self.staging_folder, limit_bytes, self.engines)


def resolve_layer_ids(config: ExtractConfig, verifier: VerifierShape) -> list[int]:
    """The layers to extract, checked against the verifier.

    Raises:
        InputError: they are not ascending ids of its layers that end with the last.
    """
    last = verifier.num_hidden_layers
    ids = config.layer_ids
    if ids is None:
        return default_layer_ids(last)
    ascending = all(one < other for one, other in itertools.pairwise(ids))
    if len(ids) < 2 or not ascending or ids[0] < 1 or ids[-1] != last:
        raise InputError(
            "extract.layer_ids",
            f"{ids} must be at least two ascending ids from 1 to {last}, the last of them {last}: the verifier has "
            f"{last} layers",
        )
    return list(ids)


def states_meta(config: ExtractConfig, verifier: Verifier) -> HiddenStatesMeta:
    """What every shard of a stage says in its metadata. Raises InputError as `resolve_layer_ids`."""
    return HiddenStatesMeta(
        layer_ids=tuple(resolve_layer_ids(config, verifier)),
        hidden_size=verifier.hidden_size,
        verifier_revision=verifier.revision,
        encoding=config.encoding,
    )


def engine_configs(config: ExtractConfig, vllm: VllmConfig) -> list[VllmConfig]:
    """How each engine is started: the config of all, on the engine's own GPUs.

    Raises:
        InputError: fewer GPUs are visible than they need.
    """
    return on_gpu_sets(vllm, config.gpu_sets, config.engines, vllm.gpus_per_engine, "extract.engines")
