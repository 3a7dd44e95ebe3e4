"""One shard of responses: every prompt by itself through the verifier, with exact token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from infra import manifest
from infra.effort import token_counts
from infra.generation.conversations import Rebuilder
from infra.generation.progress import GenerationProgress
from infra.generation.responses import status_counts, to_parquet, turns_not_found
from infra.generation.salvage import kept_rows
from infra.inference import GenerateConfig, PartialShard, WindowedAsker, generate_rows
from infra.manifest import Shard, ShardRecord, StageRef
from infra.tables import read_input
from tasks.policy import retried_task


@retried_task(name="generate-shard", run_name="generate {shard.shard}")
async def generate_shard(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    config: GenerateConfig,
    client: WindowedAsker,
    partial: PartialShard,
    rows_done: GenerationProgress,
    rebuilder: Rebuilder | None = None,
) -> ShardRecord:
    """Answer the prompts of one shard and commit the rows; every prompt gives exactly one row.

    Args:
        inputs: present record of each upstream shard, by name.
        client: the stage's one client or pool, whose window bounds the requests in flight over all shards.
        partial: rows that an earlier attempt of this run has left, for which no server is asked again; those of
            an earlier stage (`generate.redo_from`) are added here.
        rows_done: counts every row of the stage as it arrives, and refuses a stage with too many failed ones.
        rebuilder: makes the ids of answers that have none (`generate.token_source`).
    """
    prompts = await asyncio.to_thread(read_input, stage, shard, inputs[shard.inputs[0]])
    for row in await asyncio.to_thread(kept_rows, stage, shard, inputs, config):
        partial.rows[row["sample_id"]] = row
    rows = await generate_rows(
        client, prompts.to_pylist(), config, on_row=rows_done.add, partial=partial, rebuilder=rebuilder
    )
    body = await asyncio.to_thread(to_parquet, rows)
    return await asyncio.to_thread(
        manifest.commit_shard,
        stage,
        shard,
        body,
        rows=len(rows),
        status_counts=status_counts(rows),
        inputs=inputs,
        extra={**token_counts(rows), **turns_not_found(rows)},
    )
