"""Extraction's engines as tasks: names of their own, one staging, and an end at once whenever they are cancelled."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra import manifest
from infra.errors import ServerError
from infra.extraction.build_pool import BuildPool
from infra.extraction.config import states_meta
from infra.extraction.engine import ExtractConfig, ExtractionEngine
from infra.extraction.pool import EnginePool, ShardQueue
from infra.fingerprint import stage_content
from infra.generation.responses import to_parquet
from infra.locations import log_file
from infra.manifest import Shard, ShardRecord, StageRef
from infra.processes import living, process_token
from infra.state_checks.checks import ChecksConfig, StateChecks
from infra.vllm_config import VllmConfig
from tasks import extract
from tests.infra.extraction.test_engine import FAKE, VERIFIER, engine, response

NEVER_READY = "hang"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageRef:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(extract, "ExtractionEngine", partial(ExtractionEngine, worker=FAKE))
    monkeypatch.setattr(extract, "start_engine", extract.start_engine.fn)
    upstream = StageRef(str(tmp_path), "responses", stage_content("responses", 1, {}, {}, {}))
    keys = {"responses": upstream.key}
    return StageRef(str(tmp_path), "hidden_states", stage_content("hidden_states", 1, {}, {}, keys))


def vllm(fault: str = "") -> VllmConfig:
    return VllmConfig(python=sys.executable, environment={"FAKE_FAULT": fault}, startup_timeout_seconds=60.0)


def tokens(stage: StageRef) -> list[str]:
    return [process_token(stage.uri, f"engine-{number}") for number in range(2)]


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached():  # noqa: ASYNC110 (processes are no events of ours)
            await asyncio.sleep(0.05)


async def two_engines(stage: StageRef, vllm: VllmConfig, queue: ShardQueue, make: Any) -> None:
    config = ExtractConfig(engines=2)
    checks = StateChecks(ChecksConfig(), states_meta(config, VERIFIER), None)
    async with (
        extract.staging_of(stage, config) as staging,
        extract.building(stage, staging, checks, VERIFIER, ahead=2) as builders,
    ):
        launches = [
            partial(extract.extracting, stage, number, config, vllm, VERIFIER, staging, trust_remote_code=False)
            for number in range(2)
        ]
        await EnginePool(launches, partial(make, builders), queue).make_all()
    assert not staging.folder.exists()


def write_responses(stage: StageRef, num_shards: int) -> tuple[list[Shard], dict[str, ShardRecord]]:
    upstream = StageRef(stage.root, "responses", stage_content("responses", 1, {}, {}, {}))
    planned = [Shard(f"{number:05d}") for number in range(num_shards)]
    manifest.write_plan(upstream, planned)
    for shard in planned:
        rows = [response(f"{shard.shard}-a"), response(f"nan-{shard.shard}"), response("c", "failed", "no ids")]
        counts = {"ok": 2, "failed": 1}
        manifest.commit_shard(upstream, shard, to_parquet(rows), rows=3, status_counts=counts, inputs={})
    shards = [Shard(shard.shard, (f"responses/{shard.shard}",)) for shard in planned]
    manifest.write_plan(stage, shards)
    return shards, manifest.input_records(stage, shards)


@pytest.mark.seconds
async def test_two_engines_make_a_stage_and_leave_nothing(stage: StageRef) -> None:
    shards, inputs = write_responses(stage, 6)
    by_engine: set[str] = set()

    async def make(builders: BuildPool, running: ExtractionEngine, shard: Shard) -> None:
        await extract.extract_shard.fn(stage, shard, inputs, running, builders)
        by_engine.add(str(running.staging.folder))

    await two_engines(stage, vllm(), ShardQueue(shards), make)
    state = manifest.inspect(stage)
    assert not state.missing
    for record in state.records.values():
        assert record.status_counts == {"ok": 1, "failed": 2}
        assert record.extra["num_tokens"] == 10
        assert record.extra["extract_seconds"] == 0.1
        assert record.extra["encode_seconds"] >= 0
        assert record.extra["failed_checks"]["not finite"]["count"] == 1
    assert len(by_engine) == 1, "one staging for both"
    assert living(process_token(stage.uri, "builders")) == []
    for number, token in enumerate(tokens(stage)):
        assert living(token) == []
        assert log_file(stage.stage, stage.key, f"engine-{number}").exists()


async def test_cancelled_while_both_load(stage: StageRef) -> None:
    async def make(builders: BuildPool, running: ExtractionEngine, shard: Shard) -> None:
        raise AssertionError("never ready")

    loading = asyncio.create_task(two_engines(stage, vllm(NEVER_READY), ShardQueue([Shard("00000")]), make))
    await until(lambda: all(len(living(token)) == 2 for token in tokens(stage)))
    loading.cancel()
    await asyncio.sleep(0)
    loading.cancel()  # again, while the engines are being ended
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert [living(token) for token in tokens(stage)] == [[], []]
    # Joins the threads that were loading: the interpreter could not end before.
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 10)


def test_stopped_before_it_has_started(tmp_path: Path) -> None:
    token = process_token("test", str(os.getpid()), uuid.uuid4().hex)
    stopped = engine(token, tmp_path)
    stopped.stop()
    with pytest.raises(ServerError, match="stopped before it was started"):
        stopped.__enter__()
    assert living(token) == []
