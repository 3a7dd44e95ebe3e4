"""What a run would do, and how far one has come: reads plans, records and manifests, starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from flows.config import PipelineConfig
from flows.estimates import Estimator, num_measured_requests
from flows.generate import planned_salvage
from flows.interchange import import_costs
from flows.resolve import resolve
from infra import manifest, storage
from infra.drafts.start_draft import START
from infra.extraction.budget import (
    EXPECTED_RATIO,
    Budget,
    Measured,
    lasting,
    raw_bytes_per_token,
    readable,
    room_said,
)
from infra.extraction.config import resolve_layer_ids
from infra.generation.salvage import Salvage
from infra.manifest import StageRef, StageState
from infra.prompts.samples import PromptSet, left_out_said, load_prompts
from infra.schemas import STATUS_FAILED
from infra.training import checkpoint_files
from infra.verifiers.verifier import resolve_shape


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
    """For each stage: its key, whether it will be reused, continued or made, and what that takes.

    `detail` says in words what it costs at most; `estimate` (`flows.estimates`) what it is expected to take, None
    for a stage that is reused, or imported.
    """
    stages = resolve(config)
    states = {name: manifest.inspect(stage) for name, stage in stages.items()}
    prompts = load_prompts(config.prompts)
    salvage = planned_salvage(config, stages)
    samples = len(prompts.train)
    requests = samples if salvage is None else salvage.redone.total()
    costs = _costs(config, stages, states, prompts, requests, salvage)
    estimator = Estimator(config, stages, states, num_samples=samples, num_requests=requests)
    imported = import_costs(config)
    rows, stale = [], False
    for name, stage in stages.items():
        state = states[name]
        if state.complete and not stale:
            will, detail, estimate = "reuse", _reuse_detail(state), None
            if name == "prompts" and state.manifest is not None:
                detail += left_out_said(config.prompts, state.manifest.get("dropped", {}), lengths=True)
        else:
            will = "resume" if state.records else "make"
            done = f"{len(state.records)} of {len(state.plan)} shards are done; " if state.plan else ""
            if name == "drafts" and (checkpoints := checkpoint_files.find(stage.uri)):  # its shards come at the end
                will, done = "resume", f"from the checkpoint of step {checkpoints[0].step:,}; "
            detail = done + costs[name]()
            estimate = None if name in imported else asdict(estimator.estimate(name))
        stale = stale or will != "reuse"
        rows.append({"stage": name, "key": stage.key, "will": will, "detail": detail, "estimate": estimate})
    return rows


def estimate_said(estimate: Mapping[str, Any] | None, currency: str) -> str:
    """An estimate for a person; nothing for none."""
    if estimate is None:
        return ""
    guessed = "guess" in (estimate["amount_basis"], estimate["rate_basis"])
    said = "; about " if not guessed else "; a guess: "
    if estimate["tokens"] is not None:
        said += f"{estimate['tokens']:,.0f} tokens, "
    if estimate["size_bytes"] is not None:
        said += f"{readable(estimate['size_bytes'])}, "
    return said + hours_said(estimate["hours"], estimate["cost"], currency)


def total_said(estimates: Iterable[Mapping[str, Any] | None], currency: str) -> str:
    """All that is to be made, for a person."""
    found = [estimate for estimate in estimates if estimate is not None]
    prices = [estimate["cost"] for estimate in found if estimate["cost"] is not None]
    guesses = sum("guess" in (estimate["amount_basis"], estimate["rate_basis"]) for estimate in found)
    total = hours_said(sum(estimate["hours"] for estimate in found), sum(prices) if prices else None, currency)
    return f"about {total}" + (f"; {guesses} of {len(found)} stages are guesses" if guesses else "; as measured")


def hours_said(hours: float, cost: float | None, currency: str) -> str:
    return lasting(hours) + ("" if cost is None else f", {cost:,.2f} {currency}")


def _reuse_detail(state: StageState) -> str:
    assert state.manifest is not None
    totals = state.manifest["totals"]
    return f"{len(state.plan)} shards, {totals['rows']} rows, {readable(totals['size_bytes'])}"


def _costs(
    config: PipelineConfig,
    stages: Mapping[str, StageRef],
    states: Mapping[str, StageState],
    prompts: PromptSet,
    requests: int,
    salvage: Salvage | None,
) -> dict[str, Callable[[], str]]:
    """What each stage costs: upper bounds from the config and the prompts alone, but for states already begun."""
    samples, heldout = len(prompts.train), len(prompts.heldout)
    left_out = left_out_said(config.prompts, prompts.dropped, prompts.first_dropped, lengths=False)
    kept = "" if salvage is None else f"; {salvage}"
    longest = config.generate.max_tokens
    measured = num_measured_requests(config)
    steps = config.train.num_steps
    revision = stages["drafts"].content["revisions"].get(START)
    start = "" if revision is None else f", from train.init_from.revision={revision}"
    hidden = stages["hidden_states"], states["hidden_states"]
    return {
        "prompts": lambda: f"{samples} train samples, {heldout} heldout prompts{left_out}",
        "responses": lambda: f"{requests} requests, at most {requests * longest:,} new tokens{kept}",
        "hidden_states": lambda: f"{samples} samples, {_state_costs(config, *hidden, samples * longest)}",
        "vocab": lambda: f"{config.vocab.draft_vocab_size:,} token ids",
        "drafts": lambda: (f"{steps:,} optimizer steps" if steps else f"{config.train.epochs:g} epochs") + start,
        "evaluations": lambda: f"{measured} requests of at most {config.evaluate.max_tokens} tokens",
        **import_costs(config),
    }


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
