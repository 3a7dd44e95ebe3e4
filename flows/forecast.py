"""What a run would do, and how far one has come: reads plans, records and manifests, starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flows.config import PipelineConfig
from flows.generate import planned_salvage
from flows.interchange import import_costs
from flows.resolve import measured_drafts, resolve
from infra import manifest, storage
from infra.evaluation_config import samplings, ways
from infra.extraction_budget import EXPECTED_RATIO, Budget, Measured, raw_bytes_per_token, readable, room_said
from infra.extraction_config import resolve_layer_ids
from infra.manifest import StageRef, StageState
from infra.prompts import load_prompts
from infra.provenance import hardware
from infra.schemas import STATUS_FAILED
from infra.start_draft import START
from infra.verifier import resolve_shape


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
    costs = _costs(config, stages, states)
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
    return f"{len(state.plan)} shards, {totals['rows']} rows, {readable(totals['size_bytes'])}"


def _costs(
    config: PipelineConfig, stages: Mapping[str, StageRef], states: Mapping[str, StageState]
) -> dict[str, Callable[[], str]]:
    """What each stage costs: upper bounds from the config and the prompts alone, but for states already begun."""
    prompts = load_prompts(config.prompts)
    samples, heldout = len(prompts.train), len(prompts.heldout)
    salvage = planned_salvage(config, stages)
    requests = samples if salvage is None else salvage.redone.total()
    kept = "" if salvage is None else f"; {salvage}"
    longest = config.generate.max_tokens
    measured = sum(config.evaluate.num_prompts) * config.evaluate.rounds * _series(config, stages["drafts"].key)
    steps = config.train.num_steps
    revision = stages["drafts"].content["revisions"].get(START)
    start = "" if revision is None else f", from train.init_from.revision={revision}"
    hidden = stages["hidden_states"], states["hidden_states"]
    return {
        "prompts": lambda: f"{samples} train samples, {heldout} heldout prompts",
        "responses": lambda: f"{requests} requests, at most {requests * longest:,} new tokens{kept}",
        "hidden_states": lambda: f"{samples} samples, {_state_costs(config, *hidden, samples * longest)}",
        "vocab": lambda: f"{config.vocab.draft_vocab_size:,} token ids",
        "drafts": lambda: (f"{steps:,} optimizer steps" if steps else f"{config.train.epochs:g} epochs") + start,
        "evaluations": lambda: f"{measured} requests of at most {config.evaluate.max_tokens} tokens",
        **import_costs(config),
    }


def _series(config: PipelineConfig, new_key: str) -> int:
    """How many ways of decoding are measured, times samplings, times data sets."""
    every = ways(config.evaluate, measured_drafts(config, new_key))
    sampled, _ = samplings(config.evaluate, config.generate, wrong_above_zero=not hardware()["gpus"])
    heldout = len(config.prompts.sources) if config.evaluate.by_dataset else 1
    return len(every) * len(sampled) * (heldout * config.evaluate.heldout + len(config.evaluate.sources))


def _state_costs(config: PipelineConfig, stage: StageRef, state: StageState, new_tokens: int) -> str:
    """As measured on the shards that are there; before, an upper bound."""
    extract, room_bytes = config.extract, storage.free_bytes(config.root)
    inputs = manifest.input_records(stage, state.plan)
    if state.missing and (measured := Measured.of(state.records.values(), inputs)):
        left = [inputs[name] for shard in state.missing for name in shard.inputs if name in inputs]
        return str(Budget.of(measured, left, extract, room_bytes))
    shape = resolve_shape(config.verifier)
    raw = raw_bytes_per_token(len(resolve_layer_ids(extract, shape)), shape.hidden_size)
    stored = raw * EXPECTED_RATIO[extract.encoding]
    packed = "" if extract.encoding == "bf16" else f", about {stored:,.0f} as {extract.encoding}"
    return (
        f"{raw:,} bytes a token{packed}: at most {readable(stored * new_tokens)} for the completions; "
        f"{room_said(room_bytes)}"
    )
