"""One shard of responses: every prompt by itself through the verifier, with exact token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from infra import manifest
from infra.generation_progress import GenerationProgress
from infra.inference import CompletionClient, GenerateConfig, PartialShard, generate_rows
from infra.manifest import Shard, ShardRecord, StageRef
from infra.responses import status_counts, to_parquet
from infra.tables import read_input
from tasks.policy import retried_task
from tasks.progress import StageProgress


@retried_task(name="generate-shard", run_name="generate {shard.shard}")
async def generate_shard(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    config: GenerateConfig,
    client: CompletionClient,
    partial: PartialShard,
    rows_done: GenerationProgress,
    progress: StageProgress,
) -> ShardRecord:
    """Answer the prompts of one shard and commit the rows; every prompt gives exactly one row.

    Args:
        inputs: present record of each upstream shard, by name.
        client: the stage's one client, whose window bounds the requests in flight over all shards.
        partial: rows that an earlier attempt of this run has left, for which no server is asked again.
        rows_done: counts every row of the stage as it arrives, and refuses a stage with too many failed ones.
        progress: told of the shard when it is committed.
    """

    def count(row: dict[str, Any]) -> None:
        rows_done.add(row)
        statuses = ", ".join(f"{number} {status}" for status, number in rows_done.rows_by_status.items() if number)
        progress.detail(f"{statuses}, {rows_done.tokens_per_second:.0f} tokens/s")

    prompts = await asyncio.to_thread(read_input, stage, shard, inputs[shard.inputs[0]])
    rows = await generate_rows(client, prompts.to_pylist(), config, on_row=count, partial=partial)
    body = await asyncio.to_thread(to_parquet, rows)
    record = await asyncio.to_thread(
        manifest.commit_shard,
        stage,
        shard,
        body,
        rows=len(rows),
        status_counts=status_counts(rows),
        inputs=inputs,
    )
    progress.advance()
    return record
