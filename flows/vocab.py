"""Stage 4: the draft's vocabulary."""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import Summary, close_stage, open_stage, resolve_stages, reused
from infra import manifest
from infra.manifest import Shard, StageRef
from infra.verifier import resolve_shape
from infra.vocab import FILE_NAME
from tasks.vocab import build_vocabulary


@flow(name="vocab", flow_run_name="vocab {config.root}")
async def vocab(config: PipelineConfig) -> Summary:
    """Choose the tokens the draft may propose. Reads `responses`, writes `vocab`."""
    stages = await resolve_stages(config)
    stage = stages["vocab"]
    state = await open_stage(stage, plan_shards(stages["responses"]))
    if state.complete:
        return reused(stage, state)
    for shard in state.missing:
        inputs = await asyncio.to_thread(manifest.input_records, stage, [shard])
        shape = await asyncio.to_thread(resolve_shape, config.verifier)
        await build_vocabulary(stage, shard, inputs, config.vocab, shape.vocab_size)
    return await close_stage(stage)


def plan_shards(responses: StageRef) -> list[Shard]:
    """One file, made from every shard of responses."""
    names = tuple(f"responses/{shard.shard}" for shard in manifest.read_plan(responses.uri))
    return [Shard("00000", names, {"file": FILE_NAME})]
