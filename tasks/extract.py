"""One shard of hidden states: the verifier's own states over prompts and completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from infra import manifest
from infra.extraction import ExtractConfig, ExtractionEngine, build_shard, samples_of
from infra.locations import log_file
from infra.manifest import Shard, ShardRecord, StageRef
from infra.processes import process_token
from infra.schemas import STATUS_FAILED
from infra.tables import read_input
from infra.verifier import Verifier
from infra.vllm_config import VllmConfig
from tasks.policy import retried_task
from tasks.progress import StageProgress


@retried_task(name="extract-shard", run_name="extract {shard.shard}")
async def extract_shard(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    engine: ExtractionEngine,
    progress: StageProgress,
) -> ShardRecord:
    """Run the verifier over one shard of responses and commit the checked states, one row for each response."""
    record = await asyncio.to_thread(_extract, stage, shard, inputs, engine)
    progress.advance()
    return record


def _extract(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    engine: ExtractionEngine,
) -> ShardRecord:
    responses = read_input(stage, shard, inputs[shard.inputs[0]])
    built = build_shard(responses, engine.stream(shard.shard, samples_of(responses)), engine.meta)
    return manifest.commit_shard(
        stage,
        shard,
        built.data,
        rows=built.rows,
        status_counts=built.status_counts,
        inputs=inputs,
        extra=count_tokens(built.data),
    )


def count_tokens(shard: bytes) -> dict[str, int]:
    """Tokens with hidden states, those under the loss_mask, and the longest sample; ids alone are read."""
    table = pq.read_table(pa.BufferReader(shard), columns=["status", "loss_mask", "num_tokens"])
    usable = table.filter(pc.not_equal(table["status"], STATUS_FAILED))
    lengths = usable["num_tokens"].to_pylist()
    trained = sum(sum(mask) for mask in usable["loss_mask"].to_pylist())
    return {"num_tokens": sum(lengths), "num_loss_tokens": trained, "longest_tokens": max(lengths, default=0)}


@contextlib.asynccontextmanager
async def extracting(
    stage: StageRef, config: ExtractConfig, vllm: VllmConfig, verifier: Verifier, *, trust_remote_code: bool
) -> AsyncIterator[ExtractionEngine]:
    """An extraction engine for as long as the context lasts; it ends on any exit, cancellation too."""
    engine = await start_engine(stage, config, vllm, verifier, trust_remote_code)
    try:
        yield engine
    finally:
        await asyncio.shield(asyncio.to_thread(engine.stop))


@retried_task(name="start-extraction-engine", restarts=True)
async def start_engine(
    stage: StageRef, config: ExtractConfig, vllm: VllmConfig, verifier: Verifier, trust_remote_code: bool
) -> ExtractionEngine:
    """Load the verifier once for many shards. Whoever starts an engine stops it (`extracting`)."""
    engine = ExtractionEngine(
        config,
        vllm,
        verifier,
        log_path=log_file(stage.stage, stage.key, "engine"),
        token=process_token(stage.uri, "engine"),
        trust_remote_code=trust_remote_code,
    )
    try:
        return await asyncio.to_thread(engine.__enter__)
    except asyncio.CancelledError:
        # The thread goes on loading, and keeps this process from ending, until the engine has gone.
        await asyncio.shield(asyncio.to_thread(engine.stop))
        raise
