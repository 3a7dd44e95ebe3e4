"""One shard of hidden states: the verifier's own states over prompts and completions; and the engines' lives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from infra import manifest
from infra.extraction.budget import ENCODE_SECONDS, EXTRACT_SECONDS
from infra.extraction.build_pool import BuildPool
from infra.extraction.engine import ExtractConfig, ExtractionEngine, StreamTimes, samples_of
from infra.extraction.staging import Staging
from infra.locations import log_file
from infra.manifest import Shard, ShardRecord, StageRef
from infra.processes import process_token
from infra.state_checks.checks import StateChecks
from infra.tables import read_input
from infra.verifiers.verifier import Verifier
from infra.vllm_config import VllmConfig
from tasks.child_log import child_log
from tasks.policy import retried_task


@retried_task(name="extract-shard", run_name="extract {shard.shard}")
async def extract_shard(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    engine: ExtractionEngine,
    builders: BuildPool,
) -> ShardRecord:
    """Run the verifier over one shard of responses and commit the checked states, one row for each response."""
    return await asyncio.to_thread(_extract, stage, shard, inputs, engine, builders)


def _extract(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    engine: ExtractionEngine,
    builders: BuildPool,
) -> ShardRecord:
    responses = read_input(stage, shard, inputs[shard.inputs[0]])
    times, started = StreamTimes(), time.monotonic()
    built = builders.build(responses, engine.staged(shard.shard, samples_of(responses), times), times)
    encode_seconds = time.monotonic() - started - times.waited_seconds
    measured = {EXTRACT_SECONDS: round(times.engine_seconds, 3), ENCODE_SECONDS: round(encode_seconds, 3)}
    try:
        return manifest.commit_shard(
            stage,
            shard,
            built.data,
            rows=built.rows,
            status_counts=built.status_counts,
            inputs=inputs,
            extra={**built.extra, **measured},
        )
    finally:
        if isinstance(built.data, Path):
            built.data.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def staging_of(stage: StageRef, config: ExtractConfig, partition: str = "") -> AsyncIterator[Staging]:
    """The staging that all engines of a run share, empty at first; its folder is gone when the context ends.

    Args:
        partition: of a partition run, its name: another run on this node has a folder of its own.
    """
    staging = config.staging(process_token(stage.uri, "staging", *filter(None, [partition])))
    await asyncio.to_thread(staging.open)
    try:
        yield staging
    finally:
        await _in_any_case(staging.close)


@contextlib.asynccontextmanager
async def building(
    stage: StageRef, staging: Staging, checks: StateChecks, verifier: Verifier, ahead: int, partition: str = ""
) -> AsyncIterator[BuildPool]:
    """The processes that check and encode a stage's shards, their files in its staging, for as long as the context
    lasts.

    Args:
        ahead: see BuildPool.
        partition: of a partition run, its name: its processes are not to be taken for another run's on this node.
    """
    name = "-".join(["builders", *filter(None, [partition])])
    builders = BuildPool(
        checks,
        verifier.path if checks.head else None,
        staging.folder,
        token=process_token(stage.uri, name),
        log_path=log_file(stage.stage, stage.key, name),
        ahead=ahead,
    )
    try:
        yield await asyncio.to_thread(builders.__enter__)
    finally:
        await _in_any_case(builders.close)


@contextlib.asynccontextmanager
async def extracting(
    stage: StageRef,
    number: int,
    config: ExtractConfig,
    vllm: VllmConfig,
    verifier: Verifier,
    staging: Staging,
    partition: str = "",
    *,
    trust_remote_code: bool,
) -> AsyncIterator[ExtractionEngine]:
    """An extraction engine for as long as the context lasts; it ends on any exit, cancellation too.

    Args:
        number: of the engine, from 0.
        vllm: with the engine's own GPUs.
        partition: of a partition run, its name: its processes are not to be taken for another run's on this node.
    """
    name = "-".join([str(number), *filter(None, [partition])])
    async with child_log(stage, f"engine-{name}"):
        engine = await start_engine(stage, name, config, vllm, verifier, staging, trust_remote_code)
        try:
            yield engine
        finally:
            await _in_any_case(engine.stop)


@retried_task(name="start-extraction-engine", run_name="start extraction engine {name}", restarts=True)
async def start_engine(
    stage: StageRef,
    name: str,
    config: ExtractConfig,
    vllm: VllmConfig,
    verifier: Verifier,
    staging: Staging,
    trust_remote_code: bool,
) -> ExtractionEngine:
    """Load the verifier once for many shards. Whoever starts an engine stops it (`extracting`)."""
    name = f"engine-{name}"
    engine = ExtractionEngine(
        config,
        vllm,
        verifier,
        log_path=log_file(stage.stage, stage.key, name),
        token=process_token(stage.uri, name),
        trust_remote_code=trust_remote_code,
        staging=staging,
    )
    try:
        return await asyncio.to_thread(engine.__enter__)
    except asyncio.CancelledError:
        # The thread goes on loading, and keeps this process from ending, until the engine has gone.
        await _in_any_case(engine.stop)
        raise


async def _in_any_case(end: Callable[[], None]) -> None:
    """Wait for `end` in a thread, however often this is cancelled meanwhile."""
    ending = asyncio.create_task(asyncio.to_thread(end))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    ending.result()
    if cancelled is not None:
        raise cancelled
