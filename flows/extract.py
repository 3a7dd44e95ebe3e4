"""Stage 3: the verifier's hidden states over its own responses."""

from __future__ import annotations

from functools import partial

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import (
    Stages,
    StageWork,
    Summary,
    inspect,
    own_inputs,
    refuse_failed_rows,
    run_all,
    run_stage,
    with_restarts,
)
from infra import manifest
from infra.manifest import Shard
from tasks.extract import extract_shard, extracting
from tasks.progress import StageProgress
from tasks.verifier import materialize_verifier

# While one shard is in the engine, the last one is encoded and written.
SHARDS_AT_ONCE = 2


@flow(name="extract", flow_run_name="extract {config.root}")
async def extract(config: PipelineConfig) -> Summary:
    """Extract hidden states for every response. Reads `responses`, writes `hidden_states`."""
    return await run_stage(config, "hidden_states", plan_shards, make_hidden_states)


def plan_shards(stages: Stages) -> list[Shard]:
    """One shard of hidden states for each shard of responses, under the same id."""
    planned = manifest.read_plan(stages["responses"].uri)
    return [Shard(shard.shard, (f"responses/{shard.shard}",)) for shard in planned]


async def make_hidden_states(work: StageWork) -> None:
    if work.state.missing:
        await extract_missing(work)
    records = (await inspect(work.stage)).records.values()
    refuse_failed_rows(work.stage, records, work.config.extract.max_failed_share)


async def extract_missing(work: StageWork) -> None:
    config, stage = work.config, work.stage
    verifier = await materialize_verifier(config.verifier)
    inputs = await work.inputs()

    async def attempt() -> None:
        state = await inspect(stage)
        trusted = config.verifier.trust_remote_code
        async with (
            extracting(stage, config.extract, config.vllm, verifier, trust_remote_code=trusted) as engine,
            StageProgress("hidden_states", len(state.plan), len(state.records)) as progress,
        ):
            jobs = (
                partial(extract_shard, stage, shard, own_inputs(shard, inputs), engine, progress)
                for shard in state.missing
            )
            await run_all(jobs, at_once=SHARDS_AT_ONCE)

    await with_restarts(attempt, "The extraction engine")
