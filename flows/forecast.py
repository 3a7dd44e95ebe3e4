"""What a run would do, and how far one has come: reads plans, records and manifests, starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flows.config import PipelineConfig
from flows.generate import planned_salvage
from flows.resolve import resolve
from infra import manifest
from infra.manifest import StageRef, StageState
from infra.prompts import load_prompts
from infra.schemas import STATUS_FAILED
from infra.verifier import default_layer_ids, resolve_shape

BF16_BYTES = 2


def status(config: PipelineConfig) -> list[dict[str, Any]]:
    """Each stage's shards: done, missing, and rows that failed."""
    return [_status_row(stage, manifest.inspect(stage)) for stage in resolve(config).values()]


def _status_row(stage: StageRef, state: StageState) -> dict[str, Any]:
    failed = sum(record.status_counts.get(STATUS_FAILED, 0) for record in state.records.values())
    phase = "complete" if state.complete else "in progress" if state.plan else "not started"
    return {
        "stage": stage.stage,
        "key": stage.key,
        "done": len(state.records),
        "missing": len(state.missing),
        "failed_rows": failed,
        "state": phase,
    }


def forecast(config: PipelineConfig) -> list[dict[str, Any]]:
    """For each stage: its key, whether it will be reused, continued or made, and what that costs at most."""
    stages = resolve(config)
    states = {name: manifest.inspect(stage) for name, stage in stages.items()}
    costs = _costs(config, stages)
    rows, stale = [], False
    for name, stage in stages.items():
        state = states[name]
        if state.complete and not stale:
            will, detail = "reuse", _reuse_detail(state)
        else:
            will = "resume" if state.records else "make"
            done = f"{len(state.records)} of {len(state.plan)} shards are done; " if state.plan else ""
            detail = done + costs[name]()
        stale = stale or will != "reuse"
        rows.append({"stage": name, "key": stage.key, "will": will, "detail": detail})
    return rows


def _reuse_detail(state: StageState) -> str:
    assert state.manifest is not None
    totals = state.manifest["totals"]
    return f"{len(state.plan)} shards, {totals['rows']} rows, {_size(totals['size_bytes'])}"


def _costs(config: PipelineConfig, stages: Mapping[str, StageRef]) -> dict[str, Callable[[], str]]:
    """What each stage costs when made from nothing; upper bounds, from the config and the prompts alone."""
    prompts = load_prompts(config.prompts)
    samples, heldout = len(prompts.train), len(prompts.heldout)
    salvage = planned_salvage(config, stages)
    requests = samples if salvage is None else salvage.redone.total()
    kept = "" if salvage is None else f"; {salvage}"
    longest = config.generate.max_tokens
    measured = sum(config.evaluate.num_prompts) * config.evaluate.rounds * len(config.evaluate.methods)
    steps = config.train.num_steps
    return {
        "prompts": lambda: f"{samples} train samples, {heldout} heldout prompts",
        "responses": lambda: f"{requests} requests, at most {requests * longest:,} new tokens{kept}",
        "hidden_states": lambda: f"{samples} samples, {_state_bytes(config, samples * longest)}",
        "vocab": lambda: f"{config.vocab.draft_vocab_size:,} token ids",
        "drafts": lambda: f"{steps:,} optimizer steps" if steps else f"{config.train.epochs:g} epochs",
        "evaluations": lambda: f"{measured} requests of at most {config.evaluate.max_tokens} tokens",
    }


def _state_bytes(config: PipelineConfig, new_tokens: int) -> str:
    shape = resolve_shape(config.verifier)
    layers = config.extract.layer_ids or default_layer_ids(shape.num_hidden_layers)
    per_token = len(layers) * shape.hidden_size * BF16_BYTES
    return f"{per_token:,} bytes a token: at most {_size(per_token * new_tokens)} for the completions"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"
