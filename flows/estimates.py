"""What each stage of a run will take: amount, tokens, bytes, hours and price, measured where an earlier run tells.

An earlier run is one of the same verifier and engine settings under the same root; its manifests say how long its
stages took (`infra.effort`). What no run tells is guessed from sizes, and marked so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flows.config import PipelineConfig
from infra import manifest, storage
from infra.effort import (
    GUESSED_PROMPT_TOKENS,
    NUM_COMPLETION_TOKENS,
    NUM_PROMPT_TOKENS,
    UNITS,
    Effort,
    counted,
    guessed_per_second,
)
from infra.evaluation.config import BASELINE, EAGLE3, samplings
from infra.extraction.budget import EXPECTED_RATIO, raw_bytes_per_token
from infra.extraction.config import resolve_layer_ids
from infra.manifest import ShardRecord, StageRef, StageState
from infra.provenance import hardware
from infra.verifiers.verifier import VerifierShape, resolve_shape

MEASURED, GUESS = "measured", "guess"
# Bytes of a row of responses for each token (ids, mask and text, compressed), and of one without tokens.
RESPONSE_BYTES_PER_TOKEN = 6
SHARED = ("responses", "hidden_states")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is still to be made of one stage.

    Args:
        shards: to make.
        amount: in `unit`.
        tokens: that are generated, extracted or trained; None where the stage has none.
        size_bytes: that will be written; None where it is little.
        node_hours: of one node; `hours` by as many nodes as share it.
        cost: in the currency of the config; None without a price.
        amount_basis, rate_basis: `measured`, or `guess`.
    """

    shards: int | None
    amount: float
    unit: str
    tokens: float | None = None
    size_bytes: float | None = None
    node_hours: float
    hours: float
    cost: float | None
    amount_basis: str
    rate_basis: str


@dataclass(frozen=True)
class Earlier:
    """What earlier runs of the same profile have left, by stage."""

    efforts: Mapping[str, Effort]
    completion_tokens_per_row: float | None
    prompt_tokens_per_row: float | None

    @classmethod
    def of(cls, config: PipelineConfig) -> Earlier:
        """Reads `runs/*.json` and the manifests of the stages they name, the newest run first."""
        efforts: dict[str, Effort] = {}
        found = cls(efforts, None, None)
        for run in _runs(config):
            for stage, key in run["keys"].items():
                uri = storage.join(config.root, stage, key)
                if stage not in efforts and (effort := Effort.of_manifest(manifest.read_manifest(uri))):
                    efforts[stage] = effort
            if found.completion_tokens_per_row is None:
                completion, prompt = _tokens_per_row(config.root, run["keys"])
                found = cls(efforts, completion, prompt)
        return found


