"""Stage 2: the verifier's own answers to the train prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import Stages, StageWork, Summary, inspect, refuse_failed_rows, run_all, run_stage, with_restarts
from infra import manifest
from infra.generation_progress import GenerationProgress
from infra.inference import CompletionClient, PartialShard
from infra.manifest import Shard
from infra.prompts import TRAIN
from tasks.generate import generate_shard
from tasks.progress import StageProgress
from tasks.server import serving
from tasks.verifier import materialize_verifier


@flow(name="generate", flow_run_name="generate {config.root}")
async def generate(config: PipelineConfig) -> Summary:
    """Answer every train prompt by itself. Reads `prompts`, writes `responses`."""
    return await run_stage(config, "responses", plan_shards, make_responses)


def plan_shards(stages: Stages) -> list[Shard]:
    """One shard of responses for each shard of train prompts, under the same id."""
    planned = manifest.read_plan(stages["prompts"].uri)
    return [Shard(shard.shard, (f"prompts/{shard.shard}",)) for shard in planned if shard.extra["split"] == TRAIN]


async def make_responses(work: StageWork) -> None:
    if work.state.missing:
        await answer_missing(work)
    records = (await inspect(work.stage)).records.values()
    refuse_failed_rows(work.stage, records, work.config.generate.max_failed_share)


async def answer_missing(work: StageWork) -> None:
    config, stage = work.config, work.stage
    verifier = await materialize_verifier(config.verifier)
    inputs = await work.inputs()
    # Rows already answered survive a dead server: the next one is asked for the rest only.
    partials = {shard.shard: PartialShard() for shard in work.state.missing}

    async def attempt() -> None:
        state = await inspect(stage)
        rows = GenerationProgress(sum(inputs[name].rows for shard in state.missing for name in shard.inputs))
        trusted = config.verifier.trust_remote_code
        async with (
            serving(config.vllm, verifier, stage, purpose="generation", trust_remote_code=trusted) as server,
            CompletionClient.to(server, config.generate) as client,
            StageProgress("responses", len(state.plan), len(state.records)) as progress,
        ):

            def job(shard: Shard) -> Callable[[], Coroutine[Any, Any, Any]]:
                rest = partials[shard.shard]
                return partial(generate_shard, stage, shard, inputs, config.generate, client, rest, rows, progress)

            await run_all((job(shard) for shard in state.missing), at_once=shards_at_once(config))

    await with_restarts(attempt, "Generation's vLLM server")


def shards_at_once(config: PipelineConfig) -> int:
    """Shards to hold open: enough that the next one's requests start while the last ones of this one finish."""
    return 1 + math.ceil(config.generate.concurrency / config.prompts.shard_size)
