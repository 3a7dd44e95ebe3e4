"""Stage 2: the verifier's own answers to the train prompts."""

from __future__ import annotations

import asyncio
import math
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
from infra.inference import CompletionClient, PartialShard
from infra.inference import Progress as RowProgress
from infra.manifest import Shard, StageRef
from infra.prompts import TRAIN
from tasks.generate import generate_shard
from tasks.progress import StageProgress
from tasks.server import serving
from tasks.verifier import materialize_verifier


@flow(name="generate", flow_run_name="generate {config.root}")
async def generate(config: PipelineConfig) -> Summary:
    """Answer every train prompt by itself. Reads `prompts`, writes `responses`."""
    stages = await resolve_stages(config)
    stage = stages["responses"]
    state = await open_stage(stage, plan_shards(stages["prompts"]))
    if state.complete:
        return reused(stage, state)
    await show_reused_shards(stage, state)
    if state.missing:
        verifier = await materialize_verifier(config.verifier)
        inputs = await asyncio.to_thread(manifest.input_records, stage, state.plan)

        # Rows already answered survive a dead server: the next one is asked for the rest only.
        partials = {shard.shard: PartialShard() for shard in state.missing}

        async def attempt() -> None:
            missing = (await inspect(stage)).missing
            rows = RowProgress(sum(inputs[name].rows for shard in missing for name in shard.inputs))
            async with (
                serving(
                    config.vllm,
                    verifier,
                    stage,
                    purpose="generation",
                    trust_remote_code=config.verifier.trust_remote_code,
                ) as server,
                CompletionClient.to(server, config.generate) as client,
                StageProgress("responses", len(state.plan), len(state.plan) - len(missing)) as progress,
            ):
                jobs = (
                    partial(
                        generate_shard,
                        stage,
                        shard,
                        inputs,
                        config.generate,
                        client,
                        partials[shard.shard],
                        rows,
                        progress,
                    )
                    for shard in missing
                )
                await run_all(jobs, at_once=shards_at_once(config))

        await with_restarts(attempt, "Generation's vLLM server")
    refuse_failed_rows(stage, (await inspect(stage)).records.values(), config.generate.max_failed_share)
    return await close_stage(stage)


def plan_shards(prompts: StageRef) -> list[Shard]:
    """One shard of responses for each shard of train prompts, under the same id."""
    planned = manifest.read_plan(prompts.uri)
    return [Shard(shard.shard, (f"prompts/{shard.shard}",)) for shard in planned if shard.extra["split"] == TRAIN]


def shards_at_once(config: PipelineConfig) -> int:
    """Shards to hold open: enough that the next one's requests start while the last ones of this one finish."""
    return 1 + math.ceil(config.generate.concurrency / config.prompts.shard_size)