def _runs(config: PipelineConfig) -> list[dict[str, Any]]:
    """Earlier runs of the same profile, newest first; those that cannot be read are left out."""
    folder = storage.join(config.root, "runs")
    uris = [storage.join(folder, name) for name in storage.list_sizes(folder) if name.endswith(".json")]
    wanted = config.model_dump(mode="json")
    found = []
    for body in storage.get_many(uris).values():
        try:
            run = json.loads(body)
            same = all(run["config"].get(section) == wanted[section] for section in ("verifier", "vllm"))
            if same and isinstance(run["keys"], dict):
                found.append((str(run["started_at"]), run))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _tokens_per_row(root: str, keys: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Of completions and of the prompts before them, where a run's responses say so."""
    stage = keys.get("responses")
    records = manifest.read_records(storage.join(root, "responses", stage)).values() if stage else ()
    rows = sum(record.rows for record in records)
    completion, prompt = counted(records, NUM_COMPLETION_TOKENS), counted(records, NUM_PROMPT_TOKENS)
    if not rows or completion is None or prompt is None:
        return None, None
    return completion / rows, prompt / rows


def amount_made(
    config: PipelineConfig,
    stages: Mapping[str, StageRef],
    stage: str,
    made: Sequence[ShardRecord],
    *,
    resumed: bool,
) -> float | None:
    """How much a run has made of a stage, in its unit; None where a later plan could not go by it.

    Args:
        made: records that this run has committed.
        resumed: perhaps another run had begun it.
    """
    copied = config.import_states is not None or config.generate.redo_from is not None
    if not made or (copied and stage in SHARED) or (resumed and stage == "drafts"):
        return None
    match stage:
        case "prompts":
            return sum(record.rows for record in made)
        case "responses":
            return counted(made, NUM_COMPLETION_TOKENS)
        case "hidden_states":
            return float(sum(record.extra.get("num_tokens", 0) for record in made))
        case "drafts":
            states = manifest.read_manifest(stages["hidden_states"].uri) or {}
            return trained_tokens(config, states.get("extraction", {}).get("num_tokens", 0))
        case "evaluations":
            return num_measured_requests(config)
    return 1.0


def trained_tokens(config: PipelineConfig, sequence_tokens: float) -> float:
    """Tokens that training reads, padding included where the number of steps is given."""
    train = config.train
    if train.num_steps is not None:
        return train.num_steps * train.global_batch * train.total_seq_len
    return train.epochs * sequence_tokens


def num_measured_requests(config: PipelineConfig) -> int:
    """Requests of an evaluation at most: a promoted draft that is the new one is measured once."""
    evaluate = config.evaluate
    each_k = len(evaluate.num_speculative_tokens)
    ways = {BASELINE: 1, EAGLE3: each_k * (1 + len(evaluate.drafts))}
    num_ways = sum(ways.get(method, each_k) for method in evaluate.methods)
    sampled, _ = samplings(evaluate, config.generate, wrong_above_zero=not hardware()["gpus"])
    heldout = len(config.prompts.sources) if evaluate.by_dataset else 1
    num_datasets = heldout * evaluate.heldout + len(evaluate.sources)
    return sum(evaluate.num_prompts) * evaluate.rounds * num_ways * len(sampled) * num_datasets


class Estimator:
    """Tells what the stages of one config take.

    Args:
        num_samples: prompts to answer, all shards together.
        num_requests: those of them that are asked; fewer where an earlier stage's rows are kept.
    """

    def __init__(
        self,
        config: PipelineConfig,
        stages: Mapping[str, StageRef],
        states: Mapping[str, StageState],
        *,
        num_samples: int,
        num_requests: int,
    ) -> None:
        self._config, self._stages, self._states = config, stages, states
        self._samples, self._requests = num_samples, num_requests
        self._earlier = Earlier.of(config)

    @cached_property
    def _shape(self) -> VerifierShape:
        return resolve_shape(self._config.verifier)

    def estimate(self, stage: str) -> Estimate:
        """What is left of a stage that is not reused."""
        state = self._states[stage]
        left = len(state.missing) / len(state.plan) if state.plan else 1.0
        amount, basis = self._amount(stage)
        amount *= left
        rate, rate_basis = self._rate(stage)
        node_hours = amount / rate / 3600
        num_nodes = self._config.nodes.count if stage in SHARED else 1
        price = self._config.nodes.price_per_hour
        return Estimate(
            shards=len(state.missing) if state.plan else None,
            amount=amount,
            unit=UNITS[stage],
            tokens=amount if stage in ("responses", "hidden_states", "drafts") else None,
            size_bytes=self._size_bytes(stage, amount),
            node_hours=node_hours,
            hours=node_hours / num_nodes,
            cost=None if price is None else node_hours * price,
            amount_basis=basis,
            rate_basis=rate_basis,
        )

    def _amount(self, stage: str) -> tuple[float, str]:
        match stage:
            case "prompts":
                return self._samples, MEASURED
            case "responses":
                per_row, basis = self._completion_tokens_per_row()
                return self._requests * per_row, basis
            case "hidden_states":
                return self._sequence_tokens()
            case "drafts":
                tokens, basis = self._sequence_tokens()
                return trained_tokens(self._config, tokens), MEASURED if self._config.train.num_steps else basis
            case "evaluations":
                return num_measured_requests(self._config), MEASURED
        return 1.0, MEASURED

    def _sequence_tokens(self) -> tuple[float, str]:
        """Tokens of all prompts and completions together."""
        records = self._states["responses"].records.values()
        rows, tokens = (
            sum(record.rows for record in records),
            counted(records, NUM_COMPLETION_TOKENS, NUM_PROMPT_TOKENS),
        )
        if rows and tokens is not None:
            return tokens * self._samples / rows, MEASURED
        completion, basis = self._completion_tokens_per_row()
        prompt = self._earlier.prompt_tokens_per_row
        return self._samples * (completion + (GUESSED_PROMPT_TOKENS if prompt is None else prompt)), basis

    def _completion_tokens_per_row(self) -> tuple[float, str]:
        """As the stage's own shards say, or an earlier run; at most what a response may have."""
        longest = self._config.generate.max_tokens
        records = self._states["responses"].records.values()
        rows, tokens = sum(record.rows for record in records), counted(records, NUM_COMPLETION_TOKENS)
        if rows and tokens is not None:
            return tokens / rows, MEASURED
        if (earlier := self._earlier.completion_tokens_per_row) is not None:
            return min(earlier, longest), MEASURED
        return longest, GUESS

    def _size_bytes(self, stage: str, amount: float) -> float | None:
        if stage == "responses":
            return amount * RESPONSE_BYTES_PER_TOKEN
        if stage == "hidden_states":
            layers = len(resolve_layer_ids(self._config.extract, self._shape))
            raw = raw_bytes_per_token(layers, self._shape.hidden_size)
            return amount * raw * EXPECTED_RATIO[self._config.extract.encoding]
        return None

    def _rate(self, stage: str) -> tuple[float, str]:
        """What one node makes in a second, in the stage's unit."""
        own = Effort.of_manifest(manifest.read_manifest(self._stages[stage].uri))  # of a stage that was damaged
        if effort := own or self._earlier.efforts.get(stage):
            return effort.per_second, MEASURED
        gpus, cores = len(hardware()["gpus"]), os.cpu_count() or 1
        train, vocab = self._config.train, self._config.vocab
        sizes = (train.ttt_steps, vocab.draft_vocab_size)
        return guessed_per_second(stage, self._shape, gpus, cores, *sizes), GUESS
