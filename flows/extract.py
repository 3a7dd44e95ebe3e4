"""Stage 3: the verifier's hidden states over its own responses."""

from __future__ import annotations

import asyncio
from functools import partial

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import (
    Summary,
    close_stage,
    inspect,
    open_stage,
    refuse_failed_rows,
    resolve_stages,
    reused,
    run_all,
    show_reused_shards,
    with_restarts,
)
from infra import manifest
from infra.manifest import Shard, StageRef
from tasks.extract import extract_shard, extracting
from tasks.progress import StageProgress
from tasks.verifier import materialize_verifier

# While one shard is in the engine, the last one is encoded and written.
SHARDS_AT_ONCE = 2


@flow(name="extract", flow_run_name="extract {config.root}")
async def extract(config: PipelineConfig) -> Summary:
    """Extract hidden states for every response. Reads `responses`, writes `hidden_states`."""
    stages = await resolve_stages(config)
    stage = stages["hidden_states"]
    state = await open_stage(stage, plan_shards(stages["responses"]))
    if state.complete:
        return reused(stage, state)
    await show_reused_shards(stage, state)
    if state.missing:
        verifier = await materialize_verifier(config.verifier)
        inputs = await asyncio.to_thread(manifest.input_records, stage, state.plan)

        async def attempt() -> None:
            missing = (await inspect(stage)).missing
            async with (
                extracting(
                    stage,
                    config.extract,
                    config.vllm,
                    verifier,
                    trust_remote_code=config.verifier.trust_remote_code,
                ) as engine,
                StageProgress("hidden_states", len(state.plan), len(state.plan) - len(missing)) as progress,
            ):
                await run_all(
                    (partial(extract_shard, stage, shard, inputs, engine, progress) for shard in missing),
                    at_once=SHARDS_AT_ONCE,
                )

        await with_restarts(attempt, "The extraction engine")
    refuse_failed_rows(stage, (await inspect(stage)).records.values(), config.extract.max_failed_share)
    return await close_stage(stage)


def plan_shards(responses: StageRef) -> list[Shard]:
    """One shard of hidden states for each shard of responses, under the same id."""
    planned = manifest.read_plan(responses.uri)
    return [Shard(shard.shard, (f"responses/{shard.shard}",)) for shard in planned]
