"""Stage 4: the draft's vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import Stages, StageWork, Summary, run_stage
from infra import manifest
from infra.drafts.vocab import FILE_NAME
from infra.manifest import Shard
from infra.verifiers.verifier import resolve_shape
from tasks.vocab import build_vocabulary, coverage_figures


@flow(name="vocab", flow_run_name="vocab {config.root}")
async def vocab(config: PipelineConfig) -> Summary:
    """Choose the tokens the draft may propose. Reads `responses`, writes `vocab`."""
    return await run_stage(config, "vocab", plan_shards, make_vocabulary)


def plan_shards(stages: Stages) -> list[Shard]:
    """One file, made from every shard of responses."""
    names = tuple(f"responses/{shard.shard}" for shard in manifest.read_plan(stages["responses"].uri))
    return [Shard("00000", names, {"file": FILE_NAME})]


async def make_vocabulary(work: StageWork) -> Mapping[str, Any]:
    shape = await asyncio.to_thread(resolve_shape, work.config.verifier)
    config, made = work.config, dict(work.state.records)
    for shard in work.state.missing:
        inputs = await work.inputs()
        made[shard.shard] = await build_vocabulary(
            work.stage, shard, inputs, config.vocab, shape.vocab_size, config.train.init_from
        )
    (record,) = made.values()
    return await asyncio.to_thread(coverage_figures, work.stage, record)
