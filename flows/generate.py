"""Stage 2: the verifier's own answers to the train prompts."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import flow

from flows.config import PipelineConfig
from flows.interchange import make_imported_responses, plan_import
from flows.nodes import Feed, helped
from flows.stage import Stages, StageWork, Summary, inspect, own_inputs, refuse_failed_rows, run_all, run_stage
from infra import manifest
from infra.generation.conversations import Rebuilder
from infra.generation.progress import GenerationProgress
from infra.generation.reconstruct import Reconstructor
from infra.generation.responses import TOKEN_SOURCE_SERVER
from infra.generation.salvage import Salvage, refuse_kept_failures, salvage_of, with_earlier
from infra.inference import PartialShard
from infra.manifest import Shard, ShardRecord, StageState
from infra.prompts.samples import TRAIN
from infra.serving.pool import Launch, ServerPool
from infra.verifiers.verifier import verifier_name
from tasks.generate import generate_shard
from tasks.generation_watch import watching
from tasks.server import external_launches, replica_launches
from tasks.verifier import materialize_verifier

logger = logging.getLogger("draftsmith.generate")


@flow(name="generate", flow_run_name="generate {config.root}")
async def generate(config: PipelineConfig) -> Summary:
    """Answer every train prompt by itself. Reads `prompts`, writes `responses`."""
    if config.import_states is not None:
        return await run_stage(config, "responses", partial(plan_import, config), make_imported_responses)
    return await run_stage(config, "responses", plan_shards, make_responses)


def plan_shards(stages: Stages) -> list[Shard]:
    """One shard of responses for each shard of train prompts, under the same id."""
    planned = manifest.read_plan(stages["prompts"].uri)
    train = [shard.shard for shard in planned if shard.extra["split"] == TRAIN]
    return with_earlier(stages["responses"], [Shard(shard, (f"prompts/{shard}",)) for shard in train])


def planned_salvage(config: PipelineConfig, stages: Stages) -> Salvage | None:
    """What would be kept of an earlier stage and what made anew; None where nothing is salvaged."""
    if config.generate.redo_from is None:
        return None
    shards = plan_shards(stages)
    return salvage_of(config.generate, shards, manifest.input_records(stages["responses"], shards))


async def make_responses(work: StageWork) -> Mapping[str, Any] | None:
    config = work.config.generate
    salvage = salvage_of(config, work.state.plan, await work.inputs())
    if salvage is not None:
        refuse_kept_failures(salvage, config.max_failed_share)
        logger.info("%s.", salvage)
    if work.state.missing:
        async with helped(work, shards_at_once(work.config)):
            await answer_missing(work)
    records = (await inspect(work.stage)).records.values()
    refuse_failed_rows(work.stage, records, config.max_failed_share)
    return {"salvage": salvage.to_json()} if salvage is not None else None


async def answer_missing(work: StageWork) -> None:
    """Answer every missing shard; on many nodes, those that this one claims."""
    config, stage = work.config, work.stage
    inputs = await work.inputs()
    num_rows = sum(inputs[shard.inputs[0]].rows for shard in work.state.plan)  # one for each prompt
    rows = GenerationProgress(num_rows, config.generate.max_failed_share, rows_before(work, inputs))

    def see(state: StageState) -> None:
        others = {shard: record for shard, record in state.records.items() if shard not in feed.mine}
        rows.see_before(rows_before(replace(work, state=replace(state, records=others)), inputs))

    async with Feed(work, shards_at_once(config), see) as feed:
        if not await feed.begin():
            return
        rebuilder = await rebuilder_of(config)
        pool = ServerPool(await launches(work), config.generate, config.generate.servers)
        async with pool, watching(stage, rows, pool):

            async def answer(shard: Shard) -> None:
                rest = PartialShard()  # rows that a first attempt has left need not be made again
                shared = (config.generate, pool, rest, rows, rebuilder)
                await generate_shard(stage, shard, own_inputs(shard, inputs), *shared)
                await feed.made(shard)

            jobs = (partial(answer, shard) async for shard in feed)
            await run_all(jobs, at_once=shards_at_once(config))


def rows_before(work: StageWork, inputs: Mapping[str, ShardRecord]) -> Counter[str]:
    """Rows that need not be made, by status: of committed shards, and kept of an earlier stage for the others."""
    salvage = salvage_of(work.config.generate, work.state.missing, inputs)
    counts = Counter(salvage.kept if salvage is not None else {})
    for record in work.state.records.values():
        counts.update(record.status_counts)
    return counts


async def rebuilder_of(config: PipelineConfig) -> Rebuilder | None:
    """What makes token ids, where the servers are said to send none."""
    if config.generate.token_source == TOKEN_SOURCE_SERVER:
        return None
    return await asyncio.to_thread(Reconstructor.load, config.verifier, config.generate)


async def launches(work: StageWork) -> list[Launch]:
    """What starts each of the stage's servers; for external ones the verifier need not lie on this node."""
    config, servers = work.config, work.config.generate.servers
    if servers.external:
        return external_launches(servers, config.vllm, verifier_name(config.verifier))
    verifier = await materialize_verifier(config.verifier)
    trusted = config.verifier.trust_remote_code
    return replica_launches(servers, config.vllm, verifier, work.stage, work.partition, trust_remote_code=trusted)


def shards_at_once(config: PipelineConfig) -> int:
    """Shards to hold open: enough that the next one's requests start while the last ones of this one finish."""
    return 1 + math.ceil(config.generate.concurrency / config.prompts.shard_size)
